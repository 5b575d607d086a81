"""Take the blocks and layers of other pipeline stages out of a model, in place. Names stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lora_parallel.layers.module_names import clean_parameter_name
from lora_parallel.pp.context import StageContext
from lora_parallel.pp.other_stages import OtherStageBlock, OtherStageLayer
from lora_parallel.pp.stage_layers import Bounds, StageLayers
from lora_parallel.state import StageTensors

__all__ = ["StageModel", "check_trained"]


@dataclass(frozen=True)
class _Place:
    """Describe a place of the model that a stage computes, and the other stages stand in for."""

    modules: dict[str, nn.Module | None]
    """The children of the module around it."""

    key: str
    own: nn.Module | None
    """The module, if this rank holds it."""

    other: nn.Module
    """The module that stands in for it on other stages."""

    stages: frozenset[int]
    """The stages that compute it."""

    def put(self, stage: int | None) -> None:
        """Put there what belongs to a stage; None for what this rank holds, of all of its stages."""
        mine = self.own is not None and (stage is None or stage in self.stages)
        self.modules[self.key] = self.own if mine else self.other


class StageModel:
    """Hold the places of a model that its stages share, and put the modules of one stage in place.

    Args:
        model: The whole model, changed in place: what is on other ranks is taken out.
        layers: The model's layers.
        bounds: The blocks of each stage.
        pp: Size of the pp axis. Stage k is on rank k modulo pp.
        rank: This rank's place on the axis.
        context: Says which stage computes.
        dtype: The dtype that layers compute in; None for that of their parameters.
        device: The type of device that the model will be on.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: StageLayers,
        bounds: Bounds,
        pp: int,
        rank: int,
        context: StageContext,
        dtype: torch.dtype | None,
        device: str,
    ) -> None:
        self.bounds, self.context, self.pp, self.rank = bounds, context, pp, rank
        self.stages = list(range(rank, len(bounds), pp))
        """This rank's stages."""

        homes = layers.homes(bounds)
        self.tensors = _stage_tensors(model, homes, pp, rank)
        self._places = self._places_of(model, layers, homes, dtype, device)
        for place in self._places:
            place.put(None)

    @property
    def count(self) -> int:
        """Return the number of stages on all ranks."""
        return len(self.bounds)

    @property
    def is_last(self) -> bool:
        """Return True if the last stage is on this rank."""
        return len(self.bounds) - 1 in self.stages

    def _places_of(
        self,
        model: nn.Module,
        layers: StageLayers,
        homes: Mapping[nn.Module, frozenset[int]],
        dtype: torch.dtype | None,
        device: str,
    ) -> list[_Place]:
        names = {module: name for name, module in model.named_modules()}
        others: dict[nn.Module, nn.Module] = {
            block: OtherStageBlock(names[block], block, self.context, index, layers.outputs[index])
            for index, block in enumerate(layers.blocks)
        }
        for layer in (*layers.before, *layers.after):
            own = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.get_default_dtype())
            output = layers.before.get(layer)
            others[layer] = OtherStageLayer(names[layer], layer, self.context, output, dtype or own, device)
        mine = set(self.stages)
        return [
            _Place(parent._modules, key, child if homes[child] & mine else None, others[child], homes[child])
            for parent in list(model.modules())
            for key, child in parent._modules.items()
            if child is not None and child in others
        ]

    @contextmanager
    def computing(self, stage: int) -> Iterator[None]:
        """Have the modules of one of this rank's stages in place within the context."""
        if len(self.stages) == 1:
            yield
            return
        for place in self._places:
            place.put(stage)
        try:
            yield
        finally:
            for place in self._places:
                place.put(None)


def _ranks_of(
    model: nn.Module, homes: Mapping[nn.Module, frozenset[int]], pp: int
) -> Iterator[tuple[str, Tensor, set[int]]]:
    """Yield each parameter and buffer under each of its names, with the pp ranks that hold it there."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        ranks = {stage % pp for stage in homes[module]} if module in homes else set(range(pp))
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{prefix}.{key}" if prefix else key, tensor, ranks


def _stage_tensors(model: nn.Module, homes: Mapping[nn.Module, frozenset[int]], pp: int, rank: int) -> StageTensors:
    first: dict[int, int] = {}
    names, repeated, tied = set(), set(), {}
    first_names: dict[int, str] = {}
    for name, tensor, ranks in _ranks_of(model, homes, pp):
        names.add(name)
        # Ranks that hold a tensor under its first name list it, the first of them.
        listed = first.setdefault(id(tensor), min(ranks))
        canonical = first_names.setdefault(id(tensor), name)
        if canonical != name:
            tied[clean_parameter_name(name)] = clean_parameter_name(canonical)
        if listed != rank:
            repeated.add(name)
    return StageTensors(frozenset(names), frozenset(repeated), tied)


def check_trained(model: nn.Module, layers: StageLayers, bounds: Bounds, pp: int) -> None:
    """Check that each parameter that trains would be on one pipeline rank, and that each rank would have some.

    Raises:
        ValueError: A parameter that trains would be on two ranks, or nothing would train on some rank.
    """
    homes = layers.homes(bounds)
    held: dict[int, tuple[str, set[int]]] = {}
    for name, tensor, ranks in _ranks_of(model, homes, pp):
        if not tensor.requires_grad or not tensor.numel():
            continue
        before, known = held.setdefault(id(tensor), (name, set(ranks)))
        known |= ranks
        if len(known) > 1:
            where = f"{before} and {name} are one weight that trains, and" if before != name else f"{name} trains, and"
            raise ValueError(
                f"pp={pp}: {where} it would be on the pipeline ranks {sorted(known)}, whose copies would drift apart: "
                "freeze it, untie it (tie_word_embeddings=False), or use pp=1."
            )
    idle = sorted(set(range(pp)) - {rank for _, ranks in held.values() for rank in ranks})
    if idle:
        raise ValueError(
            f"pp={pp}: nothing trains on the pipeline ranks {idle}, whose optimizers would have no parameters: adapt "
            "layers of all blocks (target_modules, without layers_to_transform), or choose other stages with pp_split."
        )
