"""From a model to `{module name: style}`: its own `tp_plan`, the user's globs over it, every entry checked.

A plan speaks of the model as its author wrote it. PEFT and wrappers put components of their own into module names
(`base_model.model.`, `.base_layer`, `.modules_to_save.default`); they are taken out before anything is matched.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lora_parallel.draft import Draft, Entries
from lora_parallel.experts import Sharing
from lora_parallel.families import family_plan
from lora_parallel.names import clean_names, innermost
from lora_parallel.plan_checks import check_kinds, check_ties, check_widths
from lora_parallel.probe import ProbeError, probed_models
from lora_parallel.selection import Selection
from lora_parallel.sequence import Sequence
from lora_parallel.structure import Structure, find_structure
from lora_parallel.styles import WAYS_OF_EXPERTS, Style, style_named
from lora_parallel.trial import Trial

__all__ = ["Plan", "check_globs", "resolve_plan"]


@dataclass(frozen=True)
class Plan:
    """What each module does under tensor parallelism."""

    styles: dict[nn.Module, tuple[str, Style]]
    """`{module: (its name in PEFT's terms, style)}`."""

    selections: dict[nn.Module, Selection] = field(default_factory=dict)
    """The output features of each rank, of colwise layers that are not cut into one chunk a rank."""

    cuts: dict[nn.Module, dict[str, tuple[int, Selection]]] = field(default_factory=dict)
    """The dim and the rows of each rank, of parameters that act on slices and have something for each feature or head;
    by the module that holds them and their names there.
    """

    attributes: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    """What modules say of their own sizes (head counts, widths), on a rank."""

    trials: list[Trial] = field(default_factory=list)
    """Of models that could not be run, for the first batch."""

    sharings: dict[nn.Module, Sharing] = field(default_factory=dict)
    """Of modules of experts."""

    sequences: list[Sequence] = field(default_factory=list)
    """Where the tokens are split between ranks."""


def _own_plans(names: Mapping[nn.Module, str]) -> tuple[Entries, Entries]:
    """The plans of the models inside: those that they carry (`_tp_plan` of transformers), and where they carry none
    those of `families`. Of models in models the outermost has one.
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


def check_globs(model: nn.Module, globs: Mapping[str, str]) -> None:
    """Check what can be checked of a user's plan on any mesh.

    Raises:
        ValueError: A style is unknown, or a glob matches no module.
    """
    names = set(clean_names(model).values()) - {""}
    for glob, style in globs.items():
        style_named(style, f"the entry {glob!r}")
        if not any(fnmatchcase(name, glob) for name in names):
            near = sorted({name for name in names if name.rsplit(".", 1)[-1] == glob.rsplit(".", 1)[-1]})
            hint = f"Modules of that last name: {', '.join(near[:3])}" if near else f"Modules: {', '.join(_few(names))}"
            raise ValueError(
                f"tp_plan: the entry {glob!r} ({style}) matches no module. {hint}. Write names without "
                "base_model.model. and .base_layer."
            )


def _few(names: set[str]) -> list[str]:
    leaves = sorted(names, key=lambda name: (-name.count("."), name))
    return [*leaves[:3], "..."]


def resolve_plan(model: nn.Module, globs: Mapping[str, str] | None, tp: int, sequence_parallel: bool = False) -> Plan:
    """The style of every module that needs one at this `tp`.

    Args:
        model: Full shapes, adapters injected.
        globs: The user's entries, laid over the model's own plan; `*` matches any characters, dots included. In the
            model's own plan `*` stands for one component, as in transformers.
        tp: Size of the tp axis.
        sequence_parallel: Split the tokens between the layers that are cut.

    Raises:
        ValueError: There is no plan, and none can be derived; an entry matches nothing, names an unknown style, or is
            not what the model computes; a module with LoRA layers or a trained parameter has no style; heads or widths
            are no multiple of tp; a layer, or something that its adapter uses, is not supported under tensor
            parallelism. Nothing has been touched then.
    """
    check_globs(model, globs or {})
    names = clean_names(model)
    own, table = _own_plans(names)
    draft = Draft(model, names, tp)
    draft.take(own, table, globs or {})
    check_kinds(draft.asked_for, tp)
    structures, trials, problem = _structures(model, names, tp, draft.between_slices)
    if not own and not globs and not structures:
        raise ValueError(
            f"tp={tp}, but {type(innermost(model)).__name__} carries no tp_plan, and none can be derived, as running "
            f'it without its weights fails ({problem}): pass tp_plan={{"<glob of module names>": "colwise" | '
            '"rowwise" | ...}, or use tp=1. "colwise_gather_output" is right for any linear layer.'
        )
    for structure in structures:
        draft.fit(structure)
    draft.check_entries(structures)
    draft.check_between(structures)
    draft.share_experts(structures, sequence_parallel)
    of_layers = [glob for glob, style in (globs or {}).items() if style not in WAYS_OF_EXPERTS]
    if structures and not of_layers:
        draft.complete(structures)
    draft.keep_whole(structures)
    draft.keep_small_whole()
    draft.pack()
    if own and not globs and not draft.styles:
        raise ValueError(
            f"tp={tp}: no entry of the plan that {type(innermost(model)).__name__} carries matches a module of it: "
            'pass tp_plan={"<glob>": "<style>"}.'
        )
    draft.add_replicated()
    if sequence_parallel:
        draft.split_tokens(structures, problem)
    check_kinds(draft.styles, tp)
    check_widths(names, draft.styles, draft.proven, tp)
    check_ties(model, draft.styles)
    draft.say(problem)
    for trial in trials:
        trial.expect(draft.styles, draft.selections)
    return Plan(draft.styles, draft.selections, draft.cuts, draft.attributes, trials, draft.sharings, draft.sequences)


def _structures(
    model: nn.Module, names: Mapping[nn.Module, str], tp: int, whole: Collection[str]
) -> tuple[list[Structure], list[Trial], str]:
    """What running the models inside shows; and what went wrong, where one cannot be run, to be tried again.

    A model inside of one (a vision tower) that is not reached from its inputs, or cannot be, is run by itself.
    """
    found: list[Structure] = []
    trials: list[Trial] = []
    problem = ""
    reached: set[nn.Module] = set()
    for inner in probed_models(model):
        if any(module in reached for module in inner.modules()):
            continue
        try:
            structure = find_structure(inner, names, tp, whole)
        except ProbeError as error:
            problem = problem or str(error)
            with suppress(ProbeError):
                if inner in (model, innermost(model)):
                    trials.append(Trial(inner, names, tp))
            continue
        found.append(structure)
        reached.update(module for module, name in names.items() if name in structure.called)
    return found, trials, problem
