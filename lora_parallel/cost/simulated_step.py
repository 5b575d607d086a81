"""Run the training step of a rank without memory and without other ranks, and count what it takes.

Floating-point tensors are made on meta: they have a shape and no values. Integers (token ids, the experts that a token
goes to) are real, as models look at their values. Memory is counted as torch's own `MemTracker`
(torch.distributed._tools.mem_tracker) counts it: by the storages that operations return, until they are freed.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from lora_parallel.config import ParallelConfig
from lora_parallel.cost.described_model import DescribedModel
from lora_parallel.distributed.dtensors import local, tensors_in
from lora_parallel.distributed.mesh import build_mesh, groups_of_axes
from lora_parallel.distributed.torch_private import (
    fake_process_group,
    group_of_collective,
    in_backward,
    parameters_on_meta,
)
from lora_parallel.optimizers import StepsOn, steps_on
from lora_parallel.replaced import replaced

_META, _CPU = torch.device("meta"), torch.device("cpu")
_SENT = {
    "allgather": lambda sent, received, n: received * (n - 1) / n,
    "reducescatter": lambda sent, received, n: sent * (n - 1) / n,
    "allreduce": lambda sent, received, n: 2 * sent * (n - 1) / n,
    "alltoall": lambda sent, received, n: sent * (n - 1) / n,
}
"""Bytes that a rank sends in a ring algorithm, of the bytes that it gives to and gets from a collective of n ranks.

Source: NCCL's "Performance reported by NCCL tests" (nccl-tests, doc/PERFORMANCE.md), bus bandwidth.
"""


class SimulatedStep(TorchDispatchMode):
    """Keep floating-point tensors on meta and integers in memory, and count memory, operations and messages.

    `known` are tensors that are alive before the step and all through it; their memory is not counted. `axes` names
    mesh axes by the process group of each.
    """

    def __init__(self, known: Iterable[Tensor], axes: Mapping[str, str]) -> None:
        super().__init__()
        self._axes = axes
        self._phase = "forward"
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}  # a view of one takes no memory
        self.alive = 0  # bytes, of the tensors that operations returned since this mode began
        self.peaks: dict[str, int] = {}  # most bytes alive at a time in each phase
        self.flops = 0  # of matrix products and attention, recomputation included
        self.messages: Counter[str] = Counter()  # number of collectives, for each mesh axis
        self.sent: dict[str, float] = defaultdict(float)  # bytes that this rank sends, for each mesh axis

    def enter(self, phase: str) -> None:
        """Begin a phase of the step. Its peak counts from what is alive now."""
        self._phase = phase
        self._grow(0)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage again whose size has changed."""
        if (key := storage._cdata) in self._sizes:
            growth = storage.nbytes() - self._sizes[key]
            self._sizes[key] += growth
            self._grow(growth)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [*tensors_in((args, kwargs))]
        out = self._run(func, args, kwargs, inputs)
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        elif func._overloadpacket.__name__ in ("_grouped_mm", "int8_linear_matmul"):  # which the registry lacks
            self.flops += 2 * args[0].numel() * out.shape[-1]
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_message(func, args, inputs, out)
        # A tensor made on the device "meta" may serve for its shape alone: it counts once an operation reads it.
        is_shape = not inputs and kwargs.get("device") == _META
        for leaf in ([] if func.is_view else inputs) + ([] if is_shape else [*tensors_in(out)]):
            if type(leaf) is Tensor and (storage := leaf.untyped_storage())._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self._grow(storage.nbytes())
                weakref.finalize(storage, self._forget, storage._cdata)
        return out

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor]) -> Any:
        name = func._overloadpacket.__name__
        if any(tensor.is_meta for tensor in inputs):
            if name == "_local_scalar_dense":
                return 1.0 if inputs[0].is_floating_point() else 1
            if name == "copy_":
                return func(*args, **kwargs) if inputs[0].is_meta else inputs[0]
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": _META}
            if not all(tensor.is_meta for tensor in inputs):
                args, kwargs = tree_map_only(Tensor, lambda x: x if x.is_meta else x.to(_META), (args, kwargs))
            if name == "_grouped_mm":  # of experts: on meta torch knows that of bfloat16 alone
                dtype = args[0].dtype
                args = tree_map_only(Tensor, lambda x: x.bfloat16() if x.dtype is dtype else x, args)
                return func(*args, **kwargs).to(dtype)
            if name == "int8_vectorwise_quant":  # of bitsandbytes: no column has outliers
                return *func(args[0])[:2], torch.empty(0, dtype=torch.long)
            if name == "int8_mixed_scaled_mm":
                return self._int8_product(*args), args[0].new_empty(0)
            out = _on_meta(func, args, kwargs)
            if name != "topk":
                return out
            indices = torch.arange(out[1].numel()).remainder(inputs[0].shape[-1])  # tokens are routed to all experts
            return out[0], indices.view(out[1].shape)
        if name == "histc" and not inputs[0].is_floating_point():  # not for integers on the CPU
            return func(inputs[0].float(), *args[1:], **kwargs).to(inputs[0].dtype)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and (not inputs or kwargs.get("device") is not None):
            # A new tensor, or one that is moved: floating-point numbers to meta, integers to the CPU.
            if out.is_meta and not out.is_floating_point():
                return func(*args, **{**kwargs, "device": _CPU})
            if not out.is_meta and out.is_floating_point() and out.dim():
                return func(*args, **{**kwargs, "device": _META})
        return out

    def _int8_product(self, x: Tensor, rows: Tensor, weight: Tensor, *scales: Tensor | None) -> Tensor:
        """Return the product of bitsandbytes' int8, whose CUDA kernels make int32, then float16, then `x`'s dtype."""
        with self:
            product = torch.ops.bitsandbytes.int8_linear_matmul(rows, weight)
            half: Tensor = torch.ops.bitsandbytes.int8_mm_dequant(product, *scales[:2])
            return half.to(x.dtype)

    def _grow(self, growth: int) -> None:
        self.alive += growth
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.alive)

    def _forget(self, key: int) -> None:
        self.alive -= self._sizes.pop(key, 0)

    def _note_message(self, func: Any, args: Any, inputs: list[Tensor], out: Any) -> None:
        name = func._overloadpacket.__name__.replace("_", "")
        rule = next((rule for kind, rule in _SENT.items() if name.startswith(kind)), None)
        if rule is None or (group := group_of_collective(args)) is None:
            return
        axis = self._axes.get(group.group_name)
        if axis is None or group.size() == 1:  # a check of all ranks, of the first step
            return
        size = max((tensor.nbytes for tensor in inputs), default=0)  # of the larger side, where outputs are given too
        received = max([size, *(leaf.nbytes for leaf in tensors_in(out))])
        self.messages[axis] += 1
        self.sent[axis] += rule(size, received, group.size())


def _form(value: Any) -> Any:
    """Return what an operator on meta makes its result of: the shapes, strides and dtypes of tensors, and all else."""
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.dtype
    return tuple(map(_form, value)) if isinstance(value, (list, tuple)) else (type(value), value)


@cache
def _writes(func: Any) -> bool | None:
    """Return False for an operator whose results are new tensors, True if its result is its first argument, with other
    values, and None for any other: for views, and for what changes shapes or several tensors.
    """
    values = (*func._schema.arguments, *func._schema.returns)
    aliases = [value.alias_info is not None and value.alias_info.is_write for value in values]
    if all(value.alias_info is None for value in values):
        return False
    changes_values = aliases[0] and aliases[-1] and sum(aliases) == 2 and len(func._schema.returns) == 1
    return True if changes_values and torch.Tag.inplace_view not in func.tags else None


_forms: dict[Any, Any] = {}
"""Forms of results, by operator and forms of arguments: most operators on meta compute them in Python."""


def _on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator whose tensors are on meta. One that is a tensor is computed once a form."""
    writes = _writes(func)
    if writes is None:
        return func(*args, **kwargs)
    key = (func, _form(args), _form([*kwargs.items()]))
    if (form := _forms.get(key)) is not None:
        _, shape, stride, dtype = form
        return args[0] if writes else torch.empty_strided(shape, stride, dtype=dtype, device=_META)
    out = func(*args, **kwargs)
    if type(out) in (Tensor, nn.Parameter):  # and no DTensor, which computes with others
        _forms[key] = _form(out)
    return out


class _FusedAttention(torch.autograd.Function):
    """Take the memory of a fused attention: inputs, output and one number a row are kept for backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, step: SimulatedStep) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.step, ctx.products = step, prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        step.flops += 2 * ctx.products
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Each of the two products is computed again and has two gradients (FlashAttention-2, section 3.1).
        ctx.step.flops += 2 * (ctx.products * 5 // 2)
        return *map(torch.empty_like, ctx.saved_tensors[:3]), None


@contextmanager
def simulated_step(known: Iterable[Tensor] = (), axes: Mapping[str, str] | None = None) -> Iterator[SimulatedStep]:
    """Within the context, run on tensors without memory, and count; attention takes the memory of fused kernels."""
    step = SimulatedStep(known, axes or {})
    torch_resize = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = torch_resize(storage, size)
        step.resized(storage)
        return result

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _FusedAttention.apply(query, key, value, step)

    instead = {"scaled_dot_product_attention": attention}
    with replaced(torch.UntypedStorage, {"resize_": resize}), replaced(functional, instead), step:
        yield step


Numbers = dict[str, float]
"""What a step takes of a rank, as a constant and a share of each block: bytes, operations and messages by name."""

PHASES = ("forward", "head", "last blocks", "other blocks", "optimizer")
"""Phases of a step, each with a peak of its own: a longer model adds the same bytes to a phase with each block.

The head's phase is from the end of the last block's forward to the beginning of its backward.
"""


@dataclass(frozen=True)
class StepCost:
    """Hold what a step takes of a rank, as shares that add up."""

    around: Numbers  # of the parts around the blocks, and of what a step takes once, however many blocks there are
    blocks: list[Numbers]  # that each block adds

    def total(self, first: int = 0, last: int | None = None) -> Numbers:
        """Return what a model with the blocks `first` to `last` (left out) takes."""
        return _sum([(self.around, 1), *((block, 1) for block in self.blocks[first:last])])


def _sum(parts: Iterable[tuple[Numbers, float]]) -> Numbers:
    """Return the sum of numbers, each times a factor."""
    total: Numbers = {}
    for numbers, factor in parts:
        total |= {name: total.get(name, 0.0) + factor * value for name, value in numbers.items()}
    return total


def cost_of_a_step(
    described: DescribedModel, config: ParallelConfig, ranks: int, rows: int, tokens: int, optimizer_name: str
) -> StepCost:
    """Return what a step takes of the first rank of a mesh without pipeline, which holds the largest shards.

    The step is run for a short model, and once more for each kind of block with one block more or less.
    """

    @cache
    def run(keep: tuple[int, ...]) -> Numbers:
        with fake_process_group(ranks, 0):
            mesh = build_mesh(config, "cpu")
            model, blocks = described.build(keep)
            described.parallelize(keep, model, mesh, config)
            model.train()
            numbers = _stored_bytes(model, blocks)
            known = [*map(local, (*model.parameters(), *model.buffers()))]
            ids = torch.zeros(rows, tokens, dtype=torch.long)
            with parameters_on_meta(), simulated_step(known, groups_of_axes(mesh)) as step:
                _note_phases(blocks, step)
                model(input_ids=ids, labels=ids).loss.backward()
                step.enter("optimizer")
                trained = [p for p in model.parameters() if p.requires_grad]
                optimizer = getattr(torch.optim, optimizer_name)(trained, lr=1e-4)
                if steps_on(optimizer) is StepsOn.DTENSORS:  # shards take the same, in less time
                    optimizer = type(optimizer)(map(_shard, trained), lr=1e-4)
                optimizer.step()
        states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
        return {
            **numbers,
            "states": sum(local(state).nbytes for state in states),
            "flops": step.flops,
            **{f"peak {phase}": step.peaks.get(phase, 0) for phase in PHASES},
            **{f"messages {axis}": count for axis, count in step.messages.items()},
            **{f"sent {axis}": size for axis, size in step.sent.items()},
        }

    stack = described.stack
    shares = {kind: _sum([(run(longer), 1), (run(shorter), -1)]) for kind, (longer, shorter) in stack.pairs().items()}
    blocks = [shares.get(kind, {}) for kind in stack.kinds]
    return StepCost(_sum([(run(stack.few), 1), *((blocks[index], -1) for index in stack.few)]), blocks)


def _shard(parameter: nn.Parameter) -> nn.Parameter:
    """Return this rank's shard of a parameter, with that of its gradient."""
    shard = nn.Parameter(local(parameter))
    shard.grad = None if parameter.grad is None else local(parameter.grad)
    return shard


def _stored_bytes(model: nn.Module, blocks: Sequence[nn.Module]) -> Numbers:
    """Return the bytes that a rank holds between steps; "embedding" and "head" are those around the blocks."""
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    numbers = dict.fromkeys(("base", "trained", "embedding", "head"), 0.0)
    for parameter in model.parameters():
        size = local(parameter).nbytes
        numbers["trained" if parameter.requires_grad else "base"] += size
        if id(parameter) not in in_blocks:
            numbers["embedding" if id(parameter) in embeddings else "head"] += size
    return {**numbers, "buffers": sum(local(buffer).nbytes for buffer in model.buffers())}


def _note_phases(blocks: Sequence[nn.Module], step: SimulatedStep) -> None:
    """Let the step enter a phase as the model comes to it."""

    def at_output(phase: str, forward_phase: str | None) -> Any:
        def hook(block: nn.Module, args: Any, output: Any) -> None:
            if in_backward():  # recomputed
                return
            if forward_phase is not None:
                step.enter(forward_phase)
            next(tensors_in(output)).register_hook(lambda grad: step.enter(phase))

        return hook

    blocks[-1].register_forward_hook(at_output("last blocks", "head"))
    if len(blocks) > 2:
        blocks[-3].register_forward_hook(at_output("other blocks", None))
