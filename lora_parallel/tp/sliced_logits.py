"""Keep the logits of a language model in slices over the vocabulary, one on each tp rank (`loss_parallel=True`).

In training the head returns a `SlicedLogits`: a tensor of the shape of all logits that holds this rank's slice of them.
Two rules hold for it, whatever code of a model, a trainer or a user computes with it:

1. What models do between head and loss keeps the slices: a change of dtype or of the shape of the tokens, a choice of
   tokens, a product with a number, tanh. `torch.nn.functional.cross_entropy` computes the loss from them (see
   `tp/vocabulary_loss.py`), so that every loss that calls it is served as it is: transformers' with all its arguments,
   and a user's own.
2. Any other operation gathers the logits first. So its result is that of one process, at the cost that every step has
   without `loss_parallel`.

A cast to a wider dtype before the loss is put off until the loss casts chunks of the tokens. So the chunks save memory
on one rank, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import EllipsisType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from lora_parallel.distributed.collectives import chunk_bounds, chunks_over_tp, gather_last_dim
from lora_parallel.distributed.torch_private import no_torch_function, storageless
from lora_parallel.layers.module_names import embeddings_of, innermost
from lora_parallel.tp.layer import tp_layer_of
from lora_parallel.tp.vocabulary_loss import cross_entropy_of_slices

__all__ = ["SlicedLogits", "head_of", "keep_logits_sliced"]

log = logging.getLogger(__name__)


class _Head:
    """Hold the size of a head's vocabulary and this rank's part of it.

    Args:
        vocabulary: The number of logits of a token.
        group: The process group of the tp axis; None if this rank computes all logits.
        name: The head's name, for messages.
    """

    def __init__(self, vocabulary: int, group: ProcessGroup | None, name: str) -> None:
        self.vocabulary, self.group, self.name = vocabulary, group, name
        self.start, self.end = (
            (0, vocabulary) if group is None else chunk_bounds(vocabulary, group.size(), group.rank())
        )
        self._told = False

    def gathered(self, part: Tensor, function: Any) -> Tensor:
        """Return all logits, of which each rank has `part`; tell the user once which operation asked for them."""
        if self.group is None:
            return part
        if not self._told and dist.get_rank() == 0:
            self._told = True
            log.warning(
                "loss_parallel=True: %s reads the logits of %s in training, so that they are gathered as without "
                "loss_parallel. The result is right, if all tp ranks do the same.",
                function,
                self.name,
            )
        return chunks_over_tp(part, self.vocabulary, self.group, self.name)


class _Held:
    """Hold this rank's slice of some logits and, once an operation has asked for them, all logits."""

    def __init__(self, part: Tensor) -> None:
        self.part: Tensor | None = part
        self.whole: Tensor | None = None
        self.viewed = False
        """True if other logits share memory with these in torch, and do not here once both are gathered."""


class SlicedLogits(Tensor):
    """Stand for all logits [..., vocabulary], of which this rank holds a slice; see the module's docstring.

    Args:
        part: This rank's slice, [..., features of this rank].
        dtype: Dtype of the logits. The slice is cast to it where it is used.
        head: The head that computed the slice.
    """

    head: _Head
    held: _Held

    @staticmethod
    def __new__(cls, held: _Held, shape: Any, dtype: torch.dtype, device: torch.device, head: _Head) -> SlicedLogits:
        logits: SlicedLogits = storageless(cls, shape, dtype, device)
        logits.head, logits.held = head, held
        return logits

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"SlicedLogits(shape={tuple(self.shape)}, dtype={self.dtype}, of {self.head.name})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args else None
        if isinstance(logits, SlicedLogits) and logits.held.whole is None:
            result = _SLICED.get(func, _not_sliced)(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _OF_MEMORY:
            args = tree_map_only(SlicedLogits, lambda each: each.gathered(func), args)
        return no_torch_function(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            (logits,) = args
            return SlicedLogits(logits.held, logits.shape, logits.dtype, logits.device, logits.head)
        if func._schema.is_mutable and any(isinstance(each, SlicedLogits) and each.held.viewed for each in args):
            raise RuntimeError(
                f"loss_parallel=True: {func} changes logits in place of which a view was made, or that are one: the "
                "other would not change with them. Change the logits before the view is made, or use "
                "loss_parallel=False."
            )
        args, kwargs = tree_map_only(SlicedLogits, lambda each: each.gathered(func), (args, kwargs or {}))
        return func(*args, **kwargs)

    def gathered(self, function: Any) -> Tensor:
        """Return all logits, for an operation that autograd does not see. They are kept, and the slice is not."""
        held = self.held
        if held.whole is None:
            assert held.part is not None
            held.whole = self.head.gathered(held.part.to(self.dtype), function)
            held.part = None
        return held.whole


class _ToSlice(torch.autograd.Function):
    """Return this rank's slice of logits; the gradient of the slice becomes a slice of theirs."""

    @staticmethod
    def forward(ctx: Any, logits: SlicedLogits) -> Tensor:
        assert logits.held.part is not None
        ctx.of = logits.shape, logits.dtype, logits.device, logits.head
        return logits.held.part.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return SlicedLogits(_Held(grads[0]), *ctx.of)


class _FromSlice(torch.autograd.Function):
    """Return the logits that this rank has a slice of; of their gradient it takes this rank's slice.

    A gradient that is not sliced was computed from gathered logits, the same on every rank.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, dtype: torch.dtype, head: _Head) -> SlicedLogits:
        ctx.head, ctx.dtype = head, part.dtype
        return SlicedLogits(_Held(part.detach()), (*part.shape[:-1], head.vocabulary), dtype, part.device, head)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        if isinstance(grad, SlicedLogits):
            if grad.held.part is not None:
                return grad.held.part.to(ctx.dtype), None, None
            grad = grad.gathered("backward")
        return grad[..., ctx.head.start : ctx.head.end].to(ctx.dtype), None, None


# ------------------------------------------------------------------------------- operations on slices
#
# Each is given torch's function and its arguments, the first of which are logits. It returns NotImplemented if these
# arguments ask for more than slices.


def _not_sliced(func: Any, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def _slice_of(logits: SlicedLogits) -> Tensor:
    part: Tensor = _ToSlice.apply(logits)
    return part.to(logits.dtype)


def _view_of(logits: SlicedLogits, part: Tensor) -> SlicedLogits:
    view: SlicedLogits = _FromSlice.apply(part, logits.dtype, logits.head)
    logits.held.viewed = view.held.viewed = True
    return view


def _each_logit(func: Any, logits: SlicedLogits, *numbers: Any) -> Any:
    """Compute a function of each logit and of numbers. Tensors could have gradients, which would be partial sums."""
    if not all(isinstance(number, (int, float)) for number in numbers):
        return NotImplemented
    part = func(_slice_of(logits), *numbers)
    return _FromSlice.apply(part, part.dtype, logits.head)


def _cast(func: Any, logits: SlicedLogits, dtype: Any = torch.float32) -> Any:
    """Change the dtype. The slice is cast later, if it has the logits' own dtype still, and no bits are lost."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return NotImplemented
    if dtype is logits.dtype:
        return logits
    part: Tensor = _ToSlice.apply(logits)
    if part.dtype is not logits.dtype or torch.promote_types(dtype, torch.float32) is not dtype:
        part = part.to(logits.dtype).to(dtype)
    return _FromSlice.apply(part, dtype, logits.head)


def _reshape(func: Any, logits: SlicedLogits, *args: Any, **kwargs: Any) -> Any:
    """Change the shape of the tokens. Rows of the vocabulary's size are the rows that there were: order is kept."""
    new = func(torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *args, **kwargs)
    if new.dtype is not logits.dtype or not new.dim() or new.shape[-1] != logits.head.vocabulary:
        return NotImplemented
    part: Tensor = _ToSlice.apply(logits)
    return _view_of(logits, part.reshape(*new.shape[:-1], part.shape[-1]))


def _contiguous(func: Any, logits: SlicedLogits, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else logits  # a slice has strides of its own, and nobody sees them


def _choose(func: Any, logits: SlicedLogits, index: Any) -> Any:
    """Choose tokens, by an index that leaves the last dim whole and last."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is None or type(item) in (int, slice, EllipsisType, Tensor) for item in items):
        return NotImplemented
    if any(isinstance(item, Tensor) and item.dtype not in (torch.bool, torch.int64) for item in items):
        return NotImplemented
    indexed = [item for item in items if item is not None and item is not ...]
    dims = sum(item.dim() if isinstance(item, Tensor) and item.dtype is torch.bool else 1 for item in indexed)
    names_last = dims == logits.dim() or (any(item is ... for item in items) and items[-1] is not ...)
    if names_last and not (isinstance(items[-1], slice) and items[-1] == slice(None)):
        return NotImplemented
    part: Tensor = _ToSlice.apply(logits)
    return _view_of(logits, part[index])


def _cross_entropy(
    func: Any,
    logits: SlicedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute `torch.nn.functional.cross_entropy` of logits [tokens, vocabulary] and labels [tokens]."""
    if weight is not None or size_average is not None or reduce is not None or label_smoothing:
        return NotImplemented
    if logits.dim() != 2 or target.dtype is not torch.int64 or target.shape != logits.shape[:1]:
        return NotImplemented
    head = logits.head
    part: Tensor = _ToSlice.apply(logits)
    losses = cross_entropy_of_slices(
        part, target, ignore_index, head.vocabulary, head.start, logits.dtype, head.group, head.name
    )
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / (target != ignore_index).sum()
    return losses.to(logits.dtype)


_SLICED: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.cross_entropy: _cross_entropy,
    **dict.fromkeys((torch.mul, Tensor.mul, torch.div, Tensor.div, torch.tanh, Tensor.tanh), _each_logit),
    **dict.fromkeys((Tensor.float, Tensor.to), _cast),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten), _reshape),
    Tensor.contiguous: _contiguous,
    Tensor.__getitem__: _choose,
}
_OF_MEMORY = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__reduce_ex__, Tensor.untyped_storage}
"""Functions that read a tensor's memory without an operation of torch."""


# ------------------------------------------------------------------------------- the head


def head_of(model: nn.Module) -> nn.Module:
    """Return the layer that computes a model's logits.

    Raises:
        ValueError: The model names no output embeddings.
    """
    inner = innermost(model)
    head = embeddings_of(inner, "output")
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"loss_parallel=True: {type(inner).__name__} names no language-model head, so that nothing shows which "
            "layer computes logits: give it a method get_output_embeddings that returns the layer, or use "
            "loss_parallel=False."
        )
    return head


def keep_logits_sliced(head: nn.Module) -> None:
    """Make a head return `SlicedLogits` in training, in place. `apply_style` has been called if tp is above 1.

    A head whose output is whole on every rank (tp is 1, or its style says so) computes chunks of the tokens only.
    """
    layers = [module for module in head.modules() if tp_layer_of(module) is not None]
    for layer in layers or [head]:
        _keep_output_sliced(layer)


def _keep_output_sliced(layer: nn.Module) -> None:
    own, unit = layer.forward, tp_layer_of(layer)
    split: _Head | None = None
    if unit is not None and unit.style.leave == "gather":
        assert unit.out_features is not None
        split = _Head(unit.out_features, unit.context.group, unit.name)
        unit.style = replace(unit.style, leave="keep")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        y = own(*args, **kwargs)
        if self.training and torch.is_grad_enabled():
            return _FromSlice.apply(y, y.dtype, split or _Head(y.shape[-1], None, "the head"))
        if split is None or split.group is None:
            return y
        return gather_last_dim(y, split.vocabulary, split.group, split.name)

    layer.forward = MethodType(forward, layer)
