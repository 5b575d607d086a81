"""Hold the formats of bitsandbytes: NF4 and FP4 (`Linear4bit`), LLM.int8 (`Linear8bitLt`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import bitsandbytes
import bitsandbytes.functional as quantisation
import torch
from bitsandbytes.functional import QuantState
from torch import Tensor

from lora_parallel.layers.linear_classes import QuantisedLayer, bytes_of, frozen
from lora_parallel.lazy.graph import Block, Node, ReadNode, Region, read, whole
from lora_parallel.lazy.lazy_tensor import LazyTensor
from lora_parallel.quantised.packed_weight import Bytes, Encoding, Packed


class Linear4bit(bitsandbytes.nn.Linear4bit, QuantisedLayer):
    """Hold a 4-bit weight: `weight` uint8 [out, in / 2], two features a byte, and `weight_absmax`, the scales as bytes.

    Each block has one scale in float32. Scales that were themselves quantised (double quantisation) are held in
    float32 too, as bitsandbytes computes them in each call: 4.5 bits a weight. A shard of the quantised scales would
    need statistics of the whole weight: the mean of all scales, and the scales of groups that cross shards.
    """

    weight_absmax: Tensor
    _code: Any
    _kind: str
    _dtype: torch.dtype

    @classmethod
    def take(cls, layer: Any) -> None:
        """Change a layer whose weight bitsandbytes has quantised, in place."""
        state, packed = layer.weight.quant_state, layer.weight.data
        out, width = state.shape
        absmax = state.absmax
        if state.nested:
            absmax = quantisation.dequantize_blockwise(state.absmax, state.state2) + state.offset
        weight = frozen(packed.view(torch.uint8).view(out, width // 2))
        cls.hold(layer, {"weight": weight, "weight_absmax": bytes_of(absmax.float(), out)}, state)

    @classmethod
    def hold(cls, layer: Any, parts: Mapping[str, Tensor], state: QuantState) -> None:
        """Let a layer hold the parameters `parts`, which `state` describes, in place."""
        layer.quant_state = None
        layer._code, layer._kind, layer._dtype = state.code, state.quant_type, state.dtype
        cls.replace_weight(layer, parts, {"weight_absmax": False}, state.blocksize)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # The code follows the layer to its device, in its own dtype: the host would wait for a copy in each forward.
        self._code = self._code.to(fn(self._code).device)
        return super()._apply(fn, recurse)

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
        """Return the dequantised weight, [out, in], as bitsandbytes computes it."""
        return quantisation.dequantize_4bit(self.weight.detach().reshape(-1, 1), self._state())

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output as `bitsandbytes.nn.Linear4bit` does."""
        fed = x if self.compute_dtype is None else x.to(self.compute_dtype)
        # Without a kernel some backends of bitsandbytes 0.50 return uninitialised memory.
        if fed.dtype == torch.float64:
            raise TypeError("bitsandbytes has no 4-bit product in float64: use bnb_4bit_compute_dtype=torch.float32.")
        bias = None if self.bias is None else self.bias.to(fed.dtype)
        y = bitsandbytes.matmul_4bit(fed, self.weight.reshape(-1, 1), quant_state=self._state(), bias=bias)
        return y.to(x.dtype)


class Linear8bit(bitsandbytes.nn.Linear8bitLt, QuantisedLayer):
    """Hold an int8 weight as bytes: `weight`, int8 [out, in], and `weight_scb`, one float32 scale for each row."""

    weight_scb: Tensor

    @classmethod
    def take(cls, layer: Any) -> None:
        """Change a layer whose weight bitsandbytes has quantised, in place."""
        scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
        weight = frozen(layer.weight.data.view(torch.uint8))
        cls.hold(layer, {"weight": weight, "weight_scb": bytes_of(scales.float(), len(scales))})

    @classmethod
    def hold(cls, layer: Any, parts: Mapping[str, Tensor]) -> None:
        """Let a layer hold the parameters `parts`, in place."""
        layer.state.CB = layer.state.SCB = None
        cls.replace_weight(layer, parts, {"weight_scb": True}, layer.in_features)

    def _scales(self) -> Tensor:
        return self.weight_scb.detach().view(torch.float32).flatten()

    def dense(self) -> Tensor:
        """Return the dequantised weight, [out, in], as bitsandbytes computes it."""
        return quantisation.int8_vectorwise_dequant(self.weight.detach().view(torch.int8), self._scales())

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output as `bitsandbytes.nn.Linear8bitLt` does."""
        state = bitsandbytes.MatmulLtState()
        state.threshold, state.use_pool = self.state.threshold, self.state.use_pool
        state.has_fp16_weights, state.is_training = False, self.training
        state.CB, state.SCB = self.weight.detach().view(torch.int8), self._scales()
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return bitsandbytes.matmul(x, state.CB, bias=bias, state=state)


def problem_4bit(layer: Any) -> str | None:
    """Return the reason why a `Linear4bit` cannot be held as bytes, or None if it can."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return "its weight is not quantised yet"
    if tuple(state.shape) != (layer.out_features, layer.in_features):
        return _other_shape(state.shape, layer)
    return _problem_of_scales(state)


def _problem_of_scales(state: QuantState) -> str | None:
    """Return the reason why the scales of a 4-bit weight do not fit it, or None if they do."""
    # If a file lacks the tensors of double quantisation, bitsandbytes takes the scales as not quantised.
    blocks, rest = divmod(state.shape.numel(), state.blocksize)
    if rest or state.shape[1] % state.blocksize:
        return f"its blocks of {state.blocksize} do not end with its rows of {state.shape[1]} features"
    if state.absmax.numel() != blocks or state.absmax.dtype != (torch.uint8 if state.nested else torch.float32):
        return (
            f"its {blocks} blocks have {state.absmax.numel()} scales in {state.absmax.dtype}"
            f"{'' if state.nested else ', and no scales of these'}: the checkpoint is incomplete"
        )
    if state.nested and state.state2.absmax.numel() != -(-blocks // state.state2.blocksize):
        return (
            f"its {blocks} scales have {state.state2.absmax.numel()} of their own, for {state.state2.blocksize} each: "
            "the checkpoint is incomplete"
        )
    return None


def problem_8bit(layer: Any) -> str | None:
    """Return the reason why a `Linear8bitLt` cannot be held as bytes, or None if it can."""
    if layer.state.has_fp16_weights:
        return "it keeps its weight in 16 bits (has_fp16_weights=True)"
    scales = getattr(layer.weight, "SCB", None)  # a plain parameter has none, as transformers 5.17 may leave it
    scales = scales if scales is not None else layer.state.SCB
    if layer.weight.dtype != torch.int8 or scales is None:
        return "its weight is not quantised yet"
    if tuple(layer.weight.shape) != (layer.out_features, layer.in_features):
        return _other_shape(layer.weight.shape, layer)
    if scales.numel() != layer.out_features:
        return f"its {layer.out_features} rows have {scales.numel()} scales: the checkpoint is incomplete"
    return None


def _other_shape(shape: torch.Size, layer: Any) -> str:
    return (
        f"its weight has shape {tuple(shape)}, and the layer {(layer.out_features, layer.in_features)}: the model's "
        "config is not its checkpoint's"
    )


# ---------------------------------------------------------------------- layers that are still on disk


def dense_4bit(layer: Any, dense: Node) -> Packed:
    """Return the weight of a `Linear4bit` on meta as a node that is quantised when it is read."""
    settings, out, features = layer.weight, *dense.shape
    keep = {"quant_type": settings.quant_type, "blocksize": settings.blocksize}

    def encode(block: Tensor) -> dict[str, Tensor]:
        # bitsandbytes quantises a weight when it moves to a device: here from the CPU back to the device of the block.
        dense: Any = bitsandbytes.nn.Params4bit(block.cpu(), compress_statistics=False, **keep)
        weight = dense.to(block.device)
        absmax = bytes_of(weight.quant_state.absmax.float(), len(block))
        return {"weight": weight.data.view(len(block), -1), "weight_absmax": absmax}

    if features % settings.blocksize:
        raise ValueError(
            f"its blocks of {settings.blocksize} do not end with its rows of {features} features: such a layer cannot "
            "be sharded (llm_int8_skip_modules leaves it as it is)"
        )
    widths = {"weight": features // 2, "weight_absmax": features // settings.blocksize * 4}
    encoding = Encoding(dense, settings.blocksize, encode, widths)
    absmax: Node = encoding.part("weight_absmax")
    if settings.compress_statistics:
        encoding = Encoding(dense, settings.blocksize, encode, widths, only="weight")
        scales = Encoding(dense, settings.blocksize, encode, widths, only="weight_absmax")
        absmax = _Compressed(scales.part("weight_absmax"), (out, widths["weight_absmax"]))
    state = QuantState(
        absmax=torch.empty(0),
        shape=torch.Size((out, features)),
        code=quantisation.get_4bit_type(settings.quant_type, device="cpu"),
        dtype=dense.dtype,
        **keep,
    )
    return _packed_4bit(encoding.part("weight"), absmax, state)


def _packed_4bit(weight: Node, absmax: Node, state: QuantState) -> Packed:
    out, features = state.shape
    parts = {"weight": weight, "weight_absmax": absmax}
    return Packed(parts, partial(Linear4bit.hold, state=state), (out * features // 2, 1), torch.uint8)


@dataclass(frozen=True, eq=False)
class _Compressed(Block):
    """Compute the scales that double quantisation leaves; it subtracts the mean of the scales of the whole weight."""

    absmax: Node
    shape: tuple[int, int]
    dtype: torch.dtype = torch.uint8

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.absmax,)

    def needs(self, region: Region) -> Iterator[tuple[Node, Region]]:
        yield self.absmax, whole(self.shape)

    def blocks(self, regions: Sequence[Region], read: ReadNode, device: str) -> Iterator[Tensor]:
        absmax = read(self.absmax, device=device).view(torch.float32).flatten()
        offset = absmax.mean()
        compressed, state = quantisation.quantize_blockwise(absmax - offset, blocksize=256)
        scales = quantisation.dequantize_blockwise(compressed, state) + offset
        scales = scales.view(self.shape[0], -1).view(torch.uint8)
        yield from (scales[region] for region in regions)


def stored_4bit(layer: Any, tensors: Mapping[str, LazyTensor]) -> Packed:
    """Return the weight of a `Linear4bit` on meta as a node made of the tensors that bitsandbytes saved."""
    kinds = [name.rpartition("__")[2] for name in tensors if "quant_state" in name]
    if len(kinds) != 1 or "weight.absmax" not in tensors or "weight.quant_map" not in tensors:
        raise ValueError(
            f"config.json says that it is quantised by bitsandbytes to 4 bits, and the files hold {_list(tensors)} of "
            "it: the config is not the checkpoint's"
        )
    if kinds[0] != layer.weight.quant_type:
        raise ValueError(
            f"config.json says bnb_4bit_quant_type={layer.weight.quant_type!r}, and the files hold {kinds[0]!r}: the "
            "config is not the checkpoint's"
        )
    small = ("quant_map", "nested_quant_map", f"bitsandbytes__{kinds[0]}")
    state_tensors = {name: read(t.node) if name.endswith(small) else t for name, t in tensors.items()}
    packed: Any = state_tensors.pop("weight")
    state = QuantState.from_dict(state_tensors, device=torch.device("cpu"))
    out, features = layer.out_features, layer.in_features
    if tuple(state.shape) != (out, features) or packed.numel() * packed.element_size() * 2 != out * features:
        raise ValueError(
            f"the files hold a weight of shape {tuple(state.shape)} in {packed.numel()} bytes, and the layer has "
            f"{(out, features)}: the config is not the checkpoint's"
        )
    if problem := _problem_of_scales(state):
        raise ValueError(problem)
    absmax: Node = Bytes.of(state.absmax.node, out)
    if state.nested:
        absmax = _Nested(state.absmax.node, state.state2, state.offset, (out, features // state.blocksize * 4))
    state.absmax = torch.empty(0)
    return _packed_4bit(Bytes.of(packed.node, out), absmax, state)


@dataclass(frozen=True, eq=False)
class _Nested(Block):
    """Decode the scales of a weight from a file that holds them double-quantised."""

    compressed: Node
    """The quantised scales in the file, uint8 [blocks of the weight]."""

    state: QuantState
    """Quantisation of the scales: one scale for each `blocksize` of them, also still in the file."""

    offset: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype = torch.uint8

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.compressed, self.state.absmax.node)

    def needs(self, region: Region) -> Iterator[tuple[Node, Region]]:
        scales, blocks = self._blocks(region[0])
        yield from ((self.compressed, (blocks,)), (self.state.absmax.node, (scales,)))

    def _blocks(self, rows: slice) -> tuple[slice, slice]:
        """Return the range of scales' scales that some rows need, and the range of scales that these are for."""
        per_row, size = self.shape[1] // 4, self.state.blocksize
        scales = slice(rows.start * per_row // size, -(-rows.stop * per_row // size))
        return scales, slice(scales.start * size, min(scales.stop * size, self.compressed.shape[0]))

    def blocks(self, regions: Sequence[Region], read: ReadNode, device: str) -> Iterator[Tensor]:
        for rows, columns in regions:
            scales, blocks = self._blocks(rows)
            values = quantisation.dequantize_blockwise(
                read(self.compressed, (blocks,), device),
                absmax=read(self.state.absmax.node, (scales,), device),
                code=self.state.code.to(device),
                blocksize=self.state.blocksize,
            )
            values = values + self.offset.to(device)
            per_row = self.shape[1] // 4
            values = values[rows.start * per_row - blocks.start : rows.stop * per_row - blocks.start]
            yield values.view(rows.stop - rows.start, per_row).view(torch.uint8)[:, columns]


def dense_8bit(layer: Any, dense: Node) -> Packed:
    """Return the weight of a `Linear8bitLt` on meta as a node that is quantised when it is read."""
    out, features = dense.shape

    def encode(block: Tensor) -> dict[str, Tensor]:
        dense: Any = bitsandbytes.nn.Int8Params(block.cpu(), requires_grad=False)
        weight = dense.to(block.device)
        return {"weight": weight.data.view(torch.uint8), "weight_scb": bytes_of(weight.SCB.float(), len(block))}

    widths = {"weight": features, "weight_scb": 4}
    encoding = Encoding(dense, features, encode, widths, of_rows=frozenset({"weight_scb"}))
    parts = {name: encoding.part(name) for name in widths}
    return Packed(parts, Linear8bit.hold, (out, features), torch.int8)


def stored_8bit(layer: Any, tensors: Mapping[str, LazyTensor]) -> Packed:
    """Return the weight of a `Linear8bitLt` on meta as a node made of the tensors that bitsandbytes saved."""
    weight, scales = tensors.get("weight"), tensors.get("SCB")
    if weight is None or scales is None or weight.dtype != torch.int8:
        raise ValueError(
            "config.json says that it is quantised by bitsandbytes to int8, and the files hold "
            f"{_list(tensors)} of it: the config is not the checkpoint's"
        )
    shape = layer.out_features, layer.in_features
    if tuple(weight.shape) != shape or scales.numel() != shape[0]:
        raise ValueError(
            f"the files hold a weight of shape {tuple(weight.shape)} with {scales.numel()} scales, and the layer has "
            f"{shape}: the config is not the checkpoint's"
        )
    parts = {"weight": Bytes.of(weight.node, shape[0]), "weight_scb": Bytes.of(scales.node, shape[0])}
    return Packed(parts, Linear8bit.hold, shape, torch.int8)


def _list(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} ({str(tensor.dtype).removeprefix('torch.')})" for name, tensor in tensors.items())
