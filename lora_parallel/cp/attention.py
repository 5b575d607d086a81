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

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import AttentionInterface

from lora_parallel.cp.context import CPContext
from lora_parallel.distributed.collectives import chunk_bounds, unless_compiled
from lora_parallel.distributed.token_chunks import gather_keys, heads_to_tokens, tokens_to_heads

__all__ = ["ATTENTION", "attend_to_all_tokens", "attend_with_share", "check_method", "repeats_of", "wrap_registry"]

_WHOLE = "_lora_parallel_whole"
ATTENTION = "_lora_parallel_attention"
"""Name of the attribute of a module under which the wrapper finds what computes its attention in place of the function.

It is called as `function(own, implementation, module, query, key, value, mask, *args, **kwargs)`, or leaves the
attention as it is if the attribute is missing or None.
"""


def remember_whole(part: Tensor, whole: Tensor) -> Tensor:
    """Return `part`, a chunk of the tokens of `whole`, from which `whole_of` returns `whole`.

    It is held by the chunk itself, as a block that is recomputed is given this very tensor.
    """
    part.__dict__[_WHOLE] = whole
    return part


def whole_of(each: Any) -> Any:
    """Return the tensor that a block's argument was cut from, or the argument itself."""
    return getattr(each, _WHOLE, each) if isinstance(each, Tensor) else each


@cache
def wrap_registry() -> None:
    """Make transformers' registry of attention functions return wrapped functions, in this process, once.

    `AttentionInterface.get_interface` is replaced. The registry itself cannot hold the wrapper: a model's eager
    function is not in it, and the name of an implementation also chooses the masks.
    """
    own_get = AttentionInterface.get_interface

    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        own = own_get(self, attn_implementation, default)

        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            instead = getattr(module, ATTENTION, None)
            if instead is None:
                return own(module, *args, **kwargs)
            return instead(own, attn_implementation, module, *args, **kwargs)

        return attend

    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]


class _WithHeads:
    """Stand for an attention module of which a rank computes some of the heads.

    The function is given this in place of the module. It has the attributes of the module, but for those that are of
    all heads. The parameters are the tensors that the module has now, which tensor parallelism takes from it later.

    Args:
        module: The attention module.
        heads: The number of all query heads.
        share: First and last + 1 query head.
        groups: The number of query heads of each key head.
    """

    def __init__(self, module: nn.Module, heads: int, share: tuple[int, int], groups: int) -> None:
        self.num_key_value_groups = groups
        self._module = module
        for name in module._parameters:  # attention sinks, for example
            held = getattr(module, name)
            of_heads = isinstance(held, Tensor) and tuple(held.shape) == (heads,)
            self.__dict__[name] = held[share[0] : share[1]] if of_heads else held

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def repeats_of(heads: int, kv_heads: int, ranks: int) -> int:
    """Return how often each key and value head is repeated, so that `ranks` divide the heads.

    Raises:
        ValueError: The ranks do not divide the query heads.
    """
    if heads % ranks:
        raise ValueError(
            f'cp={ranks} with cp_method="ulysses" gives each rank as many heads, and attention has {heads} of them on '
            'a rank of tp: use another cp, or cp_method="all_gather".'
        )
    groups = heads // kv_heads
    return next(repeat for repeat in range(1, groups + 1) if not groups % repeat and not kv_heads * repeat % ranks)


def attend_with_share(
    own: Callable[..., Any],
    module: nn.Module,
    tensors: Sequence[Tensor],
    heads: int,
    share: tuple[int, int],
    mask: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Tensor:
    """Compute attention of some of the heads, and return the output [rows, tokens, heads of the share, features].

    Args:
        own: The attention function.
        module: The attention module.
        tensors: Queries, keys and values of these heads, [rows, heads, tokens, features].
        heads: The number of all query heads.
        share: First and last + 1 query head.
        mask: The mask of all heads, as the model gives it.
        args: Further positional arguments of the function.
        kwargs: Further arguments by name.
    """

    def of_share(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        if tuple(each.shape) == (heads,):
            return each[share[0] : share[1]]
        return each[:, share[0] : share[1]] if each.dim() == 4 and each.shape[1] == heads else each

    query, key, _ = tensors
    stands: Any = _WithHeads(module, heads, share, query.shape[1] // key.shape[1])
    given = {name: of_share(each) for name, each in kwargs.items()}
    return own(stands, *tensors, of_share(mask), *args, **given)[0]


def attend_to_all_tokens(context: CPContext, name: str) -> Callable[..., Any]:
    """Return what computes the attention of a module whose block runs on a chunk of the tokens.

    Args:
        context: The chunks.
        name: The name of the module, for messages.
    """

    def attend(
        own: Callable[..., Any],
        implementation: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not context.on_chunk:
            return own(module, query, key, value, attention_mask, *args, **kwargs)
        kwargs = {name: whole_of(each) for name, each in kwargs.items()}
        compute = _by_heads if context.method == "ulysses" else _with_gathered_keys
        given = own, module, (query, key, value), attention_mask, args, kwargs
        return compute(context, unless_compiled(name), implementation, *given), None

    return attend


def _by_heads(
    context: CPContext,
    where: str,
    implementation: str,
    own: Callable[..., Any],
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Tensor:
    query, key, value = tensors
    chunks, tokens, heads = context.chunks, context.tokens.count, query.shape[1]
    repeat = repeats_of(heads, key.shape[1], chunks.ranks)
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    query, key, value = tokens_to_heads((query, key, value), tokens, chunks, where)
    share = chunk_bounds(heads, chunks.ranks, chunks.rank)
    output = attend_with_share(own, module, (query, key, value), heads, share, mask, args, kwargs)
    return heads_to_tokens(output.transpose(1, 2), chunks, where).transpose(1, 2).contiguous()


def _with_gathered_keys(
    context: CPContext,
    where: str,
    implementation: str,
    own: Callable[..., Any],
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Tensor:
    check_method(implementation)
    chunks, tokens, heads = context.chunks, context.tokens.count, tensors[0].shape[1]
    stands: Any = _WithHeads(module, heads, (0, heads), heads // tensors[1].shape[1])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = gather_keys((key, value), tokens, chunks, where)
        rows = rows_of_mask(mask, stands, kwargs, tokens, chunks.positions(tokens, query.device))
        return own(stands, query, key, value, rows, *args, **kwargs)[0]

    if not torch.is_grad_enabled() or context.recomputes or not context.running:
        return attend(*tensors)
    return checkpoint(attend, *tensors, use_reentrant=False)


def rows_of_mask(
    mask: Any, module: nn.Module, kwargs: Mapping[str, Any], tokens: int, positions: Tensor
) -> Tensor | None:
    """Return the mask of this rank's queries, [.., .., tokens of this rank, tokens]; None if they see all tokens.

    Args:
        mask: The mask of all queries, or None, as the model gives it.
        module: The attention module.
        kwargs: The arguments of the attention function; `is_causal` among them stands before the module's.
        tokens: The number of all tokens.
        positions: The index of each of this rank's tokens, int32.
    """
    if mask is not None:
        return mask.index_select(2, positions) if mask.shape[2] == tokens else mask
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return None
    return (positions[:, None] >= torch.arange(tokens, device=positions.device))[None, None]


def check_method(implementation: str | None) -> None:
    """Check that keys and values may be gathered for an attention implementation.

    Raises:
        ValueError: The implementation takes no mask of some of the queries.
    """
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            f'cp_method="all_gather" needs attention that takes a mask of any shape, and attn_implementation is '
            f'{implementation!r}: set_attn_implementation("sdpa") or "eager", or use cp_method="ulysses".'
        )
