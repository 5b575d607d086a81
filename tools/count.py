"""Count what the project is made of: statements, lines and files by district, and pages and words of the docs.

python tools/count.py

A statement is an `ast.stmt` other than a docstring; comments and blank lines count as lines only.
Words are what blanks separate, in tables and code too. Pages that benchmarks and `make mutants` write count apart.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("lora_parallel", "lightning_lora", "accelerate_plugin")
WRITTEN_BY_SCRIPTS = ("results/", "development/mutants.md")


def statements_of(source: str) -> int:
    """Return the number of statements in a file, without docstrings and other bare strings."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    return sum(not _is_text(node) for node in nodes)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def districts() -> dict[str, list[Path]]:
    """Return the Python files of each district: the packages by folder, then what surrounds them."""
    found = {"single modules": sorted(ROOT.glob("*.py"))}
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            found.setdefault(str(path.parent.relative_to(ROOT)), []).append(path)
    return found


def main() -> None:
    """Print one table of Python and one of the docs."""
    rows = [(name, *_measure(paths)) for name, paths in districts().items()]
    product = tuple(sum(row[column] for row in rows) for column in (1, 2, 3))
    rows.append(("**product**", *product))
    for name in ("tests", "benchmarks", "examples", "tools"):
        rows.append((name, *_measure(sorted((ROOT / name).rglob("*.py")))))
    print("| district | statements | lines | files |\n|---|---|---|---|")
    for name, statements, lines, files in rows:
        print(f"| {name} | {statements:,} | {lines:,} | {files} |")
    print("\n| docs | pages | words |\n|---|---|---|")
    words = {name: len((ROOT / "docs" / name).read_text().split()) for names in pages().values() for name in names}
    for kind, names in pages().items():
        print(f"| {kind} | {len(names)} | {sum(words[name] for name in names):,} |")
    by_hand = [name for name in words if not name.startswith(WRITTEN_BY_SCRIPTS)]
    print(f"| **written by hand** | {len(by_hand)} | {sum(words[name] for name in by_hand):,} |")


def pages() -> dict[str, list[str]]:
    """Return the pages for users, of the reference, of results and of development, as `mkdocs.yml` lists them."""
    kinds = {"Reference": "reference, of docstrings", "Results": "results, by scripts", "Development": "development"}
    found: dict[str, list[str]] = {kind: [] for kind in ("for users", *kinds.values())}
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    kind = "for users"
    for indent, title, page in re.findall(r"^( +)- ([^:]+):(?: (\S+\.md))?$", navigation, re.M):
        if len(indent) == 2:  # a section, or a page of its own
            kind = kinds.get(title, "for users")
        if page:
            found[kind].append(page)
    return found


def _measure(paths: list[Path]) -> tuple[int, int, int]:
    texts = [path.read_text() for path in paths]
    return sum(map(statements_of, texts)), sum(text.count("\n") for text in texts), len(texts)


if __name__ == "__main__":
    main()
