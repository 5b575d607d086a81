"""Set layers' styles from the entries of plans: those that models carry, those of known families, and the user's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from transformers import PreTrainedModel

from lora_parallel.layers.module_names import innermost
from lora_parallel.layers.styles import STYLES, Style, style_named
from lora_parallel.planning.family_plans import family_plan
from lora_parallel.planning.plan_builder import LayerPlan, PlanBuilder

__all__ = ["Entries", "entries_of_models", "set_aside_unshown", "take_entries"]

Entries = list[tuple[re.Pattern[str], str]]
"""Patterns of layer names, each with the style of the layers that match it."""


_SHOWN_BY_RUNNING = frozenset(
    {
        *("all_reduce", "colwise_rep", "grouped_gemm", "local_params", "mla_kv_a_proj", "moe_identity_expert"),
        *("packed_rowwise", "rowwise_rep", "sequence_parallel"),
    }
)
"""Styles of transformers for what running the model shows anyway: their entries are not needed.

Source: `ALL_PARALLEL_STYLES` in transformers/distributed/tensor_parallel.py and expert_parallel.py.
"""


_TAKES_SLICES = frozenset({"all_reduce", "grouped_gemm", "local_params", "packed_rowwise"})
"""Those of them whose layers compute with slices: where the model cannot be run, nothing else says so."""


def entries_of_models(builder: PlanBuilder) -> tuple[Entries, Entries]:
    """Return the entries of plans that models carry, and the entries of `family_plans` for models without a plan.

    If a model has a plan, the models inside of it are covered by this plan. A plan that names an unknown style is set
    aside as a whole, since what its other entries cut may need that style; `builder.set_aside` says so.

    Args:
        builder: The plan, whose layers are those of the whole model.
    """
    names = builder.names
    own: Entries = []
    table: Entries = []
    covered: list[str] = []
    for module, name in names.items():
        if any(_inside(name, outer) for outer in covered):
            continue
        plan, at, entries = getattr(module, "_tp_plan", None), name, own
        unknown = [each for each in plan.items() if not _is_known(each[1])] if isinstance(plan, Mapping) else []
        if unknown:
            (key, style), plan = unknown[0], None
            builder.set_aside.append((type(module).__name__, key, style))
        if isinstance(module, PreTrainedModel) and not plan:
            plan, at, entries = family_plan(module.config), names.get(module.base_model, name), table
        if not isinstance(plan, Mapping) or not plan:
            continue
        covered.append(name)
        for key, style in plan.items():
            full = f"{at}.{key}" if at else key
            pattern = r"[^.]+".join(re.escape(part) for part in full.split("*"))
            entries.append((re.compile(pattern), style))
    return own, table


def set_aside_unshown(builder: PlanBuilder, own: Entries) -> bool:
    """Set the plan of a model that cannot be run aside, if an entry of it wants a run to be understood.

    Returns:
        True if there is such an entry.
    """
    for plan in builder.layers.values():
        style = next((style for pattern, style in own if pattern.fullmatch(plan.name)), None)
        if style in _TAKES_SLICES:
            builder.set_aside.append((type(innermost(builder.model)).__name__, plan.name, style))
            return True
    return False


def _is_known(style: object) -> bool:
    return isinstance(style, str) and (style in STYLES or style in _SHOWN_BY_RUNNING)


def _inside(name: str, outer: str) -> bool:
    return outer == "" or name == outer or name.startswith(outer + ".")


def take_entries(builder: PlanBuilder, own: Entries, table: Entries, globs: Mapping[str, str]) -> None:
    """Set the styles that entries name; the user's entries come last, and replace others.

    Args:
        builder: The plan.
        own: Entries of plans that models carry.
        table: Entries of `family_plans`. They do not describe heads and fused layers, and are kept only if a traced run
            confirms them.
        globs: The user's entries.
    """
    for plan in builder.layers.values():
        chosen = next((style for pattern, style in own if pattern.fullmatch(plan.name)), None)
        if chosen is None:
            chosen = next((style for pattern, style in table if pattern.fullmatch(plan.name)), None)
            plan.from_table = chosen is not None
        if chosen in STYLES:
            _give(plan, STYLES[chosen])
        for glob, style in globs.items():
            if fnmatchcase(plan.name, glob):
                plan.asked = f"the entry {glob!r}"
                _give(plan, style_named(style, plan.asked))


def _give(plan: LayerPlan, style: Style) -> None:
    """Set a layer's style; `packed_colwise` becomes colwise with `packed=True`."""
    plan.packed = style is STYLES["packed_colwise"]
    plan.style = STYLES["colwise"] if plan.packed else style
