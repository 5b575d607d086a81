"""Hold a plan in the making: one record a layer, which the passes over the plan fill one after the other.

`resolve_plan` runs the passes in this order: entries of plans (`entries`), layer groups that running the model shows
(`group_pass`), experts (`expert_pass`), everything else (`completion`), tokens (`token_pass`), the log (`report`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from lora_parallel.layers.layer_parameters import base_of
from lora_parallel.layers.module_names import embeddings_of
from lora_parallel.layers.row_partition import RowPartition
from lora_parallel.layers.styles import Style
from lora_parallel.tp.experts import ExpertSharing
from lora_parallel.tp.sequence import Sequence
from lora_parallel.tracing.layer_group import LayerGroup
from lora_parallel.tracing.tracer import traced_models

__all__ = ["LayerPlan", "PlanBuilder"]


@dataclass(eq=False)
class LayerPlan:
    """The plan for one layer, and where it comes from."""

    name: str
    """The layer's name, as the model's author would write it."""

    style: Style | None = None
    """None: the layer has no style (yet)."""

    asked: str | None = None
    """The user's entry that the style is from, in words."""

    from_table: bool = False
    """True if an entry of `family_plans` names the layer: it holds as far as it is proven."""

    packed: bool = False
    """True if the style is `packed_colwise`: the layer holds two matrices, unless a run shows more."""

    proven: bool = False
    """True if running the model has shown the style to be right: the layer is in a layer group that is cut."""

    partition: RowPartition | None = None
    """The output features of each rank, if they are not one chunk a rank."""

    sharing: ExpertSharing | None = None
    """Each rank's share, of a module of experts."""

    gathered: str | None = None
    """The reason why the layer's output is gathered after each call."""

    whole: str | None = None
    """The reason why every rank computes the layer in full."""


class PlanBuilder:
    """Hold the plan for every layer of a model while it is made.

    Args:
        model: The model that `resolve_plan` was given.
        names: The names of its layers.
        tp: Size of the tp axis.
    """

    def __init__(self, model: nn.Module, names: Mapping[nn.Module, str], tp: int) -> None:
        self.model, self.names, self.tp = model, names, tp
        self.layers = {module: LayerPlan(name) for module, name in names.items()}
        self.modules: dict[str, list[nn.Module]] = {}
        """The modules of each name: several, where PEFT keeps an original beside a trained copy."""

        for module, name in names.items():
            self.modules.setdefault(name, []).append(module)
        self.set_aside: list[tuple[str, str, object]] = []
        """The class of each model whose own plan is not used, the entry that is the reason, and its unknown style."""

        self.between: set[nn.Module] = set()
        """Modules that act on slices, between the producers and consumers of a layer group that is cut."""

        self.cuts: dict[nn.Module, dict[str, tuple[int, RowPartition]]] = {}
        self.attributes: dict[nn.Module, dict[str, Any]] = {}
        self.sequences: list[Sequence] = []
        self.layer_groups: list[LayerGroup] = []
        """The layer groups that are cut."""

        self.used_directly: set[str] = set()
        """Names of layers whose weight the model uses without calling them."""

        self.completed = False
        """True once every adapted layer is to have a style."""

    @property
    def styles(self) -> dict[nn.Module, tuple[str, Style]]:
        """The layers that have a style: `{module: (name, style)}`."""
        return {module: (plan.name, plan.style) for module, plan in self.layers.items() if plan.style is not None}

    @property
    def proven(self) -> set[nn.Module]:
        """The layers whose style is proven."""
        return {module for module, plan in self.layers.items() if plan.proven}

    @property
    def partitions(self) -> dict[nn.Module, RowPartition]:
        """The layers that are not cut into one chunk a rank."""
        return {module: plan.partition for module, plan in self.layers.items() if plan.partition is not None}

    @property
    def sharings(self) -> dict[nn.Module, ExpertSharing]:
        """The modules of experts that ranks share out."""
        return {module: plan.sharing for module, plan in self.layers.items() if plan.sharing is not None}

    def plans_of(self, names: Iterable[str]) -> list[tuple[nn.Module, LayerPlan]]:
        """Return the layers of these names, with their plans."""
        return [(module, self.layers[module]) for name in names for module in self.modules.get(name, ())]

    def ends(self, side: Literal["input", "output"]) -> list[nn.Module]:
        """Return the input or output embeddings of the models inside."""
        found = (embeddings_of(inner, side) for inner in traced_models(self.model))
        return [layer for layer in found if layer is not None]

    def is_head(self, names: Iterable[str]) -> bool:
        """Return True if one of these layers is the output embedding of a model inside."""
        heads = {base_of(module) for module in self.ends("output")}
        return any(base_of(module) in heads for module, _ in self.plans_of(names))
