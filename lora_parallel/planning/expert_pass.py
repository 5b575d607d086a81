"""Decide for each module of experts how tp ranks share it."""

from __future__ import annotations

from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lora_parallel.layers.layer_parameters import base_of
from lora_parallel.layers.styles import EXPERT_SPLITS, STYLES
from lora_parallel.planning.expert_sharing import share_experts
from lora_parallel.planning.plan_builder import PlanBuilder
from lora_parallel.tp.experts import ExpertSharing, holds_experts
from lora_parallel.tracing.structure import Structure

__all__ = ["plan_experts"]


def plan_experts(builder: PlanBuilder, structures: list[Structure], sequence_parallel: bool) -> None:
    """Share the experts of mixtures: slices of all of them on each rank if their forward computes right with slices,
    some whole experts on each rank otherwise; or as the user says.

    Args:
        builder: The plan.
        structures: Of the models inside that were run.
        sequence_parallel: True if a rank computes with its own tokens only, and needs all of the experts for them.

    Raises:
        ValueError: Experts cannot be shared as the user says, or have adapters and cannot be shared at all.
    """
    ways = {STYLES[style]: by for style, by in EXPERT_SPLITS.items()}
    fed = {
        module: (tracer, tracer.twin_of[base])
        for tracer in (structure.tracer for structure in structures)
        for module in builder.layers
        if (base := base_of(module)) in tracer.twin_of and tracer.twin_of[base] in tracer.experts
    }
    bases = [base_of(module) for module in builder.layers]
    known: dict[object, ExpertSharing | str] = {}
    for module, plan in builder.layers.items():
        base = base_of(module)
        asked = ways.get(plan.style) if plan.asked is not None and plan.style is not None else None
        if asked is not None and plan.style is not None and not holds_experts(base):
            raise ValueError(
                f"tp_plan: {plan.asked} makes {plan.name!r} {plan.style.name}, and "
                f"{type(base).__name__} holds no stacks of experts: parameters [experts, ., .], of several."
            )
        if plan.asked is not None and asked is None:
            continue
        if plan.style in ways:
            plan.style = None
        if not holds_experts(base):
            continue
        if module not in fed and any(other in fed for other in builder.modules[plan.name]):
            continue  # of `modules_to_save`, the original, which is not computed with
        reasons = ["nothing that the model was run with reached it"] if module not in fed else []
        if bases.count(base) > 1:
            reasons = ["several layers share them"]
        if sequence_parallel:
            reasons = ["with sequence_parallel=True each rank has the tokens of its own only: set it to False"]
        for style, by in ways.items() if not reasons else ():
            if asked not in (None, by):
                continue
            tracer, twin = fed[module]
            key = type(base), by, _shapes(base), _shapes(tracer.experts[twin])
            if key not in known:
                known[key] = share_experts(twin, tracer.experts[twin], builder.tp, by)
            found = known[key]
            if isinstance(found, str):
                reasons.append(f"{style.name}: {found}")
                continue
            plan.style, plan.sharing = style, found
            builder.attributes.setdefault(base, {}).update(found.attributes)
            break
        if plan.sharing is not None:
            continue
        why = "; ".join(reasons)
        if asked is not None or isinstance(module, BaseTunerLayer):
            raise ValueError(
                f"tp={builder.tp}: the experts {plan.name!r} ({type(base).__name__}) cannot be shared by tp ranks: {why}. "  # noqa: E501
                'Use another tp, tp=1 (FSDP2 only), the style "replicate" for them (in full on every tp rank), or '
                "leave them out of target_parameters and of tp_plan."
            )
        if not sequence_parallel:
            plan.whole = why


def _shapes(values: Any) -> object:
    """Return the shapes of a module's parameters, or of all tensors in arguments."""
    if isinstance(values, nn.Module):
        return tuple((key, tuple(p.shape)) for key, p in values._parameters.items() if p is not None)
    return tuple(tuple(x.shape) for x in tree_leaves(values) if isinstance(x, Tensor))
