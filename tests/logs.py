"""Listen to what the library logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def listening(name: str) -> Iterator[list[str]]:
    """Yields the messages that reach a logger, as they come; each with its level in front."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)
