"""Recognise linear layers, quantised ones too, and tell which of them and of their adapters can be cut.

Quantisers keep a weight as a tensor subclass with scales in its attributes, which FSDP2 and DTensor do not shard. Here
each of these tensors is a frozen parameter of bytes, uint8 [out, .], with the same rows as the weight; in forward the
quantiser's own object is made of views of the parameters, and its own kernel is called. Nothing is quantised again, and
FSDP2's param_dtype, which casts floating-point parameters, does not change bytes. The layer stays an instance of the
class that the quantiser uses.

A subclass keeps its class and its own forward. So its forward is run on random tensors, whole and in two parts.
Each parameter that the subclass adds to a linear layer (a factor of each output feature, a scalar, one of a child
module) gets a role. The first choice of roles is taken with which the two parts together equal the whole.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any

import torch
from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard
from transformers.pytorch_utils import Conv1D

from lora_parallel.layers.styles import STYLES, Style


class QuantisedLayer(nn.Linear):
    """Hold a quantised weight as parameters of bytes, in any format; `weight` is uint8 [out, bytes of a row]."""

    scales: dict[str, bool]
    """The other parameters of bytes, [out, .], by name: True if a value belongs to a whole row, False if to a block."""

    block: int
    """Number of input features that share a scale."""

    @classmethod
    def replace_weight(cls, layer: Any, parts: Mapping[str, Tensor], scales: dict[str, bool], block: int) -> None:
        """Let a layer, in place, hold the parameters `parts` instead of its weight, as an instance of this class."""
        del layer._parameters["weight"]
        for name, tensor in parts.items():
            setattr(layer, name, tensor)
        layer.scales, layer.block = scales, block
        layer.__class__ = cls

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the dequantised weight, [out, in], of the rows and columns that the parameters hold now."""

    def dense_of(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the dequantised weight of other bytes in this layer's format: `weight` and its scales, of any rows."""
        like: Any = object.__new__(type(self))
        like.__dict__.update(self.__dict__)
        like.__dict__["_parameters"] = dict(parts)
        return like.dense()

    def roles(self) -> dict[str, tuple[str, int | None]]:
        """Map the names of the scales to roles as in `LayerTensor`: scales of blocks are cut as the weight is."""
        return {name: ("per_output", 0) if of_rows else ("weight", None) for name, of_rows in self.scales.items()}

    def cut_problem(self, style: Any, tp: int) -> str | None:
        """Return the reason why tp ranks cannot each have a part of the layer as `style` says, or None if they can."""
        of_rows = all(self.scales.values())
        if style.weight != Shard(1) or of_rows or self.in_features % (self.block * tp) == 0:
            return None
        blocks = self.in_features // self.block
        possible = ", ".join(str(n) for n in range(1, blocks + 1) if blocks % n == 0)
        return (
            f"its {self.in_features} input features are quantised in {blocks} blocks of {self.block}, and tp={tp} "
            f"would cut one in two: tp can be {possible}"
        )


def frozen(tensor: Tensor) -> nn.Parameter:
    """Return a parameter with the values of `tensor` that does not train."""
    return nn.Parameter(tensor.detach().contiguous(), requires_grad=False)


def bytes_of(tensor: Tensor, rows: int) -> nn.Parameter:
    """Return the bytes of `tensor`, which may have any dtype, as a frozen parameter, uint8 [rows, bytes of a row]."""
    return frozen(tensor.detach().contiguous().view(rows, -1).view(torch.uint8))


Role = tuple[str, int | None]
"""Role of a parameter as in `LayerTensor`: the name of the role, and the dim that has the features."""

_SMALL = 24, 16
_LARGE = 2**22
_TRIALS = 256
_TOLERANCE = 1e-4
"""Largest error, relative to the output: a subclass may compute in float32, and a wrong role gives one of about 1."""

_known_to_give: dict[type, bool] = {}
_known_roles: dict[object, dict[str, Role] | None] = {}


def features_dim(base: nn.Module) -> int:
    """Return the dim of the weight that has the output features: 0 for `nn.Linear`, 1 for `Conv1D` and embeddings."""
    return 0 if isinstance(base, nn.Linear) else 1


def is_linear(base: nn.Module) -> bool:
    """Return True for an `nn.Linear` and for transformers' `Conv1D`, which stores its weight transposed."""
    # A subclass that returns no tensor of its output features (Llama 4's router returns a tuple) is no linear layer.
    return isinstance(base, QuantisedLayer) or (isinstance(base, (nn.Linear, Conv1D)) and _gives_features(base))


def _gives_features(base: nn.Module) -> bool:
    kind = type(base)
    if kind not in _known_to_give:
        _known_to_give[kind] = _has_plain_forward(base) or _gives_when_tried(base)
    return _known_to_give[kind]


def _has_plain_forward(base: nn.Module) -> bool:
    return type(base).forward is (Conv1D if isinstance(base, Conv1D) else nn.Linear).forward


@torch.random.fork_rng(devices=[])
def _gives_when_tried(base: nn.Module) -> bool:
    out, width = _SMALL
    shapes = {name: p.shape for name, p in base.named_parameters()}
    shapes["weight"] = torch.Size((out, width) if features_dim(base) == 0 else (width, out))
    shapes |= {"bias": torch.Size((out,))} if "bias" in shapes else {}
    values = {name: torch.rand(shape, dtype=torch.float64) for name, shape in shapes.items()}
    try:
        with torch.inference_mode(False), torch.no_grad():
            output: Any = _run(base, values, torch.rand(3, width, dtype=torch.float64), _SMALL, out, False)
    except Exception:  # a parameter of the subclass does not fit these sizes; `_search` tries it again
        return True
    return isinstance(output, Tensor) and output.shape == (3, out)


def own_roles(base: nn.Module, style: Style) -> dict[tuple[nn.Module, str], Role]:
    """Map each parameter that a subclass has beside its weight, as (module, name in it), to its role."""
    paths = {name.rpartition("."): role for name, role in (_roles(base, style) or {}).items()}
    return {(base.get_submodule(owner), key): role for (owner, _, key), role in paths.items()}


def subclass_problem(base: nn.Module, style: Style) -> str | None:
    """Return the reason why a linear layer cannot be cut as `style` says, or None if it can."""
    if _roles(base, style) is not None:
        return None
    parts = "partial sums of" if style.weight == Shard(1) else "slices of"
    return f"the forward of {type(base).__name__}, on slices of its parameters, does not give {parts} its output"


def _roles(base: nn.Module, style: Style) -> dict[str, Role] | None:
    if isinstance(base, QuantisedLayer):
        return base.roles()
    extra = {name for name, p in base.named_parameters() if p.numel()} - {"weight", "bias"}
    if not isinstance(style.weight, Shard) or (_has_plain_forward(base) and not extra):
        return {}
    shapes = tuple((name, tuple(p.shape)) for name, p in base.named_parameters(remove_duplicate=False))
    settings = tuple((k, v) for k, v in sorted(base.__dict__.items()) if isinstance(v, (bool, int, float, str)))
    key = type(base), shapes, settings, repr(base), style.weight
    if key not in _known_roles:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
            _known_roles[key] = _search(base, columns=style.weight == Shard(1))
    return _known_roles[key]


def _search(base: nn.Module, columns: bool) -> dict[str, Role] | None:
    at = features_dim(base)
    shape = base.get_parameter("weight").shape
    out, width = shape[at], shape[1 - at]
    candidates: dict[str, list[Role]] = {}
    for name, parameter in base.named_parameters():
        if name == "weight" or not parameter.numel():
            continue
        dims = list(enumerate(parameter.shape))
        roles: list[Role] = [("per_output", dim) for dim, size in dims if size == out and name != "bias"]
        roles += [("addend", dim) for dim, size in dims if size == out]
        roles += [("per_input", dim) for dim, size in dims if size == width]
        candidates[name] = [*roles, ("other", None)]
    sizes = [_SMALL, *([(out, width)] if out * width <= _LARGE else [])]
    for small in sizes:
        for chosen in islice(product(*candidates.values()), _TRIALS):
            roles_of = dict(zip(candidates, chosen, strict=True))
            try:
                if all(_agrees(base, roles_of, small, columns, training) for training in (True, False)):
                    return roles_of
            except Exception:  # a forward may raise anything on sizes that do not fit
                continue
    return None


def _agrees(base: nn.Module, roles: dict[str, Role], sizes: tuple[int, int], columns: bool, training: bool) -> bool:
    """Return True if the outputs of two parts of the layer, cut as `roles` say, together equal the whole output."""
    # The features are divided between the two at random: right roles must give the whole output for any division.
    torch.default_generator.manual_seed(0)
    out, width = sizes
    at = features_dim(base)
    values: dict[str, Tensor] = {}
    for name, parameter in base.named_parameters():
        shape = list(parameter.shape)
        role, dim = roles.get(name, ("other", None))
        if name == "weight":
            shape[at], shape[1 - at] = out, width
        elif dim is not None:
            shape[dim] = width if role == "per_input" else out
        values[name] = torch.rand(shape, dtype=torch.float64) + 0.5
    values["weight"] -= 1
    x = torch.randn(3, width, dtype=torch.float64)
    whole = _run(base, values, x, sizes, out, training)
    if whole.shape != (3, out) or not whole.isfinite().all():
        return False
    parts, order = [], torch.randperm(width if columns else out)
    for part, chosen in enumerate(order.chunk(2)):
        mine = dict(values)
        mine["weight"] = values["weight"].index_select(1 - at if columns else at, chosen)
        for name, (role, dim) in roles.items():
            cut = role == "per_input" if columns else role in ("per_output", "addend")
            if cut and dim is not None:
                mine[name] = values[name].index_select(dim, chosen)
            elif role == "addend":
                mine[name] = values[name] * (part == 0)
        inputs = x[:, chosen] if columns else x
        parts.append(_run(base, mine, inputs, sizes, out if columns else len(chosen), training))
    both = parts[0] + parts[1] if columns else torch.cat(parts, dim=-1)[:, order.argsort()]
    error = (both - whole).abs().max() if both.shape == whole.shape else torch.tensor(torch.inf)
    return bool(error <= _TOLERANCE * whole.abs().max())


def _run(
    base: nn.Module, values: dict[str, Tensor], x: Tensor, sizes: tuple[int, int], features: int, training: bool
) -> Tensor:
    memo: dict[int, Any] = {id(p): nn.Parameter(values[name], False) for name, p in base.named_parameters()}
    twin: Any = copy.deepcopy(base, memo).to("cpu", torch.float64).train(training)
    if isinstance(twin, Conv1D):
        twin.nf, twin.nx = features, sizes[1]
    else:
        twin.out_features, twin.in_features = sizes
    torch.default_generator.manual_seed(0)
    return twin(x)


def matrices(model: nn.Module, config: Any) -> Iterator[tuple[bool, float]]:
    """Yield, for each matrix that tokens are multiplied with, whether it trains and its multiplications for a token.

    Embeddings are looked up and cost none. Of a mixture's experts a token goes to some only. A sharded matrix counts as
    a whole.
    """
    used = _share_of_experts(config)
    for module in model.modules():
        if isinstance(module, QuantisedLayer):
            yield False, float(module.out_features * module.in_features)
        elif not isinstance(module, nn.Embedding):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.dim() > 1:
                    yield parameter.requires_grad, parameter.numel() * (used if parameter.dim() == 3 else 1.0)


def _share_of_experts(config: Any) -> float:
    """Return the share of a mixture's experts that a token goes to, 1 for other models."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    every = next((count for key in keys if (count := getattr(text, key, None))), None)
    chosen = getattr(text, "num_experts_per_tok", None)
    return chosen / every if every and chosen else 1.0


WORKS = (
    "What is cut over tp: LoRA (rsLoRA, rank and alpha patterns, lora_bias) and DoRA on linear layers and Conv1D, LoRA "
    "on embeddings, modules_to_save, trained biases."
)


def has_adapters_inside(base: nn.Module) -> bool:
    """Return True if a module inside of `base`, not `base` itself, is a PEFT layer."""
    return any(isinstance(inner, BaseTunerLayer) for inner in base.modules() if inner is not base)


def problem_anywhere(module: nn.Module) -> str | None:
    """Return the reason why a layer can have no style at all, or None if it can have one (at least `replicate`)."""
    tokens = (isinstance(inner, TrainableTokensLayer) for inner in module.modules() if inner is not module)
    if isinstance(module, BaseTunerLayer) and any(tokens):
        return (
            "trainable_token_indices reaches it through a tied weight, and it has an adapter of its own: leave one out"
        )
    base: Any = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    if is_linear(base) and has_adapters_inside(base):
        return f"a layer inside of {type(base).__name__} is adapted by itself: adapt the whole of it"
    return None


def cut_problem(module: nn.Module, style: Style) -> str | None:
    """Return the reason why a layer cannot be cut as `style` says, or None; `planning/experts.py` checks experts."""
    if style is STYLES["replicate"] or style.enter == "experts":
        return None
    if isinstance(module, BaseTunerLayer) and (problem := _adapter_problem(module)) is not None:
        return problem
    base: Any = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    if not isinstance(style.weight, Shard) or not is_linear(base):
        return None
    return subclass_problem(base, style)


def _adapter_problem(module: Any) -> str | None:
    if isinstance(module, TrainableTokensLayer):
        return "trainable_token_indices writes rows into the whole embedding"
    if isinstance(module, ParamWrapper):
        return f"target_parameters adapts its {module.parameter_name!r} by itself"
    if type(module) not in (LoraLinear, LoraEmbedding) and not isinstance(module.get_base_layer(), QuantisedLayer):
        return f"adapter layers of type {type(module).__name__} have no other form under tensor parallelism"
    if isinstance(module.base_layer, BaseTunerLayer):
        return "adapters are nested"
    for variant in module.lora_variant.values():
        if isinstance(module, LoraEmbedding) or type(variant) is not DoraLinearVariant:
            return f"its adapter is a LoRA variant ({type(variant).__name__})"
    return None
