"""Linear layers, and what subclasses of them compute: whether on slices of its parameters a subclass gives slices.

A subclass keeps its class and its own forward. So its forward is tried on small random tensors, whole and in two parts,
and what it adds to a linear layer (a factor of each output feature, a scalar, a child module) is given the first role
under which the parts come to the whole.
"""

from __future__ import annotations

import copy
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard
from transformers.pytorch_utils import Conv1D

from lora_parallel.quantised.layer import Quantised
from lora_parallel.styles import Style

__all__ = ["features_dim", "is_linear", "own_roles", "subclass_problem"]

Role = tuple[str, int | None]
"""As in `UnitTensor`: its name, and the dim that has the features."""

_SMALL = 24, 16
_LARGE = 2**22
_TRIALS = 256
_TOLERANCE = 1e-4
"""A subclass may compute in float32; a mistake is of the order of 1."""

_giving: dict[type, bool] = {}
_found: dict[object, dict[str, Role] | None] = {}


def features_dim(base: nn.Module) -> int:
    """The dim of a layer's weight that has its output features."""
    return 0 if isinstance(base, nn.Linear) else 1


def is_linear(base: nn.Module) -> bool:
    """Whether the layer is a linear one: `nn.Linear`, or transformers' `Conv1D`, which stores its weight transposed.

    A subclass that gives something else than its output features (Llama 4's router, a tuple) is none.
    """
    return isinstance(base, Quantised) or (isinstance(base, (nn.Linear, Conv1D)) and _gives_features(base))


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
    except Exception:  # of one whose other parameters do not fit these sizes; it is tried in `_search`
        return True
    return isinstance(given, Tensor) and given.shape == (3, out)


def own_roles(base: nn.Module, style: Style) -> dict[tuple[nn.Module, str], Role]:
    """The roles of a subclass's parameters beside its weight, by their module and name there."""
    found = _roles(base, style) or {}
    return {
        (base.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]): role for name, role in found.items()
    }


def subclass_problem(base: nn.Module, style: Style) -> str | None:
    """Why a linear layer cannot be cut as `style` says, or None if it can."""
    if _roles(base, style) is not None:
        return None
    parts = "partial sums of" if style.weight == Shard(1) else "slices of"
    return f"the forward of {type(base).__name__}, on slices of its parameters, does not give {parts} its output"


def _roles(base: nn.Module, style: Style) -> dict[str, Role] | None:
    if isinstance(base, Quantised):
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
        roles: list[Role] = [("output", dim) for dim, size in dims if size == out and name != "bias"]
        roles += [("addend", dim) for dim, size in dims if size == out]
        roles += [("input", dim) for dim, size in dims if size == width]
        candidates[name] = [*roles, ("other", None)]
    sizes = [_SMALL, *([(out, width)] if out * width <= _LARGE else [])]
    for small in sizes:
        for chosen in islice(product(*candidates.values()), _TRIALS):
            roles_of = dict(zip(candidates, chosen, strict=True))
            try:
                if all(_agrees(base, roles_of, small, columns, training) for training in (True, False)):
                    return roles_of
            except Exception:  # whatever a forward raises on sizes that do not fit
                continue
    return None


def _agrees(base: nn.Module, roles: dict[str, Role], sizes: tuple[int, int], columns: bool, training: bool) -> bool:
    """Whether two parts come to the whole. Any choice of features will do for a part."""
    torch.manual_seed(0)
    out, width = sizes
    at = features_dim(base)
    values: dict[str, Tensor] = {}
    for name, parameter in base.named_parameters():
        shape = list(parameter.shape)
        role, dim = roles.get(name, ("other", None))
        if name == "weight":
            shape[at], shape[1 - at] = out, width
        elif dim is not None:
            shape[dim] = width if role == "input" else out
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
            cut = role == "input" if columns else role in ("output", "addend")
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
    torch.manual_seed(0)
    return twin(x)
