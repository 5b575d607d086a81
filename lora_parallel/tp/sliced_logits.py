"""Keep the logits of a language model in slices over the vocabulary, one on each tp rank (`loss_parallel=True`).

In training the head returns a `SlicedLogits`: a tensor of the shape of all logits that holds this rank's slice of them.
Two rules hold for it, whatever code of a model, a trainer or a user computes with it:

1. What models do between head and loss keeps the slices: products, sums and tanh of each logit, a change of dtype, a
   view or a choice of tokens. `torch.nn.functional.cross_entropy` computes the loss from them (see
   `tp/vocabulary_loss.py`), so that every loss that calls it is served as it is: transformers' with all its arguments,
   and a user's own.
2. Any other operation gathers the logits first. So its result is that of one process, at the cost that every step has
   without `loss_parallel`.

The operations are those below autograd, which differentiates what models and users call as ever, views that change in
place included.

A cast to a wider dtype before the loss is put off until the loss casts chunks of the tokens. So the chunks save memory
on one rank, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves, tree_map_only

from lora_parallel.distributed.collectives import chunk_bounds, chunks_over_tp, gather_last_dim
from lora_parallel.distributed.torch_private import no_torch_function, storageless
from lora_parallel.layers.module_names import embeddings_of, innermost
from lora_parallel.tp.layer import tp_layer_of
from lora_parallel.tp.vocabulary_loss import cross_entropy_of_slices

__all__ = ["SlicedLogits", "head_of", "keep_logits_sliced"]

log = logging.getLogger(__name__)
aten = torch.ops.aten


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
            return part.clone()  # an operation may change it in place, and other logits may hold the slice
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
    """Hold this rank's slice of some logits and, once an operation has asked for them, all logits.

    Args:
        part: This rank's slice, [..., features of this rank]. It may be of another dtype than the logits.
        base: What holds the logits that these are a view of; None if they are no view.
        view: Makes the view of all logits in `base`.
    """

    def __init__(self, part: Tensor, base: _Held | None = None, view: Callable[[Tensor], Tensor] | None = None) -> None:
        self.part = part
        self.base, self.view = base, view
        self.whole: Tensor | None = None

    @property
    def is_gathered(self) -> bool:
        """Return True if there are all logits, which may have changed in place: the slice is of no use then."""
        return self.whole is not None or (self.base is not None and self.base.is_gathered)

    def gathered(self, dtype: torch.dtype, head: _Head, function: Any) -> Tensor:
        """Return all logits. They are kept, so that `function` may change them in place."""
        if self.whole is None:
            if self.base is not None and self.view is not None:
                self.whole = self.view(self.base.gathered(dtype, head, function))
            else:
                self.whole = head.gathered(self.part, function).to(dtype)
        return self.whole


class SlicedLogits(Tensor):
    """Stand for all logits [..., vocabulary], of which this rank holds a slice; see the module's docstring.

    Args:
        held: Holds the slice.
        like: A tensor with the shape, strides and dtype of the logits, on meta.
        head: The head that computed the slice.
    """

    head: _Head
    held: _Held

    @staticmethod
    def __new__(cls, held: _Held, like: Tensor, head: _Head) -> SlicedLogits:
        logits: SlicedLogits = storageless(cls, like.shape, like.dtype, held.part.device, like.stride())
        logits.head, logits.held = head, held
        return logits

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"SlicedLogits(shape={tuple(self.shape)}, dtype={self.dtype}, of {self.head.name})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        logits = args[0] if args else (kwargs or {}).get("input")
        if func in _FUNCTIONS and isinstance(logits, SlicedLogits) and not logits.held.is_gathered:
            result = _FUNCTIONS[func](*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if func in _OF_MEMORY:
            args = tree_map_only(SlicedLogits, lambda each: each.gathered(func), args)
        return no_torch_function(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sliced = [each for each in tree_leaves((args, kwargs)) if isinstance(each, SlicedLogits)]
        if func is aten.detach.default:
            return SlicedLogits(sliced[0].held, sliced[0].as_meta(), sliced[0].head)
        if func in _OPERATORS and not any(each.held.is_gathered for each in sliced):
            result = _OPERATORS[func](func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map_only(SlicedLogits, lambda each: each.gathered(func), (args, kwargs))
        return func(*args, **kwargs)

    def gathered(self, function: Any) -> Tensor:
        """Return all logits for an operation that autograd does not see."""
        return self.held.gathered(self.dtype, self.head, function)

    def as_meta(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor on meta of the same shape, strides and dtype, or of another dtype."""
        return torch.empty_strided(self.shape, self.stride(), dtype=dtype or self.dtype, device="meta")


class _ToSlice(torch.autograd.Function):
    """Return this rank's slice of logits; the gradient of the slice becomes a slice of theirs."""

    @staticmethod
    def forward(ctx: Any, logits: SlicedLogits) -> Tensor:
        ctx.like, ctx.head = logits.as_meta(), logits.head
        return logits.held.part.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return SlicedLogits(_Held(grads[0]), ctx.like, ctx.head)


class _FromSlice(torch.autograd.Function):
    """Return the logits that this rank has a slice of; of their gradient it takes this rank's slice.

    A gradient that is not sliced was computed from gathered logits, the same on every rank.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, head: _Head) -> SlicedLogits:
        ctx.head, ctx.dtype = head, part.dtype
        return _sliced(part.detach(), head)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        if isinstance(grad, SlicedLogits):
            if not grad.held.is_gathered:
                return grad.held.part.to(ctx.dtype), None
            grad = grad.gathered("backward")
        return grad[..., ctx.head.start : ctx.head.end].to(ctx.dtype), None


def _sliced(part: Tensor, head: _Head, dtype: torch.dtype | None = None) -> SlicedLogits:
    """Return the logits of which this rank has `part`, as they are or cast to another dtype."""
    shape = (*part.shape[:-1], head.vocabulary)
    return SlicedLogits(_Held(part), torch.empty(shape, dtype=dtype or part.dtype, device="meta"), head)


# ------------------------------------------------------------------------------- operations on slices
#
# Functions and operators of torch that are given logits. Autograd sees the functions, and not the operators, of which
# its own formulas for backward are made. The result is NotImplemented if the arguments ask for more than slices.


def _pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a function of each element, with numbers and with tensors of the vocabulary's size or of none."""
    heads = [each.head for each in args if isinstance(each, SlicedLogits)]
    head = heads[0]
    if len({(each.vocabulary, each.start, each.end) for each in heads}) > 1:
        return NotImplemented
    parts = []
    for each in args:
        if isinstance(each, SlicedLogits):
            each = each.held.part.to(each.dtype)
        elif isinstance(each, Tensor) and each.dim() and each.shape[-1] == head.vocabulary:
            each = each[..., head.start : head.end]
        elif isinstance(each, Tensor) and each.dim() and each.shape[-1] != 1:
            return NotImplemented
        parts.append(each)
    return _sliced(func(*parts, **kwargs), head)


def _cast(func: Any, logits: SlicedLogits, **kwargs: Any) -> Any:
    """Change the dtype. To a wider one the slice is cast later, where it is used."""
    dtype: torch.dtype = kwargs.get("dtype") or logits.dtype
    if not dtype.is_floating_point or kwargs.get("device", logits.device) != logits.device:
        return NotImplemented
    part = logits.held.part
    if dtype is not part.dtype or torch.promote_types(part.dtype, logits.dtype) is not logits.dtype:
        part = part.to(logits.dtype)
    if torch.promote_types(dtype, torch.float32) is not dtype:
        part = part.to(dtype)
    return SlicedLogits(_Held(part), logits.as_meta(dtype), logits.head)


def _view(func: Any, logits: SlicedLogits, *args: Any) -> Any:
    """Make a view that leaves the last dim as it is: rows of the vocabulary's size are the rows that there were."""
    like = func(logits.as_meta(), *args)
    if like.dtype is not logits.dtype or not like.dim() or like.shape[-1] != logits.head.vocabulary:
        return NotImplemented
    part = logits.held.part
    if func in (aten.view.default, aten._unsafe_view.default):
        part = part.reshape(*like.shape[:-1], part.shape[-1])
    else:
        dim, dims = args[0] if args else 0, max(like.dim(), logits.dim())
        if dim % dims == dims - 1:
            return NotImplemented
        part = func(part, *args)
    return SlicedLogits(_Held(part, logits.held, lambda whole: func(whole, *args)), like, logits.head)


def _clone(func: Any, logits: SlicedLogits, **kwargs: Any) -> Any:
    return SlicedLogits(_Held(logits.held.part), func(logits.as_meta(), **kwargs), logits.head)


def _backward_of_view(func: Any, logits: SlicedLogits, sizes: list[int], dim: int, *args: Any) -> Any:
    """Put a gradient among zeros; it is sliced as its logits are, unless the view was over the vocabulary."""
    if dim % len(sizes) == len(sizes) - 1:
        return NotImplemented
    part = logits.held.part
    return _sliced(func(part, [*sizes[:-1], part.shape[-1]], dim, *args), logits.head, logits.dtype)


def _choose(logits: SlicedLogits, index: Any) -> Any:
    """Choose tokens by a mask or by their numbers."""
    if type(index) is not Tensor or index.dtype not in (torch.bool, torch.int64):
        return NotImplemented
    if (index.dim() if index.dtype is torch.bool else 1) >= logits.dim():
        return NotImplemented
    part: Tensor = _ToSlice.apply(logits)
    return _FromSlice.apply(part[index], logits.head).to(logits.dtype)


def _cross_entropy(
    input: SlicedLogits,
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
    if reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if input.dim() != 2 or target.dtype is not torch.int64 or target.shape != input.shape[:1]:
        return NotImplemented
    head = input.head
    part: Tensor = _ToSlice.apply(input)
    losses = cross_entropy_of_slices(
        part, target, ignore_index, head.vocabulary, head.start, input.dtype, head.group, head.name
    )
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / (target != ignore_index).sum()
    return losses if torch.is_autocast_enabled(input.device.type) else losses.to(input.dtype)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.cross_entropy: _cross_entropy,
    Tensor.__getitem__: _choose,
}
_OPERATORS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default), _pointwise),
    **dict.fromkeys((aten.tanh.default, aten.tanh_backward.default), _pointwise),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.slice.Tensor, aten.select.int), _view),
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim), _view),
    **dict.fromkeys((aten.slice_backward.default, aten.select_backward.default), _backward_of_view),
    aten.clone.default: _clone,
    aten._to_copy.default: _cast,
}
_OF_MEMORY = {
    Tensor.numpy,
    Tensor.tolist,
    Tensor.__array__,
    Tensor.__deepcopy__,
    Tensor.__reduce_ex__,
    Tensor.data_ptr,
    Tensor.untyped_storage,
}
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
            return _FromSlice.apply(y, split or _Head(y.shape[-1], None, "the head"))
        if split is None or split.group is None:
            return y
        return gather_last_dim(y, split.vocabulary, split.group, split.name)

    layer.forward = MethodType(forward, layer)
