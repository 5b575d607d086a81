"""Take the layer groups that running a model shows over into its plan, and hold the plan's entries against them."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.placement_types import Shard

from lora_parallel.layers.adapter_support import cut_problem
from lora_parallel.layers.layer_parameters import base_of, is_linear, shared_parameters
from lora_parallel.layers.module_names import block_of, innermost
from lora_parallel.layers.styles import STYLES, Style
from lora_parallel.planning.plan_builder import PlanBuilder
from lora_parallel.planning.plan_checks import check_widths
from lora_parallel.tracing.layer_group import LayerGroup
from lora_parallel.tracing.structure import Structure

__all__ = ["NO_CONSUMER", "check_between", "check_entries", "fit_groups"]

NO_CONSUMER = "no layer takes slices of what it computes"


def fit_groups(builder: PlanBuilder, structure: Structure) -> None:
    """Take over the layer groups that a model was shown to have, unless the user says otherwise."""
    inside_blocks = any(block_of(name) for group in structure.layer_groups for name in group.layers)
    for group in _consistent(builder, structure.layer_groups):
        wanted = {name: _producer_style(builder, name) for name in group.producers}
        wanted |= dict.fromkeys(group.consumers, STYLES["rowwise"])
        plans = builder.plans_of(wanted)
        problem = None
        if any(plan.asked is not None and plan.style is not wanted[plan.name] for _, plan in plans):
            reason = next(plan.asked for _, plan in plans if plan.asked is not None)
            problem = f"{reason} asks for another style in the same flow"
        else:
            problems = (cut_problem(module, wanted[plan.name]) for module, plan in plans)
            found = next(filter(None, problems), None)
            problem = None if found is None else f"in the same flow, {found}"
        if problem is not None:
            structure.rejected.update(dict.fromkeys(wanted, problem))
            _drop_between(builder, group)
            continue
        planned = any(plan.style is not None for _, plan in plans)
        if not planned and ((inside_blocks and not all(map(block_of, wanted))) or builder.is_head(group.consumers)):
            continue
        builder.layer_groups.append(group)
        for _, plan in plans:
            plan.style, plan.proven = wanted[plan.name], True
            partition = group.producers.get(plan.name)
            if partition is not None and not partition.is_chunked:
                plan.partition = partition
        for module, values in group.attributes.items():
            builder.attributes.setdefault(module, {}).update(values)
        for (module, key), cut in group.between.items():
            builder.between.add(module)
            if cut is not None:
                builder.cuts.setdefault(module, {})[key] = cut


def _producer_style(builder: PlanBuilder, name: str) -> Style:
    embeds = any(isinstance(base_of(module), nn.Embedding) for module, _ in builder.plans_of([name]))
    return STYLES["embedding_colwise" if embeds else "colwise"]


def _consistent(builder: PlanBuilder, groups: list[LayerGroup]) -> list[LayerGroup]:
    """Return the groups whose layers share weights only with layers that are cut alike."""
    tied = [[holder for holder, _ in places] for places in shared_parameters(builder.model).values()]
    layer_of = {base_of(module): module for module in builder.layers}
    while True:
        cut_as = {
            module: (plan.name in group.consumers, group.producers.get(plan.name))
            for group in groups
            for module, plan in builder.plans_of(group.layers)
        }
        loose = {
            layer_of[each]
            for holders in tied
            for each in holders
            if each in layer_of and len({cut_as.get(layer_of.get(each, each)) for each in holders}) > 1
        }
        kept = [group for group in groups if not any(module in loose for module, _ in builder.plans_of(group.layers))]
        if len(kept) == len(groups):
            return kept
        groups = kept


def _drop_between(builder: PlanBuilder, group: LayerGroup) -> None:
    """Drop the styles of modules that act on slices by a model's own plan, where the group is not cut."""
    for module, _ in group.between:
        plan = builder.layers.get(module)
        if plan is not None and module not in builder.between and plan.asked is None:
            plan.style = None


def check_entries(builder: PlanBuilder, structures: list[Structure]) -> None:
    """Check that layers which were run, and whose style computes slices, are in a layer group.

    Styles of a model's own plan that are not what it computes are replaced by one that is right for any layer.

    Raises:
        ValueError: A layer is in no group, and the user says that it computes slices.
    """
    groups = [group for structure in structures for group in structure.layer_groups]
    # A layer of a group that was found can be cut, whatever keeps it whole: the width of the layer is no matter then.
    fitting = builder.proven | {module for group in groups for module, _ in builder.plans_of(group.layers)}
    for structure in structures:
        for module, plan in builder.plans_of(sorted(structure.called)):
            if plan.style is None or plan.proven or not plan.style.requires_even_split:
                continue
            kind = plan.style.name
            reason = structure.rejected.get(plan.name, NO_CONSUMER)
            check_widths(builder.names, builder.styles, fitting, builder.tp)
            if plan.asked is not None:
                raise ValueError(
                    f"tp_plan: {plan.asked} makes {plan.name!r} {kind}, which is not what "
                    f"{type(innermost(builder.model)).__name__} computes: {reason}. A rowwise layer takes slices "
                    "that colwise layers before it compute, all of them and nothing else. "
                    '"colwise_gather_output" and "rowwise_split_input" are right for any linear layer.'
                )
            plan.style = None  # `complete` gives it a style that is right for any
            if is_linear(base_of(module)):
                plan.style, plan.gathered = STYLES["colwise_gather_output"], reason
        builder.used_directly |= structure.used_directly
        for _, plan in builder.plans_of(structure.used_directly):
            if plan.asked is None:
                plan.style = None
    for module, plan in builder.layers.items():
        if plan.style is None or plan.asked is not None:
            continue
        layer = is_linear(base_of(module)) or isinstance(base_of(module), nn.Embedding)
        # Experts, say: a model's own plan means something else by the style.
        if (plan.from_table and not plan.proven) or (not layer and isinstance(plan.style.weight, Shard)):
            plan.style = None


def check_between(builder: PlanBuilder, structures: list[Structure]) -> None:
    """Check that what the user calls replicated with partial gradients acts on slices: elsewhere that is a mistake.

    Raises:
        ValueError: A module was run, and does not act on slices.
    """
    entered: set[nn.Module] = set()
    for structure in structures:
        tracer = structure.tracer
        entered |= {real for real, twin in tracer.twin_of.items() if twin in tracer.entered}
    for module, plan in builder.layers.items():
        partial = plan.style is STYLES["replicated_with_grad_allreduce"] and plan.asked is not None
        if partial and module in entered and builder.between.isdisjoint(module.modules()):
            raise ValueError(
                f"tp_plan: {plan.asked} makes {plan.name!r} replicated_with_grad_allreduce, which is for what "
                "acts on the slices between a colwise and a rowwise layer, and it does not: use replicate."
            )
