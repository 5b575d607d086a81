"""Take the entries of plans over into a plan: those that models carry, those of known families, the user's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel

from lora_parallel.layers.styles import STYLES, Style, style_named
from lora_parallel.planning.family_plans import family_plan
from lora_parallel.planning.plan_builder import LayerPlan, PlanBuilder

__all__ = ["Entries", "entries_of_models", "take_entries"]

Entries = list[tuple[re.Pattern[str], str]]
"""Patterns of names, and styles."""


def entries_of_models(names: Mapping[nn.Module, str]) -> tuple[Entries, Entries]:
    """Return the entries of the plans that the models inside carry, and the entries of `family_plans` for the others.

    A model inside of another that has a plan is covered by that plan.

    Args:
        names: The names of a model's modules.
    """
    own: Entries = []
    table: Entries = []
    covered: list[str] = []
    for module, name in names.items():
        if any(_inside(name, outer) for outer in covered):
            continue
        plan, at, entries = getattr(module, "_tp_plan", None), name, own
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


def _inside(name: str, outer: str) -> bool:
    return outer == "" or name == outer or name.startswith(outer + ".")


def take_entries(builder: PlanBuilder, own: Entries, table: Entries, globs: Mapping[str, str]) -> None:
    """Give layers the styles that entries name. Styles of a model's own plan that are unknown here are left out.

    Args:
        builder: The plan.
        own: Entries of plans that models carry.
        table: Entries of `family_plans`, which say nothing of heads and fused layers and hold as far as proven.
        globs: The user's entries.
    """
    for plan in builder.layers.values():
        chosen = next((style for pattern, style in own if pattern.fullmatch(plan.name)), None)
        if chosen is None:
            chosen = next((style for pattern, style in table if pattern.fullmatch(plan.name)), None)
            plan.from_table = chosen is not None
        if chosen is not None and chosen in STYLES:
            _give(plan, STYLES[chosen])
        for glob, style in globs.items():
            if fnmatchcase(plan.name, glob):
                plan.asked = f"the entry {glob!r}"
                _give(plan, style_named(style, plan.asked))


def _give(plan: LayerPlan, style: Style) -> None:
    """Note an entry. A packed layer is colwise, on rows that running the model shows, or on those of two halves."""
    plan.packed = style is STYLES["packed_colwise"]
    plan.style = STYLES["colwise"] if plan.packed else style
