"""Group the layers between which each tp rank computes a slice: colwise producers and rowwise consumers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lora_parallel.layers.row_partition import RowPartition

__all__ = ["LayerGroup"]


@dataclass(eq=False)
class LayerGroup:
    """Hold colwise producers and the rowwise consumers that take the producers' output.

    Between producers and consumers each tp rank computes a slice of the features. The input of a producer is whole. The
    output of a consumer is a partial sum on each rank, and whole after one reduction over tp.
    """

    consumers: dict[str, None]
    """Names of the rowwise layers, in order; the values are None."""

    producers: dict[str, RowPartition]
    """Output features that each rank computes, for each layer that feeds the consumers, by its name."""

    width: int
    """Number of features of a consumer's whole input."""

    between: dict[tuple[nn.Module, str], tuple[int, RowPartition] | None] = field(default_factory=dict)
    """Parameters that act on slices (a norm of each head), by module and name in it. The value is the dim that is cut
    and the rows of each rank, or None if the parameter stays whole."""

    attributes: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    """Sizes that modules keep (`num_heads`) as they are on a rank, by module and attribute name. The value for a
    module's config is a `ConfigView`."""

    @property
    def layers(self) -> Iterator[str]:
        """Yield the names of all layers, producers first."""
        yield from self.producers
        yield from self.consumers
