"""Remember, for each parameter and buffer of a model on meta, the lazy tensor that will fill it.

Until the model is sharded, its parameters are `LazyParameter`s, each with the node that will fill it. Then `settle`
replaces them by plain tensors on meta, which torch's sharding replaces again; from then on the modules that hold the
tensors remember the lazy tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from lora_parallel.lazy.files import Source
from lora_parallel.lazy.graph import Node, describe, leaves, read
from lora_parallel.lazy.lazy_tensor import LazyParameter, LazyTensor

# Name of the environment variable that, set to 0, lets front ends load models into memory instead of on meta.
DEFER = "LORA_PARALLEL_DEFER"
_RECORD = "_lora_parallel_deferred_values"  # on a module
_DEFERRED, _TWIN, _GIVEN = "_lora_parallel_deferred", "_lora_parallel_twin", "_lora_parallel_given"  # on a parameter


@dataclass
class _Record:
    """Hold what is known of the values that a module's own parameters and buffers will get, each by its key."""

    # Lazy tensors that will fill plain tensors on meta, after `settle`.
    lazy: dict[str, LazyTensor] = field(default_factory=dict)
    # Descriptions of the lazy tensors that were there at first, for the error if a tensor gets memory otherwise.
    expected: dict[str, str] = field(default_factory=dict)
    # Keys of parameters that the checkpoint lacks, which start as in a new layer.
    fresh: set[str] = field(default_factory=set)
    problem: Exception | None = None  # Of a model's checkpoint: `parallelize` raises it, on every rank


def _record_of(module: nn.Module) -> _Record:
    """Return the record of a module, which may be an empty one that the module does not keep."""
    return module.__dict__.get(_RECORD) or _Record()


def _kept_record(module: nn.Module) -> _Record:
    """Return the record of a module, which keeps it from now on."""
    if _RECORD not in module.__dict__:
        module.__dict__[_RECORD] = _Record()
        module.register_load_state_dict_pre_hook(_take_values)
    return module.__dict__[_RECORD]


def defer(parameter: Tensor) -> Tensor:
    """Return a tensor on meta for a parameter or buffer, the same object for each call, so that ties stay ties."""
    if _TWIN in parameter.__dict__:
        return parameter.__dict__[_TWIN]
    deferred = _on_meta(parameter)
    if isinstance(parameter, nn.Parameter):
        setattr(parameter, _TWIN, deferred)
    return deferred


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return empty
    deferred = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    setattr(deferred, _DEFERRED, True)
    return deferred


def is_deferred(parameter: Tensor) -> bool:
    """Return True if the parameter is on meta because `meta_init` put it there."""
    return isinstance(parameter, LazyParameter) or (parameter.is_meta and getattr(parameter, _DEFERRED, False))


def is_readable(parameter: Tensor) -> bool:
    """Return True if the parameter has its values in memory, or in a file that is known."""
    return isinstance(parameter, LazyParameter) or not is_deferred(parameter)


def without_values(model: nn.Module, known: Mapping[int, Any]) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are on meta."""
    memo = dict(known)
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = bare = defer(tensor)
        keep_settings(tensor, bare)
    return copy.deepcopy(model, memo)


def keep_settings(old: Tensor | None, new: Tensor) -> None:
    """Copy to `new` the settings that a quantiser has set on the weight `old` and that PEFT reads."""
    for key in ("compress_statistics", "quant_type"):
        if hasattr(old, key):
            setattr(new, key, getattr(old, key))


def has_deferred(model: nn.Module) -> bool:
    """Return True if a parameter or buffer of the model is still on meta."""
    return any(p.is_meta for p in model.parameters()) or any(b.is_meta for b in model.buffers())


def direct_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """List the parameters and buffers that `module` itself holds, by their keys."""
    tensors = {**module._parameters, **module._buffers}
    return [(key, tensor) for key, tensor in tensors.items() if tensor is not None]


def replace_tensor(module: nn.Module, key: str, tensor: Tensor) -> None:
    """Put a tensor in place of a parameter or buffer of `module` itself."""
    container = module._parameters if key in module._parameters else module._buffers
    container[key] = tensor  # type: ignore[assignment]


def lazy_tensors_of(module: nn.Module) -> dict[str, LazyTensor]:
    """Map names of the parameters and buffers that `module` itself holds to the lazy tensors that will fill them."""
    waiting = {key: LazyTensor(t.node) for key, t in direct_tensors(module) if isinstance(t, LazyParameter)}
    return {**_record_of(module).lazy, **waiting}


def fresh_of(module: nn.Module) -> set[str]:
    """Return the names of the parameters of `module` itself that its checkpoint lacks; they start as in a new layer."""
    return _record_of(module).fresh


def remember(model: nn.Module, problem: Exception | None, fresh: Collection[str] = ()) -> None:
    """Replace every `LazyTensor` of a model by a `LazyParameter`; note its checkpoint's error and what that lacks."""

    def waiting(tensor: LazyTensor) -> Tensor:
        return LazyParameter.of(tensor.node, isinstance(tensor, nn.Parameter), tensor.requires_grad).noting(tensor)

    for module, key, tensor in _replaced(model, LazyTensor, waiting):
        _kept_record(module).expected[key] = describe(tensor.node)
    for name in fresh:
        owner, _, key = name.rpartition(".")
        _kept_record(model.get_submodule(owner)).fresh.add(key)
    _kept_record(model).problem = problem


def settle(model: nn.Module) -> None:
    """Replace every `LazyParameter` by a plain tensor on meta, and note the lazy tensor on the module that holds it."""
    for module, key, tensor in _replaced(model, LazyParameter, _on_meta):
        _kept_record(module).lazy[key] = LazyTensor(tensor.node)


_T = TypeVar("_T", bound=Tensor)


def _replaced(model: nn.Module, kind: type[_T], make: Callable[[_T], Tensor]) -> Iterator[tuple[nn.Module, str, _T]]:
    """Replace tensors of a class in a model, ties once, and yield the module and the key of each, and what it was."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for key, tensor in direct_tensors(module):
            if isinstance(tensor, kind):
                if id(tensor) not in made:
                    made[id(tensor)] = make(tensor)
                replace_tensor(module, key, made[id(tensor)])
                yield module, key, tensor


def rearrange_lazy(module: nn.Module, key: str, rearrange: Callable[[Tensor], Tensor]) -> None:
    """Apply `rearrange` to the lazy tensor that `settle` noted for the parameter `key` of `module`, if there is one."""
    lazy = _record_of(module).lazy
    if key in lazy:
        lazy[key] = rearrange(lazy[key])  # type: ignore[assignment]


def _take_values(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Fill tensors on meta with the values given to `load_state_dict`, which a copy would lose without an error."""
    for key, tensor in direct_tensors(module):
        value = state.get(f"{prefix}{key}")
        if not isinstance(value, Tensor) or value.is_meta:
            continue
        if isinstance(tensor, LazyParameter):
            _swap(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))
        _record_of(module).expected.pop(key, None)
        _record_of(module).fresh.discard(key)


def _swap(waiting: LazyParameter, memory: Tensor) -> None:
    """Put memory in place of a LazyParameter; all modules that hold a tied weight get the same memory."""
    kept = nn.Parameter(memory, waiting.requires_grad) if isinstance(waiting, nn.Parameter) else memory
    setattr(kept, _GIVEN, True)
    torch.utils.swap_tensors(waiting, kept)


def read_whole(module: nn.Module) -> None:
    """Read a module's own parameters and buffers into memory, whole, for what needs them before sharding."""
    for key, tensor in direct_tensors(module):
        if isinstance(tensor, LazyParameter):
            _swap(tensor, read(tensor.node))
            _record_of(module).expected.pop(key, None)


def accept_memory(model: nn.Module) -> None:
    """Accept parameters and buffers that are in memory by now as filled: their checkpoint is not needed for them."""
    for module in model.modules():
        for key, tensor in direct_tensors(module):
            if not tensor.is_meta:
                _record_of(module).expected.pop(key, None)


def forget(model: nn.Module) -> None:
    """Remove the lazy tensors that the modules remember, after they have been read."""
    for module in model.modules():
        _record_of(module).lazy.clear()
        _record_of(module).expected.clear()


_READABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_fit(name: str, wanted: Tensor, stored: Node) -> None:
    """Refuse a node of another shape, or of a dtype that cannot fill a parameter or buffer."""
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
    """Check, before a model on meta is sharded, that its checkpoints can fill it; `materialize`: every tensor of it.

    Raises:
        OSError, ValueError: A checkpoint is incomplete, damaged or of another model; a tensor that was to be filled got
            memory in another way; or nothing fills a tensor.
    """
    for module in model.modules():
        if (problem := _record_of(module).problem) is not None:
            raise problem
    for name, module in model.named_modules():
        tensors = dict(direct_tensors(module))
        for key, where in _record_of(module).expected.items():
            if key in tensors and not tensors[key].is_meta and not hasattr(tensors[key], _GIVEN):
                raise ValueError(
                    f"{f'{name}.{key}' if name else key} was built on meta, to be filled from {where}, and has been "
                    "given memory since (by to_empty, or by an assignment). Leave it on meta, fill it with "
                    "load_state_dict, or build the model outside of meta_init."
                )
    if not materialize:
        return
    filled = {id(dict(direct_tensors(module)).get(key)) for module, key, _ in _lazy_in(model)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and id(tensor) not in filled:
            raise ValueError(
                f"{name} is on the meta device, and nothing fills it: build the model by from_pretrained under "
                "meta_init, or name its weights with attach_checkpoint(model, path), or build it in memory. (A layer "
                "that was replaced or resized on meta has lost its weights.)"
            )


def sources_of(model: nn.Module) -> list[Source]:
    """Return the files that the model will be filled from, sorted by path."""
    sources = {leaf.source for _, _, tensor in _lazy_in(model) for leaf in leaves(tensor.node)}
    return sorted(sources, key=lambda source: str(source.path))


def _lazy_in(model: nn.Module) -> Iterator[tuple[nn.Module, str, LazyTensor]]:
    return ((module, *item) for module in model.modules() for item in lazy_tensors_of(module).items())


def check_fresh(model: nn.Module) -> None:
    """Refuse a frozen parameter that no checkpoint holds: it would stay random for good."""
    wrappers = (module for module in model.modules() if isinstance(module, ModulesToSaveWrapper))
    replaced = {inner for wrapper in wrappers for inner in wrapper.original_module.modules()}
    for name, module in model.named_modules():
        for key in fresh_of(module):
            parameter = module._parameters.get(key)
            if parameter is not None and not parameter.requires_grad and module not in replaced:
                raise ValueError(
                    f"no file of the checkpoint holds {f'{name}.{key}' if name else key}, and it is frozen: it would "
                    "stay random. Train it (list its module in LoraConfig(modules_to_save=[...])), or give a "
                    "checkpoint that holds it."
                )
