"""bitsandbytes: NF4 and FP4 (`Linear4bit`), LLM.int8 (`Linear8bitLt`)."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import bitsandbytes.functional as quantisation
import torch
from bitsandbytes.functional import QuantState
from torch import Tensor

from lora_parallel.quantised.layer import Quantised, bytes_of, frozen

__all__ = ["Linear4bit", "Linear8bit", "problem_4bit", "problem_8bit"]


class Linear4bit(bitsandbytes.nn.Linear4bit, Quantised):
    """`weight` uint8 [out, in / 2], two features a byte; `weight_absmax`, float32 of each block, as bytes.

    Scales that were themselves quantised (double quantisation) are held in float32, as bitsandbytes computes them in
    each call: 4.5 bits a weight. Cut anywhere, those would need the statistics of the whole.
    """

    weight_absmax: Tensor
    _code: Any
    _kind: str
    _dtype: torch.dtype

    @classmethod
    def take(cls, layer: Any) -> None:
        """Change a layer that is quantised, in place."""
        state, packed = layer.weight.quant_state, layer.weight.data
        out, width = state.shape
        absmax = state.absmax
        if state.nested:
            absmax = quantisation.dequantize_blockwise(state.absmax, state.state2) + state.offset
        del layer._parameters["weight"]
        layer.weight = frozen(packed.view(torch.uint8).view(out, width // 2))
        layer.weight_absmax = bytes_of(absmax.float(), out)
        layer.scales = {"weight_absmax": False}
        layer.block, layer.quant_state = state.blocksize, None
        layer._code, layer._kind, layer._dtype = state.code, state.quant_type, state.dtype
        layer.__class__ = cls

    def _state(self) -> QuantState:
        return QuantState(
            absmax=self.weight_absmax.detach().view(torch.float32).flatten(),
            shape=torch.Size((self.weight.shape[0], 2 * self.weight.shape[1])),
            code=self._code.to(self.weight.device),
            blocksize=self.block,
            quant_type=self._kind,
            dtype=self._dtype,
        )

    def dense(self) -> Tensor:
        """See `Quantised`."""
        return quantisation.dequantize_4bit(self.weight.detach().reshape(-1, 1), self._state())

    def forward(self, x: Tensor) -> Tensor:
        """As `bitsandbytes.nn.Linear4bit`.

        Raises:
            TypeError: In float64, for which bitsandbytes has no kernel; some of its backends then return what is in
                memory (0.50, https://github.com/bitsandbytes-foundation/bitsandbytes).
        """
        given = x.dtype
        fed = x if self.compute_dtype is None else x.to(self.compute_dtype)
        if fed.dtype == torch.float64:
            raise TypeError("bitsandbytes has no 4-bit product in float64: use bnb_4bit_compute_dtype=torch.float32.")
        bias = None if self.bias is None else self.bias.to(fed.dtype)
        y = bitsandbytes.matmul_4bit(fed, self.weight.reshape(-1, 1), quant_state=self._state(), bias=bias)
        return y.to(given)


class Linear8bit(bitsandbytes.nn.Linear8bitLt, Quantised):
    """`weight`, int8 [out, in], and `weight_scb`, float32 of each row, as bytes."""

    weight_scb: Tensor

    @classmethod
    def take(cls, layer: Any) -> None:
        """Change a layer that is quantised, in place."""
        scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
        packed = layer.weight.data
        del layer._parameters["weight"]
        layer.weight = frozen(packed.view(torch.uint8))
        layer.weight_scb = bytes_of(scales.float(), len(scales))
        layer.scales = {"weight_scb": True}
        layer.block = layer.in_features
        layer.state.CB = layer.state.SCB = None
        layer.__class__ = cls

    def _scales(self) -> Tensor:
        return self.weight_scb.detach().view(torch.float32).flatten()

    def dense(self) -> Tensor:
        """See `Quantised`."""
        return quantisation.int8_vectorwise_dequant(self.weight.detach().view(torch.int8), self._scales())

    def forward(self, x: Tensor) -> Tensor:
        """As `bitsandbytes.nn.Linear8bitLt`."""
        state = bitsandbytes.MatmulLtState()
        state.threshold, state.use_pool = self.state.threshold, self.state.use_pool
        state.has_fp16_weights, state.is_training = False, self.training
        state.CB, state.SCB = self.weight.detach().view(torch.int8), self._scales()
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return bitsandbytes.matmul(x, state.CB, bias=bias, state=state)


def problem_4bit(layer: Any) -> str | None:
    """Why a `Linear4bit` cannot be held as bytes, or None if it can."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return "its weight is not quantised yet"
    if state.shape[1] % state.blocksize:
        return f"its blocks of {state.blocksize} do not end with its rows of {state.shape[1]} features"
    return None


def problem_8bit(layer: Any) -> str | None:
    """Why a `Linear8bitLt` cannot be held as bytes, or None if it can."""
    if layer.state.has_fp16_weights:
        return "it keeps its weight in 16 bits (has_fp16_weights=True)"
    if layer.weight.dtype != torch.int8 or (layer.weight.SCB is None and layer.state.SCB is None):
        return "its weight is not quantised yet"
    return None
