"""A stack of expert weights and its LoRA factors, multiplied one after the other.

PEFT adapts a fused 3-D weight by adding `scaling * B A` to it in every forward: a second tensor of the size of all
experts, kept for backward. A `FactoredWeight` stands where the weight stands in the model's own code. It takes part in
the products there (`F.linear`, `@`, `bmm`, grouped matrix products, of one expert or of all) by its factors; under any
other operation it becomes the sum, which is what PEFT computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["FactoredWeight", "Factors"]

_BYTES_ALIGNED = 16
"""Rows of the operands of a grouped matrix product on a GPU."""


@dataclass(frozen=True)
class Factors:
    """`scaling * left @ right`, [..., a, r] and [..., r, b]."""

    left: Tensor
    right: Tensor
    scaling: float

    def map(self, left: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor]) -> Factors:
        return Factors(left(self.left), right(self.right), self.scaling)

    @property
    def transposed(self) -> Factors:
        return Factors(self.right.transpose(-2, -1), self.left.transpose(-2, -1), self.scaling)


class FactoredWeight:
    """`base + sum(scaling * left @ right)`.

    Args:
        base: [experts, a, b], or [a, b] of one; None stands for zeros.
        factors: Of each adapter.
    """

    def __init__(self, base: Tensor | None, factors: Sequence[Factors]) -> None:
        self._base, self._factors = base, tuple(factors)

    # ------------------------------------------------------------------ what code asks of a weight

    @property
    def shape(self) -> torch.Size:
        if self._base is not None:
            return self._base.shape
        first = self._factors[0]
        return torch.Size([*first.left.shape[:-1], first.right.shape[-1]])

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def _like(self) -> Tensor:
        return self._factors[0].left if self._base is None else self._base

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def data_ptr(self) -> int:
        """Of the base; callers look at its alignment."""
        return self._like.data_ptr()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    # ------------------------------------------------------------------ parts of it

    def dense(self) -> Tensor:
        """The sum."""
        total = self._base
        for each in self._factors:
            product = each.scaling * (each.left @ each.right)
            total = product if total is None else total + product
        assert total is not None
        return total

    def __getitem__(self, index: Any) -> Any:
        """Of some experts it stays factored."""
        mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        if self.dim() != 3 or mask or not isinstance(index, (int, Tensor)):
            return self.dense()[index]
        return self._map(lambda x: x[index], lambda x: x[index], lambda x: x[index])

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Of the last two dims it stays factored."""
        if {dim0 % self.dim(), dim1 % self.dim()} != {self.dim() - 2, self.dim() - 1}:
            return self.dense().transpose(dim0, dim1)
        base = None if self._base is None else self._base.transpose(-2, -1)
        return FactoredWeight(base, [each.transposed for each in self._factors])

    @property
    def mT(self) -> Any:
        return self.transpose(-2, -1)

    @property
    def T(self) -> Any:
        return self.transpose(-2, -1) if self.dim() == 2 else self.dense().T

    def t(self) -> Any:
        """As of a tensor."""
        return self.T

    def to(self, *args: Any, **kwargs: Any) -> FactoredWeight:
        """As of a tensor."""
        return self._map(*[lambda x: x.to(*args, **kwargs)] * 3)

    def contiguous(self) -> FactoredWeight:
        """It is multiplied with only."""
        return self

    def index_select(self, dim: int, rows: Tensor) -> FactoredWeight:
        """Some experts (dim 0), rows (1) or columns (2) of a stack."""
        dim %= self.dim()

        def chosen(x: Tensor) -> Tensor:
            return x.index_select(dim, rows)

        def whole(x: Tensor) -> Tensor:
            return x

        return self._map(chosen, whole if dim == 2 else chosen, whole if dim == 1 else chosen)

    def _map(
        self, base: Callable[[Tensor], Tensor], left: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor]
    ) -> FactoredWeight:
        mapped = None if self._base is None else base(self._base)
        return FactoredWeight(mapped, [each.map(left, right) for each in self._factors])

    # ------------------------------------------------------------------ products

    def __matmul__(self, other: Tensor) -> Tensor:
        return self._times(other, torch.matmul)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        return self._after(other, torch.matmul)

    def _after(self, x: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`x @ self`"""
        if x.dim() < 2:  # each factor would take it for something else
            return multiply(x, self.dense())
        total = None if self._base is None else multiply(x, self._base)
        for each in self._factors:
            product = multiply(multiply(x, each.left), each.right) * each.scaling
            total = product if total is None else total + product
        assert total is not None
        return total

    def _times(self, x: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`self @ x`"""
        if x.dim() < 2:
            return multiply(self.dense(), x)
        total = None if self._base is None else multiply(self._base, x)
        for each in self._factors:
            product = multiply(each.left, multiply(each.right, x)) * each.scaling
            total = product if total is None else total + product
        assert total is not None
        return total

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func)).split(".")[0]
        if name == "linear":
            return _linear(*args, **kwargs)
        if name in ("matmul", "bmm", "mm", "__matmul__") and not kwargs and len(args) == 2:
            first, second = args
            if isinstance(second, cls) and not isinstance(first, cls):
                return second._after(first, func)
            if isinstance(first, cls) and not isinstance(second, cls):
                return first._times(second, func)
        if "grouped_mm" in name and not isinstance(args[0], cls) and isinstance(args[1], cls):
            rest = args[2:]
            return args[1]._aligned()._after(args[0], lambda x, w: func(x, w, *rest, **kwargs))
        dense = tree_map_only(cls, cls.dense, (args, kwargs))
        return func(*dense[0], **dense[1])

    def _aligned(self) -> FactoredWeight:
        """With ranks filled up with zeros, as kernels ask."""
        return FactoredWeight(self._base, [_filled_up(each) for each in self._factors])


def _dense_operator(name: str) -> Callable[..., Any]:
    def operator(self: FactoredWeight, *others: Any) -> Any:
        return getattr(self.dense(), name)(*tree_map_only(FactoredWeight, FactoredWeight.dense, others))

    return operator


# Python looks for these on the class.
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _side in ("", "r"):
        setattr(FactoredWeight, f"__{_side}{_name}__", _dense_operator(f"__{_side}{_name}__"))
for _name in ("neg", "abs", "lt", "le", "gt", "ge", "iter"):
    setattr(FactoredWeight, f"__{_name}__", _dense_operator(f"__{_name}__"))


def _linear(input: Tensor, weight: FactoredWeight, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, FactoredWeight) or weight.dim() != 2:
        return F.linear(*tree_map_only(FactoredWeight, FactoredWeight.dense, (input, weight, bias)))
    y = weight.transpose(-2, -1)._after(input, torch.matmul)
    return y if bias is None else y + bias


def _filled_up(factors: Factors) -> Factors:
    missing = -factors.left.shape[-1] % (_BYTES_ALIGNED // factors.left.element_size())
    if not missing:
        return factors
    return factors.map(lambda left: F.pad(left, (0, missing)), lambda right: F.pad(right, (0, 0, 0, missing)))
