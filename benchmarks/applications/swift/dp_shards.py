"""Let tensor-parallel peers read the same rows, which ms-swift deals by process: --external_plugins dp_shards.py."""

from accelerate.state import AcceleratorState
from swift.dataloader import BatchSamplerShard

BatchSamplerShard.rank = property(lambda self: AcceleratorState().process_index)
BatchSamplerShard.world_size = property(lambda self: AcceleratorState().num_processes)
