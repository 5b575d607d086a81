"""Tell which tenant each sample of a forward belongs to: its tokens, its weight in the mean, its count of forwards.

A route holds for the forwards that are computed in its context (`train()` or `route()`), also when a backward after the
context recomputes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from lora_parallel.distributed.mesh import dp_rank
from lora_parallel.distributed.rank_checks import agreed, gather_numbers
from lora_parallel.distributed.torch_private import in_backward
from lora_parallel.tenants.calls import number_of
from lora_parallel.tenants.factor import Factor

__all__ = ["Forward", "Route", "TenantTokens", "route_samples"]


@dataclass(frozen=True)
class TenantTokens:
    """Hold the places of one tenant's n tokens in the input of a layer, flattened to [tokens, features]."""

    place: Tensor
    """Index of each token in the flattened input, int64 [n]."""

    row: Tensor
    """Number of each token's sample, among the tenant's samples on all data-parallel ranks, int32 [n]."""

    token: Tensor
    """Number of each token within its sample, int32 [n].

    Where a model feeds the layer its rows flattened, each token counts as a sample of its own: `row` numbers the tokens
    of all samples, and `token` is 0.
    """


@dataclass
class Route:
    """Hold what all layers share in the forwards of one context: the tenants, their samples and their weights."""

    tenants: tuple[str, ...]
    """Tenants that have samples on at least one rank."""

    names: tuple[str, ...] | None
    """Tenant of each sample of this rank's batch.

    None: all samples belong to one tenant, and every data-parallel rank has the same number of them.
    """

    lengths: tuple[int, ...] | None
    """Number of tokens of each sample, where samples are segments of packed rows; else None."""

    weights: dict[str, float]
    """Share of each tenant's samples that is on this rank: the weight of this rank's mean in the mean over ranks."""

    first_sample: dict[str, int]
    """Number of each tenant's first sample on this rank, counted over all data-parallel ranks."""

    removed: Callable[[], list[str]]
    """Function that returns those of `tenants` that have been removed from the pool since the route was made."""

    gathered: dict[Factor, Tensor] = field(default_factory=dict)
    """Gathered values of each factor whose adapter is sharded over dp_shard: the part that this tp rank has."""

    _tokens_by_shape: dict[tuple[int, ...], dict[str, TenantTokens]] = field(default_factory=dict)

    def tokens(
        self, shape: Sequence[int], device: torch.device, layer: str, widths: set[int]
    ) -> dict[str, TenantTokens]:
        """Return the tokens of each tenant in the input of a layer.

        Tenants without samples on this rank are left out.

        Args:
            shape: Shape of the layer's input without its last dim: [rows, tokens, ...], or [all tokens].
            device: Device of the layer's input.
            layer: Name of the layer, for messages.
            widths: Numbers of tokens that a row of this forward is known to have.

        Raises:
            ValueError: The input does not fit the number of samples that were named, or their lengths.
        """
        assert self.names is not None
        key = tuple(shape)
        if key not in self._tokens_by_shape:
            if self.lengths is None and len(key) == 1 and widths and key[0] not in self._flat(widths):
                raise ValueError(
                    f"route: {layer} is fed {key[0]} tokens in one dim, which are not those of {len(self.names)} rows "
                    f"of {' or '.join(map(str, sorted(widths)))}: nobody knows whose they are. Leave it out of "
                    "target_modules."
                )
            self._tokens_by_shape[key] = self._place(key, device, layer)
        return self._tokens_by_shape[key]

    def _flat(self, widths: set[int]) -> set[int]:
        """Return the lengths that an input in one dim may have: all tokens of all rows, or one (pooled) of each row."""
        assert self.names is not None
        return {len(self.names) * width for width in (1, *widths)}

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
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        flattened = self.lengths is None and len(shape) == 1
        found = {}
        for tenant in self.tenants:
            mine = [index for index, name in enumerate(self.names) if name == tenant]
            if not mine:
                continue
            row = [
                torch.full((lengths[i],), self.first_sample[tenant] + n, dtype=torch.int32) for n, i in enumerate(mine)
            ]
            token = [torch.arange(lengths[i], dtype=torch.int32) for i in mine]
            if flattened:
                row = [sample * lengths[0] + place for sample, place in zip(row, token, strict=True)]
                token = [torch.zeros_like(each) for each in token]
            place = [torch.arange(starts[i], starts[i + 1]) for i in mine]
            found[tenant] = TenantTokens(*(torch.cat(each).to(device) for each in (place, row, token)))
        return found


@dataclass
class Forward:
    """Hold the state of one forward of the model in a route."""

    route: Route
    counts: dict[str, int]
    """Number of this forward among each tenant's training forwards; empty in evaluation and outside of the model's own
    forward.
    """

    trains: bool = False
    """True if gradients were enabled when the model's forward began."""

    widths: set[int] = field(default_factory=set)
    """Numbers of tokens that a row is known to have, by the inputs of the model and of layers that keep rows apart."""

    agrees: bool = False
    """True while the model's own forward is computed with named samples: every rank then reaches `end`."""

    training: dict[str, bool] = field(default_factory=dict)
    """Training mode of each layer that took part: True for training, by the layer's name."""

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
        """Raise `error`, or keep it for `end` if all ranks come there.

        If the error were raised at once, the other ranks would wait for this one in the next collective.
        """
        if not self.agrees or in_backward():
            raise error
        self._problem = self._problem or error

    def end(self, device: str) -> None:
        """Raise on every rank if any rank has kept an error with `refuse`. Collective.

        Args:
            device: Type of the device that messages between ranks go by.
        """
        if not self.agrees:
            return
        self.agrees = False
        if gather_numbers([self._problem is not None], device).any():
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
    """Make the route of a batch: its tenants, and each one's weight and first sample on this rank. Collective.

    Args:
        tenants: All tenants of the pool.
        names: The tenant of each sample of this rank's batch.
        lengths: The number of tokens of each sample, if rows are packed; else None.
        mesh: The model's mesh.
        removed: Given tenants, returns a function that returns those of them that have been removed since.
    """
    counts = _count_samples(tenants, names, lengths, mesh)
    mine, total = dp_rank(mesh), counts.sum(0)
    there = [name for name, number in zip(tenants, total.tolist(), strict=True) if number]
    index = {name: number for number, name in enumerate(tenants)}
    return Route(
        tuple(there),
        tuple(names),
        lengths if lengths is None else tuple(lengths),
        {name: int(counts[mine, index[name]]) / int(total[index[name]]) for name in there},
        {name: int(counts[:mine, index[name]].sum()) for name in there},
        removed(there),
    )


def _count_samples(
    tenants: Sequence[str], names: Sequence[str], lengths: Sequence[int] | None, mesh: DeviceMesh
) -> Tensor:
    """Count the samples of each tenant on each data-parallel rank, int64 [data-parallel ranks, tenants]. Collective.

    Args:
        tenants: All tenants of the pool.
        names: The tenant of each sample of this rank's batch.
        lengths: The number of tokens of each sample, if rows are packed; else None.
        mesh: The model's mesh.

    Raises:
        ValueError: The tp ranks of one data-parallel rank name different samples.
    """
    digest = number_of(f"{list(names)} {None if lengths is None else list(lengths)}")
    own = [list(names).count(name) for name in tenants]
    everyone = gather_numbers([digest, *own], mesh.device_type)
    tp = mesh["tp"].size()
    everyone = everyone.view(-1, tp, everyone.shape[1])
    for rank, peers in enumerate(everyone):
        if len(peers[:, 0].unique()) > 1:
            raise ValueError(
                f"route: the tp ranks of data-parallel rank {rank} name other samples: give them the same batch."
            )
    return everyone[:, 0, 1:]
