"""Set the styles of layers without one from plan entries or layer groups, and keep layers whole that cannot be cut."""

from __future__ import annotations

from typing import Any, Literal

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.tensor.placement_types import Shard

from lora_parallel.layers.adapter_support import cut_problem, problem_anywhere
from lora_parallel.layers.layer_parameters import base_of, features_dim, is_linear, shared_parameters
from lora_parallel.layers.module_names import block_of, without_block_numbers
from lora_parallel.layers.row_partition import RowPartition
from lora_parallel.layers.styles import STYLES
from lora_parallel.planning.group_pass import NO_CONSUMER
from lora_parallel.planning.plan_builder import PlanBuilder
from lora_parallel.planning.plan_checks import cut_as, leaves_a_rank_empty
from lora_parallel.tracing.structure import Structure

__all__ = ["add_replicated", "complete", "keep_small_whole", "keep_whole", "partition_packed"]


def complete(builder: PlanBuilder, structures: list[Structure]) -> None:
    """Set styles on linear layers in blocks that have none yet, and on embeddings and head.

    Linear layers in blocks get `colwise_gather_output`, which is right for any linear layer, if they have adapters or a
    traced run called them. Layers whose weight the model uses without calling them are left out.
    """
    called = {name for structure in structures for name in structure.called}
    reasons = {name: reason for structure in structures for name, reason in structure.rejected.items()}
    for module, plan in builder.layers.items():
        if plan.style is not None or plan.name in builder.used_directly or not is_linear(base_of(module)):
            continue
        if block_of(plan.name) and (isinstance(module, BaseTunerLayer) or plan.name in called):
            plan.style = STYLES["colwise_gather_output"]
            plan.gathered = reasons.get(plan.name, NO_CONSUMER)
    ends: dict[Literal["input", "output"], str] = {"input": "embedding_rowwise", "output": "colwise_gather_output"}
    for side, style in ends.items():
        for module in builder.ends(side):
            fits = isinstance(base_of(module), nn.Embedding) if side == "input" else is_linear(base_of(module))
            end = builder.layers.get(module)
            if fits and end is not None and end.style is None and end.name not in builder.used_directly:
                end.style = STYLES[style]
    _untie(builder)
    builder.completed = True


def keep_whole(builder: PlanBuilder, structures: list[Structure]) -> None:
    """Set `replicate` on layers that cannot be cut, unless the user named them or layers around them work on slices.

    If `complete` has set styles before, all other layers with adapters and without a style get `replicate` too.
    """
    reached = {name for structure in structures for name in structure.called}
    for module, plan in builder.layers.items():
        if plan.style is None and not isinstance(module, BaseTunerLayer):
            continue
        problem = cut_problem(module, plan.style if plan.style is not None else STYLES["colwise_gather_output"])
        if problem is None or plan.asked is not None or problem_anywhere(module) is not None:
            continue
        if plan.style is None or not plan.style.requires_even_split or (plan.name in reached and not plan.proven):
            plan.style, plan.whole, plan.gathered = STYLES["replicate"], problem, None
    if any(plan.whole is not None for plan in builder.layers.values()):
        _untie(builder)
    if builder.completed:
        for module, plan in builder.layers.items():
            if isinstance(module, BaseTunerLayer) and plan.style is None:
                plan.style = STYLES["replicate"]


def keep_small_whole(builder: PlanBuilder) -> None:
    """Set `replicate` on layers that have too few features to give each tp rank some of them.

    FSDP2 does not reduce gradients without elements, and the whole layer computes the same output.
    """
    for module, plan in builder.layers.items():
        if (
            plan.style is not None
            and not plan.style.requires_even_split
            and leaves_a_rank_empty(module, plan.style, builder.tp)
        ):
            plan.style, plan.gathered = STYLES["replicate"], None


def _untie(builder: PlanBuilder) -> None:
    """Clear the style of layers whose tied weight another layer keeps whole or cuts in another way.

    The styles that the user has asked for stay.
    """
    tied = [[holder for holder, _ in places] for places in shared_parameters(builder.model).values()]
    layer_of = {base_of(module): module for module in builder.layers}
    while True:
        styles = builder.styles
        apart = [
            holders for holders in tied if len({cut_as(styles.get(layer_of.get(each, each))) for each in holders}) > 1
        ]
        loose = [
            plan
            for holders in apart
            for each in holders
            if each in layer_of
            and (plan := builder.layers[layer_of[each]]).style is not None
            and plan.asked is None
            and isinstance(plan.style.weight, Shard)
        ]
        if not loose:
            return
        for plan in loose:
            plan.style = None


def partition_packed(builder: PlanBuilder) -> None:
    """Give each rank a chunk of each half of the rows of packed layers that no traced run has confirmed.

    Raises:
        ValueError: The output features of a layer are no two halves that are multiples of tp.
    """
    for module, plan in builder.layers.items():
        if not plan.packed or plan.proven or plan.style is None or not is_linear(base_of(module)):
            continue
        base: Any = base_of(module)
        half, odd = divmod(base.weight.shape[features_dim(base)], 2)
        if odd or half % builder.tp:
            raise ValueError(
                f"tp={builder.tp} does not divide {plan.name!r}: packed_colwise cuts each half of "
                f"its {2 * half + odd} output features."
            )
        plan.partition = RowPartition.packed([half, half], builder.tp)


def add_replicated(builder: PlanBuilder, whole: bool = False) -> None:
    """Set a replicated style on every remaining layer that trains or acts on slices.

    Every trained tensor becomes a DTensor over tp in this way.

    Args:
        builder: The plan.
        whole: Compute layers with adapters in full too, where nothing else names them.

    Raises:
        ValueError: A layer has an adapter and no style, or the model uses a trained weight without calling its layer.
    """
    for module, plan in builder.layers.items():
        trains = any(p is not None and p.requires_grad for p in module._parameters.values())
        if module in builder.between and not plan.proven:
            if trains or module in builder.cuts or plan.style is not None:
                plan.style = STYLES["replicated_with_grad_allreduce"]
            continue
        if plan.style is not None:
            continue
        adapted = isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        if adapted and not whole:
            glob = without_block_numbers(plan.name)
            raise ValueError(
                f"tp={builder.tp}: {plan.name!r} has adapter layers ({type(module).__name__}) but no tensor parallel "
                f'style. Add it to the plan, for example tp_plan={{"{glob}": "colwise"}} (or "replicate", computed '
                "in full on every tp rank), or leave it out of target_modules."
            )
        if trains or adapted:
            if plan.name in builder.used_directly:
                raise ValueError(
                    f"tp={builder.tp}: {plan.name!r} trains, and its weight is used without calling it, where tensor "
                    "parallelism has no hold of it: freeze it, or use tp=1 (FSDP2 only)."
                )
            plan.style = STYLES["replicate"]
