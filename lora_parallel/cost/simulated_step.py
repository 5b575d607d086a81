"""Run a rank's training step without memory and without other ranks, and count what it takes.

Floating-point tensors are made on meta: they have a shape and no values. Integers (token ids, the experts that a token
goes to) are real, as models look at their values. Memory is counted as torch's own `MemTracker`
(torch.distributed._tools.mem_tracker) counts it: by the storages that operations return, until they are freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from lora_parallel.distributed.torch_private import group_of_collective

__all__ = ["Counts", "SimulatedStep", "simulated_step"]

_META, _CPU = torch.device("meta"), torch.device("cpu")
_SENT = {
    "all_gather": lambda sent, received, n: received * (n - 1) / n,
    "allgather": lambda sent, received, n: received * (n - 1) / n,
    "reduce_scatter": lambda sent, received, n: sent * (n - 1) / n,
    "all_reduce": lambda sent, received, n: 2 * sent * (n - 1) / n,
    "allreduce": lambda sent, received, n: 2 * sent * (n - 1) / n,
    "all_to_all": lambda sent, received, n: sent * (n - 1) / n,
    "alltoall": lambda sent, received, n: sent * (n - 1) / n,
}
"""Bytes that a rank sends in a ring algorithm, of the bytes that it gives to and gets from a collective of n ranks.

Source: NCCL's "Performance reported by NCCL tests" (nccl-tests, doc/PERFORMANCE.md), bus bandwidth.
"""


@dataclass
class Counts:
    """Hold what a rank's step took."""

    peaks: dict[str, int] = field(default_factory=dict)
    """Most bytes alive at a time above what was alive before the step, in each phase of it."""

    flops: int = 0
    """Floating-point operations of matrix products and attention, recomputation included."""

    messages: dict[str, int] = field(default_factory=dict)
    """Number of collectives, for each mesh axis."""

    sent: dict[str, float] = field(default_factory=dict)
    """Bytes that this rank sends, for each mesh axis."""


class SimulatedStep(TorchDispatchMode):
    """Keep floating-point tensors on meta and integers in memory, and count memory, operations and messages.

    Args:
        held: Tensors that are alive before the step and all through it; their memory is not counted.
        axes: Names of mesh axes by the process group of each.
    """

    def __init__(self, held: Iterable[Tensor] = (), axes: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._axes = axes or {}
        self.counts = Counts()
        self.alive = 0
        """Bytes that are alive, of those that operations returned since this mode began."""

        self._phase = "forward"
        self._sizes = {each.untyped_storage()._cdata: 0 for each in held}  # a view of one takes no memory

    def enter(self, phase: str) -> None:
        """Begin a phase of the step. Its peak counts from what is alive now."""
        self._phase = phase
        self._note_peak()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage again that was given another size."""
        key = storage._cdata
        if key in self._sizes:
            self.alive += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
            self._note_peak()

    def attention(self, products: int) -> None:
        """Count the operations of an attention, of which each product of two matrices has `products`."""
        self.counts.flops += 2 * products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        out = self._run(func, args, kwargs or {}, given)
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.counts.flops += count(*args, **(kwargs or {}), out_val=out)
        elif func._overloadpacket.__name__ in ("_grouped_mm", "int8_linear_matmul"):  # which the registry lacks
            self.counts.flops += 2 * args[0].numel() * out.shape[-1]
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_message(func, args, given, out)
        # A tensor made on the device "meta" may serve for its shape alone: it counts once an operation reads it.
        is_shape = not given and (kwargs or {}).get("device") == _META
        for each in ([] if func.is_view else given) + ([] if is_shape else tree_leaves(out)):
            if type(each) is Tensor:
                self._note(each)
        return out

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        if any(each.is_meta for each in given):
            name = func._overloadpacket.__name__
            if name == "_local_scalar_dense":
                return 1.0 if given[0].is_floating_point() else 1
            if name == "copy_":
                return func(*args, **kwargs) if given[0].is_meta else given[0]
            on_meta = {**kwargs, "device": _META} if kwargs.get("device") is not None else kwargs
            args, on_meta = tree_map_only(Tensor, _on_meta, (args, on_meta))
            if name == "_grouped_mm":
                return _grouped_product(func, args, on_meta)
            if name == "int8_vectorwise_quant":  # of bitsandbytes: no column has outliers
                return *func(args[0])[:2], torch.empty(0, dtype=torch.long)
            if name == "int8_mixed_scaled_mm":
                return self._product_of_bytes(*args), args[0].new_empty(0)
            out = func(*args, **on_meta)
            return (out[0], _in_turn(out[1], given[0].shape[-1])) if name == "topk" else out
        if given and kwargs.get("device") is None:
            if (
                func is torch.ops.aten.histc.default and not given[0].is_floating_point()
            ):  # the CPU has none of integers
                return func(given[0].float(), *args[1:], **kwargs).to(given[0].dtype)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            # A new tensor, or one that is moved: floating-point numbers to meta, integers to the CPU.
            if out.is_meta and not out.is_floating_point():
                return func(*args, **{**kwargs, "device": _CPU})
            if not out.is_meta and out.is_floating_point() and out.dim():
                return func(*args, **{**kwargs, "device": _META})
        return out

    def _product_of_bytes(self, x: Tensor, rows: Tensor, weight: Tensor, *scales: Tensor | None) -> Tensor:
        """Return the product of bitsandbytes' int8, whose CUDA kernels make int32, then float16, then `x`'s dtype."""
        with self:
            product = torch.ops.bitsandbytes.int8_linear_matmul(rows, weight)
            half: Tensor = torch.ops.bitsandbytes.int8_mm_dequant(product, *scales[:2])
            return half.to(x.dtype)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.alive += storage.nbytes()
            self._note_peak()
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self.alive -= self._sizes.pop(key, 0)

    def _note_peak(self) -> None:
        self.counts.peaks[self._phase] = max(self.counts.peaks.get(self._phase, 0), self.alive)

    def _note_message(self, func: Any, args: Any, given: list[Tensor], out: Any) -> None:
        name = func._overloadpacket.__name__.strip("_")
        rule = next((rule for kind, rule in _SENT.items() if name.startswith(kind)), None)
        if rule is None or (group := group_of_collective(args)) is None:
            return
        axis = self._axes.get(group.group_name)
        if axis is None or group.size() == 1:  # a check of all ranks, of the first step
            return
        size = max(map(_bytes, given), default=0)  # of the larger side, where outputs are given too
        received = max([size, *(_bytes(each) for each in tree_leaves(out) if isinstance(each, Tensor))])
        self.counts.messages[axis] = self.counts.messages.get(axis, 0) + 1
        self.counts.sent[axis] = self.counts.sent.get(axis, 0) + rule(size, received, group.size())


def _grouped_product(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the products of experts. On meta torch knows those of bfloat16 alone; others take the same shape."""
    dtype = args[0].dtype
    narrow = tree_map_only(Tensor, lambda each: each.bfloat16() if each.dtype is dtype else each, args)
    product: Tensor = func(*narrow, **kwargs)
    return product.to(dtype)


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to(_META)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _in_turn(indices: Tensor, choices: int) -> Tensor:
    """Return indices [..., k] that choose among `choices` as evenly as can be: tokens are routed to all experts."""
    return torch.arange(indices.numel()).remainder(choices).view(indices.shape)


class _FusedAttention(torch.autograd.Function):
    """Take the memory of a fused attention: inputs, output and one number a row are kept for backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, step: SimulatedStep) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.step, ctx.products = step, prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        step.attention(ctx.products)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Each of the two products is computed again and has two gradients (FlashAttention-2, section 3.1).
        ctx.step.attention(ctx.products * 5 // 2)
        return *(torch.empty_like(each) for each in ctx.saved_tensors[:3]), None


@contextmanager
def simulated_step(held: Iterable[Tensor] = (), axes: Mapping[str, str] | None = None) -> Iterator[SimulatedStep]:
    """Within the context, run on tensors without memory, and count.

    `scaled_dot_product_attention` takes the memory of the fused kernels of accelerators; on meta torch has none.

    Yields:
        The counts so far.
    """
    step = SimulatedStep(held, axes)
    storages: Any = torch.UntypedStorage
    functions: Any = functional
    own_resize, own_attention = storages.resize_, functions.scaled_dot_product_attention

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = own_resize(storage, size)
        step.resized(storage)
        return result

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _FusedAttention.apply(query, key, value, step)

    storages.resize_, functions.scaled_dot_product_attention = resize, attention
    try:
        with step:
            yield step
    finally:
        storages.resize_, functions.scaled_dot_product_attention = own_resize, own_attention
