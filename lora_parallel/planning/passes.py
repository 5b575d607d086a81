"""Fill a plan in the making, a pass after the other: layer groups, tokens, layers that are left, the report."""

from __future__ import annotations

import logging
from typing import Any, Literal

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.tensor.placement_types import Shard

from lora_parallel.distributed.rank_checks import is_rank_zero
from lora_parallel.layers.layer_parameters import (
    base_of,
    block_of,
    count_kinds,
    innermost,
    shared_parameters,
    without_block_numbers,
)
from lora_parallel.layers.linear_classes import cut_problem, features_dim, is_linear, problem_anywhere
from lora_parallel.layers.styles import (
    STYLES,
    RowPartition,
    Style,
    with_gathered_input,
    with_token_input,
    with_token_output,
)
from lora_parallel.planning.entries import LayerPlan, PlanBuilder
from lora_parallel.planning.plan_checks import check_widths, cut_as, leaves_a_rank_empty
from lora_parallel.tracing.layer_groups import LayerGroup
from lora_parallel.tracing.prove_feature_slices import Structure
from lora_parallel.tracing.prove_token_chunks import find_sequence

NO_CONSUMER = "no layer takes slices of what it computes"


def fit_groups(builder: PlanBuilder, structure: Structure) -> None:
    """Take over the layer groups that a model was shown to have, unless the user says otherwise."""
    inside_blocks = any(block_of(name) for group in structure.layer_groups for name in group.layers)
    for group in _consistent(builder, structure.layer_groups):
        wanted = {name: _producer_style(builder, name) for name in group.producers}
        wanted |= dict.fromkeys(group.consumers, STYLES["rowwise"])
        plans = builder.plans_of(wanted)
        problems = (cut_problem(module, wanted[plan.name]) for module, plan in plans)
        problem = next((f"in the same flow, {why}" for why in problems if why), None)
        if any(plan.asked is not None and plan.style is not wanted[plan.name] for _, plan in plans):
            reason = next(plan.asked for _, plan in plans if plan.asked is not None)
            problem = f"{reason} asks for another style in the same flow"
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
    """Refuse slices that the user asks of a layer outside of layer groups; replace a model's own wrong styles."""
    groups = [group for structure in structures for group in structure.layer_groups]
    # A layer of a group that was found can be cut, whatever keeps it whole: the width of the layer is no matter then.
    fitting = builder.proven | {module for group in groups for module, _ in builder.plans_of(group.layers)}
    for structure in structures:
        for module, plan in builder.plans_of(sorted(structure.called)):
            if plan.style is None or plan.proven or not plan.style.requires_even_split:
                continue
            reason = structure.rejected.get(plan.name, NO_CONSUMER)
            check_widths(builder.names, builder.styles, fitting, builder.tp)
            if plan.asked is not None:
                raise ValueError(
                    f"tp_plan: {plan.asked} makes {plan.name!r} {plan.style.name}, which is not what "
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
        if not layer and isinstance(plan.style.weight, Shard):
            plan.style = None


def check_between(builder: PlanBuilder, structures: list[Structure]) -> None:
    """Check that what the user calls replicated with partial gradients acts on slices: elsewhere that is a mistake."""
    tracers = [structure.tracer for structure in structures]
    entered = {tracer.real_of[twin] for tracer in tracers for twin in tracer.entered}
    for module, plan in builder.layers.items():
        partial = plan.style is STYLES["replicated_with_grad_allreduce"] and plan.asked is not None
        if partial and module in entered and builder.between.isdisjoint(module.modules()):
            raise ValueError(
                f"tp_plan: {plan.asked} makes {plan.name!r} replicated_with_grad_allreduce, which is for what "
                "acts on the slices between a colwise and a rowwise layer, and it does not: use replicate."
            )


def split_tokens(builder: PlanBuilder, structures: list[Structure], problem: str) -> None:
    """Split the tokens of a model's blocks between tp ranks."""
    remedy = "Use sequence_parallel=False."
    if not structures:
        raise ValueError(
            f"sequence_parallel=True: {type(innermost(builder.model)).__name__} cannot be run without its weights "
            f"({problem}), so that nothing shows where its tokens may be split. {remedy}"
        )
    for structure in structures:
        groups = [group for group in structure.layer_groups if any(group is taken for taken in builder.layer_groups)]
        model = type(structure.tracer.model).__name__
        in_group = {name for group in groups for name in group.layers}
        for _, plan in builder.plans_of(sorted(structure.called - in_group)):
            if plan.style is not None and block_of(plan.name) and isinstance(plan.style.weight, Shard):
                raise ValueError(
                    f"sequence_parallel=True: {plan.name!r} is {plan.style.name}, and its output would have to be "
                    f"gathered with that of other tokens. {remedy[:-1]}, or the style replicate for it."
                )
        try:
            sequence = find_sequence(structure, groups, builder.tp)
        except ValueError as error:
            raise ValueError(
                f"sequence_parallel=True: the tokens of {model} cannot be split: {error}. {remedy}"
            ) from error
        builder.sequences.append(sequence)
        for module, plan in builder.layers.items():
            if plan.style is None or (module not in sequence.inside and plan.name not in in_group):
                continue
            if plan.name not in in_group:
                plan.style = STYLES["replicated_with_grad_allreduce"]
            elif plan.name in sequence.consumers:
                plan.style = with_token_output(plan.style)
            elif plan.style.enter == "copy":
                change = with_token_input if plan.name in sequence.layers else with_gathered_input
                plan.style = change(plan.style)


def complete(builder: PlanBuilder, structures: list[Structure]) -> None:
    """Set `colwise_gather_output` on adapted or called layers in blocks, and styles on embeddings and head."""
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
    """Set `replicate` on layers that cannot be cut, unless the user named them or layers around them work on slices."""
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
    """Set `replicate` on layers with too few features for the ranks: FSDP2 reduces no gradients without elements."""
    for module, plan in builder.layers.items():
        style = plan.style
        if style and not style.requires_even_split and leaves_a_rank_empty(module, style, builder.tp):
            plan.style, plan.gathered = STYLES["replicate"], None


def _untie(builder: PlanBuilder) -> None:
    """Clear the style of layers whose tied weight another layer places otherwise, unless the user asked for it."""
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
    """Give each rank a chunk of each half of the rows of packed layers that no traced run has confirmed."""
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
    """Set a replicated style on every remaining layer that trains or acts on slices: what trains becomes a DTensor."""
    # `whole`: compute layers with adapters in full too, where nothing else names them.
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


log = logging.getLogger(__name__)

_TRIED = (
    "will be tried on the first batch, and refused there if it is not what the model computes. There is nothing to do"
)
_UNCHECKED = "holds unchecked. Compare a step with one process once"


def log_plan(builder: PlanBuilder, problem: str, tried_later: bool) -> None:
    """Log a plan on rank 0."""
    if not is_rank_zero():
        return
    inner, plans = innermost(builder.model), builder.layers.values()
    model = type(inner).__name__
    chosen = count_kinds({plan.name: _in_words(plan) for plan in plans if plan.style is not None})
    lines = "\n".join(f"  {glob}: {what} ({count} layers)" for (glob, what), count in chosen.items())
    log.info("tp_plan of %s for tp=%d:\n%s", model, builder.tp, lines)
    for kind, key, style in builder.set_aside:
        log.warning(
            "tp_plan: the plan that %s carries is set aside, since its entry %r asks for the style %r, which is not "
            "known.",
            kind,
            key,
            style,
        )
    if problem:
        (log.info if tried_later else log.warning)(
            "tp_plan: %s could not be run without its weights (%s%s): its plan %s.",
            model,
            "its forward was replaced, as TRL's trainers do; " if "forward" in vars(inner) else "",
            problem,
            _TRIED if tried_later else _UNCHECKED,
        )
    gathered = {plan.name: plan.gathered for plan in plans if plan.gathered is not None}
    reasons = {
        without_block_numbers(name): reason
        for name, reason in sorted(gathered.items(), key=lambda said: said[1] != NO_CONSUMER)
    }
    for (glob, reason), count in count_kinds({name: reasons[without_block_numbers(name)] for name in gathered}).items():
        log.warning("tp_plan: the output of %s (%d layers) is gathered after each: %s.", glob, count, reason)
    whole = {plan.name: plan.whole for plan in plans if plan.whole is not None}
    for (glob, reason), count in count_kinds(whole).items():
        log.warning("tp_plan: %s (%d layers) is computed in full on every tp rank: %s.", glob, count, reason)


def _in_words(plan: LayerPlan) -> str:
    assert plan.style is not None
    if plan.partition is None:
        return plan.style.name
    return f"{plan.style.name}, {plan.partition.width} of {plan.partition.size} rows on each rank"
