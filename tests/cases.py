"""Cases of a test, some of them for `make matrix` only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def cases(*kept: Any, matrix: Iterable[Any] = ()) -> list[Any]:
    """The cases of `make test`, and those of `make matrix`: the same mechanism on other meshes or models."""
    more = [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.matrix) for each in matrix]
    return [*kept, *more]
