"""Quantised bases: layers of bitsandbytes and torchao, their weights held as bytes that can be sharded."""

from lora_parallel.quantised.layer import Quantised
from lora_parallel.quantised.model import bare_states, check_quantised, hold_as_bytes

__all__ = ["Quantised", "bare_states", "check_quantised", "hold_as_bytes"]
