"""Running a model without its weights, to see what it computes between its linear layers.

A copy of the model runs on a few random tokens, with a stand-in for every linear layer and every embedding: it ignores
its weights and gives random numbers of the right shape. What is left is the model's own code, reshapes, heads, norms,
masks and activations, at no cost that depends on the size of the weights. Each stand-in notes what it was fed, with
autograd's graph back to the other stand-ins' outputs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lora_parallel.experts import holds_experts
from lora_parallel.layers import base_of, features_dim, is_linear
from lora_parallel.nests import tensors_in
from lora_parallel.wording import brief

__all__ = ["Call", "FailedError", "Probe", "ProbeError", "probed_models", "stand_in_for"]

_SHAPE, _MORE_ROWS, _OTHER_SHAPE = (1, 8), (2, 8), (2, 12)
"""Rows and tokens of the first run, whose graph of a model of 405 billion parameters is in memory as a whole; of the
first run of a model that takes several rows only; and of the next."""


class ProbeError(Exception):
    """A model that cannot be run this way, and why."""


class FailedError(ProbeError):
    """The model's own code raised something."""


@dataclass(eq=False)
class Call:
    """One call of a stand-in."""

    unit: str
    """Which layer, by its name."""

    fed: Tensor
    """Its input [..., in_features], or token ids."""

    gave: Tensor
    """A leaf of autograd's graph, from which its output [..., features] is made."""

    def output(self, features: Tensor | None = None) -> Tensor:
        """What the stand-in returns, or some features of it; free to be changed in place."""
        gave = self.gave if features is None else self.gave.index_select(-1, features)
        # Each feature is positive for one token and negative for the next: no ReLU is dead for all of them.
        signs = 1 - 2 * (torch.arange(gave[..., 0].numel()) % 2)
        return gave * signs.view(*gave.shape[:-1], 1)


class _Tape:
    """Random numbers above 0.1, of which every stand-in reads another stretch: none is stored twice."""

    _STARTS, _STRIDE = 2**16, 9973

    def __init__(self) -> None:
        # Its own, so that what the model draws is the same when it is run again.
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


def probed_models(model: nn.Module) -> list[nn.Module]:
    """The transformers models in `model`, outer ones first; or `model` itself, if there is none."""
    found: list[nn.Module] = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return found or [model]


@dataclass(eq=False)
class Probe:
    """A model that can be run without its weights.

    Args:
        model: Stays as it is.
        names: The names of the layers to stand in for.
        given: Inputs, where some are known: keyword arguments, and the others under "args".

    Raises:
        ProbeError: There are no inputs that it is known to take, or it fails.
    """

    model: nn.Module
    names: Mapping[nn.Module, str]
    given: dict[str, Any] | None = None
    twin: nn.Module = field(init=False)
    embeddings: dict[nn.Module, str] = field(init=False)
    """Embeddings that do more than look up, and run as they are."""

    units: dict[nn.Module, str] = field(init=False)
    """The stand-ins: linear layers and embeddings, by module of the twin."""

    calls: list[Call] = field(init=False, default_factory=list)
    outputs: list[Tensor] = field(init=False, default_factory=list)
    """Floating-point tensors that the model returned."""

    parameters: dict[Tensor, tuple[nn.Module, str]] = field(init=False)
    """All parameters of the twin, with the (first) module that holds each, and its name there."""

    used: set[Tensor] = field(init=False, default_factory=set)
    """The parameters that anything was computed with."""

    entered: set[nn.Module] = field(init=False, default_factory=set)
    """The modules of the twin that were called; of others, parameters may be used all the same."""

    experts: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = field(init=False, default_factory=dict)
    """What modules of the twin that hold experts were fed first: positional and keyword arguments."""

    _tape: _Tape = field(init=False, default_factory=_Tape)

    def __post_init__(self) -> None:
        with torch.enable_grad(), torch.inference_mode(False):
            torch.manual_seed(0)
            try:
                self.twin = stand_in_for(self.model)
            except Exception as error:
                raise ProbeError(f"it cannot be copied ({brief(error)})") from error
            twins = dict(zip(self.model.modules(), self.twin.modules(), strict=True))
            self.twin_of = twins
            self.paths = {module: name for name, module in self.twin.named_modules()}
            self.units = {
                twins[module]: name
                for module, name in self.names.items()
                if module in twins and (is_linear(base_of(module)) or _looks_up(base_of(module)))
            }
            self.parameters = {}
            for module in self.twin.modules():
                for key, parameter in module._parameters.items():
                    if parameter is not None:
                        self.parameters.setdefault(parameter, (module, key))
            self.embeddings = {
                twins[module]: name
                for module, name in self.names.items()
                if module in twins and type(module) is not nn.Embedding and isinstance(module, nn.Embedding)
            }
            for module in self.embeddings:
                self._tell_apart(module)
            hooks = [m.register_forward_pre_hook(self._enter, with_kwargs=True) for m in self.twin.modules()]
            self._inputs = self._first_run()
            for hook in hooks:
                hook.remove()
            self._run_without_gradients()

    def _tell_apart(self, embedding: nn.Module) -> None:
        """Let an embedding that runs its own forward use another parameter there: one that is found to use its weight
        was not called.
        """
        own, weight = embedding.forward, embedding._parameters["weight"]
        assert weight is not None
        alias = nn.Parameter(weight.detach())
        self.parameters[alias] = embedding, "weight"

        def forward(*args: Any, **kwargs: Any) -> Any:
            embedding._parameters["weight"] = alias
            try:
                return own(*args, **kwargs)
            finally:
                embedding._parameters["weight"] = weight

        embedding.__dict__["forward"] = forward

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.entered.add(module)
        if holds_experts(module):
            self.experts.setdefault(module, tree_map_only(Tensor, Tensor.detach, (args, kwargs)))

    def _first_run(self) -> dict[str, Any]:
        """Find inputs that work, and note the calls."""
        problems = []
        for index, inputs in [(0, self.given)] if self.given is not None else self._attempts():
            self.calls = []
            try:
                with _Uses(self.used):
                    self.outputs = self._run(inputs, self._note)
                self._kind = index
                return inputs
            except Exception as error:  # whatever the model's own code may raise
                problems.append(brief(error))
        raise ProbeError(problems[0] if problems else "there are no inputs that it is known to take")

    def _attempts(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for shape in (_SHAPE, _MORE_ROWS):
            yield from enumerate(_inputs(self.twin, shape))

    def _run_without_gradients(self) -> None:
        """See what is computed with in training only (dropout makes it no good for more), or in torch's fast paths."""
        for training in (True, False):
            self.twin.train(training)
            try:
                with torch.no_grad(), _Uses(self.used):
                    self._run(self._inputs, lambda unit, features, fed: torch.randn(*_positions(fed), features))
            except Exception:  # what needs labels in training, say; such a model is seen in evaluation mode
                continue

    def run_otherwise(self) -> None:
        """Note a run under other conditions, in place of the first: more tokens, training mode (without dropout), or as
        much of it as the model allows. Nothing is noted for gradients.

        Raises:
            ProbeError: It does not even run as it did.
        """
        _without_dropout(self.twin)
        problem: Exception | None = None
        for shape, training in ((_OTHER_SHAPE, True), (_OTHER_SHAPE, False), (_MORE_ROWS, True), (_MORE_ROWS, False)):
            self.calls, self.outputs = [], []
            try:
                with torch.inference_mode(False), torch.no_grad():
                    torch.manual_seed(0)
                    self._inputs = next(islice(_inputs(self.twin, shape), self._kind, None))
                    self.twin.train(training)
                    self.outputs = self._run(self._inputs, self._note)
                return
            except Exception as error:  # positions that are no more, say
                problem = error
        assert problem is not None
        raise ProbeError(brief(problem)) from problem

    def _note(self, unit: str, features: int, fed: Tensor) -> Tensor:
        gave = self._tape.read(torch.Size([*_positions(fed), features])).requires_grad_()
        self.calls.append(Call(unit, fed, gave))
        return self.calls[-1].output()

    def drop_graph(self) -> None:
        """Keep the numbers that were noted only; the graph takes more memory than they."""
        for call in self.calls:
            call.fed = call.fed.detach()
        self.outputs = [output.detach() for output in self.outputs]

    def run_again(self, stand_in: Callable[[int, Call, Tensor], Tensor]) -> list[Tensor]:
        """Run on the same inputs; `stand_in(index, noted call, fed now)` gives each output.

        Raises:
            ProbeError: Other layers are called, or the model fails.
        """
        remaining = iter(enumerate(self.calls))

        def replay(unit: str, features: int, fed: Tensor) -> Tensor:
            index, call = next(remaining, (0, None))
            if call is None or call.unit != unit:
                raise ProbeError(f"{unit} was called out of turn")
            return stand_in(index, call, fed)

        with torch.inference_mode(False), torch.no_grad():  # in this order: the former enables gradients
            try:
                return self._run(self._inputs, replay)
            except ProbeError:
                raise
            except Exception as error:
                raise FailedError(brief(error)) from error

    def _run(self, inputs: dict[str, Any], stand_in: Callable[[str, int, Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        with _standing_in(self.units, stand_in):
            args = inputs.get("args", ())
            outputs = self.twin(*args, **{key: value for key, value in inputs.items() if key != "args"})
        return [each for each in tensors_in(outputs) if each.is_floating_point()]


class _Uses(TorchDispatchMode):
    """Notes the parameters that operations are given, whether or not anything comes of it."""

    def __init__(self, used: set[Tensor]) -> None:
        super().__init__()
        self._used = used

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._used.update(each for each in tree_leaves((args, kwargs)) if isinstance(each, nn.Parameter))
        return func(*args, **(kwargs or {}))


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for key, value in list(getattr(holder, "__dict__", {}).items()):
                if isinstance(value, float) and "drop" in key:
                    holder.__dict__[key] = 0.0
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _positions(fed: Tensor) -> torch.Size:
    """The shape of a layer's input without its features; of token ids, all of it."""
    return fed.shape[:-1] if fed.is_floating_point() else fed.shape


@contextmanager
def _standing_in(units: Mapping[nn.Module, str], stand_in: Callable[[str, int, Tensor], Tensor]) -> Iterator[None]:
    for module, name in units.items():
        base: Any = base_of(module)
        features = base.embedding_dim if isinstance(base, nn.Embedding) else base.weight.shape[features_dim(base)]

        def forward(*args: Any, _name: str = name, _features: int = features, **kwargs: Any) -> Tensor:
            return stand_in(_name, _features, args[0] if args else next(iter(kwargs.values())))

        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in units:
            module.__dict__.pop("forward", None)


def _looks_up(base: nn.Module) -> bool:
    """Whether it is an embedding that does nothing else, as positions counted in its forward would be."""
    return isinstance(base, nn.Embedding) and type(base).forward is nn.Embedding.forward


def stand_in_for(model: nn.Module) -> nn.Module:
    """A copy in float32 on the CPU, whose parameters are random and take no memory beyond one row each."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        values = 0.5 + torch.rand(parameter.shape[-1:])
        if parameter.numel() <= 2**16:
            values = 0.5 + torch.rand(parameter.shape)
        if parameter.is_floating_point():
            memo[id(parameter)] = nn.Parameter(values.expand(parameter.shape))
        else:  # of a quantised layer, for which another stands in
            nothing = torch.zeros(1, dtype=parameter.dtype).view([1] * parameter.dim())
            memo[id(parameter)] = nn.Parameter(nothing.expand(parameter.shape), requires_grad=False)
    for buffer in model.buffers():
        if id(buffer) in memo:
            continue
        plain = type(buffer) is Tensor and not buffer.is_meta
        held = buffer.detach().cpu().clone() if plain else torch.ones(buffer.shape, dtype=buffer.dtype)
        memo[id(buffer)] = held.float() if held.is_floating_point() else held
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():  # they are the user's, and are to see what the user runs
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    config = getattr(twin, "config", None)
    if isinstance(twin, PreTrainedModel) and getattr(config, "_attn_implementation", None) not in ("eager", "sdpa"):
        twin.set_attn_implementation("eager")  # the others' kernels need an accelerator
    for module in twin.modules():  # grouped products of these parameters are refused: they have strides of zero
        inner = getattr(module, "config", None)
        if getattr(inner, "_experts_implementation", None) is not None:
            inner._experts_implementation = "eager"  # type: ignore[union-attr]
    return twin.eval()


def _inputs(model: nn.Module, shape: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Inputs that the model may take, the likeliest first; of texts, this many rows and tokens."""
    if not isinstance(model, PreTrainedModel):
        first = next((m for m in model.modules() if next(m.children(), None) is None and m._parameters), None)
        if isinstance(first, nn.Embedding):
            yield {"args": (torch.randint(first.num_embeddings, shape),)}
        elif isinstance(first, (nn.Linear, Conv1D, nn.LayerNorm, nn.RMSNorm)):
            layer = isinstance(first, (nn.Linear, Conv1D))
            width = first.weight.shape[1 - features_dim(first)] if layer else first.weight.shape[-1]
            yield {"args": (torch.randn(*shape, width),)}
            yield {"args": (torch.randn(shape[0], width),)}
        return
    known = set(inspect.signature(model.forward).parameters)
    off = {key: False for key in ("use_cache",) if key in known}
    config: Any = model.config
    text = {key: value for key, value in _text(config, shape).items() if key in known}
    options = {key: value for key, value in _options(config, shape).items() if key in known}
    image = {key: value for key, value in _image(config, shape[0]).items() if key in known}
    sound = {key: value for key, value in _sound(config, shape[0]).items() if key in known}
    decoder = (
        {"decoder_input_ids": text.get("input_ids", _text(config, shape)["input_ids"])}
        if ("decoder_input_ids" in known and getattr(config, "is_encoder_decoder", False))
        else {}
    )
    text = {key: value for key, value in text.items() if not key.startswith("decoder_")}
    for each in (text, options, {**text, **image}, image, sound, {**text, **sound}, model.dummy_inputs):
        if each:
            yield {**each, **decoder, **off}
    for each in (_video(config, shape[0]), _spectrogram(config, shape[0])):
        if each.keys() & known:
            yield {key: value for key, value in each.items() if key in known} | decoder | off


def _text(config: Any, shape: tuple[int, int]) -> dict[str, Tensor]:
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(inner, "vocab_size", None) or 2
    special = [getattr(inner, key, None) for key in ("pad_token_id", "eos_token_id", "bos_token_id")]
    reserved = {each for value in special for each in (value if isinstance(value, (list, tuple)) else [value])}
    ids = [index for index in range(min(vocabulary, 64)) if index not in reserved] or [0]
    chosen = torch.tensor(ids)[torch.randint(len(ids), shape)]
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, -(shape[1] // 8) :] = 0
    return {"input_ids": chosen, "attention_mask": mask}


def _options(config: Any, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Multiple choice: [rows, choices, tokens]."""
    return {key: value[:, None].expand(-1, 2, -1) for key, value in _text(config, shape).items()}


def _video(config: Any, rows: int) -> dict[str, Tensor]:
    frames = getattr(config, "num_frames", 8)
    image = _image(config, rows)["pixel_values"]
    return {"pixel_values": image[:, None].expand(-1, frames, -1, -1, -1)}


def _spectrogram(config: Any, rows: int) -> dict[str, Tensor]:
    bands: Any = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
    length: Any = getattr(config, "max_length", None) or 64
    values = torch.randn(rows, length, bands)
    return {"input_values": values, "input_features": values}


def _image(config: Any, rows: int) -> dict[str, Tensor]:
    inner = getattr(config, "vision_config", config)
    size = getattr(inner, "image_size", 32)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {"pixel_values": torch.randn(rows, getattr(inner, "num_channels", 3), height, width)}


def _sound(config: Any, rows: int) -> dict[str, Tensor]:
    frames = 2 * getattr(config, "max_source_positions", 50)
    return {
        "input_features": torch.randn(rows, getattr(config, "num_mel_bins", 80), frames),
        "input_values": torch.randn(rows, 4000),
    }
