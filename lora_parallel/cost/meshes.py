"""List the meshes that a plan looks at."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["possible_meshes"]

_TOKENS_OF_A_CHUNK = 4096
"""Fewest tokens of a context parallel chunk that is looked at: shorter rows are better divided by other axes."""


def possible_meshes(gpus: int, gpus_per_node: int, blocks: int, tokens: int, batch: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of the axes of each mesh.

    - tp stays inside of a machine, as it sends the activations of every layer.
    - cp leaves each rank 4,096 tokens at least.
    - pp has a block at least for each stage, and a micro-batch at least for each stage.
    - dp_replicate is 1, or as many copies as let dp_shard, of 2 at least, stay inside of a machine: Accelerate refuses
      copies that nothing is sharded in.
    - The data-parallel ranks divide the batch.

    Args:
        gpus: Number of GPUs.
        gpus_per_node: GPUs of a machine.
        blocks: Number of the model's blocks.
        tokens: Tokens of a row.
        batch: Rows of a step, over all ranks.
    """
    for pp in _divisors(gpus):
        for cp in _divisors(gpus // pp):
            for tp in _divisors(gpus // (pp * cp)):
                dp = gpus // (pp * cp * tp)
                if pp > blocks or tp > gpus_per_node or (cp > 1 and tokens // cp < _TOKENS_OF_A_CHUNK):
                    continue
                if batch % dp or (pp > 1 and batch // dp < pp):
                    continue
                inside = max(1, gpus_per_node // (tp * cp))
                for copies in sorted({1, dp // inside if dp > inside > 1 and dp % inside == 0 else 1}):
                    yield {"pp": pp, "dp_replicate": copies, "dp_shard": dp // copies, "cp": cp, "tp": tp}


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
