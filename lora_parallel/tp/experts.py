"""Describe how tp ranks share the experts of a mixture, and cut the experts' adapters to match.

Either each rank computes slices of all experts (up projections cut by output features, the down projection by input
features), or each rank computes some of the experts as a whole. In both cases each rank's output is a partial sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lora_parallel.distributed.pytree import tensors_in
from lora_parallel.layers.row_partition import RowPartition

__all__ = ["ExpertSharing", "adapter_cuts", "expert_stacks", "holds_experts"]


@dataclass(frozen=True)
class ExpertSharing:
    """Describe the part of a module of experts that each tp rank has."""

    split_by: str
    """"features": slices of all experts; "experts": all of some."""

    cuts: dict[str, tuple[int, RowPartition]]
    """Dim and rows of each rank, for each parameter of the module that is cut, by its name."""

    addends: frozenset[str] = frozenset()
    """Names of the parameters (biases) that are added to the output. Only the first rank adds them."""

    attributes: dict[str, Any] = field(default_factory=dict)
    """Sizes that the module keeps as attributes, as they are on a rank, by attribute name."""

    absent_expert: int = 0
    """Index that replaces the index of another rank's expert, if `split_by` is "experts"; its routing weight becomes 0.
    It is one past this rank's last expert, as in transformers' expert parallelism, or else 0, any valid index."""

    def local_arguments(self, values: Any, rank: int) -> Any:
        """Return the arguments of one rank's share of the module, made from the arguments of the whole module.

        If the split is by features, they are the same. If it is by experts, an index of an expert counts from the
        rank's first expert, and the routing weights of other ranks' experts are 0.

        Args:
            values: The arguments, as nested tuples, lists and dicts.
            rank: The tp rank.

        Raises:
            ValueError: The split is by experts, and no argument is a tensor of indices.
        """
        if self.split_by == "features":
            return values
        _, chosen = next(iter(self.cuts.values()))
        start, stop = chosen.ranks[rank][0]
        index = next((x for x in tensors_in(values) if not x.is_floating_point() and x.dtype != torch.bool), None)
        if index is None:
            raise ValueError("no argument of the experts is an index of experts")
        others = (index < start) | (index >= stop)

        def mine(x: Tensor) -> Tensor:
            if x is index:
                return (x - start).masked_fill(others, self.absent_expert)
            return x.masked_fill(others, 0) if x.is_floating_point() and x.shape == others.shape else x

        return tree_map_only(Tensor, mine, values)


def adapter_cuts(wrapper: Any, adapter: str, sharing: ExpertSharing) -> dict[str, tuple[int, RowPartition]]:
    """Return the cuts of an adapter of experts that match the cut of the parameter that it adapts.

    Args:
        wrapper: PEFT's `ParamWrapper`, which holds "lora_A" [experts * r, in] and "lora_B" [out, r * experts].
        adapter: The adapter's name.
        sharing: The part of the experts that each rank has.

    Returns:
        The dim and the rows of each rank, by "lora_A" and "lora_B". If the split is by features, only one of the two is
        cut.
    """
    dim, chosen = sharing.cuts[wrapper.parameter_name]
    A, B = wrapper.lora_A[adapter].weight.shape, wrapper.lora_B[adapter].weight.shape
    if dim:
        feeds = A[1] == chosen.size and dim == (2 if wrapper._did_swap_in_out_features else 1)
        return {"lora_A": (1, chosen)} if feeds else {"lora_B": (0, chosen)}
    experts, r = chosen.size, A[0] // chosen.size
    mine = [chosen.rows(rank) for rank in range(len(chosen.ranks))]
    of_A = [(each[:, None] * r + torch.arange(r)).flatten().tolist() for each in mine]
    of_B = [(torch.arange(r)[:, None] * experts + each).flatten().tolist() for each in mine]
    return {"lora_A": (0, RowPartition.of(of_A, A[0])), "lora_B": (1, RowPartition.of(of_B, B[1]))}


def holds_experts(module: nn.Module) -> bool:
    """Return True if the module holds several stacks of expert weights, [experts, ., .]."""
    return len(expert_stacks(module)) > 1


def expert_stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the 3-D parameters [experts, ., .] by name, or nothing if they differ in their number of experts."""
    found = {key: p for key, p in module._parameters.items() if p is not None and p.dim() == 3 and p.shape[0] > 1}
    return found if len({p.shape[0] for p in found.values()}) == 1 else {}
