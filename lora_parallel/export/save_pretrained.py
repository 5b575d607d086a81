"""Make `save_pretrained`, called in the user's own code, work on a sharded model.

The methods of PEFT and transformers need full tensors, and are replaced. A save that a class overrides runs on rank 0
alone, and what it calls of the model runs on every rank: rank 0 sends the method, the name of the module and the
arguments to the others, which wait for such messages. An empty message says that no more come.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial, partialmethod
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from lora_parallel.adapters.adapter_folder import gather_adapter
from lora_parallel.adapters.inspection import adapted_model, check_finite, loose_parameters, peft_configs
from lora_parallel.distributed.dtensors import axis_of_parts, gather_on_rank_zero, reshard, tensors_in
from lora_parallel.distributed.meetings import alone, collective_call, refuse_alone
from lora_parallel.distributed.rank_checks import agreed, gather_objects, is_rank_zero
from lora_parallel.export.export_merged import write_merged
from lora_parallel.layers.layer_parameters import innermost
from lora_parallel.layers.linear_classes import QuantisedLayer
from lora_parallel.layers.styles import partition_of
from lora_parallel.state import Setup, mesh_of
from lora_parallel.storage import Scratch, local_path

_log = logging.getLogger(__name__)

TRAINED = "trained_parameters.safetensors"
"""File of what trains and belongs to no adapter."""

_SUPPORTED = frozenset(
    {"is_main_process", "selected_adapters", "save_embedding_layers", "max_shard_size", "state_dict", "save_function"}
)


_BARRIER = dist, "barrier"  # holds in a save that rank 0 runs alone: the other ranks wait for its end
_PARAMETERS = nn.Module, "named_parameters"
_PICKLE = DTensor, "__reduce_ex__"


def allow_save_pretrained(setup: Setup) -> None:
    """Replace `save_pretrained` of a parallelized model, and of the base in a `PeftModel`, by one for sharded models.

    If the model has adapters, the new method writes their folders, as `save_adapter` does; if it has none, it writes
    the model, as `export_merged` does, into a folder that may hold other files.
    """
    model = setup.model
    for holder in {model, adapted_model(model) or model, innermost(model)}:
        if (own := getattr(type(holder), "save_pretrained", None)) is not None:
            holder.__dict__["save_pretrained"] = partial(_save_pretrained, model, own, holder)


def _save_pretrained(model: nn.Module, own: Callable[..., None], holder: Any, *args: Any, **kwargs: Any) -> None:
    """Write the adapters' folders in PEFT's format, or a model without adapters. Collective: call it on every rank.

    If a `state_dict` is given, whose tensors were gathered already, the class's own method is called instead, on the
    calling process alone; one that is neither PEFT's nor transformers' is always called, on rank 0. `is_main_process`
    and `save_function` are ignored: rank 0 writes, with the engine's own functions.
    """
    names = list(signature(own).parameters)[1:]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if alone.get() or arguments.get("state_dict") is not None:
        _refuse_parts((arguments.get("state_dict") or {}).values(), "save_pretrained was given a state_dict with")
        type(holder).save_pretrained(holder, *args, **kwargs)
        return
    with collective_call("save_pretrained"):
        if own not in (PreTrainedModel.save_pretrained, PeftModel.save_pretrained):
            save_on_rank_zero(model, partial(own, holder, *args, **kwargs))
            return
        configs = peft_configs(model)
        with agreed() as alike:
            signature(own).bind(holder, *args, **kwargs)
            directory = arguments.pop(names[0])
            methods = (PreTrainedModel.save_pretrained, PeftModel.save_pretrained)
            parameters = [each for method in methods for each in signature(method).parameters.values()]
            defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
            changed = {
                key: value for key, value in arguments.items() if key not in _SUPPORTED and value != defaults.get(key)
            }
            if changed:
                texts = ", ".join(f"{key}={value!r}" for key, value in changed.items())
                raise TypeError(f"save_pretrained of a sharded model does not support {texts}.")
            arguments = {**defaults, **arguments}
            chosen = list(configs) if arguments["selected_adapters"] is None else list(arguments["selected_adapters"])
            alike["selected_adapters"] = chosen
            unknown = [name for name in chosen if name not in configs]
            if unknown:
                raise ValueError(f"no adapter {unknown[0]!r} in the model; it has: {', '.join(configs) or 'none'}.")
        write_pretrained(model, directory, chosen, arguments["save_embedding_layers"], arguments["max_shard_size"])


def save_on_rank_zero(model: nn.Module, save: Callable[[], object], given: dict[str, Tensor] | None = None) -> None:
    """Call `save` on rank 0, and raise what it raises on every rank. Collective.

    It may call modules of the parallelized `model`, their `state_dict`, which returns full tensors, and
    `save_pretrained`, which writes what trains if it is called with the state dict `given` or none.
    """
    sent: dict[tuple[type, str], Callable[..., Any]] = {
        (nn.Module, "__call__"): nn.Module.__call__,
        (nn.Module, "train"): nn.Module.train,
        (nn.Module, "state_dict"): partial(_full_state_dict, model),
        (PreTrainedModel, "save_pretrained"): partial(_save_pretrained, model, PreTrainedModel.save_pretrained),
        (PeftModel, "save_pretrained"): partial(_save_pretrained, model, PeftModel.save_pretrained),
    }
    own = {key: getattr(*key) for key in (*sent, _BARRIER, _PARAMETERS, _PICKLE)}
    names = {module: name for name, module in model.named_modules()}
    mesh: Any = mesh_of(model)

    def send(module: nn.Module, key: tuple[type, str], *args: Any, **kwargs: Any) -> Any:
        state = kwargs.get("state_dict")
        is_sharded = module in names and (key[0] is nn.Module or "save_pretrained" in vars(module))
        if not is_sharded or not (state is None or state is given):
            return own[key](module, *args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("state_dict", "save_function")}
        call = key, names[module], torch.is_grad_enabled(), args, kwargs
        torch.save(call, message := BytesIO())
        put(own)  # for the calls in this one
        try:
            gather_objects(message.getvalue())
            return make(*call)
        finally:
            put(senders)

    def make(key: tuple[type, str], name: str, grad: bool, args: Any, kwargs: Any) -> Any:
        with torch.set_grad_enabled(grad):
            return sent[key](model.get_submodule(name), *args, **kwargs)

    def put(methods: dict[tuple[Any, str], Any]) -> None:
        alone.set(methods is senders)
        for key, method in methods.items():
            setattr(*key, method)

    def named_parameters(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module in names and "pp" in mesh.mesh_dim_names:
            raise ValueError(
                "parameters() and named_parameters() in a save that rank 0 runs alone: under pp they list those of its "
                "stage, and the save would lack all others. Use the state_dict that _save is given, or "
                "model.state_dict() in such a save."
            )
        return own[_PARAMETERS](module, *args, **kwargs)

    def reduce(tensor: DTensor, protocol: Any) -> Any:
        _refuse_parts([tensor], "pickle was given")
        return own[_PICKLE](tensor, protocol)

    senders: dict[tuple[Any, str], Any] = {key: partialmethod(send, key) for key in sent}
    senders[_BARRIER] = lambda *args, **kwargs: None
    senders[_PARAMETERS], senders[_PICKLE] = named_parameters, reduce
    with agreed():
        if is_rank_zero():
            put(senders)
            try:
                with _OnRankZero():
                    save()
            finally:
                put(own)
                gather_objects(b"")
            return
        while message := gather_objects(b"")[0]:  # a pickle that rank 0 has made just now, and that was in no file
            call = torch.load(BytesIO(message), map_location=mesh.device_type, weights_only=False)
            with suppress(Exception):  # rank 0 has it too, and `save` may catch it
                make(*call)


class _OnRankZero(TorchDispatchMode):
    """Refuse, in a save that rank 0 runs alone, collectives, and tensors of which each rank has a part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if alone.get():
            if func.namespace in ("c10d", "_c10d_functional"):
                refuse_alone(str(func))
            _refuse_parts(tensors_in((args, kwargs)), f"{func} in a save that rank 0 runs alone was given")
        return func(*args, **(kwargs or {}))


def _refuse_parts(tensors: Iterable[Any], what: str) -> None:
    """Raise ValueError if this rank has a part of a tensor, which would be taken for the whole."""
    for tensor in tensors:
        if isinstance(tensor, DTensor) and axis_of_parts(tensor) is not None:
            raise ValueError(
                f"{what} a DTensor of shape {list(tensor.shape)}, of which each rank has a part, and that would be "
                "saved. Use the state_dict that _save is given, model.state_dict() in such a save, or, on every rank, "
                "accelerator.get_state_dict(model)."
            )


@torch.inference_mode(False)  # a DTensor cannot be detached in inference mode
def _full_state_dict(model: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the state dict of a module of `model`, with full tensors on rank 0. Collective."""
    reshard(model)
    state = nn.Module.state_dict(module, *args, **kwargs)  # an override of it has called this
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    size = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    with agreed():
        for name, inner in module.named_modules():
            if isinstance(inner, QuantisedLayer) or any(partition_of(inner, key) for key in inner._parameters):
                raise ValueError(
                    f"state_dict() in a save cannot gather {name}: each rank stores its rows in its own order or form. "
                    "Use the state_dict that _save is given, which is what trains, or export_merged."
                )
        if is_rank_zero():
            _log.warning("a save calls state_dict() of %s: %.2g GB are gathered.", type(module).__name__, size)
    state.update(gather_on_rank_zero(tensors))
    return state


def write_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    adapters: Iterable[str] | None = None,
    save_embedding_layers: Literal["auto"] | bool = "auto",
    max_shard_size: int | str = "50GB",
) -> None:
    """Write a parallelized model's adapters, or a model without adapters, as `save_pretrained` does. Collective.

    Parameters that train and belong to no adapter, such as a head beside a `PeftModel`, are written into a file beside
    the adapters, `trained_parameters.safetensors`, by their names in the model. Nothing is written unless all adapters
    can be.

    Args:
        model: The model that `parallelize` returned.
        directory: The folder to write, as in PEFT and transformers.
        adapters: The names of the adapters to write; None: all.
        save_embedding_layers: As in PEFT.
        max_shard_size: As in transformers; it applies to a model without adapters.

    Raises:
        OSError: The folder cannot be written.
        ValueError: Values are not finite. Both are raised on every rank.
    """
    names = list(peft_configs(model)) if adapters is None else list(adapters)
    reshard(model)
    loose = loose_parameters(model)
    with agreed() as alike:
        folder = local_path(directory)
        alike.update(directory=str(folder), save_embedding_layers=save_embedding_layers)
        check_finite(loose)
    if not names:
        write_merged(model, directory, max_shard_size, beside_others=True)
        return
    with torch.inference_mode(False):  # a DTensor cannot be detached in inference mode
        gathered = [gather_adapter(model, name, save_embedding_layers) for name in names]
        beside = gather_on_rank_zero(loose)
    with agreed():
        if is_rank_zero():
            for adapter in gathered:
                adapter.write(folder)
            _write_beside(folder / TRAINED, beside)


def _write_beside(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write what trains and belongs to no adapter; if there is nothing, remove the file of an earlier save."""
    if not tensors:
        file.unlink(missing_ok=True)
        return
    scratch = Scratch(file)
    scratch.make()
    try:
        save_file(tensors, scratch.path / file.name, metadata={"format": "pt"})
        scratch.place_file(file.name)
    finally:
        scratch.discard()
    _log.warning(
        "%d parameters train and belong to no adapter (first: %s): PEFT's files do not hold them, %s does.",
        len(tensors),
        next(iter(tensors)),
        file,
    )
