"""Log a plan on rank 0, and warn about layers that are not computed in slices, plans set aside and unchecked plans."""

from __future__ import annotations

import logging

import torch.distributed as dist

from lora_parallel.layers.module_names import count_kinds, innermost, without_block_numbers
from lora_parallel.planning.group_pass import NO_CONSUMER
from lora_parallel.planning.plan_builder import LayerPlan, PlanBuilder

__all__ = ["log_plan"]

log = logging.getLogger(__name__)

_TRIED = (
    "will be tried on the first batch, and refused there if it is not what the model computes. There is nothing to do"
)
_UNCHECKED = "holds unchecked. Compare a step with one process once"


def log_plan(builder: PlanBuilder, problem: str, tried_later: bool) -> None:
    """Log a plan on rank 0.

    Args:
        builder: The plan.
        problem: The reason why a model could not be run without its weights; empty if there is none.
        tried_later: True if the plan will be checked on the first batch instead.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
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
        log.warning(
            "tp_plan: %s could not be run without its weights (%s%s): its plan %s.",
            model,
            "its forward was replaced, as TRL's trainers do; " if "forward" in vars(inner) else "",
            problem,
            _TRIED if tried_later else _UNCHECKED,
        )
    gathered = {plan.name: plan.gathered for plan in plans if plan.gathered is not None}
    reasons = {without_block_numbers(name): reason for name, reason in sorted(gathered.items(), key=_vague_first)}
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


def _vague_first(said: tuple[str, str]) -> bool:
    return said[1] != NO_CONSUMER
