"""Tell which tenant each sample of a forward belongs to, and which forward a layer takes part in.

A route holds for the forwards that are computed in its context (`train()` or `route()`), also when a backward after the
context recomputes them.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from lora_parallel.distributed.dtensors import local, tensors_in
from lora_parallel.distributed.gradients import scale_gradient
from lora_parallel.distributed.mesh import dp_rank
from lora_parallel.distributed.rank_checks import agreed, gather_numbers, gather_objects
from lora_parallel.distributed.torch_private import backward_pass, in_backward, queue_after_backward
from lora_parallel.replaced import replaced
from lora_parallel.tenants.state import Cut


@dataclass(eq=False)
class Factor:
    """Hold one factor, `lora_A` or `lora_B`, of a tenant's adapter on one layer."""

    parameter: nn.Parameter  # the parameter that the optimizer gets
    rows: Tensor | None  # rows that this rank computes with, int64 [rows], of a factor that is stored whole; None: all
    partial: bool  # True if the gradient on one rank is a partial sum over tp
    whole: bool  # True if each tp rank has the factor and its gradient whole, but for rounding
    cut: Cut | None = None  # layout of the chunks over dp_shard; None if it is not sharded over dp_shard
    # gathered copies that are still alive, for instance in the graph of a forward
    gathered: weakref.WeakSet[Tensor] = field(default_factory=weakref.WeakSet)
    # Gradient of the values that forwards computed with, before its sum over ranks. `parameter.grad` is another one:
    # that of loss terms of the parameter itself, such as a penalty.
    waiting: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the part that this tp rank has, before it is sharded over dp_shard."""
        return tuple(local(self.parameter).shape) if self.cut is None else self.cut.shape

    def zeros(self) -> Tensor:
        """Return zeros in place of a gradient of the part that this tp rank has."""
        return torch.zeros(self.shape, dtype=self.parameter.dtype, device=local(self.parameter).device)

    def compute(self, gathered: Tensor | None, weight: float, dtype: torch.dtype | None) -> Tensor:
        """Return the values (`gathered`, if sharded over dp_shard) to compute with; `weight` scales their gradient."""
        values = local(self.parameter) if gathered is None else gathered
        if gathered is None and torch.is_grad_enabled():
            self.lend(values)
        values = scale_gradient(values, weight)
        if self.rows is not None:
            values = values.index_select(0, self.rows.to(values.device))
        return values if dtype is None else values.to(dtype)

    def lend(self, whole: Tensor) -> Tensor:
        """Return `whole`, the part of the factor that this tp rank has, whose gradient a hook adds to `waiting`."""
        whole.requires_grad_().register_post_accumulate_grad_hook(self._keep)
        if self.cut is not None:
            self.gathered.add(whole)
        return whole

    def _keep(self, whole: Tensor) -> None:
        grad, whole.grad = whole.grad, None
        assert grad is not None
        self.waiting = grad if self.waiting is None else self.waiting + grad

    @property
    def has_gradient(self) -> bool:
        """Return True if a gradient waits for its sum over ranks."""
        return self.waiting is not None or self.parameter.grad is not None

    def take_gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return and drop `waiting`, to be summed over ranks, and the parameter's gradient, complete on every rank."""
        gradients = self.waiting, self.parameter.grad
        self.drop_gradients()
        return gradients

    def drop_gradients(self) -> None:
        """Drop both gradients."""
        self.parameter.grad = self.waiting = None

    def placed(self, values: Tensor, dp_shard_rank: int) -> Tensor:
        """Return a tensor placed as the parameter is, from values of the part that this tp rank has."""
        like = torch.zeros_like(self.parameter, requires_grad=False)
        local(like).copy_(values if self.cut is None else self.cut.of(values, dp_shard_rank))
        return like


@torch.no_grad()
def gathered_factors(factors: Sequence[Factor], mesh: DeviceMesh) -> dict[Factor, Tensor]:
    """Gather factors that are sharded over dp_shard; gradients go to `Factor.waiting`. Collective."""
    gathered: dict[Factor, Tensor] = {}
    ranks = range(mesh["dp_shard"].size())
    for dtype in dict.fromkeys(factor.parameter.dtype for factor in factors):  # one message for each
        cuts = {factor: factor.cut for factor in factors if factor.cut is not None and factor.parameter.dtype == dtype}
        sizes = [[torch.Size(cut.part(rank)).numel() for cut in cuts.values()] for rank in ranks]
        longest = max(map(sum, sizes))
        mine = torch.cat([local(factor.parameter).reshape(-1) for factor in cuts])
        padded = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
        everyone = padded.new_empty(len(ranks) * longest)
        dist.all_gather(list(everyone.split(longest)), padded, group=mesh.get_group("dp_shard"))
        chunks = [everyone[rank * longest :][: sum(of_rank)].split(of_rank) for rank, of_rank in enumerate(sizes)]
        for position, (factor, cut) in enumerate(cuts.items()):
            parts = [chunks[rank][position].view(cut.part(rank)) for rank in ranks]
            gathered[factor] = factor.lend(torch.cat(parts, cut.dim))
    return gathered


class Calls:
    """Compare the calls that ranks make of a pool."""

    def __init__(self, tenants: Callable[[], Sequence[str]]) -> None:
        self._tenants = tenants
        self._alone: list[str] = []  # calls noted by `apart` since the last `together`

    @contextmanager
    def together(self, call: str) -> Iterator[None]:
        """Run checks without collectives; raise an error on every rank if one fails or ranks make other calls."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        said = " and then ".join([*self._alone, call])
        numbers = gather_numbers([number_of(said), error is not None], f"TenantPool.{call.partition('(')[0]}")
        if len(numbers[:, 0].unique()) > 1:
            everyone = gather_objects(f"{said}, with tenants {list(self._tenants())}")
            other = int((numbers[:, 0] != numbers[0, 0]).nonzero()[0])
            raise ValueError(
                f"ranks make different calls of the pool: rank 0 {everyone[0]}; rank {other} {everyone[other]}. Make "
                "the same calls in the same order on every rank."
            )
        if numbers[:, 1].any():
            with agreed():
                if error is not None:
                    raise error
        self._alone.clear()

    @contextmanager
    def apart(self, call: str) -> Iterator[None]:
        """Note a call without a message: the next `together` finds out if a rank has made another call."""
        yield
        self._alone.append(call)


def number_of(text: str) -> int:
    """Return a 56-bit hash of a text, which is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


@dataclass(frozen=True)
class TenantTokens:
    """Hold the places of one tenant's n tokens in the input of a layer, flattened to [tokens, features]."""

    index: Tensor  # of each token in the flattened input, int64 [n]
    row: Tensor  # number of each token's sample, among the tenant's on all data-parallel ranks, int32 [n]
    token: Tensor  # number of each token within its sample, int32 [n]


@dataclass
class Route:
    """Hold what all layers share in the forwards of one context: the tenants, their samples and their weights."""

    tenants: tuple[str, ...]  # tenants that have samples on at least one rank
    # Tenant of each sample of this rank's batch. None: all are of one tenant, and each data-parallel rank has as many.
    names: tuple[str, ...] | None
    lengths: tuple[int, ...] | None  # number of tokens of each sample, where samples are segments of packed rows
    # share of each tenant's samples on this rank: the weight of its mean in the mean over ranks
    weights: dict[str, float]
    # number of each tenant's first sample on this rank, counted over all data-parallel ranks
    first_sample: dict[str, int]
    removed: Callable[[], list[str]]  # returns those of `tenants` that have been removed from the pool since
    gathered: dict[Factor, Tensor] = field(default_factory=dict)  # gathered values of factors sharded over dp_shard
    _tokens_by_shape: dict[tuple[int, ...], dict[str, TenantTokens]] = field(default_factory=dict)

    def tokens(
        self, shape: Sequence[int], device: torch.device, layer: str, widths: set[int]
    ) -> dict[str, TenantTokens]:
        """Return the tokens of each tenant on this rank, in a layer's input of `shape` [rows, tokens, ...] or [all]."""
        assert self.names is not None
        key = tuple(shape)
        if key not in self._tokens_by_shape:
            # An input in one dim has all tokens of all rows, or one (pooled) of each row.
            flat = {len(self.names) * width for width in (1, *widths)}
            if self.lengths is None and len(key) == 1 and widths and key[0] not in flat:
                raise ValueError(
                    f"route: {layer} is fed {key[0]} tokens in one dim, which are not those of {len(self.names)} rows "
                    f"of {' or '.join(map(str, sorted(widths)))}: nobody knows whose they are. Leave it out of "
                    "target_modules."
                )
            self._tokens_by_shape[key] = self._place(key, device, layer)
        return self._tokens_by_shape[key]

    @torch.inference_mode(False)  # a training forward in the same context must be able to use these tensors
    def _place(self, shape: tuple[int, ...], device: torch.device, layer: str) -> dict[str, TenantTokens]:
        assert self.names is not None
        total = prod(shape)
        lengths = self.lengths
        if lengths is None:
            samples = len(self.names)
            if total % samples or (len(shape) > 1 and shape[0] != samples):
                raise ValueError(f"route names {samples} samples, and {layer} is fed {shape[0]} rows: name each row.")
            lengths = (total // samples,) * samples
        if sum(lengths) != total:
            raise ValueError(
                f"route: the lengths of the segments add up to {sum(lengths)} tokens, and {layer} is fed {total}."
            )
        starts = list(accumulate(lengths, initial=0))
        tokens_of = {}
        for tenant in (name for name in self.tenants if name in self.names):
            mine = [index for index, name in enumerate(self.names) if name == tenant]
            first = self.first_sample[tenant]
            index = torch.cat([torch.arange(starts[i], starts[i + 1], device=device) for i in mine])
            on: dict[str, Any] = {"dtype": torch.int32, "device": device}
            row = torch.cat([torch.full((lengths[i],), first + n, **on) for n, i in enumerate(mine)])
            token = torch.cat([torch.arange(lengths[i], **on) for i in mine])
            if self.lengths is None and len(shape) == 1:  # the model flattens its rows: each token counts as a sample
                row, token = row * lengths[0] + token, torch.zeros_like(token)
            tokens_of[tenant] = TenantTokens(index, row, token)
        return tokens_of


@dataclass
class Forward:
    """Hold the state of one forward of the model in a route."""

    route: Route
    # number of this forward among each tenant's training forwards, in the model's own training forward
    counts: dict[str, int]
    trains: bool = False  # True if gradients were enabled when the model's forward began
    widths: set[int] = field(default_factory=set)  # numbers of tokens that a row is known to have
    agrees: bool = False  # True while the model's own forward is computed with named samples: every rank reaches `end`
    training: dict[str, bool] = field(default_factory=dict)  # training mode of each layer that took part, by its name
    _problem: Exception | None = None

    def tokens(self, shape: Sequence[int], device: torch.device, layer: str) -> dict[str, TenantTokens] | None:
        """Return the result of `Route.tokens`; None if the input does not fit the samples and `end` will raise."""
        if len(shape) > 1:
            self.widths.add(prod(shape[1:]))
        try:
            return self.route.tokens(shape, device, layer, self.widths)
        except ValueError as error:
            self.refuse(error)
            return None

    def refuse(self, error: Exception) -> None:
        """Raise `error`, or keep it for `end` if all ranks come there: other ranks would wait for one that raises."""
        if not self.agrees or in_backward():
            raise error
        self._problem = self._problem or error

    def end(self) -> None:
        """Raise on every rank if any rank has kept an error with `refuse`. Collective."""
        if not self.agrees:
            return
        self.agrees = False
        if gather_numbers([self._problem is not None], "the model's forward in a route").any():
            with agreed():
                if self._problem is not None:
                    raise self._problem


def route_samples(
    tenants: Sequence[str],
    names: Sequence[str],
    lengths: Sequence[int] | None,
    mesh: DeviceMesh,
    removed: Callable[[Sequence[str]], Callable[[], list[str]]],
) -> Route:
    """Make the route of a batch: its tenants, and each one's weight and first sample on this rank. Collective."""
    digest = number_of(f"{list(names)} {None if lengths is None else list(lengths)}")
    here = [list(names).count(name) for name in tenants]
    everyone = gather_numbers([digest, *here], "TenantPool.route")
    everyone = everyone.view(-1, mesh["tp"].size(), everyone.shape[1])
    for rank, peers in enumerate(everyone):
        if len(peers[:, 0].unique()) > 1:
            raise ValueError(
                f"route: the tp ranks of data-parallel rank {rank} name other samples: give them the same batch."
            )
    counts = everyone[:, 0, 1:]  # [data-parallel ranks, tenants]
    mine, total = dp_rank(mesh), counts.sum(0)
    index = {name: number for number, name in enumerate(tenants) if total[number]}
    return Route(
        tuple(index),
        tuple(names),
        lengths if lengths is None else tuple(lengths),
        {name: int(counts[mine, index[name]]) / int(total[index[name]]) for name in index},
        {name: int(counts[:mine, index[name]].sum()) for name in index},
        removed(list(index)),
    )


class ForwardTracker:
    """Follow the forwards and backwards of a model by hooks, and tell its layers which forward they take part in."""

    def __init__(self, model: nn.Module, count: Callable[[Route], dict[str, int]]) -> None:
        self._count = count
        self.route: Route | None = None  # of the context that is open; None outside of any
        self._forward: Forward | None = None
        # Forwards whose backward has begun, by the number of the backward pass: of passes that are running (several, if
        # a hook starts one inside another) and of those that ended with an error.
        self._begun: dict[int, list[Forward | None]] = {}
        # Tenants of forwards whose backward has begun, until their gradients are summed or dropped: the same on all
        # ranks, also if a backward reached a tenant's layers on some ranks only.
        self.trained: set[str] = set()
        model.register_forward_pre_hook(self._forward_begins, with_kwargs=True)
        model.register_forward_hook(self._forward_ends)
        # When a gradient reaches the output of a module, layers that are recomputed after it belong to the forward that
        # made this output. All modules have a hook, since a loss may be computed from a hidden state.
        for module in list(model.modules()):
            module.register_forward_hook(self._made)

    def within(self, route: Route) -> AbstractContextManager[None]:
        """Run the forwards of a block in a route."""
        return replaced(self, {"route": route, "_forward": Forward(route, {})})

    def current(self, layer: str) -> Forward | None:
        """Return the forward that is computed, or that a backward recomputes; None outside of any route."""
        if not in_backward():
            if self._forward is not None and self._forward.trains and not torch.is_grad_enabled():
                raise RuntimeError(f"{layer} is computed without gradients in a training forward. {_REENTRANT}")
            return self._forward
        if backward_pass() not in self._begun:
            raise RuntimeError(f"{layer} is recomputed, and it cannot be told in which forward it was. {_REENTRANT}")
        forward = self._begun[backward_pass()][-1]
        removed = [] if forward is None else forward.route.removed()
        if removed:
            raise RuntimeError(
                f"{layer} is recomputed for the tenants {removed}, which were removed after the forward: remove a "
                "tenant when the backwards of its forwards are over."
            )
        return forward

    def died(self) -> set[str]:
        """Return the tenants of backward passes that ended with an error, and forget these; none inside a backward."""
        if in_backward():
            return set()
        forwards = [forward for begun in self._begun.values() for forward in begun if forward is not None]
        self._begun.clear()
        return {name for forward in forwards for name in forward.route.tenants}

    def _forward_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if in_backward() or self.route is None:
            return
        rows = len(self.route.names or ())
        inputs = tensors_in([args, kwargs])
        widths = {x.shape[1] for x in inputs if x.dim() in (2, 3) and x.shape[0] == rows}  # not of images
        counts = self._count(self.route) if model.training else {}
        self._forward = Forward(self.route, counts, torch.is_grad_enabled(), widths, self.route.names is not None)

    def _forward_ends(self, *_: Any) -> None:
        if not in_backward() and self._forward is not None:
            self._forward.end()

    def _made(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or in_backward():  # what a graph returns is the output of a block
            return
        this = self._forward

        def backward_begins(grad: Tensor) -> None:
            this_pass = backward_pass()
            if this_pass not in self._begun:
                self._begun[this_pass] = []
                queue_after_backward(partial(self._ended, this_pass))
            begun = self._begun[this_pass]
            if not begun or begun[-1] is not this:
                begun.append(this)
                self.trained.update(() if this is None else this.route.tenants)

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(backward_begins)

    def _ended(self, this_pass: int) -> None:
        self._begun.pop(this_pass, None)


_REENTRANT = (
    "Under a TenantPool checkpoint activations with use_reentrant=False (activation_checkpointing=True does), and "
    "leave out of target_modules what the model computes under no_grad."
)
