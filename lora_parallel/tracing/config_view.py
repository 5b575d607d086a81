"""Show one module the model's config with some values replaced, such as the number of heads on a rank.

All modules of a model share one config object. A module whose sizes differ gets an object that replaces those values
and has the shared config's own `__dict__` for every other attribute, so that later changes to it
(`set_attn_implementation`) reach the module too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
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
    kind: Any = type(shared)
    seen: Any = object.__new__(_kind(kind, tuple(value.values.items())))
    object.__setattr__(seen, "__dict__", shared.__dict__)
    return seen


@cache
def _kind(kind: Any, values: tuple[tuple[str, Any], ...]) -> Any:
    """Return a subclass of `kind` with properties for the replaced values, which are found before the instance's own.

    Views with the same values share the class, so that a graph of one block serves the others.
    """
    replaced = {key: property(partial(_replaced, value), partial(_set, key)) for key, value in values}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **replaced})


def _replaced(value: Any, _view: Any) -> Any:
    return value


def _set(key: str, view: Any, new: Any) -> None:
    view.__dict__[key] = new
