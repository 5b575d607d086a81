"""Represent quantised weights on disk: bytes that a checkpoint holds, or bytes made of a dense weight as it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from lora_parallel.lazy.graph import Block, Node, Piece, ReadNode, Region, whole

_CHUNK = 8 * 2**20  # elements, in whole rows, that are brought into memory at once to be made smaller


def row_chunks(rows: slice, width: int) -> Iterator[slice]:
    """Yield consecutive ranges of `rows`, of at most `_CHUNK` elements (or one row) if a row has `width` elements."""
    step = max(1, _CHUNK // max(1, width))
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))


@dataclass(frozen=True)
class Packed:
    """Represent the weight of a quantised layer, with the shape and dtype that its quantiser shows.

    It is not read itself: the layer holds parameters of bytes in its place, and these are read.
    """

    parts: Mapping[str, Node]  # nodes of the bytes, uint8 [out, .], by the name of the parameter that holds them
    # function that lets a layer hold parameters of these names in place of its weight
    hold: Callable[[Any, Mapping[str, Tensor]], None]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def inputs(self) -> tuple[Node, ...]:
        return tuple(self.parts.values())

    def pieces(self, region: Region) -> Iterator[Piece]:
        raise ValueError(
            "the weight of a quantised layer is on disk, and cannot be used before the model is sharded: load the "
            "model outside of meta_init for that."
        )


@dataclass(frozen=True)
class Bytes:
    """Represent a tensor of a checkpoint, which may have any shape, as row-major uint8 [rows, bytes of a row]."""

    parent: Node
    shape: tuple[int, int]
    dtype: torch.dtype = torch.uint8

    @staticmethod
    def of(parent: Node, rows: int) -> Bytes:
        """Return the bytes of `parent` in `rows` rows of equal length."""
        return Bytes(parent, (rows, prod(parent.shape) * parent.dtype.itemsize // rows))

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.parent,)

    def pieces(self, region: Region) -> Iterator[Piece]:
        rows, columns = region
        if rows.stop <= rows.start or columns.stop <= columns.start:
            return
        size, shape = self.parent.dtype.itemsize, tuple(self.parent.shape)
        if len(shape) == 2 and shape[0] == self.shape[0]:
            first, last = columns.start // size, -(-columns.stop // size)
            yield self._piece((rows, slice(first, last)), region, rows, first * size)
        elif len(shape) == 1 and shape[0] == self.shape[0]:
            yield self._piece((rows,), region, rows, 0)
        else:
            per_row = shape[0] // self.shape[0]
            for some in row_chunks(rows, per_row):
                flat = slice(some.start * per_row, some.stop * per_row)
                yield self._piece((flat, *whole(shape[1:])), region, some, 0)

    def _piece(self, asked: Region, region: Region, rows: slice, offset: int) -> Piece:
        """Return the piece that fills `rows` of `region` from the parent's region `asked`.

        `offset` is the position in a row of the first byte that is read.
        """
        (piece,) = self.parent.pieces(asked)
        cut = slice(region[1].start - offset, region[1].stop - offset)
        height = rows.stop - rows.start
        return replace(
            piece,
            target=(slice(rows.start - region[0].start, rows.stop - region[0].start), slice(0, cut.stop - cut.start)),
            steps=(*piece.steps, lambda block: block.contiguous().view(height, -1).view(torch.uint8)[:, cut]),
        )


@dataclass(eq=False)
class Encoding:
    """Make a layer's parts of bytes from a dense weight [out, in], in blocks of one row and `block` input features."""

    dense: Node
    block: int
    # function that encodes some rows and some whole blocks of features, and returns uint8 [rows, .] of each part
    encode: Callable[[Tensor], Mapping[str, Tensor]]
    widths: Mapping[str, int]  # number of bytes in a row of each part
    # parts whose bytes in a row do not depend on the number of features, such as one scale for a whole row
    of_rows: frozenset[str] = frozenset()
    # name of the only part that will be asked for, so that no other part is kept; None if every part will be
    only: str | None = None
    # parts that were encoded together with another one and not asked for yet, by the bounds of rows and features
    _rest: dict[tuple[int, ...], dict[str, Tensor]] = field(default_factory=dict)

    def part(self, name: str) -> Encoded:
        """Return the node of one part."""
        return Encoded(self, name, (self.dense.shape[0], self.widths[name]))

    def features(self, part: str, columns: slice) -> slice:
        """Return the range of input features, in whole blocks, from which the bytes `columns` of a row are made."""
        total, width = self.dense.shape[1], self.widths[part]
        if part in self.of_rows:
            return slice(0, total)
        first, last = columns.start * total // width, -(-columns.stop * total // width)
        return slice(first // self.block * self.block, min(-(-last // self.block) * self.block, total))

    def rows(
        self, part: str, rows: slice, features: slice, read: ReadNode, device: str
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the bytes of `part` for some rows and features: ranges of a few rows, each with its uint8 [rows, .]."""
        for some in row_chunks(rows, features.stop - features.start):
            key = (some.start, some.stop, features.start, features.stop)
            parts = self._rest.pop(key, None)
            if parts is None or part not in parts:
                parts = dict(self.encode(read(self.dense, (some, features)).to(device)))
            yield some, parts.pop(part)
            if parts and self.only is None:
                self._rest[key] = parts


@dataclass(frozen=True, eq=False)
class Encoded(Block):
    """Represent one part of an encoding, uint8 [out, bytes of a row]."""

    encoding: Encoding
    part: str
    shape: tuple[int, int]
    dtype: torch.dtype = torch.uint8

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.encoding.dense,)

    def needs(self, region: Region) -> Iterator[tuple[Node, Region]]:
        yield self.encoding.dense, (region[0], self.encoding.features(self.part, region[1]))

    def blocks(self, regions: Sequence[Region], read: ReadNode, device: str) -> Iterator[Tensor]:
        for rows, columns in regions:
            features = self.encoding.features(self.part, columns)
            before = features.start * self.shape[1] // self.encoding.dense.shape[1]
            cut = slice(columns.start - before, columns.stop - before)
            block = torch.empty(rows.stop - rows.start, cut.stop - cut.start, dtype=torch.uint8, device=device)
            for some, values in self.encoding.rows(self.part, rows, features, read, device):
                block[some.start - rows.start : some.stop - rows.start] = values[:, cut]
            yield block
