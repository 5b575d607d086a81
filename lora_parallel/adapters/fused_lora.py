"""Compute a LoRA layer and its base in one autograd function, in the precision that PEFT computes in.

PEFT computes `base(x) + scaling * B(A(dropout(x)))` operator by operator: a copy of x in the adapter's dtype, a product
of the output's size, one with the scaling, a sum. Here the branch is added into the base's output, and its gradient
into the base's, inside of the products. Of an activation's size x alone is kept for backward.

The adapters of a bfloat16 base are float32, for which PEFT copies x to float32. Here a float32 matrix is the exact sum
of three bfloat16 ones (of 24 bits of the mantissa each has 8), so that x is read as it is, by a product of bfloat16
matrices that is summed in float32. Of the nine products of two such sums those six are taken that reach 2^-24. What is
added to an output is rounded once, as PEFT rounds it. Ootomo and Yokota, "Recovering single precision accuracy from
Tensor Cores" (2022), split matrices in this way.

What cannot change after set-up is decided by `why_not_fused`, and what can in each call, by `_branch`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from lora_parallel.adapters.dropout import TopologyInvariantDropout
from lora_parallel.distributed.dtensors import autocast_dtype
from lora_parallel.distributed.torch_private import (
    has_global_hooks,
    has_hooks,
    in_function_transform,
    is_view,
    unsafe_view,
)
from lora_parallel.layers.layer_parameters import clean_names
from lora_parallel.layers.linear_classes import QuantisedLayer, features_dim
from lora_parallel.layers.wrapped_forward import wrap_forward
from lora_parallel.state import Setup

_WHY = "_lora_parallel_not_fused"
_PEFT = "_lora_parallel_peft_forward"
_OTHERWISE = "which a fused LoRA layer has not: on a mesh of one rank fused=False (in ParallelConfig) gives it."
_FORWARDS = nn.Linear.forward, Conv1D.forward


class Call(NamedTuple):
    """Hold what one call of a LoRA layer is computed with."""

    base: Any
    weight: Tensor | None  # of the base, as it is stored; None for a quantised base
    lora_A: Tensor  # [r, in]
    lora_B: Tensor  # [out, r]
    addend: Tensor | None  # [out], the bias of B
    dropout: TopologyInvariantDropout | None  # None where nothing is dropped
    scaling: float


class FusedLoRA(torch.autograd.Function):
    """Compute `x W^T + bias + scaling * ((fed A^T) B^T + addend)`, or add the branch, in place, to a `y` of the base.

    Shapes: x and fed [..., in], y [..., out], weight [out, in], A [r, in], B [out, r], bias [out], addend [out]. The
    addend is the bias of B. `fed` is x after dropout, or None where nothing is dropped. Either `y` or `weight` is None.
    All have the dtype of x, but the weight, which is cast to it in each pass, and A, B and addend if they are split.
    """

    @staticmethod
    def forward(ctx: Any, how: tuple[float, bool], y: Tensor | None, x: Tensor, *tensors: Any) -> Tensor:
        # y is the first tensor: if it is a view, autograd takes the first one for what is changed
        output, factors, h = _forward(how, y, x, *tensors)
        if y is not None:
            ctx.mark_dirty(y)
        fed, weight = tensors[:2]
        ctx.how = how
        needs_A = ctx.needs_input_grad[6]
        ctx.save_for_backward((x if fed is None else fed) if needs_A else None, weight, *factors, h)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _, needs_y, needs_x, needs_fed, _, needs_bias, needs_A, needs_B, needs_addend = ctx.needs_input_grad
        saved, weight, lora_A, lora_B, h = ctx.saved_tensors
        scaling, is_split = ctx.how
        dy = grads[0].reshape(-1, grads[0].shape[-1])  # [tokens, out]
        shape = *grads[0].shape[:-1], lora_A.shape[-1]  # [..., in]
        fed = saved.reshape(-1, shape[-1]) if needs_A else None  # [tokens, in]
        dx = dy @ _in_dtype(weight, dy.dtype) if needs_x and weight is not None else None  # [tokens, in]
        # What is dropped has the branch's gradient by itself: its mask is to come. Without, the base's gets it added.
        into = None if needs_fed else dx
        branch = None
        if is_split:
            u = _split(_sum_parts(_wide(_middle(lora_B), dy.t())).mul_(scaling), _OF_ACTIVATIONS)  # [6 r, tokens]
            if needs_x or needs_fed:
                into = dy.new_zeros(dy.shape[0], shape[-1]) if into is None else into
                branch = _add_product(into, u.t(), lora_A, 1)
            dA = None if fed is None else _sum_parts(_wide(_first(u), fed))  # [r, in]
            dB = _sum_parts(_wide(_first(h), dy)) if needs_B else None  # [r, out]
        else:
            u = (lora_B.t() @ dy.t()).mul_(scaling)  # [r, tokens]
            if needs_x or needs_fed:
                branch = u.t() @ lora_A if into is None else into.addmm_(u.t(), lora_A)
            dA = None if fed is None else u @ fed
            dB = h @ dy if needs_B else None
        dx, dfed = (dx, branch) if needs_fed else (branch, None)
        return (
            None,
            grads[0] if needs_y else None,
            None if dx is None else dx.view(shape),
            None if dfed is None else dfed.view(shape),
            None,
            dy.sum(0) if needs_bias else None,
            dA,
            None if dB is None else dB.mul_(scaling).t().contiguous(),
            dy.sum(0, dtype=torch.float32 if is_split else None).mul_(scaling) if needs_addend else None,
        )


class _Eager(FusedLoRA):
    """Refuse derivatives of the gradient, which would take h for a constant; a compiled block has none of its own.

    Compute gradients in the dtypes of the forward, even if `backward` is called under autocast.
    """

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True asks for a derivative of the gradient, {_OTHERWISE} Leave create_graph out."
            )
        device = grads[0].device.type
        with torch.autocast(device, enabled=False) if autocast_dtype(device) else nullcontext():
            return FusedLoRA.backward(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(f"forward-mode differentiation asks for a tangent of the output, {_OTHERWISE}")


def _forward(
    how: tuple[float, bool],
    y: Tensor | None,
    x: Tensor,
    fed: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    addend: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Return what backward needs, too: y, A and B as they are computed, and h."""
    scaling, is_split = how
    x2 = x.reshape(-1, x.shape[-1])  # [tokens, in]
    fed2 = x2 if fed is None else fed.reshape(x2.shape)
    if weight is None:
        assert y is not None
        flat = y.view(-1, y.shape[-1])  # [tokens, out]
    else:
        flat = _product(x2, _in_dtype(weight, x.dtype).t(), bias)
        y = unsafe_view(flat, (*x.shape[:-1], flat.shape[-1]))
    if is_split:
        factors = _split(lora_A, _OF_FACTORS), _split(lora_B.t(), _OF_FACTORS)  # [6 r, in], [6 r, out]
        h = _split(_sum_parts(_wide(_middle(factors[0]), fed2.t())), _OF_ACTIVATIONS)  # [6 r, tokens]
        left, right = _with_addend(h, factors[1], addend)
        _add_product(flat, left.t(), right, scaling)
    else:
        factors = lora_A, lora_B
        h = (fed2 @ lora_A.t()).t()  # [r, tokens]; computed as PEFT computes it, to the bit
        left, right = _with_addend(h, lora_B.t(), addend)
        flat.addmm_(left.t(), right, alpha=scaling)
    return y, factors, h


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Return `a b + bias` in memory that may be changed in place."""
    # Selective recomputation may keep the outputs of `mm` and `addmm` for its second forward. To change such an output
    # in place would spoil the kept one. It does not keep what `mm.out` and `addmm.out` write.
    into = a.new_empty(a.shape[0], b.shape[1])
    return torch.mm(a, b, out=into) if bias is None else torch.addmm(bias, a, b, out=into)


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


# ------------------------------------------------------------------ float32 as the sum of three parts in bfloat16

# The products (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0) of parts are one product, of two matrices that are stored
# with their parts in these orders: so that in the one of activations the parts 0, 1, 2 stand at the front, and in the
# one of a factor in the middle, and what needs each part once finds it without a copy. All are stored with the rank as
# their rows, one part below the other: products that are [r, n] take a CPU half to a fifth of the time of [n, r].
_OF_ACTIVATIONS = 0, 1, 2, 0, 0, 1
_OF_FACTORS = 0, 0, 0, 1, 2, 1


def _split(matrix: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return the parts of a float32 matrix [r, n] in an order, one below the other: [6 r, n], bfloat16."""
    parts = _parts(matrix)
    return torch.cat([parts[part] for part in order])


def _parts(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three bfloat16 tensors whose sum is a float32 tensor."""
    first = tensor.bfloat16()
    rest = tensor - first
    second = rest.bfloat16()
    return first, second, (rest - second).bfloat16()


def _with_addend(h: Tensor, factor: Tensor, addend: Tensor | None) -> tuple[Tensor, Tensor]:
    """Extend h [n, tokens] and `factor` [n, out] so that `h^T factor` has `addend` [out] added to each row."""
    if addend is None:
        return h, factor
    rows = addend[None] if addend.dtype is h.dtype else torch.stack(_parts(addend))  # [1, out] or [3, out]
    return torch.cat((h, h.new_ones(rows.shape[0], h.shape[1]))), torch.cat((factor, rows))


def _first(parts: Tensor) -> Tensor:
    """Return the parts 0, 1, 2 of activations [6 r, tokens]: [3 r, tokens]."""
    return parts[: parts.shape[0] // 2]


def _middle(parts: Tensor) -> Tensor:
    """Return the parts 0, 1, 2 of a factor [6 r, n]: [3 r, n]."""
    return parts[parts.shape[0] // 3 : parts.shape[0] * 5 // 6]


def _sum_parts(product: Tensor) -> Tensor:
    """Sum the products with three parts that stand below one another, [3 r, n]: [r, n]."""
    return product.view(3, product.shape[0] // 3, product.shape[1]).sum(0)


def _wide(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of bfloat16 matrices, summed and returned in float32."""
    if a.device.type in _wide_devices:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_product(y: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Add `scaling * a b` of bfloat16 matrices to y, bfloat16, in place; the sum is rounded once."""
    if y.device.type in _wide_devices:
        return y.addmm_(a, b, alpha=scaling)
    return y.copy_(torch.addmm(y.float(), a.float(), b.float(), alpha=scaling))


_wide_devices = {"meta"}  # which stands for a GPU wherever a step is simulated
"""Types of devices that multiply bfloat16 matrices into float32. A CPU does not (torch 2.14)."""


def _find_wide_product(device_type: str) -> None:
    """Try the product on a type of device, before any graph is made that depends on it."""
    one = torch.ones(8, 8, dtype=torch.bfloat16, device=device_type)
    with suppress(RuntimeError, NotImplementedError):
        if torch.equal(torch.mm(one, one, out_dtype=torch.float32), one.float() * 8):
            _wide_devices.add(device_type)


# ------------------------------------------------------------------ layers


def why_not_fused(layer: LoraLayer) -> str | None:
    """Return why a LoRA layer keeps PEFT's forward for good, or None if its calls may be fused."""
    base = layer.get_base_layer()
    if "forward" in layer.__dict__ or not type(layer).__module__.startswith("peft."):
        return "a forward of its own"
    if isinstance(base, QuantisedLayer):
        return None
    if type(layer) is not LoraLinear:
        return f"a layer of class {type(layer).__name__}"
    if layer.lora_variant:
        kind = type(next(iter(layer.lora_variant.values())))
        return "DoRA" if kind is DoraLinearVariant else kind.__name__
    if type(base).forward not in _FORWARDS or "forward" in base.__dict__:
        return f"a base of class {type(base).__name__}, with a forward of its own"
    for parameter in layer.parameters():
        if parameter.dtype is torch.float16:
            return "float16"
        if type(parameter).__torch_function__ is not nn.Parameter.__torch_function__:
            return f"a weight of class {type(parameter).__name__}"
    return None


def _run(layer: Any, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a call of a LoRA layer in one function, if it is PEFT's plain sum; else by PEFT's forward."""
    call = _call(layer) if len(args) == 1 and not kwargs and _can_be_fused(args[0]) else None
    if call is None:
        return compute(*args, **kwargs)
    (x,) = args
    base, weight, lora_A, lora_B, addend, dropout, scaling = call
    if not torch.is_grad_enabled() and dropout is None and x.dim() > 2 and x.shape[-2] == 1:
        # What `generate` computes, again and again: a sum of the output's size costs less than a split of A and B.
        h = nn.functional.linear(_in_dtype(x, lora_A.dtype), lora_A)
        return base(x).add_(nn.functional.linear(h, lora_B, addend), alpha=scaling)
    precision = _precision(layer, x, call)
    if precision is None:
        return compute(*args, **kwargs)
    dtype, is_split = precision
    x = _in_dtype(x, dtype)
    fed: Tensor | None = None
    if dropout is not None:
        fed = dropout(x, is_scaled=False)
        scaling *= dropout.scale
        addend = None if addend is None else addend / dropout.scale
    y = bias = None
    if weight is None:
        y = base(x)
        if torch.compiler.is_compiling() or is_view(y):
            y = y.clone()  # autograd forbids to change a view that another autograd function has returned
    else:
        bias = _tensor(base, "bias")
        weight = weight.t() if features_dim(base) == 1 else weight
    if not is_split:
        lora_A, lora_B = _in_dtype(lora_A, dtype), _in_dtype(lora_B, dtype)
        addend = None if addend is None else _in_dtype(addend, dtype)
    bias = None if bias is None else _in_dtype(bias, dtype)
    how = scaling, is_split
    function = FusedLoRA if torch.compiler.is_compiling() else _Eager
    return function.apply(how, y, x, fed, weight, bias, lora_A, lora_B, addend)


def _can_be_fused(x: Tensor) -> bool:
    """Return False in a transform of `torch.func`, for a nested tensor, and for an inference tensor in training.

    An autograd function takes neither of the first two, and cannot keep the third for backward.
    """
    if torch.compiler.is_compiling():
        return True
    return not (in_function_transform() or x.is_nested or (x.is_inference() and torch.is_grad_enabled()))


def _call(layer: Any) -> Call | None:
    """Return what a call is computed with, or None if PEFT's forward is to compute it."""
    if layer.disable_adapters or layer.merged_adapters or layer.lora_variant:
        return None
    if type(layer).forward is not layer.__dict__[_PEFT] or has_global_hooks():
        return None
    children = layer._modules  # each attribute that is a module or a parameter takes `nn.Module` ten times as long
    modules_A = children["lora_A"]._modules
    names = [name for name in layer.active_adapters if name in modules_A]
    if len(names) != 1:
        return None
    base, (name,) = children["base_layer"], names
    lora_A, lora_B = modules_A[name], children["lora_B"]._modules[name]
    dropout: Any = children["lora_dropout"]._modules[name]
    scaling = layer.scaling[name]
    if not _is_plain(lora_A) or not _is_plain(lora_B) or _is_changed(dropout):
        return None
    if not isinstance(scaling, (int, float)) or scaling == 0:
        return None
    weight = None
    if isinstance(base, QuantisedLayer):
        if has_hooks(base):
            return None
    else:
        if not _is_plain(base):
            return None
        weight = _tensor(base, "weight")
        if weight.requires_grad or isinstance(weight, DTensor):
            return None
    if _tensor(lora_A, "bias") is not None:
        return None
    if isinstance(dropout, TopologyInvariantDropout):
        if not dropout.drops:
            dropout = None
        elif dropout.p >= 1:
            return None
    elif type(dropout) is nn.Identity:
        dropout = None
    else:
        return None
    A, B = _tensor(lora_A, "weight"), _tensor(lora_B, "weight")
    return Call(base, weight, A, B, _tensor(lora_B, "bias"), dropout, scaling)


def _tensor(module: nn.Module, key: str) -> Any:
    """Return an attribute that is most often a parameter; it may be a buffer, or computed by a property."""
    own = module.__dict__  # has what tensor parallelism computes with in the place of a parameter
    if key in own:
        return own[key]
    return own["_parameters"][key] if key in own["_parameters"] else getattr(module, key)


def _is_plain(module: nn.Module) -> bool:
    """Return True if a call of a module computes a linear layer and nothing else."""
    return type(module).forward in _FORWARDS and not _is_changed(module)


def _is_changed(module: nn.Module) -> bool:
    """Return True if a call of a module runs hooks, or a forward that somebody has put on it."""
    return has_hooks(module) or "forward" in module.__dict__


def _precision(layer: Any, x: Tensor, call: Call) -> tuple[torch.dtype, bool] | None:
    """Return the dtype to compute in, and True if A and B, float32, are computed in three parts of bfloat16.

    Return None if PEFT's forward is to compute the call.
    """
    lora_A, lora_B = call.lora_A.dtype, call.lora_B.dtype
    base = x.dtype if call.weight is None else call.weight.dtype
    if (dtype := autocast_dtype(x.device.type)) is not None:
        fits = dtype is torch.bfloat16 and {x.dtype, base, lora_A, lora_B} <= {torch.float32, torch.bfloat16}
        return (dtype, False) if fits and call.weight is not None else None
    if x.dtype is not base or lora_A is not lora_B or base is torch.float16:
        return None
    if base is lora_A:
        return base, False
    casts = getattr(layer, "cast_input_dtype_enabled", True)
    return (base, True) if (base, lora_A) == (torch.bfloat16, torch.float32) and casts else None


def fuse_lora(setup: Setup) -> None:
    """Fuse the LoRA layers of a model with their bases, unless the config says fused=False."""
    if setup.config.fused:
        _find_wide_product(setup.mesh.device_type)
    for module in clean_names(setup.model):
        if isinstance(module, LoraLayer):
            why = why_not_fused(module) if setup.config.fused else "fused=False"
            module.__dict__[_WHY] = why
            if why is None:
                module.__dict__[_PEFT] = type(module).forward
                wrap_forward(module, _run)


def count_fused(model: nn.Module) -> tuple[int, Counter[str]]:
    """Return the number of LoRA layers that are fused, and of those that keep PEFT's forward, by the reason."""
    found = [module.__dict__[_WHY] for module in model.modules() if _WHY in module.__dict__]
    return found.count(None), Counter(why for why in found if why is not None)
