"""Set layers' styles from the entries of plans: those that models carry, and the user's.

The keys are globs over module names, relative to the base model (without the prefix of the task's class). A star
matches one component of a name, as in transformers' own plans. Plans say nothing of attention heads, fused projections
and the sizes that a module keeps: these are found, and every plan is checked, by running the model (see
`lora_parallel.tracing.prove_feature_slices`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from lora_parallel.layers.layer_parameters import base_of, embeddings_of, innermost
from lora_parallel.layers.styles import STYLES, RowPartition, Style, style_named
from lora_parallel.tp.experts import ExpertSharing
from lora_parallel.tp.sequence import Sequence
from lora_parallel.tracing.layer_groups import LayerGroup
from lora_parallel.tracing.tracer import traced_models


@dataclass(eq=False)
class LayerPlan:
    """Hold the plan for one layer, and where it comes from."""

    name: str  # The layer's name, as the model's author would write it
    style: Style | None = None  # None: the layer has no style (yet)
    asked: str | None = None  # The user's entry that the style is from, in words
    packed: bool = False  # True if the style is `packed_colwise`: the layer holds two matrices, unless a run shows more
    # True if running the model has shown the style to be right: the layer is in a layer group that is cut.
    proven: bool = False
    partition: RowPartition | None = None  # The output features of each rank, if they are not one chunk a rank
    sharing: ExpertSharing | None = None  # Each rank's share, of a module of experts
    gathered: str | None = None  # The reason why the layer's output is gathered after each call
    whole: str | None = None  # The reason why every rank computes the layer in full


class PlanBuilder:
    """Hold the plan for every layer of a model while it is made."""

    def __init__(self, model: nn.Module, names: Mapping[nn.Module, str], tp: int) -> None:
        self.model, self.names, self.tp = model, names, tp
        self.layers = {module: LayerPlan(name) for module, name in names.items()}
        # The modules of each name: several, where PEFT keeps an original beside a trained copy.
        self.modules: dict[str, list[nn.Module]] = {}
        for module, name in names.items():
            self.modules.setdefault(name, []).append(module)
        # The class of each model whose own plan is not used, the entry that is the reason, and its unknown style.
        self.set_aside: list[tuple[str, str, object]] = []
        # Modules that act on slices, between the producers and consumers of a layer group that is cut.
        self.between: set[nn.Module] = set()
        self.cuts: dict[nn.Module, dict[str, tuple[int, RowPartition]]] = {}
        self.attributes: dict[nn.Module, dict[str, Any]] = {}
        self.sequences: list[Sequence] = []
        self.layer_groups: list[LayerGroup] = []  # The layer groups that are cut
        self.used_directly: set[str] = set()  # Names of layers whose weight the model uses without calling them
        self.completed = False  # True once every adapted layer is to have a style

    @property
    def styles(self) -> dict[nn.Module, tuple[str, Style]]:
        """Return the layers that have a style: `{module: (name, style)}`."""
        return {module: (plan.name, plan.style) for module, plan in self.layers.items() if plan.style is not None}

    @property
    def proven(self) -> set[nn.Module]:
        """Return the layers whose style is proven."""
        return {module for module, plan in self.layers.items() if plan.proven}

    @property
    def partitions(self) -> dict[nn.Module, RowPartition]:
        """Return the layers that are not cut into one chunk a rank."""
        return {module: plan.partition for module, plan in self.layers.items() if plan.partition is not None}

    @property
    def sharings(self) -> dict[nn.Module, ExpertSharing]:
        """Return the modules of experts that ranks share out."""
        return {module: plan.sharing for module, plan in self.layers.items() if plan.sharing is not None}

    def plans_of(self, names: Iterable[str]) -> list[tuple[nn.Module, LayerPlan]]:
        """Return the layers of these names, with their plans."""
        return [(module, self.layers[module]) for name in names for module in self.modules.get(name, ())]

    def ends(self, side: Literal["input", "output"]) -> list[nn.Module]:
        """Return the input or output embeddings of the models inside."""
        layers = (embeddings_of(inner, side) for inner in traced_models(self.model))
        return [layer for layer in layers if layer is not None]

    def is_head(self, names: Iterable[str]) -> bool:
        """Return True if one of these layers is the output embedding of a model inside."""
        heads = {base_of(module) for module in self.ends("output")}
        return any(base_of(module) in heads for module, _ in self.plans_of(names))


Entries = list[tuple[re.Pattern[str], str]]  # Patterns of layer names, each with the style of the layers that match it
# Styles of transformers for what running the model shows anyway: their entries are not needed. Source:
# `ALL_PARALLEL_STYLES` in transformers/distributed/tensor_parallel.py and expert_parallel.py.
_SHOWN_BY_RUNNING = frozenset(
    {
        *("all_reduce", "colwise_rep", "ep_router", "grouped_gemm", "local_params", "megamoe_experts"),
        *("megamoe_router", "mla_kv_a_proj", "moe_identity_expert", "packed_rowwise", "rowwise_rep"),
        "sequence_parallel",
    }
)
# Those of them whose layers compute with slices: where the model cannot be run, nothing else says so.
_TAKES_SLICES = frozenset({"all_reduce", "grouped_gemm", "local_params", "megamoe_experts", "packed_rowwise"})


def entries_of_models(builder: PlanBuilder) -> Entries:
    """Return the entries of plans that models carry."""
    # A model's plan covers the models inside of it. One that names an unknown style is set aside as a whole, since what
    # its other entries cut may need that style.
    declared: Entries = []
    covered: tuple[str, ...] = ()
    for module, name in builder.names.items():
        plan = getattr(module, "_tp_plan", None)
        if f"{name}.".startswith(covered) or not isinstance(plan, Mapping) or not plan:
            continue
        if unknown := [(key, style) for key, style in plan.items() if str(style) not in {*STYLES, *_SHOWN_BY_RUNNING}]:
            builder.set_aside.append((type(module).__name__, *unknown[0]))
            continue
        prefix = f"{name}." if name else ""
        covered += (prefix,)
        for key, style in plan.items():
            pattern = r"[^.]+".join(re.escape(part) for part in f"{prefix}{key}".split("*"))
            declared.append((re.compile(pattern), style))
    return declared


def set_aside_unshown(builder: PlanBuilder, declared: Entries) -> bool:
    """Set the plan of a model that cannot be run aside, if an entry of it wants a run to be understood."""
    for plan in builder.layers.values():
        style = next((style for pattern, style in declared if pattern.fullmatch(plan.name)), None)
        if style in _TAKES_SLICES:
            builder.set_aside.append((type(innermost(builder.model)).__name__, plan.name, style))
            return True
    return False


def take_entries(builder: PlanBuilder, declared: Entries, globs: Mapping[str, str]) -> None:
    """Set the styles that entries name; the user's entries come last, and replace others."""
    for plan in builder.layers.values():
        chosen = next((style for pattern, style in declared if pattern.fullmatch(plan.name)), None)
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
