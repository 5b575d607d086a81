"""Name the quantisers of transformers whose weights can be sharded."""

from __future__ import annotations

__all__ = ["check_method"]

_KNOWN = ("bitsandbytes", "torchao")


def check_method(name: str, method: str) -> None:
    """Check that weights that are quantised in a way can be sharded.

    Args:
        name: Name of the model, for the message.
        method: The `quant_method` of its quantisation.

    Raises:
        ValueError: They cannot.
    """
    if not method.startswith(_KNOWN):
        raise ValueError(
            f"{name} is quantised by {method}, whose weights cannot be sharded. "
            "What can: linear layers of bitsandbytes (4-bit, int8) and of torchao (int8, float8, intx weight-only)."
        )
