"""A config as one module sees it, with head counts of its own.

Modules of a model share one config. What differs for some of them is laid over it, and everything else stays the shared
one's, whatever it is changed to later (`set_attn_implementation`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Overlay", "laid_over"]


@dataclass(frozen=True)
class Overlay:
    """Attributes of an object that one holder of it sees otherwise."""

    values: dict[str, Any]


def laid_over(shared: Any, value: Any) -> Any:
    """`value`; or, if it is an overlay, an object like `shared` with its values."""
    if not isinstance(value, Overlay):
        return value
    kind = type(shared)

    class Seen(kind):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            pass

        def __getattribute__(self, name: str) -> Any:
            if name in value.values:
                return value.values[name]
            return object.__getattribute__(self, name) if name == "__class__" else getattr(shared, name)

        def __setattr__(self, name: str, new: Any) -> None:
            setattr(shared, name, new)

    Seen.__name__, Seen.__qualname__ = kind.__name__, kind.__qualname__
    return Seen()
