"""What a model on meta remembers: for each parameter and buffer the stored tensor that will fill it.

Until it is sharded the tensors themselves know (`Waiting`). Then `settle` puts plain ones in their place, which torch's
sharding replaces by others again, and the modules that hold them remember.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from lora_parallel.nodes import Leaf, Node, describe, leaves, read
from lora_parallel.sources import Source, open_checkpoint
from lora_parallel.stored import StoredTensor
from lora_parallel.waiting import Waiting

__all__ = [
    "Checkpoint",
    "accept_memory",
    "attach_checkpoint",
    "check_checkpoints",
    "check_fit",
    "check_fresh",
    "checkpoints_in",
    "defer",
    "forget",
    "fresh_of",
    "has_deferred",
    "is_deferred",
    "keep_settings",
    "read_whole",
    "rearrange_stored",
    "remember",
    "settle",
    "sources_of",
    "stored_of",
    "without_values",
]

_STORED, _FRESH, _CHECKPOINT = "_lora_parallel_stored", "_lora_parallel_fresh", "_lora_parallel_checkpoint"
_DEFERRED, _TWIN, _GIVEN = "_lora_parallel_deferred", "_lora_parallel_twin", "_lora_parallel_given"
_EXPECTED = "_lora_parallel_expected"


@dataclass
class Checkpoint:
    """Where a model on meta came from."""

    path: str
    """As the user named it: a folder, a file or a name on the hub."""

    revision: str | None = None
    dtype: torch.dtype | None = None
    """What `from_pretrained` was told to load in."""

    key_mapping: dict[str, str] | None = None
    """The `key_mapping` argument of `from_pretrained`."""

    problem: Exception | None = field(default=None, repr=False)
    """What is wrong with it. `parallelize` raises it, on every rank; raising at once would leave peers waiting."""


def defer(parameter: Tensor) -> Tensor:
    """`parameter` (or buffer) on meta, with the same shape, dtype and requires_grad; the same object each time."""
    if _TWIN in parameter.__dict__:
        return parameter.__dict__[_TWIN]
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    if not isinstance(parameter, nn.Parameter):
        return empty
    deferred = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    setattr(deferred, _DEFERRED, True)
    setattr(parameter, _TWIN, deferred)
    return deferred


def is_deferred(parameter: Tensor) -> bool:
    """Whether the parameter is on meta because `meta_init` put it there."""
    return isinstance(parameter, Waiting) or (parameter.is_meta and getattr(parameter, _DEFERRED, False))


def without_values(model: nn.Module, known: Mapping[int, Any]) -> nn.Module:
    """A copy on meta.

    Args:
        model: Any model.
        known: What to take in place of other objects in it, by their ids, as for `copy.deepcopy`.
    """
    memo = dict(known)
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = bare = defer(tensor)
        keep_settings(tensor, bare)
    return copy.deepcopy(model, memo)


def keep_settings(old: Tensor | None, new: Tensor) -> None:
    """Set on `new` what a quantiser has set on the weight that it stands for, and PEFT asks for."""
    for key in ("compress_statistics", "quant_type"):
        if hasattr(old, key):
            setattr(new, key, getattr(old, key))


def has_deferred(model: nn.Module) -> bool:
    """Whether something of the model has yet to be given a value."""
    return any(p.is_meta for p in model.parameters()) or any(b.is_meta for b in model.buffers())


def stored_of(module: nn.Module) -> dict[str, StoredTensor]:
    """What will fill the parameters and buffers that `module` itself holds, by their names there."""
    held = {**module._parameters, **module._buffers}
    waiting = {key: StoredTensor(tensor.node) for key, tensor in held.items() if isinstance(tensor, Waiting)}
    return {**module.__dict__.get(_STORED, {}), **waiting}


def fresh_of(module: nn.Module) -> set[str]:
    """The parameters of `module` itself that its checkpoint does not hold, and that start as a new layer's do."""
    return set(module.__dict__.get(_FRESH, ()))


def checkpoints_in(model: nn.Module) -> Iterator[Checkpoint]:
    """The checkpoints that the models inside remember."""
    for module in model.modules():
        if _CHECKPOINT in module.__dict__:
            yield module.__dict__[_CHECKPOINT]


def remember(model: nn.Module, checkpoint: Checkpoint, fresh: set[str] | None = None) -> None:
    """Put tensors that wait in place of every stored tensor that `model` holds; ties stay ties.

    Args:
        model: Some of its parameters and buffers are `StoredTensor`s.
        checkpoint: Where they are from.
        fresh: Names of the parameters that it does not hold.
    """
    replaced: dict[int, Tensor] = {}
    for module in model.modules():
        for container in (module._parameters, module._buffers):
            for key, tensor in container.items():
                if not isinstance(tensor, StoredTensor):
                    continue
                _note(module, _EXPECTED, key, describe(tensor.node))
                if id(tensor) not in replaced:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    waiting = Waiting.of(tensor.node, is_parameter, tensor.requires_grad)
                    replaced[id(tensor)] = waiting.noting(tensor)
                container[key] = replaced[id(tensor)]  # type: ignore[assignment]
    for name in fresh or ():
        owner, _, key = name.rpartition(".")
        _note(model.get_submodule(owner), _FRESH, key, checkpoint.path)
    model.__dict__[_CHECKPOINT] = checkpoint


def _note(module: nn.Module, what: str, key: str, where: str) -> None:
    if not {_EXPECTED, _FRESH} & module.__dict__.keys():
        module.register_load_state_dict_pre_hook(_take_values)
    module.__dict__.setdefault(what, {})[key] = where


def settle(model: nn.Module) -> None:
    """Put plain parameters and buffers on meta in place of those that wait, and let their modules remember."""
    replaced: dict[int, Tensor] = {}
    for module in model.modules():
        for container in (module._parameters, module._buffers):
            for key, tensor in container.items():
                if not isinstance(tensor, Waiting):
                    continue
                module.__dict__.setdefault(_STORED, {})[key] = StoredTensor(tensor.node)
                if id(tensor) not in replaced:
                    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    if isinstance(tensor, nn.Parameter):
                        plain = nn.Parameter(plain, requires_grad=tensor.requires_grad)
                        setattr(plain, _DEFERRED, True)
                    replaced[id(tensor)] = plain
                container[key] = replaced[id(tensor)]  # type: ignore[assignment]


def rearrange_stored(module: nn.Module, key: str, rearrange: Callable[[Tensor], Tensor]) -> None:
    """Let a parameter of `module` be filled by `rearrange` of what its checkpoint holds for it."""
    stored = module.__dict__.get(_STORED, {})
    if key in stored:
        stored[key] = rearrange(stored[key])


def _take_values(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let `load_state_dict` win over the checkpoint: a copy into a meta tensor would be lost without a word.

    So a trained head in an adapter's folder (`modules_to_save`) is taken from there.
    """
    for key, waiting in [*module._parameters.items(), *module._buffers.items()]:
        given = state.get(f"{prefix}{key}")
        if not isinstance(given, Tensor) or given.is_meta:
            continue
        if isinstance(waiting, Waiting):
            _swap(waiting, torch.empty(waiting.shape, dtype=waiting.dtype))
        for what in (_EXPECTED, _FRESH):
            module.__dict__.get(what, {}).pop(key, None)


def _swap(waiting: Waiting, memory: Tensor) -> None:
    """Put memory in place of what waits; a tied weight is given in all places that hold it."""
    kept = nn.Parameter(memory, waiting.requires_grad) if isinstance(waiting, nn.Parameter) else memory
    setattr(kept, _GIVEN, True)
    torch.utils.swap_tensors(waiting, kept)


def read_whole(module: nn.Module) -> None:
    """Read what `module` itself holds into memory, on every rank that calls it: for what needs its values before the
    model is sharded.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    for key, waiting in [*module._parameters.items(), *module._buffers.items()]:
        if isinstance(waiting, Waiting):
            _swap(waiting, read(waiting.node))
            module.__dict__.get(_EXPECTED, {}).pop(key, None)


def accept_memory(model: nn.Module) -> None:
    """Take note that what waited for a checkpoint and is in memory by now was given its values."""
    for module in model.modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and not tensor.is_meta:
                module.__dict__.get(_EXPECTED, {}).pop(key, None)


def forget(model: nn.Module) -> None:
    """Let go of what has been read."""
    for module in model.modules():
        module.__dict__.pop(_STORED, None)
        module.__dict__.pop(_EXPECTED, None)


def attach_checkpoint(model: nn.Module, path: str | os.PathLike[str], allow_pickle: bool = False) -> nn.Module:
    """Say where the weights of a model are that was not built by `from_pretrained`; `parallelize` reads them.

    Call it before PEFT wraps the model. What the checkpoint holds goes to meta; the rest stays as it is.

    Args:
        model: Any `nn.Module`, on meta or not. Names in the checkpoint are those of its `state_dict()`; a transformers
            model's may be any that `from_pretrained` understands.
        path: A safetensors file; a directory with one, or with several and an index; a torch DCP directory; or, if
            `allow_pickle`, a state dict that `torch.save` wrote.
        allow_pickle: Read a pickle, with weights_only=True.

    Returns:
        The same object.

    Raises:
        Nothing itself: a checkpoint that cannot be read, or does not fit, is an error of `parallelize`, on every rank.
    """
    checkpoint = Checkpoint(str(path))
    try:
        found = open_checkpoint(path, allow_pickle)
        _claim(model, found, str(path))
    except (OSError, ValueError) as error:
        checkpoint.problem = error
    remember(model, checkpoint)
    return model


def _claim(model: nn.Module, found: dict[str, Leaf], path: str) -> None:
    """Put stored tensors in place of the parameters and buffers that they are for."""
    from transformers import PreTrainedModel

    from lora_parallel.transformers_hooks import claim

    if isinstance(model, PreTrainedModel):
        claim(model, found, path)
        return
    wanted = model.state_dict(keep_vars=True)
    sources = {id(tensor): name for name, tensor in wanted.items() if name in found}
    missing = [name for name, tensor in wanted.items() if id(tensor) not in sources]  # a tied one is there once
    unclaimed = [name for name in found if name not in wanted]
    if missing or unclaimed:
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: it does not hold {len(missing)} of its parameters and "
            f"buffers (first: {missing[:2]}), and nothing claims {len(unclaimed)} of its tensors (first: "
            f"{unclaimed[:2]}). Names must be those of model.state_dict(), before PEFT wraps the model."
        )
    for name, tensor in wanted.items():
        if name in found:
            check_fit(name, tensor, found[name])
    placed: dict[int, Tensor] = {}
    for name, tensor in wanted.items():
        if id(tensor) not in placed:
            stored: Tensor = StoredTensor(found[sources[id(tensor)]]).to(tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                stored = nn.Parameter(stored, requires_grad=tensor.requires_grad)
            placed[id(tensor)] = stored
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        container = module._parameters if key in module._parameters else module._buffers
        container[key] = placed[id(tensor)]  # type: ignore[assignment]


_READABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_fit(name: str, wanted: Tensor, stored: Node) -> None:
    """Check that a stored tensor can fill a parameter or buffer.

    Raises:
        ValueError: Its shape differs; or its dtype is not a floating-point one that can be converted, or, for integers,
            not the same.
    """
    for leaf in leaves(stored):
        where = f"{leaf.source.path}: {leaf.key}"
        if wanted.is_floating_point() and leaf.dtype not in _READABLE:
            raise ValueError(
                f"{where} has dtype {leaf.dtype}, and {name} is {wanted.dtype}: a quantised checkpoint is read by "
                "from_pretrained, with the config.json that it was saved with."
            )
        if not wanted.is_floating_point() and leaf.dtype != wanted.dtype:
            raise ValueError(f"{where} has dtype {leaf.dtype}, and {name} is {wanted.dtype}: give a checkpoint of it.")
    if tuple(stored.shape) != tuple(wanted.shape):
        raise ValueError(
            f"{describe(stored)} has shape {tuple(stored.shape)}, and {name} has {tuple(wanted.shape)}: the model's "
            "config is not the checkpoint's. A layer of another size (a resized embedding, a new head) must be saved "
            "with the model first, or the model loaded outside of meta_init."
        )


def check_checkpoints(model: nn.Module, materialize: bool) -> None:
    """Check what can be checked of a model on meta before it is sharded.

    Args:
        model: Before adapters are injected.
        materialize: Everything on meta is to be filled.

    Raises:
        OSError, ValueError: A checkpoint is incomplete, damaged or another model's; or nothing fills a parameter.
    """
    for checkpoint in checkpoints_in(model):
        if checkpoint.problem is not None:
            raise checkpoint.problem
    for name, module in model.named_modules():
        for key, where in module.__dict__.get(_EXPECTED, {}).items():
            tensor = module._parameters.get(key, module._buffers.get(key))
            if tensor is not None and not tensor.is_meta and not hasattr(tensor, _GIVEN):
                raise ValueError(
                    f"{f'{name}.{key}' if name else key} was built on meta, to be filled from {where}, and has been "
                    "given memory since (by to_empty, or by an assignment). Leave it on meta, fill it with "
                    "load_state_dict, or build the model outside of meta_init."
                )
    if not materialize:
        return
    filled = {id(module._parameters.get(key, module._buffers.get(key))) for module, key in _stored_in(model)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and id(tensor) not in filled:
            raise ValueError(
                f"{name} is on the meta device, and nothing fills it: build the model by from_pretrained under "
                "meta_init, or name its weights with attach_checkpoint(model, path), or build it in memory. (A layer "
                "that was replaced or resized on meta has lost its weights.)"
            )


def sources_of(model: nn.Module) -> list[Source]:
    """The files that the model is to be filled from."""
    found = {leaf.source: None for module, key in _stored_in(model) for leaf in leaves(stored_of(module)[key].node)}
    return sorted(found, key=lambda source: str(source.path))


def _stored_in(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        for key in stored_of(module):
            yield module, key


def check_fresh(model: nn.Module) -> None:
    """Check that what no checkpoint holds trains.

    Raises:
        ValueError: It is frozen: it would stay random for good.
    """
    replaced = {
        inner
        for module in model.modules()
        if isinstance(module, ModulesToSaveWrapper)
        for inner in module.original_module.modules()
    }
    for name, module in model.named_modules():
        if module in replaced:
            continue
        for key in fresh_of(module):
            parameter = module._parameters.get(key)
            if parameter is not None and not parameter.requires_grad:
                raise ValueError(
                    f"no file of the checkpoint holds {f'{name}.{key}' if name else key}, and it is frozen: it would "
                    "stay random. Train it (list its module in LoraConfig(modules_to_save=[...])), or give a "
                    "checkpoint that holds it."
                )
