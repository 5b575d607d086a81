"""Let a tensor stand for all logits, of which each rank holds a slice: `SlicedTensor`, and the loss from slices.

With x the logits of a token and t its label, the loss is log(sum(exp(x))) - x[t]. Each rank computes both terms for its
slice of the vocabulary, and one all-gather gives all ranks the terms of all slices (Megatron-LM takes two all-reduces,
https://arxiv.org/abs/1909.08053, section 3). Backward needs no message: the gradient of a slice is softmax(x), from the
sum over all slices, minus one at the label.

Tokens are computed in chunks, in forward and in backward, so that logits of a wider dtype than the model's never exist
for all tokens at once.

A slice is over the vocabulary, among tp ranks (`loss_parallel=True`), or over the tokens, among cp ranks, or both. Two
rules hold, whatever code of a model, a trainer or a user computes with the tensor:

1. What models do between head and loss keeps the slices: products, sums and tanh of each logit, a change of dtype, a
   view or a choice of tokens. `torch.nn.functional.cross_entropy` computes the loss from them, so that every loss that
   calls it is served as it is: transformers' with all its arguments, and a user's own.
2. Any other operation gathers the logits first. So its result is that of one process, at the cost that every step has
   without `loss_parallel`.

The operations are those below autograd, which differentiates what models and users call as ever, views that change in
place included. A cast to a wider dtype is put off until the loss casts chunks of the tokens, which saves memory on one
rank, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.tensor.placement_types import Shard
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map_only

from lora_parallel.distributed.collectives import chunk_bounds, chunks_over_tp, gather_last_dim, stacked_over
from lora_parallel.distributed.dtensors import autocast_dtype
from lora_parallel.distributed.token_chunks import TokenChunks
from lora_parallel.distributed.torch_private import MEMORY_READERS, no_torch_function, storageless
from lora_parallel.layers.layer_parameters import embeddings_of, innermost
from lora_parallel.layers.wrapped_forward import wrap_forward
from lora_parallel.state import Setup
from lora_parallel.tp.layer import tp_layer_of

log = logging.getLogger(__name__)


class Slicing:
    """Say which slice of a tensor [rows, tokens, features] this rank has."""

    def __init__(
        self,
        features: int,
        group: ProcessGroup | None,
        name: str,
        chunks: TokenChunks | None = None,
        tokens: int = 0,
        plain_loss: bool = False,
    ) -> None:
        # `group` is None if this rank has all features, `chunks` if it has all tokens. `plain_loss`: compute a chunk's
        # loss by torch's own function, to which it equals bit by bit.
        self.features, self.group, self.name, self.chunks, self.tokens = features, group, name, chunks, tokens
        self.plain_loss = plain_loss
        self.start, self.end = (0, features) if group is None else chunk_bounds(features, group.size(), group.rank())
        self._told: set[str] = set()

    def over_tokens(self, chunks: TokenChunks, tokens: int) -> Slicing:
        """Return the same slicing of a chunk of the tokens."""
        slicing = Slicing(self.features, self.group, self.name, chunks, tokens, self.plain_loss)
        slicing._told = self._told  # once, for all forwards
        return slicing

    def equals(self, other: Slicing) -> bool:
        """Return True if the slices of two tensors are of the same features and tokens."""
        mine, theirs = ((slicing.features, slicing.start, slicing.end, slicing.tokens) for slicing in (self, other))
        return mine == theirs

    def shape(self, part: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor that `part` is a slice of."""
        lead = part.shape[:-1] if self.chunks is None else (part.shape[0], self.tokens)
        return (*lead, self.features)

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of a whole tensor."""
        if self.chunks is not None:
            whole = self.chunks.mine(whole.reshape(-1, self.tokens, whole.shape[-1]))
        return whole[..., self.start : self.end]

    def gathered(self, part: Tensor, function: Any) -> Tensor:
        """Return the whole tensor, of which each rank has `part`; tell the user once which operation asked for it."""
        if self.group is not None:
            if not self._told and dist.get_rank() == 0:
                self._told.add(self.name)
                log.warning(
                    "loss_parallel=True: %s reads the logits of %s in training, so that they are gathered as without "
                    "loss_parallel. The result is right, if all tp ranks do the same.",
                    function,
                    self.name,
                )
            part = chunks_over_tp(part, self.features, self.group, self.name)
        if self.chunks is not None:
            return self.chunks.whole(part, self.tokens, self.name)
        # A copy: an operation may change it in place, and other logits may hold the slice.
        return part if self.group is not None else part.clone()


CHUNK_ELEMENTS = 2**22  # Number of logits that are computed at a time: 16 MiB in float32


def _chunks(part: Tensor) -> Iterator[slice]:
    """Yield slices of the tokens of `part` [tokens, features], as many at a time as make `CHUNK_ELEMENTS` logits."""
    step = max(CHUNK_ELEMENTS // max(part.shape[1], 1), 1)
    yield from (slice(start, start + step) for start in range(0, part.shape[0], step))


class _CrossEntropyOfSlices(torch.autograd.Function):
    """Return the loss of each token; its backward is that of the slice of one rank."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        labels: Tensor,
        ignored: Tensor,
        start: int,
        dtype: torch.dtype,
        group: ProcessGroup | None,
        where: str,
    ) -> Tensor:
        tokens, width = part.shape
        places = labels - start
        outside = (places < 0) | (places >= width) | ignored
        places = places.masked_fill(outside, 0)
        terms = torch.full((2, tokens), -torch.inf, dtype=dtype, device=part.device)  # log of the sum; the label's
        terms[1] = 0
        if width:
            for chunk in _chunks(part):
                x = part[chunk].to(dtype)
                terms[0, chunk] = x.logsumexp(-1)
                terms[1, chunk] = x.gather(-1, places[chunk, None]).squeeze(-1)
            terms[1] = terms[1].masked_fill(outside, 0)
        if group is not None:
            stacked = stacked_over(terms, group, "sums of exponentials and logits of labels", where)
            terms = torch.stack([stacked[:, 0].logsumexp(0), stacked[:, 1].sum(0)])
        ctx.save_for_backward(part, places, outside, ignored, terms[0])
        return (terms[0] - terms[1]).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        part, places, outside, ignored, log_sums = ctx.saved_tensors
        losses = grads[0].masked_fill(ignored, 0)
        at_labels = losses.masked_fill(outside, 0)
        grad = torch.empty_like(part)
        for chunk in _chunks(part) if part.shape[1] else ():
            p = (part[chunk].to(log_sums.dtype) - log_sums[chunk, None]).exp_()
            p *= losses[chunk, None]
            p.scatter_add_(-1, places[chunk, None], -at_labels[chunk, None])
            grad[chunk] = p
        return grad, None, None, None, None, None, None


def cross_entropy_of_slices(
    part: Tensor,
    labels: Tensor,
    ignore_index: int,
    vocabulary: int,
    start: int,
    dtype: torch.dtype,
    group: ProcessGroup | None,
    where: str,
) -> Tensor:
    """Return the cross entropy of each token, [tokens], 0 for ignored ones, in float32 at least. Collective over tp."""
    # `part` is [tokens, features of this rank], from the feature `start`; `labels` are int64 [tokens], the same on all.
    ignored = check_labels(labels, ignore_index, vocabulary, where)
    dtype = torch.promote_types(dtype, torch.float32)
    return _CrossEntropyOfSlices.apply(part, labels, ignored, start, dtype, group, where)


def check_labels(labels: Tensor, ignore_index: int, vocabulary: int, where: str) -> Tensor:
    """Check that every label that is not ignored is in the vocabulary, and return which labels are ignored."""
    ignored = labels == ignore_index
    valid = (ignored | ((labels >= 0) & (labels < vocabulary))).all()
    if labels.device.type != "cpu":
        torch._assert_async(valid)  # the CPU need not wait
    elif not valid:
        raise IndexError(
            f"the labels of {where} go from {int(labels.min())} to {int(labels.max())}, outside of its vocabulary of "
            f"{vocabulary} and other than ignore_index={ignore_index}."
        )
    return ignored


aten = torch.ops.aten


class _Held:
    """Hold this rank's slice of some logits and, once an operation has asked for them, all logits."""

    def __init__(self, part: Tensor, base: _Held | None = None, view: Callable[[Tensor], Tensor] | None = None) -> None:
        self.part = part
        self.base, self.view = base, view
        self.whole: Tensor | None = None

    @property
    def is_gathered(self) -> bool:
        """Return True if there are all logits, which may have changed in place: the slice is of no use then."""
        return self.whole is not None or (self.base is not None and self.base.is_gathered)

    def gathered(self, dtype: torch.dtype, slicing: Slicing, function: Any) -> Tensor:
        """Return all logits. They are kept, so that `function` may change them in place."""
        if self.whole is None:
            if self.base is not None and self.view is not None:
                self.whole = self.view(self.base.gathered(dtype, slicing, function))
            else:
                self.whole = slicing.gathered(self.part, function).to(dtype)
        return self.whole


class SlicedTensor(Tensor):
    """Stand for all logits [..., vocabulary], or activations, of which this rank holds a slice (see the top)."""

    # A slice of the tokens is always held as [rows, tokens of this rank, features].

    slicing: Slicing
    held: _Held

    @staticmethod
    def __new__(cls, held: _Held, like: Tensor, slicing: Slicing) -> SlicedTensor:
        logits: SlicedTensor = storageless(cls, like.shape, like.dtype, held.part.device, like.stride())
        logits.slicing, logits.held = slicing, held
        return logits

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"SlicedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, of {self.slicing.name})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        logits = args[0] if args else (kwargs or {}).get("input")
        if func in _FUNCTIONS and isinstance(logits, SlicedTensor) and not logits.held.is_gathered:
            result = _FUNCTIONS[func](*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if func in MEMORY_READERS:
            args = tree_map_only(SlicedTensor, lambda tensor: tensor.gathered(func), args)
        return no_torch_function(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sliced = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, SlicedTensor)]
        if func is aten.detach.default:
            return SlicedTensor(sliced[0].held, sliced[0].as_meta(), sliced[0].slicing)
        if func in _OPERATORS and not any(tensor.held.is_gathered for tensor in sliced):
            result = _OPERATORS[func](func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map_only(SlicedTensor, lambda tensor: tensor.gathered(func), (args, kwargs))
        return func(*args, **kwargs)

    def gathered(self, function: Any) -> Tensor:
        """Return all logits for an operation that autograd does not see."""
        return self.held.gathered(self.dtype, self.slicing, function).view(self.shape)

    @property
    def is_chunk(self) -> bool:
        """Return True if this rank has a chunk of the tokens, and nothing has gathered them."""
        return self.slicing.chunks is not None and not self.held.is_gathered

    def as_meta(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor on meta of the same shape, strides and dtype, or of another dtype."""
        return torch.empty_strided(self.shape, self.stride(), dtype=dtype or self.dtype, device="meta")


class _ToSlice(torch.autograd.Function):
    """Return this rank's slice of logits; the gradient of the slice becomes a slice of theirs."""

    @staticmethod
    def forward(ctx: Any, logits: SlicedTensor) -> Tensor:
        ctx.like, ctx.slicing = logits.as_meta(), logits.slicing
        return logits.held.part.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return SlicedTensor(_Held(grads[0]), ctx.like, ctx.slicing)


class _FromSlice(torch.autograd.Function):
    """Return the logits that this rank has a slice of; of their gradient it takes this rank's slice."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, slicing: Slicing) -> SlicedTensor:
        ctx.slicing, ctx.dtype = slicing, part.dtype
        return _sliced(part.detach(), slicing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        if isinstance(grad, SlicedTensor):
            if not grad.held.is_gathered:
                return grad.held.part.to(ctx.dtype), None
            grad = grad.gathered("backward")
        return ctx.slicing.slice_of(grad).to(ctx.dtype), None


def part_of(sliced: SlicedTensor) -> Tensor:
    """Return this rank's slice; autograd sees it."""
    return _ToSlice.apply(sliced)


def sliced_tensor(part: Tensor, slicing: Slicing) -> SlicedTensor:
    """Return the tensor that this rank has the slice `part` of; autograd sees it."""
    return _FromSlice.apply(part, slicing)


def _sliced(
    part: Tensor, slicing: Slicing, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None
) -> SlicedTensor:
    """Return the logits of which this rank has `part`, as they are or cast to another dtype."""
    shape = slicing.shape(part) if shape is None else tuple(shape)
    return SlicedTensor(_Held(part), torch.empty(shape, dtype=dtype or part.dtype, device="meta"), slicing)


# ------------------------------------------------------------------------------- operations on slices
#
# Functions and operators of torch that are given logits. Autograd sees the functions, and not the operators, of which
# its own formulas for backward are made. The result is NotImplemented if the arguments ask for more than slices.


def _pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a function of each element, with numbers and with tensors of the vocabulary's size or of none."""
    sliced = [arg for arg in args if isinstance(arg, SlicedTensor)]
    slicing, shape = sliced[0].slicing, sliced[0].shape
    if not all(arg.slicing.equals(slicing) for arg in sliced):
        return NotImplemented
    if slicing.chunks is not None and any(arg.shape != shape for arg in sliced):
        return NotImplemented
    parts = []
    for arg in args:
        if isinstance(arg, SlicedTensor):
            arg = arg.held.part.to(arg.dtype)
        elif isinstance(arg, Tensor) and arg.shape == shape:
            arg = slicing.slice_of(arg)
        elif isinstance(arg, Tensor) and slicing.chunks is not None and arg.numel() != arg.shape[-1:].numel():
            return NotImplemented
        elif isinstance(arg, Tensor) and arg.dim() and arg.shape[-1] == slicing.features:
            arg = arg[..., slicing.start : slicing.end]
        elif isinstance(arg, Tensor) and arg.dim() and arg.shape[-1] != 1:
            return NotImplemented
        parts.append(arg)
    return _sliced(func(*parts, **kwargs), slicing, shape=shape if slicing.chunks is not None else None)


def _cast(func: Any, logits: SlicedTensor, **kwargs: Any) -> Any:
    """Change the dtype. To a wider one the slice is cast later, where it is used."""
    dtype: torch.dtype = kwargs.get("dtype") or logits.dtype
    if not dtype.is_floating_point or kwargs.get("device", logits.device) != logits.device:
        return NotImplemented
    part = logits.held.part
    if dtype is not part.dtype or torch.promote_types(part.dtype, logits.dtype) is not logits.dtype:
        part = part.to(logits.dtype)
    if torch.promote_types(dtype, torch.float32) is not dtype:
        part = part.to(dtype)
    return SlicedTensor(_Held(part), logits.as_meta(dtype), logits.slicing)


def _view(func: Any, logits: SlicedTensor, *args: Any) -> Any:
    """Make a view that leaves the last dim as it is: rows of the vocabulary's size are the rows that there were."""
    like = func(logits.as_meta(), *args)
    if like.dtype is not logits.dtype or not like.dim() or like.shape[-1] != logits.slicing.features:
        return NotImplemented
    part = logits.held.part
    if logits.slicing.chunks is not None:
        rows = (part.shape[0], logits.slicing.tokens)
        if tuple(like.shape[:-1]) not in (rows, (prod(rows),)):
            return NotImplemented  # all else that keeps the number of tokens is the tensor itself
    elif func in (aten.view.default, aten._unsafe_view.default):
        part = part.reshape(*like.shape[:-1], part.shape[-1])
    else:
        dim, dims = args[0] if args else 0, max(like.dim(), logits.dim())
        if dim % dims == dims - 1:
            return NotImplemented
        part = func(part, *args)
    return SlicedTensor(_Held(part, logits.held, lambda whole: func(whole, *args)), like, logits.slicing)


def _clone(func: Any, logits: SlicedTensor, **kwargs: Any) -> Any:
    return SlicedTensor(_Held(logits.held.part), func(logits.as_meta(), **kwargs), logits.slicing)


def _backward_of_view(func: Any, logits: SlicedTensor, sizes: list[int], dim: int, *args: Any) -> Any:
    """Put a gradient among zeros; it is sliced as its logits are, unless the view was over the vocabulary."""
    if dim % len(sizes) == len(sizes) - 1:
        return NotImplemented
    part = logits.held.part
    if logits.slicing.chunks is not None:
        return logits if list(logits.shape) == list(sizes) else NotImplemented
    return _sliced(func(part, [*sizes[:-1], part.shape[-1]], dim, *args), logits.slicing, logits.dtype)


def _choose(logits: SlicedTensor, index: Any) -> Any:
    """Choose tokens by a mask or by their numbers."""
    if logits.slicing.chunks is not None:
        return NotImplemented
    if type(index) is not Tensor or index.dtype not in (torch.bool, torch.int64):
        return NotImplemented
    if (index.dim() if index.dtype is torch.bool else 1) >= logits.dim():
        return NotImplemented
    return sliced_tensor(part_of(logits)[index], logits.slicing).to(logits.dtype)


def _cross_entropy(
    input: SlicedTensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute `torch.nn.functional.cross_entropy` of logits [tokens, vocabulary] and labels [tokens]."""
    others = weight is not None or size_average is not None or reduce is not None or label_smoothing
    if others or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if input.dim() != 2 or target.dtype is not torch.int64 or target.shape != input.shape[:1]:
        return NotImplemented
    part = part_of(input)
    if input.slicing.chunks is not None:
        return _cross_entropy_of_chunks(input, part, target, ignore_index, reduction)
    losses = _losses(part, target, ignore_index, input)
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / (target != ignore_index).sum()
    return losses if autocast_dtype(input.device.type) else losses.to(input.dtype)


def _losses(part: Tensor, labels: Tensor, ignore_index: int, logits: SlicedTensor) -> Tensor:
    s = logits.slicing
    return cross_entropy_of_slices(part, labels, ignore_index, s.features, s.start, logits.dtype, s.group, s.name)


def _cross_entropy_of_chunks(
    logits: SlicedTensor, part: Tensor, target: Tensor, ignore_index: int, reduction: str
) -> Tensor:
    """Compute the cross entropy of each token of this rank's chunk, gather those of all tokens, and reduce them."""
    slicing, chunks = logits.slicing, logits.slicing.chunks
    assert chunks is not None
    mine, flat = chunks.mine(target.view(-1, slicing.tokens)), part.flatten(0, 1)
    if slicing.plain_loss:
        check_labels(target, ignore_index, slicing.features, slicing.name)
        losses = cross_entropy(flat.to(logits.dtype), mine.flatten(), ignore_index=ignore_index, reduction="none")
    else:
        losses = _losses(flat, mine.flatten(), ignore_index, logits)
    everyone = chunks.whole(losses.view(mine.shape), slicing.tokens, slicing.name).flatten()
    everyone = everyone if autocast_dtype(logits.device.type) else everyone.to(logits.dtype)
    if reduction == "none":
        return everyone
    # torch's own sum and mean, in the order of one process.
    ignored = torch.where(target == ignore_index, -100, 0)
    return torch.nn.functional.nll_loss(-everyone[:, None], ignored, ignore_index=-100, reduction=reduction)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.cross_entropy: _cross_entropy,
    Tensor.__getitem__: _choose,
}
_OPERATORS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default), _pointwise),
    **dict.fromkeys((aten.tanh.default, aten.tanh_backward.default), _pointwise),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.slice.Tensor, aten.select.int), _view),
    **dict.fromkeys((aten.alias.default, aten.unsqueeze.default, aten.squeeze.dim), _view),
    **dict.fromkeys((aten.slice_backward.default, aten.select_backward.default), _backward_of_view),
    aten.clone.default: _clone,
    aten._to_copy.default: _cast,
}


def head_of(model: nn.Module) -> nn.Module:
    """Return the layer that computes a model's logits."""
    inner = innermost(model)
    head = embeddings_of(inner, "output")
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"loss_parallel=True: {type(inner).__name__} names no language-model head, so that nothing shows which "
            "layer computes logits: give it a method get_output_embeddings that returns the layer, or use "
            "loss_parallel=False."
        )
    return head


def plan_logits(setup: Setup) -> None:
    """Let the head's layers return their slices of the logits where the plan would gather them: see `split_logits`."""
    if _splits_logits(setup):
        styles = setup.plan.styles
        for layer in head_of(setup.model).modules():
            if layer in styles and styles[layer][1].leave == "gather":
                name, style = styles[layer]
                styles[layer] = name, replace(style, leave="keep")


def _splits_logits(setup: Setup) -> bool:
    """Return True if `loss_parallel` asks for slices, and this rank has the head."""
    return setup.config.loss_parallel and (setup.stages is None or setup.stages.is_last)


def split_logits(setup: Setup) -> None:
    """Make the head return `SlicedTensor` in training, in place."""
    if _splits_logits(setup):
        # A head whose output is whole on every rank (tp is 1, or its style says so) computes chunks of tokens only.
        head = head_of(setup.model)
        for layer in [module for module in head.modules() if tp_layer_of(module) is not None] or [head]:
            _keep_output_sliced(layer)


def _keep_output_sliced(layer: nn.Module) -> None:
    unit = tp_layer_of(layer)
    split: Slicing | None = None
    if unit is not None and unit.style.leave == "keep" and unit.style.weight == Shard(0):  # what it returns is a slice
        assert unit.out_features is not None
        split = Slicing(unit.out_features, unit.context.group, unit.name)

    def around(layer: nn.Module, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        y = compute(*args, **kwargs)
        if layer.training and torch.is_grad_enabled():
            return sliced_tensor(y, split or Slicing(y.shape[-1], None, "the head"))
        if split is None or split.group is None:
            return y
        return gather_last_dim(y, split.features, split.group, split.name)

    wrap_forward(layer, around)
