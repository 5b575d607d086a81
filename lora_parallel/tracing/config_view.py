"""Show one module the model's config with some values replaced, such as the number of heads on a rank.

All modules of a model share one config object. A module whose sizes differ gets an object that replaces those values
and reads and writes every other attribute on the shared config, so that later changes to it
(`set_attn_implementation`) reach the module too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ConfigView", "viewed_with"]


@dataclass(frozen=True)
class ConfigView:
    """Hold the values that one module sees in place of the shared config's, by attribute name."""

    values: dict[str, Any]


def viewed_with(shared: Any, value: Any) -> Any:
    """Return `value`, or the config that it describes if it is a `ConfigView`.

    Args:
        shared: The attribute's present value: the shared config, if `value` is a `ConfigView`.
        value: The new value of the attribute. A `ConfigView` becomes an object of a subclass of the class of `shared`,
            with the view's values and, for every other attribute, those of `shared`.
    """
    if not isinstance(value, ConfigView):
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
