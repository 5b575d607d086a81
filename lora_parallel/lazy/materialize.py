"""Read the weights of a sharded model: from each file, each rank reads the rectangles that it owns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lora_parallel.distributed.dtensors import local, region_of, sharded_as
from lora_parallel.distributed.rank_checks import is_rank_zero
from lora_parallel.lazy.files import Source
from lora_parallel.lazy.graph import Leaf, Node, Piece, Region, put, read_blocks
from lora_parallel.lazy.tracking import direct_tensors, forget, lazy_tensors_of, replace_tensor
from lora_parallel.storage import bytes_bar


@dataclass(frozen=True)
class Read:
    """Describe one read of this rank."""

    parameter: str
    """Name in the model of the parameter or buffer that the read is for."""

    file: str | None
    """The file, or the directory of a torch DCP checkpoint; None if no checkpoint is remembered for the parameter."""

    key: str
    """Name of the tensor in the file."""

    region: tuple[tuple[int, int], ...]
    """Range (start, stop) of each dim of the tensor in the file."""

    bytes: int
    """Number of bytes of the file that are read."""


@dataclass
class _Wanted:
    """Describe a parameter or buffer on meta, with all modules that hold it (tied weights have several)."""

    name: str
    tensor: Tensor
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)
    node: Node | None = None

    def pieces(self) -> Iterator[Piece]:
        if self.node is not None and local(self.tensor).numel():
            yield from self.node.pieces(region_of(self.tensor))


def _wanted(model: nn.Module) -> list[_Wanted]:
    by_tensor: dict[int, _Wanted] = {}
    for prefix, module in model.named_modules():
        lazy = lazy_tensors_of(module)
        for key, tensor in direct_tensors(module):
            if tensor.is_meta:
                wanted = by_tensor.setdefault(id(tensor), _Wanted(f"{prefix}.{key}" if prefix else key, tensor))
                wanted.holders.append((module, key))
                wanted.node = wanted.node or (lazy[key].node if key in lazy else None)
    return list(by_tensor.values())


def read_plan(model: nn.Module) -> list[Read]:
    """List the parts of files that this rank reads to fill the tensors on meta. Nothing is read, nothing is sent.

    Args:
        model: A model that was built under `meta_init`. After `parallelize(..., materialize=False)` the plan of each
            rank is for its shard; before, it is for the whole model.

    Returns:
        The reads in the order of the model's parameters. A parameter without a remembered checkpoint (of a model from
        `from_config`) is read from an imagined file with the parameter's own name and dtype.
    """
    plan: list[Read] = []
    for wanted in _wanted(model):
        if wanted.node is None:
            mine = local(wanted.tensor)
            region = region_of(wanted.tensor) if mine.numel() else ()
            plan.append(Read(wanted.name, None, wanted.name, _ranges(region), mine.numel() * mine.itemsize))
        for leaf, region in _read_regions(wanted.pieces()):
            count = prod(part.stop - part.start for part in region) * leaf.dtype.itemsize
            plan.append(Read(wanted.name, str(leaf.source.path), leaf.key, _ranges(region), count))
    return plan


def _ranges(region: Region) -> tuple[tuple[int, int], ...]:
    return tuple((part.start, part.stop) for part in region)


def _read_regions(pieces: Iterable[Piece]) -> Iterator[tuple[Leaf, Region]]:
    """Yield the regions of tensors in files that pieces are read or computed from."""
    for piece in pieces:
        if isinstance(piece.leaf, Leaf):
            yield piece.leaf, piece.region
        else:
            for node, needed in piece.leaf.needs(piece.region):
                yield from _read_regions(node.pieces(needed))


def read_weights(model: nn.Module, device: str) -> None:
    """Allocate memory on `device` for the tensors on meta that a checkpoint fills, and read this rank's part into it.

    Files are opened one after the other and read in their own order; beside the shards, memory holds one slice at a
    time, or the inputs of one computed tensor. Tied weights stay one parameter. Adapters and other tensors that no
    checkpoint holds stay on meta.

    Raises:
        ValueError, OSError: A file cannot be read.
    """
    by_source: dict[Source | None, list[tuple[Piece, Tensor]]] = {}
    for wanted in _wanted(model):
        if wanted.node is None:
            continue
        filled = _allocate(wanted, device)
        for piece in wanted.pieces():
            source = piece.leaf.source if isinstance(piece.leaf, Leaf) else None
            by_source.setdefault(source, []).append((piece, filled))
    total = sum(_bytes(piece) for work in by_source.values() for piece, _ in work)
    # Computed tensors (source None) come last: to compute one opens the files of its inputs.
    ordered = sorted(by_source, key=lambda source: (source is None, str(source.path) if source else ""))
    with bytes_bar("Reading weights", total, shown=is_rank_zero() and total > 0) as progress:
        for source in ordered:
            if source is None:
                by_leaf: dict[int, list[tuple[Piece, Tensor]]] = {}  # a derived node is computed once
                for piece, filled in by_source[source]:
                    by_leaf.setdefault(id(piece.leaf), []).append((piece, filled))
                for work in by_leaf.values():
                    blocks = read_blocks(work[0][0].leaf, [piece.region for piece, _ in work], device)
                    for block, (piece, filled) in zip(blocks, work, strict=True):
                        put(block, piece, filled)
                        progress.update(_bytes(piece))
                continue
            order = {key: index for index, key in enumerate(source.list())}
            with source.open() as reader:
                for piece, filled in sorted(by_source[source], key=lambda work: order[work[0].leaf.key]):  # type: ignore[union-attr]
                    put(reader(piece.leaf.key, piece.region), piece, filled)  # type: ignore[union-attr]
                    progress.update(_bytes(piece))
    forget(model)


def _bytes(piece: Piece) -> int:
    return prod(part.stop - part.start for part in piece.region) * piece.leaf.dtype.itemsize


def allocate_adapters(layer: nn.Module, device: str) -> None:
    """Allocate uninitialised memory on `device` for the adapters of a LoRA layer that are on meta."""
    for wanted in _wanted(layer):
        if "lora_" in wanted.name:
            _allocate(wanted, device)


def _allocate(wanted: _Wanted, device: str) -> Tensor:
    """Put uninitialised memory for this rank's part in all modules that hold the tensor, and return the memory."""
    filled = torch.empty(local(wanted.tensor).shape, dtype=wanted.tensor.dtype, device=device)
    sharded = wanted.tensor.detach()
    tensor = sharded_as(filled, sharded) if isinstance(sharded, DTensor) else filled
    if isinstance(wanted.tensor, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=wanted.tensor.requires_grad)
    for module, key in wanted.holders:
        replace_tensor(module, key, tensor)
    return filled
