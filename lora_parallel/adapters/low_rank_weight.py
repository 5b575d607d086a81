"""Multiply with a stack of expert weights and with its LoRA factors separately, without adding the factors to it.

PEFT adapts a fused 3-D weight by adding `scaling * B A` to it in every forward: a second tensor of the size of all
experts, kept for backward. A `LowRankWeight` takes the place of the weight in the model's own code. In the products
there (`F.linear`, `@`, `bmm`, grouped matrix products, of one expert or of all) it multiplies with the base and with
the factors, and adds the results. Any other operation gets the dense sum, which is what PEFT computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

_BYTES_ALIGNED = 16  # the rows of the operands of a grouped matrix product on a GPU must be multiples of it


@dataclass(frozen=True)
class Factors:
    """Hold the factors of `scaling * left @ right`: left is [..., a, r] and right is [..., r, b]."""

    left: Tensor
    right: Tensor
    scaling: float

    @property
    def transposed(self) -> Factors:
        return Factors(self.right.transpose(-2, -1), self.left.transpose(-2, -1), self.scaling)


class LowRankWeight:
    """Stand for the weight `base + sum(scaling * left @ right)` without computing the sum.

    The base is [experts, a, b], or [a, b] of one expert; None for zeros.
    """

    def __init__(self, base: Tensor | None, factors: Sequence[Factors]) -> None:
        self.base, self.factors = base, tuple(factors)

    @property
    def shape(self) -> torch.Size:
        if self.base is not None:
            return self.base.shape
        return torch.Size([*self.factors[0].left.shape[:-1], self.factors[0].right.shape[-1]])

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def _like(self) -> Tensor:
        return self.factors[0].left if self.base is None else self.base

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dims, as `Tensor.dim` does."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one dim, as `Tensor.size` does."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def data_ptr(self) -> int:
        """Return the address of the base (of the first factor if there is none): callers check its alignment."""
        return self._like.data_ptr()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def dense(self) -> Tensor:
        """Return the sum of the base and the products of all factors, as a tensor."""
        return self._sum(self.base, lambda f: f.scaling * (f.left @ f.right))

    def _sum(self, total: Tensor | None, product: Callable[[Factors], Tensor]) -> Tensor:
        """Add the product of each adapter's factors to a tensor, if there is one."""
        for factors in self.factors:
            total = product(factors) if total is None else total + product(factors)
        assert total is not None
        return total

    def __getitem__(self, index: Any) -> Any:
        """Return the weight of some experts: still factored for a stack and ints or a tensor of them, else a tensor."""
        mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        if self.dim() != 3 or mask or not isinstance(index, (int, Tensor)):
            return self.dense()[index]
        return self._map(*[lambda x: x[index]] * 3)

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Return the weight with two dims swapped: still factored if these are the last two, else a tensor."""
        if {dim0 % self.dim(), dim1 % self.dim()} != {self.dim() - 2, self.dim() - 1}:
            return self.dense().transpose(dim0, dim1)
        base = None if self.base is None else self.base.transpose(-2, -1)
        return LowRankWeight(base, [f.transposed for f in self.factors])

    @property
    def mT(self) -> Any:
        return self.transpose(-2, -1)

    @property
    def T(self) -> Any:
        return self.transpose(-2, -1) if self.dim() == 2 else self.dense().T

    def t(self) -> Any:
        """Return the transpose of a 2-D weight, as `Tensor.t` does."""
        return self.T

    def to(self, *args: Any, **kwargs: Any) -> LowRankWeight:
        """Return the weight with another dtype or device, as `Tensor.to` does, still factored."""
        return self._map(*[lambda x: x.to(*args, **kwargs)] * 3)

    def contiguous(self) -> LowRankWeight:
        """Return the weight itself: products do not need contiguous memory."""
        return self

    def index_select(self, dim: int, rows: Tensor) -> LowRankWeight:
        """Return some experts (dim 0), rows (dim 1) or columns (dim 2) of a stack [experts, a, b], still factored."""
        dim %= self.dim()

        def select(x: Tensor) -> Tensor:
            return x.index_select(dim, rows)

        def keep(x: Tensor) -> Tensor:
            return x

        return self._map(select, keep if dim == 2 else select, keep if dim == 1 else select)

    def _map(
        self, base: Callable[[Tensor], Tensor], left: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor]
    ) -> LowRankWeight:
        mapped = None if self.base is None else base(self.base)
        return LowRankWeight(mapped, [Factors(left(f.left), right(f.right), f.scaling) for f in self.factors])

    def __matmul__(self, other: Tensor) -> Tensor:
        return self._times(other, torch.matmul)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        return self._after(other, torch.matmul)

    def _after(self, x: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return `x @ self`, computed by `multiply`."""
        if x.dim() < 2:  # broadcasting over one factor after the other would give another result
            return multiply(x, self.dense())
        base = None if self.base is None else multiply(x, self.base)
        return self._sum(base, lambda f: multiply(multiply(x, f.left), f.right) * f.scaling)

    def _times(self, x: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return `self @ x`, computed by `multiply`."""
        if x.dim() < 2:
            return multiply(self.dense(), x)
        base = None if self.base is None else multiply(self.base, x)
        return self._sum(base, lambda f: multiply(f.left, multiply(f.right, x)) * f.scaling)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func in _PRODUCTS and not kwargs and len(args) == 2:
            first, second = args
            if isinstance(second, cls) and not isinstance(first, cls):
                return second._after(first, func)
            if isinstance(first, cls) and not isinstance(second, cls):
                return first._times(second, func)
        if _is_grouped(func) and not isinstance(args[0], cls) and isinstance(args[1], cls):
            rest = args[2:]
            return args[1]._aligned()._after(args[0], lambda x, w: func(x, w, *rest, **kwargs))
        dense_args, dense_kwargs = tree_map_only(cls, cls.dense, (args, kwargs))
        return func(*dense_args, **dense_kwargs)

    def _aligned(self) -> LowRankWeight:
        """Return the weight with contiguous factors, each r padded by zeros to the alignment that kernels require."""
        # PEFT's B of a stack is a view whose innermost stride belongs to the experts.
        missing = [-f.left.shape[-1] % (_BYTES_ALIGNED // f.left.element_size()) for f in self.factors]
        padded = [
            Factors(F.pad(f.left, (0, n)).contiguous(), F.pad(f.right, (0, 0, 0, n)).contiguous(), f.scaling)
            for f, n in zip(self.factors, missing, strict=True)
        ]
        return LowRankWeight(self.base, padded)


_PRODUCTS = frozenset([torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__])
_GROUPED = frozenset(filter(None, [getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)]))


def _is_grouped(func: Any) -> bool:
    if func in _GROUPED or torch.compiler.is_compiling():  # torch.compile cannot trace names of functions
        return func in _GROUPED
    return "grouped_mm" in getattr(func, "__name__", str(func))  # transformers has one of its own, where torch has none


def _dense_operator(name: str) -> Callable[..., Any]:
    def operator(self: LowRankWeight, *others: Any) -> Any:
        return getattr(self.dense(), name)(*tree_map_only(LowRankWeight, LowRankWeight.dense, others))

    return operator


# Python looks for these operators on the class, where `__getattr__` does not apply.
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _side in ("", "r"):
        setattr(LowRankWeight, f"__{_side}{_name}__", _dense_operator(f"__{_side}{_name}__"))
for _name in ("neg", "abs", "lt", "le", "gt", "ge", "iter"):
    setattr(LowRankWeight, f"__{_name}__", _dense_operator(f"__{_name}__"))


def _linear(input: Tensor, weight: LowRankWeight, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, LowRankWeight) or weight.dim() != 2:
        return F.linear(*tree_map_only(LowRankWeight, LowRankWeight.dense, (input, weight, bias)))
    y = weight.transpose(-2, -1)._after(input, torch.matmul)
    return y if bias is None else y + bias
