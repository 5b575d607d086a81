"""`make matrix SHARD=2/4`: each test is in one shard, the same one in every run."""

from __future__ import annotations

from argparse import ArgumentTypeError
from types import SimpleNamespace

import pytest

from tests.conftest import _shard, pytest_collection_modifyitems

NAMES = [f"tests/test_{number % 7}.py::test_{number}[2x{number}]" for number in range(300)]


def chosen(shard: tuple[int, int] | None, names: list[str]) -> tuple[list[str], list[str]]:
    """The names that are kept and those that are deselected."""
    marks = {"fixturenames": (), "add_marker": lambda mark: None, "get_closest_marker": lambda name: None}
    items = [SimpleNamespace(nodeid=name, **marks) for name in names]
    left: list[str] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(item.nodeid for item in items))
    pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: shard, hook=hook, stash={}), items)
    return [item.nodeid for item in items], left


def test_each_test_is_in_one_shard_whatever_else_is_chosen():
    kept = [chosen((number, 4), NAMES) for number in (1, 2, 3, 4)]
    for mine, left in kept:
        assert sorted(mine + left) == sorted(NAMES)
        assert mine == [name for name in NAMES if name in mine]  # in their order
        assert 50 < len(mine) < 100
        assert chosen((kept.index((mine, left)) + 1, 4), NAMES[::2])[0] == [name for name in NAMES[::2] if name in mine]
    assert sorted(name for mine, _ in kept for name in mine) == sorted(NAMES)
    assert chosen(None, NAMES) == (NAMES, [])


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "a/b", "-1/4", "1/4/2", ""])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(ArgumentTypeError, match=r"is no shard: write 1/4, 2/4"):
        _shard(text)
    assert _shard("4/4") == (4, 4)
