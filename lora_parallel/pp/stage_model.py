"""Take the blocks and layers of other pipeline stages out of a model, in place, and stand in for them.

The model's own code runs on every stage, so that masks, rotary tables and position ids are what they are in one
process. Before the first block of a stage it gets the hidden states that the stage before has sent, and at the first
block after the stage it ends: `StageEnd`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lora_parallel.distributed.torch_private import MEMORY_READERS, no_torch_function, storageless
from lora_parallel.layers.layer_parameters import clean_parameter_name
from lora_parallel.state import OTHER_STAGE, StageTensors
from lora_parallel.tp.sequence import Entry, first_activations


@dataclass(frozen=True)
class OutputShape:
    """Say which shape the output of a layer before the blocks has, by that of its first tensor."""

    features: int  # The last dim of the output
    # True if the layer is given ids [...], or a mask of them; False if it is given activations [..., features].
    looks_up: bool

    def of(self, given: Tensor) -> tuple[int, ...]:
        """Return the shape of the output, from the layer's first tensor."""
        return (*(given.shape if self.looks_up else given.shape[:-1]), self.features)


class StageEnd(Exception):
    """Leave a model's forward behind the last block of a stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _OtherStage(nn.Module):
    """Stand in for a module of another stage, with its plain attributes and without its parameters."""

    def __init__(self, name: str, module: nn.Module, run: StageContext) -> None:
        super().__init__()
        self.__dict__ |= {
            key: value
            for key, value in vars(module).items()
            if key != "training" and not key.startswith("_") and not isinstance(value, Tensor) and not callable(value)
        }
        self._name, self._run = name, run
        self.__dict__[OTHER_STAGE] = True

    def check_running(self) -> None:
        """Check that the parallelized model runs."""
        if not self._run.running:
            raise RuntimeError(
                f"{self._name} was called, and is on another pipeline stage than this rank's: call the "
                "parallelized model, not a module inside of it, nor its forward."
            )


class OtherStageBlock(_OtherStage):
    """Stand in for a block."""

    def __init__(self, name: str, block: nn.Module, run: StageContext, index: int, outputs: int | None) -> None:
        super().__init__(name, block, run)
        self._index, self._outputs = index, outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.check_running()
        hidden = self._run.pass_block(self._index, first_activations(args, kwargs)[1])
        return hidden if self._outputs is None else (hidden, *[None] * (self._outputs - 1))


class OtherStageLayer(_OtherStage):
    """Stand in for a layer before the blocks, by zeros, or for one after the blocks, which is never reached."""

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        run: StageContext,
        output: OutputShape | None,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        super().__init__(name, layer, run)
        self._output = output
        # Models ask an embedding's weight for its device. It has no elements, so that nothing is computed with it.
        self.weight = torch.empty(0, dtype=dtype, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OtherStageLayer:
        """Follow `model.to(dtype)`, as the layer would."""
        self.weight = fn(self.weight)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.check_running()
        given = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        if self._output is None or given is None:
            raise RuntimeError(f"{self._name} was called on a pipeline stage that has no part of it.")
        return torch.zeros(self._output.of(given), dtype=self.weight.dtype, device=given.device)


Bounds = list[tuple[int, int]]  # First and last + 1 block of each stage


@dataclass
class StageLayers:
    """List the blocks of a model, and the layers around them that hold parameters."""

    stack: nn.Module  # Module whose children are the blocks
    blocks: list[nn.Module]  # The blocks in order
    # Number of values that each block returns in a tuple; None if it returns the hidden states.
    outputs: list[int | None]
    # Layers that are called before the first block, each with the shape of its output.
    before: dict[nn.Module, OutputShape] = field(default_factory=dict)
    # Layers that are called after the last block. A layer may be in `before` too.
    after: list[nn.Module] = field(default_factory=list)

    def of_stage(self, stage: int, bounds: Bounds) -> list[nn.Module]:
        """Return the modules that a stage computes."""
        first, last = bounds[stage]
        before = self.before if stage == 0 else ()
        after = self.after if stage == len(bounds) - 1 else ()
        return list(dict.fromkeys((*self.blocks[first:last], *before, *after)))

    def homes(self, bounds: Bounds) -> dict[nn.Module, frozenset[int]]:
        """Map each module that only some stages compute, and those in it, to these stages."""
        stages: dict[nn.Module, frozenset[int]] = {}
        for stage in range(len(bounds)):
            for module in self.of_stage(stage, bounds):
                stages |= {inner: stages.get(inner, frozenset()) | {stage} for inner in module.modules()}
        return stages


class StageContext:
    """Say which stage of this rank computes, and hand its input to it."""

    def __init__(self, entries: list[Entry]) -> None:
        # `entries`: what cuts hidden states of all tokens, in order: context parallelism, sequence parallelism.
        self.running = False  # True while a stage computes; other calls of the modules are errors
        self._entries = entries
        self._first, self._last = 0, 0
        self._receive: Callable[[Tensor], Tensor] | None = None

    def begin(self, bounds: tuple[int, int], receive: Callable[[Tensor], Tensor] | None) -> None:
        """Begin a stage."""
        self.running = True
        (self._first, self._last), self._receive = bounds, receive

    def end(self, hidden: Tensor | None) -> None:
        """End a stage, which hands on `hidden`; None if it is the last, or has failed."""
        self.running, self._receive = False, None
        if hidden is not None:
            for entry in reversed(self._entries):
                entry.leave(hidden.device)

    def pass_block(self, index: int, hidden: Tensor) -> Tensor:
        """Return the output of block `index`, which is on another stage; end the stage at the first block after it."""
        if index >= self._last:
            raise StageEnd(hidden)
        if index < self._first - 1:
            return hidden
        assert self._receive is not None
        for entry in self._entries:
            hidden = entry.enter(hidden)
        return self._receive(hidden)


@dataclass(frozen=True)
class _Place:
    """Describe a place of the model that a stage computes, and the other stages stand in for."""

    modules: dict[str, nn.Module | None]  # The children of the module around it
    key: str
    own: nn.Module | None  # The module, if this rank holds it
    other: nn.Module  # The module that stands in for it on other stages
    stages: frozenset[int]  # The stages that compute it

    def put(self, stage: int | None) -> None:
        """Put there what belongs to a stage; None for what this rank holds, of all of its stages."""
        mine = self.own is not None and (stage is None or stage in self.stages)
        self.modules[self.key] = self.own if mine else self.other


class StageModel:
    """Hold the places of a model that its stages share, and put the modules of one stage in place."""

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
        self.count = len(bounds)  # Number of stages on all ranks
        self.stages = list(range(rank, len(bounds), pp))  # This rank's stages
        self.is_last = self.count - 1 in self.stages  # True if the last stage is on this rank
        homes = layers.homes(bounds)
        self.tensors = _stage_tensors(model, homes, pp, rank)
        names = {module: name for name, module in model.named_modules()}
        others: dict[nn.Module, nn.Module] = {
            block: OtherStageBlock(names[block], block, context, index, layers.outputs[index])
            for index, block in enumerate(layers.blocks)
        }
        for layer in (*layers.before, *layers.after):
            own = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.get_default_dtype())
            output = layers.before.get(layer)
            others[layer] = OtherStageLayer(names[layer], layer, context, output, dtype or own, device)
        mine = set(self.stages)
        self._places = [
            _Place(parent._modules, key, child if homes[child] & mine else None, others[child], homes[child])
            for parent in list(model.modules())
            for key, child in parent._modules.items()
            if child is not None and child in others
        ]
        for place in self._places:
            place.put(None)

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
    """Refuse a parameter that would train on two pipeline ranks, and a rank on which nothing trains."""
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


class _Held:
    """Get a tensor from the last stage once."""

    def __init__(self, fetch: Callable[[], Tensor]) -> None:
        self._fetch: Callable[[], Tensor] | None = fetch
        self._whole: Tensor | None = None

    def whole(self) -> Tensor:
        if self._whole is None:
            assert self._fetch is not None
            self._whole, self._fetch = self._fetch(), None
        return self._whole


class LastStageTensor(Tensor):
    """Stand for an output of the last stage, such as the logits beside a loss."""

    # The first operation that reads it gets it from the last stage: all ranks of the pipeline must run that operation.

    held: _Held

    @staticmethod
    def __new__(cls, held: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LastStageTensor:
        tensor: LastStageTensor = storageless(cls, shape, dtype, device)
        tensor.held = held if isinstance(held, _Held) else _Held(held)
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LastStageTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in MEMORY_READERS:
            args = tree_map_only(LastStageTensor, lambda each: each.held.whole(), args)
        return no_torch_function(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            (tensor,) = args
            return LastStageTensor(tensor.held, tuple(tensor.shape), tensor.dtype, tensor.device)
        args, kwargs = tree_map_only(LastStageTensor, lambda each: each.held.whole(), (args, kwargs or {}))
        return func(*args, **kwargs)
