"""Replace attributes and entries of dictionaries within a context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Replace methods of a class, functions of a module or attributes of an object within the context."""
    before = {name: getattr_static(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def replaced_entries(entries: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Set entries (dictionary, key, value) within the context, one after the other; then put back what was there.

    What is set in `module.__dict__` is found before a parameter, a module or a method of that name.
    """
    undo = []
    try:
        for dictionary, key, value in entries:
            undo.append((dictionary, key, dictionary.get(key, _ABSENT)))
            dictionary[key] = value
        yield
    finally:
        for dictionary, key, value in reversed(undo):
            if value is _ABSENT:
                del dictionary[key]
            else:
                dictionary[key] = value
