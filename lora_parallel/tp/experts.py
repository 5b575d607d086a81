"""Compute a module of experts as one of tp ranks: which part of its weights a rank has, and which arguments.

Either each rank computes slices of all experts (up projections cut by output features, the down projection by input
features), or each rank computes some of the experts as a whole. In both cases each rank's output is a partial sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lora_parallel.distributed.dtensors import tensors_in
from lora_parallel.layers.styles import RowPartition


@dataclass(frozen=True)
class ExpertSharing:
    """Describe the part of a module of experts that each tp rank has."""

    split_by: str  # "features": slices of all experts; "experts": all of some
    # Dim and rows of each rank, for each parameter of the module that is cut, by its name.
    cuts: dict[str, tuple[int, RowPartition]]
    # Names of the parameters (biases) that are added to the output. Only the first rank adds them.
    addends: frozenset[str] = frozenset()
    # Sizes that the module keeps as attributes, as they are on a rank, by attribute name.
    attributes: dict[str, Any] = field(default_factory=dict)
    # Index that replaces the index of another rank's expert, if `split_by` is "experts"; its routing weight becomes 0.
    # It is one past this rank's last expert, as in transformers' expert parallelism, or else 0, any valid index.
    absent_expert: int = 0

    def local_arguments(self, values: Any, rank: int) -> Any:
        """Return a rank's arguments: indices count from its first expert, other experts' routing weights are 0."""
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
    """Map "lora_A" and "lora_B" of experts to the dim and rows of each rank that match the adapted parameter's."""
    # lora_A is [experts * r, in], lora_B [out, r * experts]. By features, only one of the two is cut.
    dim, chosen = sharing.cuts[wrapper.parameter_name]
    A, B = wrapper.lora_A[adapter].weight.shape, wrapper.lora_B[adapter].weight.shape
    if dim:
        feeds = A[1] == chosen.size and dim == (2 if wrapper._did_swap_in_out_features else 1)
        return {"lora_A": (1, chosen)} if feeds else {"lora_B": (0, chosen)}
    experts, r = chosen.size, A[0] // chosen.size
    mine = [chosen.rows(rank) for rank in range(len(chosen.ranks))]
    of_A = [(expert_ids[:, None] * r + torch.arange(r)).flatten().tolist() for expert_ids in mine]
    of_B = [(torch.arange(r)[:, None] * experts + expert_ids).flatten().tolist() for expert_ids in mine]
    return {"lora_A": (0, RowPartition.of(of_A, A[0])), "lora_B": (1, RowPartition.of(of_B, B[1]))}


def holds_experts(module: nn.Module) -> bool:
    """Return True if the module holds several stacks of expert weights, [experts, ., .]."""
    return len(expert_stacks(module)) > 1


def expert_stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the 3-D parameters [experts, ., .] by name, or nothing if they differ in their number of experts."""
    stacks = {key: p for key, p in module._parameters.items() if p is not None and p.dim() == 3 and p.shape[0] > 1}
    return stacks if len({p.shape[0] for p in stacks.values()}) == 1 else {}
