"""`make mutants`: each breakage fits the product and names a test of `make test`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import IN_MAKE_TEST
from tests.mutants import ROOT, Mutant, MutantError, mutants, place_of, product_files

TEXTS = {path: path.read_text() for path in product_files()}
ALL = mutants()


def test_each_fits_the_product_and_breaks_it_as_python():
    for mutant in ALL:
        text = TEXTS[place_of(mutant, TEXTS)]
        ast.parse(text.replace(mutant.old, mutant.new))
    assert len(ALL) >= 120
    assert len({(mutant.old, mutant.new) for mutant in ALL}) == len(ALL)


def test_each_names_a_test_that_make_test_runs(pytestconfig):
    """Look up the cases of a file that is collected whole, and read the functions of others."""
    names = set() if any("::" in each for each in pytestconfig.args) else pytestconfig.stash[IN_MAKE_TEST]
    known = {name.partition("::")[0] for name in names}
    functions: dict[Path, dict[str, ast.FunctionDef]] = {}
    for mutant in ALL:
        name, _, function = mutant.test.partition("::")
        if name in known:
            assert any(each == mutant.test or each.startswith(f"{mutant.test}[") for each in names), mutant.test
            continue
        path = ROOT / name
        if path not in functions:
            tree = ast.parse(path.read_text())
            functions[path] = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
        found = functions[path][function.partition("[")[0].rpartition("::")[2]]
        assert "pytest.mark.matrix" not in [ast.unparse(each) for each in found.decorator_list], mutant.test


def test_every_backward_is_broken_by_one():
    for path, text in TEXTS.items():
        # A simulated step has no gradients; the kernel of dropout runs in Triton's interpreter, in the matrix.
        if "cost" in path.parts or path.name == "dropout_kernel.py":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and any("autograd.Function" in ast.unparse(base) for base in node.bases):
                source = ast.get_source_segment(text, node) or ""
                assert any(mutant.old in source for mutant in ALL), f"{path}: {node.name}"


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("def ", "fed ", "guard"),
        ("no such text", "", "guard"),
        (ALL[0].old, ALL[0].old, "guard"),
        (ALL[0].old, "", "?"),
    ],
)
def test_one_that_does_not_fit_is_an_error(old, new, kind):
    with pytest.raises(MutantError):
        place_of(Mutant(kind, "", "", old, new), TEXTS)


def test_the_page_lists_them():
    page = (ROOT / "docs" / "development" / "mutants.md").read_text()
    assert [mutant.harm for mutant in ALL if f"| {mutant.harm} |" not in page] == []
    assert f"\n{len(ALL)} breakages." in page
