"""Give attention all tokens, of which each rank has a chunk, whatever kernel computes it.

transformers' models ask a registry for the function that computes attention from queries, keys and values. What the
registry returns is wrapped: inside of a block that computes on a chunk, the wrapper first gets all tokens from the
other ranks, and then calls the function as the model would.

- "ulysses": an all-to-all turns all heads of a chunk into a share of the heads of all tokens, and another one turns the
  output back. The function sees all tokens, and so any mask, window or packing as in one process; any function serves.
- "all_gather": keys and values of all tokens are gathered, and this rank's queries attend to them. The heads need not
  be divided. Keys and values are gathered again in backward, not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import AttentionInterface

from lora_parallel.distributed.collectives import chunk_bounds
from lora_parallel.distributed.token_chunks import TokenChunks, gather_keys, heads_to_tokens, tokens_to_heads
from lora_parallel.distributed.torch_private import in_backward
from lora_parallel.replaced import replaced
from lora_parallel.tp.context import Tokens


class CPContext:
    """Hold the chunks of one model's tokens."""

    def __init__(self, chunks: TokenChunks, tokens: Tokens, method: Literal["ulysses", "all_gather"]) -> None:
        self.chunks, self.tokens, self.method = chunks, tokens, method
        self.cuts = False  # True while a forward runs whose tokens are cut
        self.has_labels = False  # True if the forward that runs was given labels
        self.running = False  # True while a block, or a layer after the blocks, computes on a chunk
        # Tensors that blocks share (rotary tables), their versions and this rank's part of them, by `id`.
        self._cut: dict[int, tuple[Tensor, int, Tensor]] = {}
        self.recomputes = False  # True if the block that runs is recomputed in backward, attention included

    @property
    def active(self) -> bool:
        """Return True if what is being computed is a forward whose tokens are cut, or is recomputed for one."""
        return self.cuts or in_backward()

    @property
    def on_chunk(self) -> bool:
        """Return True if a chunk is being computed, or computed again in backward."""
        return self.running or (not torch.compiler.is_compiling() and in_backward())

    def cut(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of `x` [rows, tokens, ...] in memory of their own, as a view keeps all of `x`."""
        return self.chunks.mine(x).clone()

    def part(self, x: Tensor) -> Tensor:
        """Return what `cut` does, the same for all blocks that are given `x`: it is kept until the forward ends."""
        kept = self._cut.get(id(x))
        if kept is None or kept[0] is not x or kept[1] != x._version:
            kept = x, x._version, self.cut(x)
            if self.cuts:
                self._cut[id(x)] = kept
        return kept[2]

    def end_forward(self) -> None:
        """Note that no forward runs any more."""
        self.cuts = self.running = False
        self._cut.clear()

    def kept_for_graph(self) -> AbstractContextManager[None]:
        """Note within the context what a graph cannot ask: whether it is run again in a backward pass."""
        return replaced(self, {"running": self.on_chunk, "recomputes": self.recomputes or in_backward()})

    def places(self, rows: int, tokens: int, device: torch.device, share: int | Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the global row and token of each position of a rank's activations, int32 [rows, tokens], or None."""
        # `tokens` is 1 if rows and tokens are flattened into `rows`. `share`: index of these rows in the global batch.
        # None if no chunk is computed, or the activations are not those of all tokens of this rank.
        if not self.on_chunk:
            return None
        count = self.tokens.count
        mine = self.chunks.count(count)
        is_flat = tokens != mine and tokens == 1 and mine and rows % mine == 0
        if tokens != mine and not is_flat:
            return None
        rows = rows // mine if is_flat else rows
        token = self.chunks.positions(count, device).expand(rows, mine)
        row = (torch.arange(rows, dtype=torch.int32, device=device) + share * rows)[:, None].expand(rows, mine)
        if not is_flat:
            return row, token
        flat = (row * count + token).view(-1, 1)  # in one process, each token of flattened rows counts as a row
        return flat, torch.zeros_like(flat)


_WHOLE = "_lora_parallel_whole"
# Name of the attribute of a module under which the wrapper finds what computes its attention in place of the function.
# It is called as `function(own, implementation, module, *args, **kwargs)`, or leaves the attention as it is if the
# attribute is missing or None.
ATTENTION = "_lora_parallel_attention"


def remember_whole(part: Tensor, whole: Tensor) -> Tensor:
    """Return `part`, a chunk of the tokens of `whole`, from which `whole_of` returns `whole`."""
    # The chunk itself holds it, as a block that is recomputed is given this very tensor.
    part.__dict__[_WHOLE] = whole
    return part


def whole_of(value: Any) -> Any:
    """Return the tensor that a block's argument was cut from, or the argument itself."""
    return getattr(value, _WHOLE, value) if isinstance(value, Tensor) else value


@cache
def wrap_registry() -> None:
    """Replace `AttentionInterface.get_interface`, once in this process, by one that returns wrapped functions."""
    # The registry cannot hold the wrapper: a model's eager function is not in it, and the names in it choose the masks.
    own_get = AttentionInterface.get_interface

    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = own_get(self, attn_implementation, default)

        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            instead = getattr(module, ATTENTION, None)
            if instead is None:
                return function(module, *args, **kwargs)
            return instead(function, attn_implementation, module, *args, **kwargs)

        return attend

    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]


class _WithHeads:
    """Stand for an attention module of which a rank computes some of the heads, with the parameters that it has now."""

    def __init__(self, module: nn.Module, heads: int, share: tuple[int, int], groups: int) -> None:
        self.num_key_value_groups = groups
        self._module = module
        for name in module._parameters:  # attention sinks, for example
            value = getattr(module, name)
            of_heads = isinstance(value, Tensor) and tuple(value.shape) == (heads,)
            self.__dict__[name] = value[share[0] : share[1]] if of_heads else value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def check_heads(heads: int, ranks: int) -> None:
    """Refuse a number of query heads that the ranks do not divide."""
    if heads % ranks:
        raise ValueError(
            f'cp={ranks} with cp_method="ulysses" gives each rank as many heads, and attention has {heads} of them on '
            'a rank of tp: use another cp, or cp_method="all_gather".'
        )


def with_repeated_heads(tensors: Sequence[Tensor], ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with each key and value head as often as `ranks` need to divide them."""
    query, key, value = tensors
    check_heads(query.shape[1], ranks)
    kv_heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    repeat = next(times for times in range(1, groups + 1) if not groups % times and not kv_heads * times % ranks)
    if repeat == 1:
        return query, key, value
    return query, key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)


@dataclass(eq=False)
class AttentionCall:
    """Hold what an attention module gives to its attention function."""

    function: Callable[..., Any]
    module: nn.Module
    tensors: tuple[Tensor, Tensor, Tensor]  # Queries, keys and values, [rows, heads, tokens, features]
    mask: Any
    args: tuple[Any, ...]  # Further positional arguments
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> AttentionCall:
        """Return the call of a function with these arguments, among which the mask may stand by place or by name."""
        mask = kwargs.pop("attention_mask", None) if len(args) < 4 else args[3]
        return cls(function, module, args[:3], mask, args[4:], kwargs)

    @property
    def heads(self) -> int:
        """Return the number of query heads."""
        return self.tensors[0].shape[1]

    def compute(self) -> Tensor:
        """Return the output [rows, tokens, heads, features]."""
        return self.function(self.module, *self.tensors, self.mask, *self.args, **self.kwargs)[0]


def attend_with_share(call: AttentionCall, tensors: Sequence[Tensor], share: tuple[int, int]) -> Tensor:
    """Compute attention of some of the heads, and return the output [rows, tokens, heads of the share, features]."""
    # `tensors` are of these heads, [rows, heads, tokens, features]; `share` is the first and last + 1 query head.
    heads = call.heads

    def of_share(value: Any) -> Any:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.dtype is torch.bool):
            return value  # lengths of packed rows, for example
        if tuple(value.shape) == (heads,):
            return value[share[0] : share[1]]
        return value[:, share[0] : share[1]] if value.dim() == 4 and value.shape[1] == heads else value

    query, key, _ = tensors
    stands: Any = _WithHeads(call.module, heads, share, query.shape[1] // key.shape[1])
    kwargs = {name: of_share(value) for name, value in call.kwargs.items()}
    return call.function(stands, *tensors, of_share(call.mask), *call.args, **kwargs)[0]


def attend_to_all_tokens(context: CPContext, name: str) -> Callable[..., Any]:
    """Return what computes the attention of a module whose block runs on a chunk of the tokens."""

    def attend(function: Callable[..., Any], implementation: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not context.on_chunk:
            return function(module, *args, **kwargs)
        call = AttentionCall.of(function, module, *args, **{key: whole_of(value) for key, value in kwargs.items()})
        where = "" if torch.compiler.is_compiling() else name  # see `TPLayer._run`
        if context.method == "ulysses":
            return _by_heads(context, where, call), None
        check_method(implementation)
        return _with_gathered_keys(context, where, call), None

    return attend


def _by_heads(context: CPContext, where: str, call: AttentionCall) -> Tensor:
    chunks, heads = context.chunks, call.heads
    share = chunk_bounds(heads, chunks.ranks, chunks.rank)
    parts = tokens_to_heads(with_repeated_heads(call.tensors, chunks.ranks), context.tokens.count, chunks, where)
    output = attend_with_share(call, parts, share)
    return heads_to_tokens(output.transpose(1, 2), chunks, where).transpose(1, 2).contiguous()


def _with_gathered_keys(context: CPContext, where: str, call: AttentionCall) -> Tensor:
    chunks, tokens, heads = context.chunks, context.tokens.count, call.heads
    stands: Any = _WithHeads(call.module, heads, (0, heads), heads // call.tensors[1].shape[1])
    call = replace(call, module=stands)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_from_tokens(call, (query, *gather_keys((key, value), tokens, chunks, where)), chunks)

    if not torch.is_grad_enabled() or context.recomputes or not context.running:
        return attend(*call.tensors)
    return checkpoint(attend, *call.tensors, use_reentrant=False)


def attend_from_tokens(call: AttentionCall, tensors: Sequence[Tensor], chunks: TokenChunks) -> Tensor:
    """Compute attention of a rank's tokens to all, and return [rows, tokens of the rank, heads, features]."""
    # Causal without a mask, each chunk's queries see the keys up to its end only: half of the work, the same on each
    # rank.
    (query, key, value), tokens = tensors, tensors[1].shape[2]
    positions = chunks.positions(tokens, query.device)
    if call.mask is not None or not _is_causal(call):
        has_rows = call.mask is not None and call.mask.shape[2] == tokens
        mask = call.mask.index_select(2, positions) if has_rows else call.mask
        return replace(call, tensors=(query, key, value), mask=mask).compute()
    ranges = chunks.ranges(tokens)
    sizes, ends = [end - start for start, end in ranges], [end for _, end in ranges]
    if tokens < 4 * chunks.ranks:  # a graph with transformers' sdpa needs more than one query
        sizes, ends = [sum(sizes)], [tokens]
    outputs = []
    for part, rows, end in zip(query.split(sizes, 2), positions.split(sizes), ends, strict=True):
        seen = key[:, :, :end], value[:, :, :end]
        outputs.append(replace(call, tensors=(part, *seen), mask=causal_mask(rows, end)).compute())
    return torch.cat(outputs, 1)


def causal_mask(positions: Tensor, keys: int) -> Tensor:
    """Return the mask of the queries of these tokens for the first keys, [1, 1, positions, keys]."""
    return (positions[:, None] >= torch.arange(keys, device=positions.device))[None, None]


def _is_causal(call: AttentionCall) -> bool:
    """Return True if attention is causal without a mask: `is_causal` of the call stands before the module's."""
    causal = call.kwargs.get("is_causal")
    return bool(getattr(call.module, "is_causal", True) if causal is None else causal)


def check_method(implementation: str | None) -> None:
    """Refuse attention that takes no mask of some of the queries, under "all_gather"."""
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            f'cp_method="all_gather" needs attention that takes a mask of any shape, and attn_implementation is '
            f'{implementation!r}: set_attn_implementation("sdpa") or "eager", or use cp_method="ulysses".'
        )
