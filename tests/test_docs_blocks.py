"""Run the Python of the documentation on four processes: every block, unless the page says why it is not run."""

from __future__ import annotations

import pytest

from tests.docs_blocks import NOT_RUN, ROOT, TINY, blocks, run_page

PAGES = sorted([path for path in (ROOT / "docs").rglob("*.md") if blocks(path)] + [ROOT / "README.md"])
SCRIPTS = {"quick_start.md"}
"""Pages of whole scripts, which tests/test_docs.py starts."""

SLOW = {"recipes.md"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("docs")
    for name, family in TINY.items():
        family.save(root / name)
    return root


@pytest.mark.matrix
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.matrix] if page.name in SLOW else [])
        for page in PAGES
        if page.name not in SCRIPTS and any(is_run for _, _, is_run in blocks(page))
    ],
)
def test_blocks_run(front_end_pool, folder, page):
    (folder / page.stem).mkdir()
    expected = sum(is_run and not title for title, _, is_run in blocks(page))
    assert front_end_pool.run(4, run_page, page.name, str(folder / page.stem)) == [expected] * 4


def test_every_block_is_run_or_says_why_not():
    """A block is found by its fence at the beginning of a line; a mark stands in the line before it."""
    for page in PAGES:
        text = page.read_text()
        assert text.count("```python") == len(blocks(page)), page.name
        marked = [each for each in text.split(NOT_RUN)[1:] if each.split("-->\n", 1)[1].startswith("```python")]
        assert len(marked) == sum(not is_run for _, _, is_run in blocks(page)), page.name
