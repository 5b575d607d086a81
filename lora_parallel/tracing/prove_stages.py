"""Find the layers of a model that pipeline stages are made of, and prove stages by running the model as each of them.

The model is run without its weights: once as a whole, to see what is called before, in and after its blocks, and then
as each stage would run it, with the hidden states that the stage before sends. Every layer of a stage must be fed what
it is fed in the whole model. A model that hands on more than hidden states from block to block fails this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
from lora_parallel.state import Setup
from lora_parallel.tp.sequence import NoActivationsError, block_output, first_activations
from lora_parallel.tracing.inputs import TraceError
from lora_parallel.tracing.rank_simulation import same, same_outputs
from lora_parallel.tracing.tracer import Call, Tracer, check_outside, hooked, refuse_flows, tracer_of


class StageTrace:
    """Run a model without its weights, to find the layers of its stages and to prove them. The model is not changed."""

    def __init__(self, model: nn.Module, names: Mapping[nn.Module, str], pp: int) -> None:
        self._model, self._pp = model, pp
        refuse_flows(model, f"pp={pp}", "two stacks of blocks", "for which PEFT puts hooks into each forward")
        # The block that each noted call of a layer is in: -1 before all of them, their number after them.
        self._places: list[int] = []
        self._inputs: list[Tensor] = []  # Hidden states that each block is fed, [rows, tokens, features]
        with torch.random.fork_rng(devices=[]), self._explained():
            self._tracer = tracer_of(model, names)
            check_outside(model, self._tracer)
            self.layers = self._find()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (TraceError, NoActivationsError) as error:
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
        noted = self._note()
        self._phases = dict(noted.layers())
        found = StageLayers(real_of[stack], [real_of[each] for each in self._blocks], noted.outputs)
        phases = self._phases.items()
        found.before = {real_of[module]: noted.output_of(module) for module, each in phases if "before" in each}
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

    # ------------------------------------------------------------------------ the runs of stages

    def prove(self, bounds: Bounds) -> None:
        """Run the model as each stage would: as it was run to find layers, then in training mode on more rows."""
        with torch.random.fork_rng(devices=[]), self._explained():
            for stage in range(len(bounds)):
                self._run_stage(stage, bounds)
            self._tracer.run_otherwise()
            if dict(self._note().layers()) != self._phases:
                raise TraceError("its layers are called at other places in training mode")
            for stage in range(len(bounds)):
                self._run_stage(stage, bounds)

    def _note(self) -> _Noted:
        noted = _Noted(self._blocks, self._tracer)
        noted.run()
        self._places, self._inputs = noted.places, noted.inputs
        return noted

    def _run_stage(self, stage: int, bounds: Bounds) -> None:
        tracer, layers, (first, last) = self._tracer, self.layers, bounds[stage]
        is_first, is_last = stage == 0, stage == len(bounds) - 1
        inside = [
            call
            for call, block in zip(tracer.calls, self._places, strict=True)
            if first <= block < last or (is_first and block < 0) or (is_last and block == len(layers.blocks))
        ]
        done = 0

        def stand_in(index: int, call: Call, fed: Tensor) -> Tensor:
            nonlocal done
            done += 1
            if not same(fed, call.fed):
                raise TraceError(
                    f"{call.layer} is not fed the same by a stage as by the whole model, as if blocks handed on more "
                    "than hidden states"
                )
            return call.output()

        def receive(hidden: Tensor) -> Tensor:
            if hidden.shape != self._inputs[first].shape:
                raise TraceError(f"block {first} is fed hidden states of another shape than the first block")
            return self._inputs[first].clone()

        run = StageContext([])
        run.begin(bounds[stage], receive)
        with self._standing_in(run, stage, bounds):
            try:
                outputs = tracer.run_again(stand_in, inside)
            except StageEnd as end:
                if is_last or not same(end.hidden, self._inputs[last]):
                    raise TraceError(f"a stage ends with other hidden states than block {last} is fed") from None
            else:
                if not is_last or not same_outputs(tracer, outputs):
                    raise TraceError("what the model returns changes")
        if done != len(inside):
            raise TraceError("a stage does not call all of its layers")

    @contextmanager
    def _standing_in(self, run: StageContext, stage: int, bounds: Bounds) -> Iterator[None]:
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
        places = [
            (parent._modules, key, child)
            for parent in self._tracer.twin.modules()
            for key, child in parent._modules.items()
            if child in instead
        ]
        for modules, key, child in places:
            assert child is not None
            modules[key] = instead[child]
        try:
            yield
        finally:
            for modules, key, child in places:
                modules[key] = child


class _Noted:
    """Run the copy of a model, and note when each of its modules is called."""

    def __init__(self, blocks: list[nn.Module], tracer: Tracer) -> None:
        self._blocks, self._tracer = blocks, tracer
        self._index = {block: index for index, block in enumerate(blocks)}
        self._inside = {module for block in blocks for module in block.modules()}
        self._current: int | None = None
        self._done = 0
        self._phases: dict[nn.Module, set[str]] = {}
        self._shapes: dict[nn.Module, tuple[Tensor | None, Any]] = {}
        self.places: list[int] = []
        self.inputs: list[Tensor] = []
        self.outputs: list[int | None] = []

    def run(self) -> None:
        modules = list(self._tracer.twin.modules())
        hooks = [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in modules]
        hooks += [module.register_forward_hook(self._leave, with_kwargs=True) for module in modules]
        with hooked(hooks):
            self._tracer.run_again(self._stand_in)
        if self._done != len(self._blocks):
            raise TraceError("its blocks are not called one after the other")

    def _stand_in(self, index: int, call: Call, fed: Tensor) -> Tensor:
        between = -1 if self._done == 0 else len(self._blocks)
        self.places.append(between if self._current is None else self._current)
        return call.output()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module in self._index:
            if self._current is not None or self._index[module] != self._done:
                raise TraceError("its blocks are not called one after the other, each once")
            self._current = self._done
            self.inputs.append(first_activations(args, kwargs)[1].clone())
        elif self._current is None:
            phase = "before" if self._done == 0 else "after" if self._done == len(self._blocks) else "between blocks"
            self._phases.setdefault(module, set()).add(phase)
        elif module not in self._inside:
            self._phases.setdefault(module, set()).add("in a block")

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if module in self._index:
            self._current, self._done = None, self._done + 1
            self.outputs.append(len(output) if isinstance(output, (tuple, list)) else None)
            block_output(output)
        elif self._done == 0 and self._current is None:
            first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            self._shapes.setdefault(module, (first, output))

    def layers(self) -> list[tuple[nn.Module, set[str]]]:
        """Return the outermost modules outside of blocks with parameters or persistent buffers, and their phases."""
        layers: list[tuple[nn.Module, set[str]]] = []

        def visit(module: nn.Module, name: str) -> None:
            if module in self._index:
                return
            if any(inner in self._index for inner in module.modules()):
                real = self._tracer.real_of[module]._parameters
                if trained := [key for key, p in real.items() if p is not None and p.requires_grad]:
                    raise TraceError(f"{f'{name}.{trained[0]}'.lstrip('.')} trains, and is in no layer of its own")
            elif not (any(True for _ in module.parameters()) or persistent_buffers(module)):
                return
            elif module in self._phases or isinstance(module, BaseTunerLayer):
                layers.append((module, self._phase(module, name)))
                return
            elif not any(True for _ in module.children()):
                self._phase(module, name)
            else:
                if parameters := [key for key, p in module._parameters.items() if p is not None]:
                    raise TraceError(f"{name}.{parameters[0]} is in a module that is not called")
            for key, child in module.named_children():
                visit(child, f"{name}.{key}".lstrip("."))

        visit(self._tracer.twin, "")
        return layers

    def _phase(self, module: nn.Module, name: str) -> set[str]:
        phases = self._phases.get(module, set())
        looked_up = module in self._tracer.layers or module in self._tracer.embeddings
        if looked_up and any(parameter in self._tracer.used for parameter in module.parameters()):
            raise TraceError(f"the weight of {name} is used without calling it")
        if not phases:
            raise TraceError(f"{name} was not called as the model was run, so that no stage is known to need it")
        for phase in ("between blocks", "in a block"):
            if phase in phases:
                raise TraceError(f"{name} is called {phase}")
        return phases

    def output_of(self, module: nn.Module) -> OutputShape:
        """Return the shape of the output of a layer before the blocks."""
        first, output = self._shapes.get(module, (None, None))
        if first is not None and isinstance(output, Tensor) and output.dim():
            shape = OutputShape(output.shape[-1], looks_up=output.dim() == first.dim() + 1)
            if shape.of(first) == tuple(output.shape):
                return shape
        raise TraceError(
            f"the shape of the output of {self._tracer.paths[module]}, which is before the blocks, does not follow "
            "from that of its first argument"
        )


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
    check_held(config.pp, config.pp_schedule, has_adapters(model))
    names = clean_names(model)
    trace = StageTrace(model, names, config.pp)
    check_microbatches(config.pp, config.pp_stages_per_rank, config.pp_microbatches)
    stages = config.pp * config.pp_stages_per_rank
    bounds = split_stages(trace.layers, names, stages, config.pp_split, getattr(inner, "config", None))
    trace.prove(bounds)
    check_trained(model, trace.layers, bounds, config.pp)
    setup.stage_layers = trace.layers, bounds
