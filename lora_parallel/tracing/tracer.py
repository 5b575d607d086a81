"""Run a model without its weights, to see what it computes between its linear layers.

A copy of the model runs on a few random tokens. Every linear layer and every embedding is replaced by a stand-in, which
ignores the weights and returns random numbers of the right shape. All other code runs as it is: reshapes, heads, norms,
masks and activations. So the cost of a run does not depend on the size of the weights. Each stand-in notes its input,
with autograd's graph back to the outputs of the other stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from lora_parallel.adapters.inspection import peft_configs
from lora_parallel.adapters.low_rank_weight import Factors, LowRankWeight
from lora_parallel.distributed.dtensors import tensors_in
from lora_parallel.layers.layer_parameters import base_of, innermost
from lora_parallel.layers.linear_classes import features_dim, is_linear
from lora_parallel.layers.styles import Range
from lora_parallel.layers.wrapped_forward import Around, wrap_forward
from lora_parallel.pp.stage_model import StageEnd
from lora_parallel.replaced import replaced, replaced_entries
from lora_parallel.tp.experts import expert_stacks, holds_experts
from lora_parallel.tracing.inputs import (
    FailedError,
    TraceError,
    brief,
    likely_inputs,
    stand_in_for,
    without_own_attention,
)
from lora_parallel.tracing.repeated_blocks import RepeatedBlocks

# Rows and tokens of a run. `_SHAPE` is the first run's; it is small because the graph of the whole model is in memory,
# also for a model of 405 billion parameters. `_MORE_ROWS` is for a model that fails on one row. `_OTHER_SHAPE` is the
# first that `run_otherwise` takes.
_SHAPE, _MORE_ROWS, _OTHER_SHAPE = (1, 8), (2, 8), (2, 12)


@dataclass(eq=False)
class Call:
    """Record one call of a stand-in."""

    layer: str  # Name of the layer that was called
    fed: Tensor  # Input of the layer [..., in_features], or token ids [...]
    # Leaf of autograd's graph [..., features], positive numbers. `output` makes the layer's output of them.
    gave: Tensor

    def output(self, features: Sequence[Range] | None = None) -> Tensor:
        """Return the layer's output [..., features], as a new tensor that the model may change in place."""
        gave = self.gave if features is None else torch.cat([self.gave[..., a:b] for a, b in features], -1)
        # Each feature is positive for one token and negative for the next: no ReLU is dead for all of them.
        signs = 1 - 2 * (torch.arange(gave[..., 0].numel()) % 2)
        return gave * signs.view(*gave.shape[:-1], 1)


class _Tape:
    """Give the stand-ins random numbers of at least 0.1, as views of one tensor at different offsets to save memory."""

    _STARTS, _STRIDE = 2**16, 9973

    def __init__(self) -> None:
        # A generator of its own, so that the model draws the same random numbers when it is run again.
        self._generator = torch.Generator().manual_seed(0)
        self._values = torch.empty(0)
        self._reads = 0

    def read(self, shape: torch.Size) -> Tensor:
        start = self._reads * self._STRIDE % self._STARTS
        self._reads += 1
        missing = self._STARTS + shape.numel() - len(self._values)
        if missing > 0:
            self._values = torch.cat([self._values, torch.randn(missing, generator=self._generator).abs() + 0.1])
        return self._values[start : start + shape.numel()].view(shape)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks, which the caller has registered, after the context."""
    registered = list(handles)
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()


def traced_models(model: nn.Module) -> list[nn.Module]:
    """Return the transformers models in `model`, outer ones first, or `model` itself if it holds none."""
    models: list[nn.Module] = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return models or [model]


class Tracer:
    """Run a copy of a model (`twin`) without its weights, and hold what the run shows."""

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[nn.Module, str],
        inputs: dict[str, Any] | None = None,
        blocks: RepeatedBlocks | None = None,
    ) -> None:
        # `names` are of the layers that stand-ins replace. `inputs`: what the model is given, if that is known.
        self.model, self.given = model, inputs
        self.blocks = blocks or RepeatedBlocks()
        self.calls: list[Call] = []  # Calls of stand-ins in the noted run, in order
        self.outputs: list[Tensor] = []  # Floating-point tensors that the model returned in the noted run
        # Parameters of the copy, each with the first module that holds it, and its name in that module.
        self.parameters: dict[Tensor, tuple[nn.Module, str]] = {}
        self.used: set[Tensor] = set()  # Parameters that an operation was given in any run of the copy so far
        # Modules of the copy that were called. The parameters of other modules may be used all the same.
        self.entered: set[nn.Module] = set()
        # Positional and keyword arguments of the first call of each module of the copy that holds experts.
        self.experts: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._tape = _Tape()
        self._stand_in: Callable[[str, int, Tensor], Tensor] | None = None  # of the run, while the copy runs
        with torch.enable_grad(), torch.inference_mode(False):
            torch.default_generator.manual_seed(0)
            self.twin = stand_in_for(model, self.blocks.left_out)
            kept = (module for module in model.modules() if module not in self.blocks.left_out)
            self.twin_of = dict(zip(kept, self.twin.modules(), strict=True))
            self.real_of = {twin: real for real, twin in self.twin_of.items()}
            self.paths = {module: name for name, module in self.twin.named_modules()}
            inside = [(module, self.twin_of[module], name) for module, name in names.items() if module in self.twin_of]
            self.twin_of |= {module: self.twin_of[like] for module, like in self.blocks.left_out.items()}
            # Names of the linear layers and embeddings that stand-ins replace, by module of the copy.
            self.layers = {
                twin: name for real, twin, name in inside if is_linear(base_of(real)) or _looks_up(base_of(real))
            }
            self.modules = {name: module for module, name in self.layers.items()}
            for module in self.twin.modules():
                for key, parameter in module._parameters.items():
                    if parameter is not None:
                        self.parameters.setdefault(parameter, (module, key))
            # Names of embeddings of a subclass. Those with a forward of their own run as they are.
            self.embeddings = {
                twin: name
                for real, twin, name in inside
                if type(real) is not nn.Embedding and isinstance(real, nn.Embedding)
            }
            arounds: list[tuple[nn.Module, Around]] = [
                *((module, self._with_alias(module)) for module in self.embeddings),
                *((module, _with_one_row) for module in self.twin.modules() if holds_experts(module)),
                *((module, self._standing_in(name)) for module, name in self.layers.items()),
            ]
            for module, around in arounds:
                wrap_forward(module, around)
            with hooked(m.register_forward_pre_hook(self._enter, with_kwargs=True) for m in self.twin.modules()):
                self._inputs = self._first_run()
            self._run_without_gradients()

    def _with_alias(self, embedding: nn.Module) -> Around:
        """Replace an embedding's weight by an alias in its own forward: any other use is then told apart."""
        weight = embedding._parameters["weight"]
        assert weight is not None
        alias = nn.Parameter(weight.detach())
        self.parameters[alias] = embedding, "weight"

        def around(embedding: nn.Module, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            with replaced_entries([(embedding._parameters, "weight", alias)]):
                return compute(*args, **kwargs)

        return around

    def _standing_in(self, name: str) -> Around:
        """Let the stand-in of the run, if one runs, compute in the place of a layer."""

        def around(layer: nn.Module, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self._stand_in is None:
                return compute(*args, **kwargs)
            base: Any = base_of(layer)
            features = base.embedding_dim if isinstance(base, nn.Embedding) else base.weight.shape[features_dim(base)]
            return self._stand_in(name, features, args[0] if args else next(iter(kwargs.values())))

        return around

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.entered.add(module)
        if holds_experts(module):
            self.experts.setdefault(module, tree_map_only(Tensor, Tensor.detach, (args, kwargs)))

    def _first_run(self) -> dict[str, Any]:
        """Find inputs that the model takes, note the calls of the run on them, and return them."""
        problems = []
        likely = (each for shape in (_SHAPE, _MORE_ROWS) for each in enumerate(likely_inputs(self.twin, shape)))
        for index, inputs in likely if self.given is None else [(0, self.given)]:
            self.calls = []
            try:
                with _Uses(self.used):
                    self.outputs = self._run(inputs, self._note)
                self._kind = index
                return inputs
            except Exception as error:  # the model's own code may raise anything
                problems.append(brief(error))
        if problems and without_own_attention(self.twin):
            return self._first_run()
        raise TraceError(problems[0] if problems else "there are no inputs that it is known to take")

    def _run_without_gradients(self) -> None:
        """Run in training mode and without gradients, to note the parameters that only torch's fast paths use."""
        for training in (True, False):
            self.twin.train(training)
            try:
                with torch.no_grad(), _Uses(self.used):
                    self._run(self._inputs, lambda layer, features, fed: torch.randn(*_positions(fed), features))
            except Exception:  # such as a model that needs labels in training: its run in evaluation mode counts
                continue

    def run_otherwise(self) -> None:
        """Replace the noted run by one on more rows and tokens and in training mode, or what of that it takes."""
        _without_dropout(self.twin)
        problem: Exception | None = None
        for shape, training in ((_OTHER_SHAPE, True), (_OTHER_SHAPE, False), (_MORE_ROWS, True), (_MORE_ROWS, False)):
            self.calls, self.outputs = [], []
            try:
                with torch.inference_mode(False), torch.no_grad():
                    torch.default_generator.manual_seed(0)
                    self._inputs = next(islice(likely_inputs(self.twin, shape), self._kind, None))
                    self.twin.train(training)
                    self.outputs = self._run(self._inputs, self._note)
                return
            except Exception as error:  # such as more tokens than the model has positions for
                problem = error
        assert problem is not None
        raise TraceError(brief(problem)) from problem

    def _note(self, layer: str, features: int, fed: Tensor) -> Tensor:
        gave = self._tape.read(torch.Size([*_positions(fed), features])).requires_grad_()
        self.calls.append(Call(layer, fed, gave))
        return self.calls[-1].output()

    def drop_graph(self) -> None:
        """Free autograd's graph of the noted run and keep the values, which take less memory."""
        for call in self.calls:
            call.fed = call.fed.detach()
        self.outputs = [output.detach() for output in self.outputs]

    def run_again(
        self, stand_in: Callable[[int, Call, Tensor], Tensor], calls: Iterable[Call] | None = None
    ) -> list[Tensor]:
        """Run the copy on the inputs of the noted run again, and return the floating-point tensors that it returns."""
        remaining = iter(enumerate(self.calls if calls is None else calls))

        def replay(layer: str, features: int, fed: Tensor) -> Tensor:
            index, call = next(remaining, (0, None))
            if call is None or call.layer != layer:
                raise TraceError(f"{layer} was called out of turn")
            return stand_in(index, call, fed)

        with torch.inference_mode(False), torch.no_grad():  # in this order, as inference_mode(False) enables gradients
            try:
                return self._run(self._inputs, replay)
            except (TraceError, StageEnd):
                raise
            except Exception as error:
                raise FailedError(brief(error)) from error

    def _run(self, inputs: dict[str, Any], stand_in: Callable[[str, int, Tensor], Tensor]) -> list[Tensor]:
        # The CPU's generator alone: torch.manual_seed would seed those of accelerators too, which nobody restores.
        torch.default_generator.manual_seed(0)
        with replaced(self, {"_stand_in": stand_in}):
            args = inputs.get("args", ())
            outputs = self.twin(*args, **{key: value for key, value in inputs.items() if key != "args"})
        return [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point()]


class _Uses(TorchDispatchMode):
    """Note the parameters that operations are given, whether or not the result is used."""

    def __init__(self, used: set[Tensor]) -> None:
        super().__init__()
        self._used = used

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._used.update(value for value in tree_leaves((args, kwargs)) if isinstance(value, nn.Parameter))
        return func(*args, **(kwargs or {}))


def _with_one_row(experts: nn.Module, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make the forward of a module of experts cost a row of each weight, not all of them, and no loop over experts."""
    # The rows of a large parameter of the copy are equal (see `stand_in_for`), so each matrix is a column of ones times
    # one row, which is taken from the parameter in the forward, so that its use is noted.
    entries: list[tuple[dict[str, Any], str, Any]] = []
    stacks = expert_stacks(experts)
    for key, p in stacks.items():
        own = experts.__dict__.get(key, LowRankWeight(p, ()))  # with the factors of LoRA, if there are any
        if p.stride()[:2] == (0, 0) and isinstance(own, LowRankWeight) and own.base is p:  # else other values are tried
            ones = torch.ones(1, 1, 1).expand(*p.shape[:2], 1)
            row = LowRankWeight(None, [Factors(ones, p[:, :1], 1.0), *own.factors])
            entries.append((experts.__dict__, key, row))
    config: Any = getattr(experts, "config", None)
    key = "_experts_implementation"
    if getattr(config, key, None) == "eager" and len(entries) == len(stacks):
        entries.append((vars(config), key, "batched_mm"))  # which copies a matrix for each token: here a row
    with replaced_entries(entries):
        return compute(*args, **kwargs)


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for key, value in list(getattr(holder, "__dict__", {}).items()):
                if isinstance(value, float) and "drop" in key:
                    holder.__dict__[key] = 0.0
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _positions(fed: Tensor) -> torch.Size:
    """Return the shape of a layer's input [..., features] without the last dim, or the whole shape of token ids."""
    return fed.shape[:-1] if fed.is_floating_point() else fed.shape


def _looks_up(base: nn.Module) -> bool:
    """Return True for an embedding with `nn.Embedding`'s forward; one of its own may count positions, say."""
    return isinstance(base, nn.Embedding) and type(base).forward is nn.Embedding.forward


def tracer_of(model: nn.Module, names: Mapping[nn.Module, str]) -> Tracer:
    """Return what runs the outermost model inside of `model` that can be run, without autograd's graph."""
    # A forward that replaces a whole model's own, as TRL's does, cannot be copied. Then the trunk is run.
    problem = TraceError("it holds no model that can be run")
    for inner in traced_models(model):
        try:
            tracer = Tracer(inner, dict(names))
        except TraceError as error:
            problem = error if inner is traced_models(model)[0] else problem
            continue
        tracer.drop_graph()
        return tracer
    raise problem


def refuse_flows(model: nn.Module, axis: str, two_stacks: str, alora: str) -> None:
    """Refuse an encoder with a decoder, and aLoRA, for `axis` ("cp=2") with the reason for each."""
    inner, remedy = innermost(model), f"use {axis.partition('=')[0]}=1."
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"{axis}: {type(inner).__name__} is an encoder and a decoder, {two_stacks}: {remedy}")
    for name, adapter in peft_configs(model).items():
        if getattr(adapter, "alora_invocation_tokens", None):
            raise ValueError(f"{axis}: adapter {name!r} has alora_invocation_tokens, {alora}: {remedy}")


def check_outside(model: nn.Module, tracer: Tracer) -> None:
    """Refuse a parameter that trains outside of the model that is run, where nobody knows how it is used."""
    inside = {id(parameter) for parameter in tracer.model.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in inside:
            raise TraceError(
                f"{name} trains, and {type(innermost(model)).__name__} cannot be run without its weights to see how it "
                "is used"
            )
