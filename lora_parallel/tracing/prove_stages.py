"""Find the layers of a model that pipeline stages are made of, and prove stages by running the model as each of them.

The model is run without its weights: once as a whole, to see what is called before, in and after its blocks, and then
as each stage would run it, with the hidden states that the stage before sends. Every layer of a stage must be fed what
it is fed in the whole model. A model that hands on more than hidden states from block to block fails this.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lora_parallel.adapters.injection import has_adapters
from lora_parallel.distributed.dtensors import persistent_buffers
from lora_parallel.layers.layer_parameters import block_of, clean_names, innermost
from lora_parallel.pp.pipeline import refuse_outputs
from lora_parallel.pp.schedules import check_held, check_microbatches, split_stages
from lora_parallel.pp.stage_model import (
    Bounds,
    OtherStageBlock,
    OtherStageLayer,
    OutputShape,
    StageContext,
    StageEnd,
    StageLayers,
    check_trained,
)
from lora_parallel.replaced import replaced_entries
from lora_parallel.state import Setup
from lora_parallel.tracing.inputs import TraceError
from lora_parallel.tracing.rank_simulation import RankTable, Visit, WholeRun, run_as_rank, same
from lora_parallel.tracing.tracer import check_outside, refuse_flows, tracer_of


class StageTrace:
    """Run a model without its weights, to find the layers of its stages and to prove them. The model is not changed."""

    def __init__(self, model: nn.Module, names: Mapping[nn.Module, str], pp: int) -> None:
        self._model, self._pp = model, pp
        refuse_flows(model, f"pp={pp}", "two stacks of blocks", "for which PEFT puts hooks into each forward")
        with torch.random.fork_rng(devices=[]), self._explained():
            self._tracer = tracer_of(model, names)
            check_outside(model, self._tracer)
            self.layers = self._find()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except TraceError as error:
            raise ValueError(
                f"pp={self._pp}: {type(innermost(self._model)).__name__} cannot be divided into stages: {error}. Use "
                "pp=1, with tp or dp_shard for the memory."
            ) from error

    # ------------------------------------------------------------------------ the run of the whole model

    def _find(self) -> StageLayers:
        tracer, real_of = self._tracer, self._tracer.real_of
        paths = [block_of(tracer.paths[tracer.modules[call.layer]]) for call in tracer.calls]
        stacks = Counter(path.rpartition(".")[0] for path in paths if path)
        if not stacks:
            raise TraceError("it has no stack of blocks (modules with numbers, as in model.layers.0)")
        stack = tracer.twin.get_submodule(stacks.most_common(1)[0][0])
        self._blocks = list(stack.children())
        self._phases = self._run_whole()
        outputs = [visit.outputs for visit in self._visits]
        found = StageLayers(real_of[stack], [real_of[each] for each in self._blocks], outputs)
        phases = self._phases.items()
        found.before = {real_of[module]: self._output_of(module) for module, each in phases if "before" in each}
        found.after = [real_of[module] for module, each in phases if "after" in each]
        # The outermost layers with parameters around the model that was run, which a replaced forward uses.
        holders = [module for module in self._model.modules() if any(each is tracer.model for each in module.modules())]
        found.after += [
            module
            for parent in holders
            if parent is not tracer.model
            for module in parent.children()
            if module not in holders and any(True for _ in module.parameters())
        ]
        return found

    def _run_whole(self) -> dict[nn.Module, set[str]]:
        """Run the whole model; return the outermost layers outside of its blocks, and when they are called."""
        # With parameters or persistent buffers. They are called "before", "after", "between blocks" or "in a block".
        self._whole = WholeRun(self._tracer, self._blocks)
        self._visits = sorted((visit for block in self._blocks for visit in self._whole.of(block)), key=_begin)
        one_by_one = all(before.end < after.begin for before, after in pairwise(self._visits))
        if [visit.module for visit in self._visits] != self._blocks or not one_by_one:
            raise TraceError("its blocks are not called one after the other, each once")
        layers: dict[nn.Module, set[str]] = {}
        blocks, twin = set(self._blocks), self._tracer.twin

        def visit(module: nn.Module, name: str) -> None:
            if module in blocks:
                return
            if any(inner in blocks for inner in module.modules()):
                real = self._tracer.real_of[module]._parameters
                if trained := [key for key, p in real.items() if p is not None and p.requires_grad]:
                    raise TraceError(f"{f'{name}.{trained[0]}'.lstrip('.')} trains, and is in no layer of its own")
            elif not (any(True for _ in module.parameters()) or persistent_buffers(module)):
                return
            elif self._whole.of(module) or isinstance(module, BaseTunerLayer):
                layers[module] = self._phases_of(module, name)
                return
            elif not any(True for _ in module.children()):
                self._phases_of(module, name)
            elif parameters := [key for key, p in module._parameters.items() if p is not None]:
                raise TraceError(f"{name}.{parameters[0]} is in a module that is not called")
            for key, child in module.named_children():
                visit(child, f"{name}.{key}".lstrip("."))

        visit(twin, "")
        return layers

    def _place(self, event: int) -> int:
        """Return the index of the block that ran at an event: -1 before all of them, their number after one ended."""
        index = bisect(self._visits, event, key=_begin) - 1
        return index if index < 0 or event < self._visits[index].end else len(self._visits)

    def _phases_of(self, module: nn.Module, name: str) -> set[str]:
        """Return when a layer outside of the blocks is called, or raise a TraceError if no stage could hold it."""
        phases, count = set[str](), len(self._visits)
        for visit in self._whole.of(module):
            place, is_after = self._place(visit.begin), visit.begin > self._visits[-1].end
            between = "after" if is_after else "between blocks"
            phases.add("before" if place < 0 else "in a block" if place < count else between)
        looked_up = module in self._tracer.layers or module in self._tracer.embeddings
        if looked_up and any(parameter in self._tracer.used for parameter in module.parameters()):
            raise TraceError(f"the weight of {name} is used without calling it")
        if not phases:
            raise TraceError(f"{name} was not called as the model was run, so that no stage is known to need it")
        for phase in ("between blocks", "in a block"):
            if phase in phases:
                raise TraceError(f"{name} is called {phase}")
        return phases

    def _output_of(self, module: nn.Module) -> OutputShape:
        """Return the shape of the output of a layer before the blocks."""
        visit = self._whole.of(module)[0]
        if visit.first is not None and visit.gave is not None and visit.gave.dim():
            shape = OutputShape(visit.gave.shape[-1], looks_up=visit.gave.dim() == visit.first.dim() + 1)
            if shape.of(visit.first) == tuple(visit.gave.shape):
                return shape
        raise TraceError(
            f"the shape of the output of {self._tracer.paths[module]}, which is before the blocks, does not follow "
            "from that of its first argument"
        )

    # ------------------------------------------------------------------------ the runs of stages

    def prove(self, bounds: Bounds) -> None:
        """Run the model as each stage would: as it was run to find layers, then in training mode on more rows."""
        with torch.random.fork_rng(devices=[]), self._explained():
            for stage in range(len(bounds)):
                self._run_stage(stage, bounds)
            self._tracer.run_otherwise()
            if self._run_whole() != self._phases:
                raise TraceError("its layers are called at other places in training mode")
            for stage in range(len(bounds)):
                self._run_stage(stage, bounds)

    def _run_stage(self, stage: int, bounds: Bounds) -> None:
        tracer, (first, last), fed = self._tracer, bounds[stage], [visit.fed for visit in self._visits]
        is_first, is_last = stage == 0, stage == len(bounds) - 1
        places = [self._place(event) for event in self._whole.calls]
        inside = [
            call
            for call, block in zip(tracer.calls, places, strict=True)
            if first <= block < last or (is_first and block < 0) or (is_last and block == len(fed))
        ]
        remaining = iter(inside)

        def receive(hidden: Tensor) -> Tensor:
            given = fed[first]
            if given is None or hidden.shape != given.shape:
                raise TraceError(f"block {first} is fed hidden states of another shape than the first block")
            return given.clone()

        run = StageContext([])
        run.begin(bounds[stage], receive)
        wanted = "the same by a stage as by the whole model, as if blocks handed on more than hidden states"
        with self._standing_in(run, stage, bounds):
            try:
                run_as_rank(tracer, RankTable(wanted), calls=remaining)
            except StageEnd as end:
                given = None if is_last else fed[last]
                if given is None or not same(end.hidden, given):
                    raise TraceError(f"a stage ends with other hidden states than block {last} is fed") from None
            else:
                if not is_last:
                    raise TraceError("what the model returns changes")
        if next(remaining, None) is not None:
            raise TraceError("a stage does not call all of its layers")

    def _standing_in(self, run: StageContext, stage: int, bounds: Bounds) -> AbstractContextManager[None]:
        twin_of, layers = self._tracer.twin_of, self.layers
        of_stage = set(layers.of_stage(stage, bounds))
        instead: dict[nn.Module, nn.Module] = {}
        for index, block in enumerate(layers.blocks):
            if block not in of_stage:
                instead[twin_of[block]] = OtherStageBlock("", twin_of[block], run, index, layers.outputs[index])
        for layer in (*layers.before, *layers.after):
            if layer not in of_stage and layer in twin_of:  # others are around what is run
                twin = twin_of[layer]
                instead[twin] = OtherStageLayer("", twin, run, layers.before.get(layer), torch.float32)
        return replaced_entries(
            [
                (parent._modules, key, instead[child])
                for parent in self._tracer.twin.modules()
                for key, child in parent._modules.items()
                if child in instead
            ]
        )


def _begin(visit: Visit) -> int:
    return visit.begin


def find_stages(setup: Setup) -> None:
    """Find the layers of the model's pipeline stages, and the blocks of each, proven by running the model.

    Raises:
        ValueError: The model cannot be divided into stages, or not into these.
    """
    model, config = setup.model, setup.config
    if config.pp == 1:
        return
    inner = innermost(model)
    refuse_outputs(inner, {})
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"pp={config.pp}: no parameter of this {type(inner).__name__} trains, as of the frozen teacher of a "
            "distillation (GKD) or a reference model, and only a model that trains is divided into stages: use pp=1, "
            "with tp or dp_shard for the memory, or leave it out of the mesh, whole on every rank (do not prepare it)."
        )
    check_held(config.pp, config.pp_schedule, has_adapters(model))
    names = clean_names(model)
    trace = StageTrace(model, names, config.pp)
    check_microbatches(config.pp, config.pp_stages_per_rank, config.pp_microbatches)
    stages = config.pp * config.pp_stages_per_rank
    bounds = split_stages(trace.layers, names, stages, config.pp_split, getattr(inner, "config", None))
    trace.prove(bounds)
    check_trained(model, trace.layers, bounds, config.pp)
    setup.stage_layers = trace.layers, bounds
