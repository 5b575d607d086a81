"""Set layers' styles from the entries of plans: those that models carry, those of known families, and the user's."""

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
"""Patterns of layer names, each with the style of the layers that match it."""


def entries_of_models(names: Mapping[nn.Module, str]) -> tuple[Entries, Entries]:
    """Return the entries of plans that models carry, and the entries of `family_plans` for models without a plan.

    If a model has a plan, the models inside of it are covered by this plan.

    Args:
        names: The names of the modules of the whole model.
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
    """Set the styles that entries name; the user's entries come last, and replace others.

    Unknown styles in plans that models carry are ignored.

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
        if chosen is not None and chosen in STYLES:
            _give(plan, STYLES[chosen])
        for glob, style in globs.items():
            if fnmatchcase(plan.name, glob):
                plan.asked = f"the entry {glob!r}"
                _give(plan, style_named(style, plan.asked))


def _give(plan: LayerPlan, style: Style) -> None:
    """Set a layer's style; `packed_colwise` becomes colwise with `packed=True`."""
    plan.packed = style is STYLES["packed_colwise"]
    plan.style = STYLES["colwise"] if plan.packed else style
