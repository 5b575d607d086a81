"""Recognise linear layers, and test if the forward of a subclass works on slices of its parameters.

A subclass keeps its class and its own forward. So its forward is run on random tensors, whole and in two parts.
Each parameter that the subclass adds to a linear layer (a factor of each output feature, a scalar, one of a child
module) gets a role. The first choice of roles is taken with which the two parts together equal the whole.
"""

from __future__ import annotations

import copy
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard
from transformers.pytorch_utils import Conv1D

from lora_parallel.layers.quantised_layer import QuantisedLayer
from lora_parallel.layers.styles import Style

__all__ = ["features_dim", "is_linear", "own_roles", "subclass_problem"]

Role = tuple[str, int | None]
"""Role of a parameter as in `LayerTensor`: the name of the role, and the dim that has the features."""

_SMALL = 24, 16
_LARGE = 2**22
_TRIALS = 256
_TOLERANCE = 1e-4
"""Largest error, relative to the output: a subclass may compute in float32, and a wrong role gives one of about 1."""

_giving: dict[type, bool] = {}
_found: dict[object, dict[str, Role] | None] = {}


def features_dim(base: nn.Module) -> int:
    """Return the dim of the weight that has the output features: 0 for `nn.Linear`, 1 for `Conv1D` and embeddings."""
    return 0 if isinstance(base, nn.Linear) else 1


def is_linear(base: nn.Module) -> bool:
    """Return True for an `nn.Linear` and for transformers' `Conv1D`, which stores its weight transposed.

    A subclass that does not return a tensor of its output features (Llama 4's router returns a tuple) is no linear
    layer.
    """
    return isinstance(base, QuantisedLayer) or (isinstance(base, (nn.Linear, Conv1D)) and _gives_features(base))


def _gives_features(base: nn.Module) -> bool:
    kind, own = type(base), Conv1D if isinstance(base, Conv1D) else nn.Linear
    if kind not in _giving:
        _giving[kind] = kind.forward is own.forward or _gives_when_tried(base)
    return _giving[kind]


@torch.random.fork_rng(devices=[])
def _gives_when_tried(base: nn.Module) -> bool:
    out, width = _SMALL
    shapes = {name: p.shape for name, p in base.named_parameters()}
    shapes["weight"] = torch.Size((out, width) if features_dim(base) == 0 else (width, out))
    shapes |= {"bias": torch.Size((out,))} if "bias" in shapes else {}
    values = {name: torch.rand(shape, dtype=torch.float64) for name, shape in shapes.items()}
    try:
        with torch.inference_mode(False), torch.no_grad():
            given: Any = _run(base, values, torch.rand(3, width, dtype=torch.float64), _SMALL, out, False)
    except Exception:  # a parameter of the subclass does not fit these sizes; `_search` tries it again
        return True
    return isinstance(given, Tensor) and given.shape == (3, out)


def own_roles(base: nn.Module, style: Style) -> dict[tuple[nn.Module, str], Role]:
    """Map each parameter that a subclass has beside its weight, as (module, name in it), to its role."""
    found = _roles(base, style) or {}
    return {
        (base.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]): role for name, role in found.items()
    }


def subclass_problem(base: nn.Module, style: Style) -> str | None:
    """Return the reason why a linear layer cannot be cut as `style` says, or None if it can."""
    if _roles(base, style) is not None:
        return None
    parts = "partial sums of" if style.weight == Shard(1) else "slices of"
    return f"the forward of {type(base).__name__}, on slices of its parameters, does not give {parts} its output"


def _roles(base: nn.Module, style: Style) -> dict[str, Role] | None:
    if isinstance(base, QuantisedLayer):
        return base.roles()
    own = Conv1D if isinstance(base, Conv1D) else nn.Linear
    extra = {name for name, p in base.named_parameters() if p.numel()} - {"weight", "bias"}
    if not isinstance(style.weight, Shard) or (type(base).forward is own.forward and not extra):
        return {}
    shapes = tuple((name, tuple(p.shape)) for name, p in base.named_parameters(remove_duplicate=False))
    settings = tuple((k, v) for k, v in sorted(base.__dict__.items()) if isinstance(v, (bool, int, float, str)))
    key = type(base), shapes, settings, repr(base), style.weight
    if key not in _found:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
            _found[key] = _search(base, columns=style.weight == Shard(1))
    return _found[key]


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
    """Return True if the outputs of two parts of the layer, cut as `roles` say, together equal the whole output.

    The features are divided between the two parts at random: right roles must give the whole output for any division.
    """
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
        fed = x[:, chosen] if columns else x
        parts.append(_run(base, mine, fed, sizes, out if columns else len(chosen), training))
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
