"""Run transformers' `from_pretrained` on lazy tensors, without reading weights.

All private API of transformers that this needs is in this file; `tests/lora_parallel/loading` tests it. transformers 5
builds the model on meta, maps the names in the files to parameters, reads, initialises parameters that no file holds,
recomputes buffers and ties weights. Here it does all of that itself, with lazy tensors in place of those that it would
have read.

The public way to read slices is `DistributedConfig` (https://github.com/huggingface/transformers/pull/45409), which
shards the model itself, before there are adapters; there is no public way to stop before reading.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from lora_parallel.lazy.files import INDEX, PickleFile, SafetensorsFile, list_sources, read_index, refusal
from lora_parallel.lazy.graph import Leaf
from lora_parallel.lazy.lazy_tensor import LazyTensor
from lora_parallel.lazy.tracking import DEFER, check_fit, read_whole, remember
from lora_parallel.loading.quantisers import check_complete, check_marks, lazily
from lora_parallel.quantised.packed_weight import Packed
from lora_parallel.replaced import replaced

_LOAD = "_load_pretrained_model"
_own_from_pretrained = PreTrainedModel.__dict__["from_pretrained"]
_own_load = PreTrainedModel.__dict__[_LOAD]
_RESIZE = "resize_token_embeddings"
_own_resize = PreTrainedModel.__dict__[_RESIZE]
_PENDING = "_lora_parallel_pending"


@contextmanager
def deferred_loading(constructing: Callable[[], Any], unless_told: bool = False) -> Iterator[None]:
    """Let transformers' `from_pretrained` return models on meta with their lazy tensors, inside this context."""
    before = {name: PreTrainedModel.__dict__[name] for name in ("from_pretrained", _LOAD, _RESIZE)}

    @wraps(_own_from_pretrained.__func__)
    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if unless_told and os.environ.get(DEFER) == "0":
            with replaced(PreTrainedModel, before):
                return cls.from_pretrained(name, *args, **kwargs)
        with constructing():
            return _from_pretrained(cls, name, *args, **kwargs)

    @wraps(_own_resize)
    def resize(self: Any, *args: Any, **kwargs: Any) -> Any:
        # New rows are drawn from the values of the old rows, so every rank reads the embeddings, whole.
        for layer in (self.get_input_embeddings(), self.get_output_embeddings()):
            if layer is not None:
                read_whole(layer)
        with constructing():
            return _own_resize(self, *args, **kwargs)

    ours = {"from_pretrained": classmethod(from_pretrained), _LOAD: staticmethod(_load), _RESIZE: resize}
    with replaced(PreTrainedModel, ours):
        yield


def _from_pretrained(cls: type[PreTrainedModel], name: Any, *args: Any, **kwargs: Any) -> Any:
    _check_arguments(kwargs)
    kwargs.pop("device_map", None)  # it names one device; the mesh decides which
    index = Path(str(name)) / (kwargs.get("subfolder") or "") / INDEX
    if index.is_file():
        read_index(index)  # its errors name the index; those of transformers do not
    try:
        # With Accelerate's launcher, transformers would leave ranks other than 0 without values, to be broadcast.
        with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
            result = _own_from_pretrained.__get__(None, cls)(name, *args, **kwargs)
    except ValueError as error:
        if "torchao safetensors metadata" not in str(error):
            raise
        raise ValueError(
            f"{name}: config.json says that it is quantised by torchao, and the files are not: the config is not the "
            "checkpoint's."
        ) from error
    except SafetensorError as error:
        raise ValueError(f"{name}: a file cannot be read as safetensors ({error}): it is damaged.") from error
    model = result[0] if isinstance(result, tuple) else result
    pending = model.__dict__.pop(_PENDING, None)
    if pending is not None:
        problem, info = pending
        new = info.missing_keys | {name for name, *_ in info.mismatched_keys}
        fresh = new & {name for name, _ in model.named_parameters(remove_duplicate=False)}
        remember(model, problem or _problem(model, info, fresh, str(name)), fresh)
    return result


def _check_arguments(kwargs: Mapping[str, Any]) -> None:
    for name in ("distributed_config", "tp_plan", "tp_size", "device_mesh"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"from_pretrained({name}=...) lets transformers shard the model, and parallelize shards it too: leave "
                f"{name} out."
            )
    device_map = kwargs.get("device_map")
    spread = isinstance(device_map, str) and device_map in ("auto", "balanced", "balanced_low_0", "sequential")
    if spread or (isinstance(device_map, Mapping) and len(set(device_map.values())) > 1):
        raise ValueError(
            f"from_pretrained(device_map={device_map!r}) spreads a model over the devices of one process: leave it "
            "out. The mesh says where each part goes."
        )


def _load(
    model: PreTrainedModel,
    state_dict: dict[str, Any] | None,
    checkpoint_files: list[str] | None,
    load_config: LoadStateDictConfig,
    expected_keys: list[str] | None = None,
) -> Any:
    """Fill a model with lazy tensors, in place of transformers' `_load_pretrained_model`, which reads values."""
    if state_dict is not None or checkpoint_files is None or expected_keys is not None:  # expected_keys: an adapter
        return _own_load.__func__(model, state_dict, checkpoint_files, load_config, expected_keys)
    load_config = lazily(load_config)
    problem = None
    try:
        info = _fill(model, _list(checkpoint_files, load_config), load_config)
    except Exception as error:  # transformers may raise anything here; `parallelize` raises it on every rank
        path = load_config.pretrained_model_name_or_path
        known = isinstance(error, (OSError, ValueError))
        problem = error if known else ValueError(f"{path} does not fit the model ({error!r}).")
        info = _fill(model, {}, load_config)
        info.missing_keys = set()
        drawn: list[Any] = [*model.modules(), *model.parameters()]
        for module_or_parameter in drawn:
            module_or_parameter._is_hf_initialized = True  # not true, but transformers cannot draw random bytes
    model.__dict__[_PENDING] = problem, info
    return info, None


def _list(files: list[str], load_config: LoadStateDictConfig) -> dict[str, Leaf]:
    paths = [Path(file).absolute() for file in files]
    for path in paths:
        if path.suffix != ".safetensors" and load_config.use_safetensors is not False:
            raise ValueError(refusal(path, "pass use_safetensors=False to from_pretrained"))
    weight_map = (load_config.sharded_metadata or {}).get("weight_map", {})
    sources = (SafetensorsFile(path) if path.suffix == ".safetensors" else PickleFile(path) for path in paths)
    return list_sources(sources, weight_map, f"the index of {load_config.pretrained_model_name_or_path}")


def _fill(model: PreTrainedModel, leaves: Mapping[str, Leaf], load_config: LoadStateDictConfig) -> Any:
    """Let transformers map lazy tensors to parameters, check the resulting shapes and dtypes, and return its report."""
    wanted = model.state_dict()
    if load_config.hf_quantizer is not None:
        path = str(load_config.pretrained_model_name_or_path)
        check_marks(model, load_config.hf_quantizer, leaves, path)
    stored = {key: LazyTensor(leaf) for key, leaf in leaves.items()}
    showed = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        info, _ = convert_and_load_state_dict_in_model(
            model=model, state_dict=stored, load_config=load_config, disk_offload_index=None
        )
    finally:
        if showed:
            transformers_logging.enable_progress_bar()
    if info.conversion_errors:
        name, cause = next(iter(info.conversion_errors.items()))
        reason = [line for line in cause.strip().splitlines() if not line.startswith("Error")][-1]
        raise ValueError(
            f"{load_config.pretrained_model_name_or_path}: {name} cannot be made of what the files hold: {reason}"
        )
    if info.mismatched_keys and not load_config.ignore_mismatched_sizes:
        name, there, here = min(info.mismatched_keys, key=lambda mismatch: mismatch[0])
        where = next(
            (f"{leaf.source.path}: {key}" for key, leaf in leaves.items() if key.endswith(name)),
            f"{load_config.pretrained_model_name_or_path}: {name}",
        )
        info.mismatched_keys = set()
        raise ValueError(
            f"{where} has shape {tuple(there)}, and {name} of {type(model).__name__} has {tuple(here)}: the config is "
            "not the checkpoint's. For a new head of another size pass ignore_mismatched_sizes=True to from_pretrained."
        )
    if leaves:  # if not, the lazy tensors are left from an earlier attempt, whose problem is known
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, LazyTensor) and not isinstance(tensor.node, Packed):
                check_fit(name, wanted[name], tensor.node)
        if load_config.hf_quantizer is not None:
            check_complete(model, load_config.hf_quantizer, info.missing_keys, path)
    return info


def _problem(model: PreTrainedModel, info: Any, fresh: set[str], path: str) -> Exception | None:
    prefix = f"{model.base_model_prefix}."
    is_base = model.base_model is model
    # A part of the base that no file holds at all (a pooler) may be new; `check_fresh` checks that it trains.
    on_disk = (name for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, LazyTensor))
    filled = {_part(name, prefix) for name in on_disk}
    lost = sorted(name for name in fresh if (is_base or name.startswith(prefix)) and _part(name, prefix) in filled)
    if lost or not filled:
        return ValueError(
            f"{path}: no file of it holds {min(lost or fresh)}"
            f"{f' (nor {len(lost or fresh) - 1} others)' if len(lost or fresh) > 1 else ''}, which "
            f"{type(model).__name__} has: the base would start from random numbers there. Use the checkpoint's own "
            "class and config, or load the model outside of meta_init."
        )
    same_class = type(model).__name__ in (getattr(model.config, "architectures", None) or [type(model).__name__])
    names = set(model.state_dict())
    unclaimed = sorted(
        key
        for key in info.unexpected_keys
        # A checkpoint of another class may hold another head, which this model does not use.
        if same_class or key.startswith(prefix) or (not is_base and f"{prefix}{key}" in names)
    )
    if is_base and not same_class:
        outer = {key.split(".")[0] for key in names}
        unclaimed = [key for key in unclaimed if key.removeprefix(prefix).split(".")[0] in outer]
    if unclaimed:
        unclaimed = [key for key in unclaimed if _is_repeated(key, model)] or _of_no_relative(unclaimed, model, path)
    if unclaimed:
        return ValueError(
            f"{path}: nothing in {type(model).__name__} claims {unclaimed[0]}"
            f"{f' (nor {len(unclaimed) - 1} others)' if len(unclaimed) > 1 else ''}: the weights are of another model. "
            "Use the checkpoint's own class and config, or a key_mapping."
        )
    return None


def _part(name: str, prefix: str) -> str:
    """Return the name of the child of the base model that a weight belongs to, such as "pooler" or "encoder"."""
    return name.removeprefix(prefix).split(".")[0]


def _is_repeated(key: str, model: PreTrainedModel) -> bool:
    """Return True if `key` belongs to one more layer of a stack than the model has, not to another part."""
    module: nn.Module = model if key.split(".")[0] in dict(model.named_children()) else model.base_model
    for step in key.removeprefix(f"{model.base_model_prefix}." if module is model.base_model else "").split("."):
        children = dict(module.named_children())
        if step not in children:
            return step.isdigit()
        module = children[step]
    return False


def _of_no_relative(keys: list[str], model: PreTrainedModel, path: str) -> list[str]:
    """Return the keys that no other class of the checkpoint's own architecture claims either, as of CLIP's images."""
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        return keys
    for kind in list(vars(sys.modules[type(model).__module__]).values()):
        if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.config_class is type(config)):
            continue
        try:
            with torch.device("meta"):
                names = set(kind(copy.deepcopy(config)).state_dict())
        except Exception:  # an abstract class, or a class that needs packages which are not installed
            continue
        prefix = f"{kind.base_model_prefix}."
        keys = [key for key in keys if not {key, f"{prefix}{key}", key.removeprefix(prefix)} & names]
    return keys


def claim(model: PreTrainedModel, leaves: Mapping[str, Leaf], path: str) -> None:
    """Put lazy tensors in place of a model's parameters and persistent buffers, as `from_pretrained` maps them."""
    load_config = LoadStateDictConfig(
        pretrained_model_name_or_path=path,
        dtype=model.dtype if isinstance(model.dtype, torch.dtype) else None,
        weight_mapping=get_model_conversion_mapping(model),  # type: ignore[arg-type]
    )
    info = _fill(model, leaves, load_config)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    missing, unclaimed = sorted(info.missing_keys), sorted(info.unexpected_keys)
    if missing or unclaimed:
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: it does not hold {len(missing)} of its parameters (first: "
            f"{missing[:2]}), and nothing claims {len(unclaimed)} of its tensors (first: {unclaimed[:2]})."
        )
