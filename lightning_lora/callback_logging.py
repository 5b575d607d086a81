"""Let callbacks log, and be copied and pickled while a sharded model trains.

Lightning gives each callback the methods `log` and `log_dict` of the LightningModule: a copy of a callback would copy
the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Logging"]


class Logging:
    """Call a method of the LightningModule; so does a copy of it, and one that was pickled calls none."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._method(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Logging:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Logging, (_no_run,)


def _no_run(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("a callback that was pickled logs nothing until a Trainer runs it.")
