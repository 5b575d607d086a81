"""From a model to `{module name: style}`: its own `tp_plan`, the user's globs over it, every entry checked.

A plan speaks of the model as its author wrote it. PEFT and wrappers put components of their own into module names
(`base_model.model.`, `.base_layer`, `.modules_to_save.default`); they are taken out before anything is matched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import gcd
from typing import Any

from peft import PeftModel
from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from torch.distributed.tensor.placement_types import Shard

from lora_parallel.layers import base_of, shared_parameters, unit_tensors
from lora_parallel.styles import STYLES, Style, style_named

__all__ = ["Plan", "check_globs", "clean_names", "resolve_plan"]


@dataclass(frozen=True)
class Plan:
    """Which style each module has: `{module: (its name in PEFT's terms, style)}`."""

    styles: dict[nn.Module, tuple[str, Style]]


def clean_names(model: nn.Module) -> dict[nn.Module, str]:
    """Each layer's name as the model's author would write it; what PEFT put inside a layer is left out.

    A PEFT layer and its base layer are one layer, of which the PEFT layer stands here. The modules inside a
    `ModulesToSaveWrapper` (the original and the trained copies) all have the wrapper's name.
    """
    names: dict[nn.Module, str] = {}

    def walk(module: nn.Module, name: str) -> None:
        if isinstance(module, PeftModel):
            walk(module.get_base_model(), name)
            return
        if isinstance(module, ModulesToSaveWrapper):
            for inner in (module.original_module, *module.modules_to_save.values()):
                walk(inner, name)
            return
        if module in names:
            return
        names[module] = name
        if isinstance(module, BaseTunerLayer):
            return
        for key, child in module.named_children():
            walk(child, f"{name}.{key}" if name else key)

    walk(model, "")
    return names


def _own_plan(names: Mapping[nn.Module, str]) -> list[tuple[re.Pattern[str], str]]:
    """The plans that the models inside carry (`_tp_plan` of transformers), outermost first, as (pattern, style)."""
    entries: list[tuple[re.Pattern[str], str]] = []
    covered: list[str] = []
    for module, name in names.items():
        plan = getattr(module, "_tp_plan", None)
        if not isinstance(plan, Mapping) or not plan or any(_inside(name, outer) for outer in covered):
            continue
        covered.append(name)
        for key, style in plan.items():
            full = f"{name}.{key}" if name else key
            pattern = r"[^.]+".join(re.escape(part) for part in full.split("*"))
            entries.append((re.compile(pattern), style))
    return entries


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


def resolve_plan(model: nn.Module, globs: Mapping[str, str] | None, tp: int) -> Plan:
    """The style of every module that needs one at this `tp`.

    Args:
        model: Full shapes, adapters injected.
        globs: The user's entries, laid over the model's own plan; `*` matches any characters, dots included. In the
            model's own plan `*` stands for one component, as in transformers.
        tp: Size of the tp axis.

    Raises:
        ValueError: There is no plan; an entry matches nothing or names an unknown style; a module with LoRA layers or a
            trained parameter has none; heads or widths are no multiple of tp; a layer, or something that its adapter
            uses, is not supported under tensor parallelism. Nothing has been touched then.
    """
    check_globs(model, globs or {})
    names = clean_names(model)
    own = _own_plan(names)
    if not own and not globs:
        raise ValueError(
            f"tp={tp}, but {type(_innermost(model)).__name__} carries no tp_plan: pass "
            'tp_plan={"<glob of module names>": "colwise" | "rowwise" | ...}, or use tp=1.'
        )
    styles: dict[nn.Module, tuple[str, Style]] = {}
    for module, name in names.items():
        chosen = next((style for pattern, style in own if pattern.fullmatch(name)), None)
        source = f"the model's own entry for {name!r}"
        for glob, style in (globs or {}).items():
            if fnmatchcase(name, glob):
                chosen, source = style, f"the entry {glob!r}"
        if chosen is not None:
            styles[module] = (name, style_named(chosen, source))
    if own and not globs and not styles:
        raise ValueError(
            f"tp={tp}: no entry of the plan that {type(_innermost(model)).__name__} carries matches a module of it: "
            'pass tp_plan={"<glob>": "<style>"}.'
        )
    _add_replicated(model, names, styles, tp)
    _check_kinds(styles, tp)
    _check_widths(model, names, styles, tp)
    _check_ties(model, styles)
    return Plan({module: (name, style) for module, (name, style) in styles.items()})


def _innermost(model: nn.Module) -> nn.Module:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _add_replicated(
    model: nn.Module, names: Mapping[nn.Module, str], styles: dict[nn.Module, tuple[str, Style]], tp: int
) -> None:
    """Give `replicate` to what trains outside the plan, so that every trained tensor ends as a DTensor over tp."""
    for module, name in names.items():
        if module in styles:
            continue
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            raise ValueError(
                f"tp={tp}: {name!r} has adapter layers ({type(module).__name__}) but no tensor parallel style. "
                f'Add it to the plan, for example tp_plan={{"{_glob(name)}": "colwise"}} (or "replicate", computed in '
                "full on every tp rank), or leave it out of target_modules."
            )
        if any(p is not None and p.requires_grad for p in module._parameters.values()):
            styles[module] = (name, STYLES["replicate"])


def _glob(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


_LINEAR_STYLES = frozenset({"colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"})


def _check_kinds(styles: Mapping[nn.Module, tuple[str, Style]], tp: int) -> None:
    by_style = {id(style): key for key, style in STYLES.items()}
    for module, (name, style) in styles.items():
        style_name = by_style[id(style)]
        base = base_of(module)
        kind = type(base).__name__
        refused = _unsupported_adapter(module) if isinstance(module, BaseTunerLayer) else None
        if refused is None and style_name in _LINEAR_STYLES and not isinstance(base, nn.Linear):
            refused = f"{kind} is no nn.Linear, which {style_name} needs"
        if refused is None and style_name == "embedding_rowwise":
            if not isinstance(base, nn.Embedding):
                refused = f"{kind} is no nn.Embedding, which {style_name} needs"
            elif base.max_norm is not None:
                refused = "an embedding with max_norm rewrites its weights in forward"
        if refused is None and any(not t.owner._parameters[t.key].is_floating_point() for t in unit_tensors(module)):  # type: ignore[union-attr]
            refused = f"{kind} holds quantised weights"
        if refused is not None:
            raise ValueError(
                f"tp={tp}: {name!r} cannot be {style_name}: {refused}. Use tp=1 (FSDP2 only), or leave it out of "
                "target_modules and of tp_plan."
            )


def _unsupported_adapter(module: Any) -> str | None:
    """What of a PEFT layer has no tensor parallel form here."""
    if type(module) not in (LoraLinear, LoraEmbedding):
        return f"adapter layers of type {type(module).__name__} are not supported under tensor parallelism"
    if module.lora_variant:
        kinds = sorted({type(variant).__name__ for variant in module.lora_variant.values()})
        return f"its adapter is a LoRA variant ({', '.join(kinds)}; DoRA is one)"
    if any(module.lora_bias.values()):
        return "its adapter has lora_bias=True"
    if isinstance(base_of(module), BaseTunerLayer):
        return "adapters are nested"
    return None


def _check_widths(
    model: nn.Module, names: Mapping[nn.Module, str], styles: Mapping[nn.Module, tuple[str, Style]], tp: int
) -> None:
    """Widths that other code computes on in slices, and the attention heads inside them, must be multiples of tp."""
    parents = {child: module for module in names for child in module.children()}
    sizes: dict[tuple[str, str], int] = {}
    for module, (name, style) in styles.items():
        base: Any = base_of(module)
        if not style.even or not isinstance(base, nn.Linear):
            continue
        split_out = isinstance(style.weight, Shard) and style.weight.dim == 0
        width = base.out_features if split_out else base.in_features
        head_dim = getattr(parents.get(module), "head_dim", None)
        if isinstance(head_dim, int) and head_dim > 0 and width % head_dim == 0:
            sizes[name, f"{width // head_dim} heads (of width {head_dim})"] = width // head_dim
        else:
            sizes[name, f"{'out' if split_out else 'in'}_features={width}"] = width
    bad = [(name, what) for (name, what), size in sizes.items() if size % tp]
    if bad:
        common = gcd(*sizes.values())
        possible = [str(n) for n in range(1, common + 1) if common % n == 0]
        name, what = bad[0]
        more = f" (and {len(bad) - 1} more layers)" if len(bad) > 1 else ""
        raise ValueError(
            f"tp={tp} does not divide {name!r}: {what}{more}. For this model tp can be {', '.join(possible)}."
        )


def _check_ties(model: nn.Module, styles: Mapping[nn.Module, tuple[str, Style]]) -> None:
    """Layers that share a weight must place it alike, or the tie would be cut."""
    by_base = {base_of(module): entry for module, entry in styles.items()}
    for parameter, holders in shared_parameters(model).items():
        placements: dict[str, object] = {}
        for holder in holders:
            if holder in by_base:
                name, style = by_base[holder]
                placements[name] = style.weight
            else:
                placements[type(holder).__name__] = None
        if len(set(map(str, placements.values()))) > 1:
            raise ValueError(
                f"tp_plan: the weight of shape {tuple(parameter.shape)} is tied, and its layers place it differently: "
                f"{', '.join(f'{name}: {placement}' for name, placement in placements.items())}. Give them styles that "
                "split it alike (colwise_gather_output and embedding_rowwise do)."
            )
