"""Build models on meta that remember which files hold their weights, and make all ranks start from the same.

For models in memory every rank takes the values of rank 0, as under DDP. For models on meta the ranks' files must be
copies of the same files.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from transformers import PreTrainedModel

from lora_parallel.adapters.base_dependent import factors_in
from lora_parallel.adapters.peft_private import adapters_off_meta, suspend_during_injection
from lora_parallel.distributed.dtensors import fingerprint
from lora_parallel.distributed.rank_checks import agreed, gather_objects
from lora_parallel.fsdp.wrapping import device_at_rest, move_to_device
from lora_parallel.lazy.files import fingerprint_of, open_checkpoint
from lora_parallel.lazy.graph import Leaf
from lora_parallel.lazy.lazy_tensor import LazyTensor
from lora_parallel.lazy.materialize import read_weights
from lora_parallel.lazy.tracking import check_fit, defer, remember, replace_tensor, settle, sources_of
from lora_parallel.loading.transformers_private import claim, deferred_loading
from lora_parallel.replaced import replaced
from lora_parallel.state import Setup


def attach_checkpoint(model: nn.Module, path: str | os.PathLike[str], allow_pickle: bool = False) -> nn.Module:
    """Name the checkpoint that fills a model which `from_pretrained` did not build; `parallelize` reads the checkpoint.

    Call it before PEFT wraps the model. Parameters and buffers that the checkpoint holds go to meta; all others stay as
    they are.

    Args:
        model: Any `nn.Module`, on meta or not. Names in the checkpoint are those of its `state_dict()`; a transformers
            model's may be any that `from_pretrained` understands.
        path: A safetensors file; a directory with one, or with several and an index; a torch DCP directory; or, if
            `allow_pickle`, a state dict that `torch.save` wrote.
        allow_pickle: Read a pickle, with weights_only=True.

    Returns:
        `model` itself.

    Raises:
        Nothing itself: `parallelize` raises the error, on every rank, if the checkpoint cannot be read or does not fit.
    """
    problem: Exception | None = None
    try:
        _claim(model, open_checkpoint(path, allow_pickle), str(path))
    except (OSError, ValueError) as error:
        problem = error
    remember(model, problem)
    return model


def _claim(model: nn.Module, leaves: dict[str, Leaf], path: str) -> None:
    """Replace the parameters and buffers of `model` by the lazy tensors that are for them."""
    if isinstance(model, PreTrainedModel):
        return claim(model, leaves, path)
    wanted = model.state_dict(keep_vars=True)
    sources = {id(tensor): leaves[name] for name, tensor in wanted.items() if name in leaves}
    missing = [name for name, tensor in wanted.items() if id(tensor) not in sources]  # a tie needs one name
    unclaimed = [name for name in leaves if name not in wanted]
    if missing or unclaimed:
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: it does not hold {len(missing)} of its parameters and "
            f"buffers (first: {missing[:2]}), and nothing claims {len(unclaimed)} of its tensors (first: "
            f"{unclaimed[:2]}). Names must be those of model.state_dict(), before PEFT wraps the model."
        )
    for name, leaf in leaves.items():
        check_fit(name, wanted[name], leaf)
    lazy: dict[int, Tensor] = {}
    for name, tensor in wanted.items():
        if id(tensor) not in lazy:
            stored: Tensor = LazyTensor(sources[id(tensor)]).to(tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            lazy[id(tensor)] = nn.Parameter(stored, tensor.requires_grad) if is_parameter else stored
        owner, _, key = name.rpartition(".")
        replace_tensor(model.get_submodule(owner), key, lazy[id(tensor)])


@contextmanager
def meta_init() -> Iterator[None]:
    """Build every model inside this context on meta: no memory, no file read, a second or two at any size.

    - `AutoModelForX.from_pretrained(path, dtype=..., ...)` returns a model that remembers its checkpoint; `parallelize`
      reads it, each rank the bytes of its own shard. Tensors that no file holds are made as in a normal load: buffers
      are computed, weights tied, a new head drawn from the random state.
    - `from_config` and constructors of any `nn.Module` make parameters on meta; name the checkpoint that holds their
      weights with `attach_checkpoint`. Buffers are computed.
    - `get_peft_model`, `PeftModel.from_pretrained(model, directory)` and `model.add_adapter` draw or load adapters as
      usual, in memory; also after the context has ended, for a model that was built inside of it.

    Raises:
        ValueError: `from_pretrained` gets an argument that has no meaning here. If a checkpoint is wrong, `parallelize`
            raises the error, on every rank.
    """
    with deferred_loading(_constructors_in_memory), _constructors_on_meta():
        yield


@contextmanager
def defer_from_pretrained() -> Iterator[None]:
    """Let transformers' `from_pretrained` build models as under `meta_init`; build other models in memory as usual.

    A model is not deferred if the environment variable LORA_PARALLEL_DEFER is 0 when it is loaded.
    """
    adapters_off_meta()
    with deferred_loading(_constructors_in_memory, unless_told=True):
        yield


_own_register = nn.Module.register_parameter


@contextmanager
def _constructors_on_meta() -> Iterator[None]:
    """Move each parameter to meta when its module registers it; buffers are computed: no checkpoint need hold them."""

    @wraps(_own_register)
    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        _own_register(module, name, param)
        if param is not None and not param.is_meta and not isinstance(param, LazyTensor):
            module._parameters[name] = defer(param)  # type: ignore[assignment]

    with _registering(register_parameter), suspend_during_injection(_constructors_in_memory):
        yield


def _registering(function: object) -> AbstractContextManager[None]:
    return replaced(nn.Module, {"register_parameter": function})


_constructors_in_memory = partial(_registering, _own_register)


log = logging.getLogger(__name__)


def adopt_rank_zero(tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> int:
    """Give every rank the parameters and buffers of rank 0, by name; return how many tensors had to be sent.

    Tensors on meta have no values yet; only their names, shapes and dtypes are compared.

    Fingerprints of the tensors are compared first, in one message with one of the structure: copies that are equal
    (same seed, same file) cost no more than that. Unequal tensors are broadcast one by one.

    Raises:
        ValueError: The ranks hold models of different structure (names, shapes, dtypes or requires_grad); every rank
            raises it.
    """
    if dist.get_world_size() == 1:
        return 0
    lines = [f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad} {t.is_meta}" for name, t in tensors.items()]
    structure = len(lines), hashlib.blake2b("\n".join(lines).encode()).digest()
    names = [name for name, tensor in tensors.items() if not tensor.is_meta]
    everyone = gather_objects((structure, [fingerprint(tensors[name]) for name in names]))
    if others := [rank for rank, (theirs, _) in enumerate(everyone) if theirs != everyone[0][0]]:
        raise ValueError(
            f"ranks {others} built a model that differs from rank 0's in names, shapes, dtypes or requires_grad "
            f"({everyone[0][0][0]} tensors on rank 0): build the same model on every rank."
        )
    prints = zip(*(theirs for _, theirs in everyone), strict=True)
    unequal = [name for name, of_ranks in zip(names, prints, strict=True) if len(set(of_ranks)) > 1]
    if unequal and dist.get_rank() == 0:
        log.warning(
            "%d of %d tensors differ between ranks (first: %s): every rank takes rank 0's, as under DDP. Seed the "
            "model's construction to make this unnecessary.",
            len(unequal),
            len(names),
            unequal[0],
        )
    for name in unequal:
        tensor = tensors[name].detach()
        staged = tensor.to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(staged, src=0)
        tensor.copy_(staged)
    return len(unequal)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of `model` by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_same_files(model: nn.Module) -> None:
    """Check that all ranks fill a model on meta from copies of the same files. Collective."""
    with agreed("their shards would be of different checkpoints. Give every rank the same one.") as alike:
        for source in sources_of(model):
            alike[f"the fingerprint of {source.path.name}"] = fingerprint_of(source)


def start_alike(setup: Setup) -> None:
    """Give every rank the values of rank 0, or copies of the same files to read, and put plain tensors on meta."""
    # A decomposition may differ between ranks: what is taken from a base must be what rank 0's adapter starts with.
    values = tensors_of(setup.model) | factors_in(setup.model)
    adopt_rank_zero(values, setup.mesh)
    check_same_files(setup.model)
    settle(setup.model)


def fill_shards(setup: Setup) -> None:
    """Draw the adapter of a model on meta, and read this rank's part of its weights."""
    model, mesh, config = setup.model, setup.mesh, setup.config
    with agreed():
        if setup.late is not None:
            setup.late.draw(model, config.seed, device_at_rest(mesh, config))
        if setup.materialize:
            read_weights(model, device_at_rest(mesh, config))
    if setup.materialize:
        move_to_device(model, mesh, config)  # what was in memory already
