"""The layout of the packages: imports run one way, and each district says what goes in and what comes out."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINE = "lora_parallel"
FRONT_ENDS = ("lightning_lora", "accelerate_plugin")
FACE = {ENGINE, f"{ENGINE}.integration", f"{ENGINE}.sizes"}
"""`sizes` stands by itself: it needs no torch."""

Graph = Mapping[str, set[str]]


def modules(root: Path, package: str) -> dict[str, Path]:
    """Map the module names of a package to their files."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path, package: str) -> dict[str, set[str]]:
    """Map each module of a package to the modules of the project that it imports, in functions too."""
    there = {name for each in (ENGINE, *FRONT_ENDS) for name in modules(root, each)}
    graph: dict[str, set[str]] = {}
    for name, path in modules(root, package).items():
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                public = exported(root, node.module)
                inner = {f"{node.module}.{alias.name}" for alias in node.names if alias.name not in public} & there
                graph[name] |= inner or ({node.module} & there)
            elif isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & there
    return graph


def exported(root: Path, package: str) -> set[str]:
    """Return what a package exports by itself: a name there stands before a file of that name."""
    path = root / package.replace(".", "/") / "__init__.py"
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def district(module: str) -> str:
    """Return the part of the engine that a module belongs to: a package in it, or a file at its top."""
    return [*module.split("."), "__init__"][1]


def between_districts(graph: Graph) -> dict[str, set[str]]:
    """Return the imports between districts, without those inside of one."""
    found: dict[str, set[str]] = {}
    for name, imported in graph.items():
        found.setdefault(district(name), set()).update(
            district(each) for each in imported if district(each) != district(name)
        )
    return found


def circle(graph: Graph) -> list[str]:
    """Return a circle of imports, or nothing."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for each in sorted(graph.get(name, ())):
            if found := search(each, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := search(name, []))), [])


def floors(graph: Graph) -> dict[str, int]:
    """Return the floor of each node: one above the highest that it imports."""
    found: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in found:
            found[name] = 1 + max((floor(each) for each in graph.get(name, ())), default=0)
        return found[name]

    for name in graph:
        floor(name)
    return found


def test_files_do_not_import_in_a_circle():
    for package in (ENGINE, *FRONT_ENDS):
        assert circle(imports(ROOT, package)) == []


def test_districts_import_one_way_on_few_floors():
    graph = between_districts(imports(ROOT, ENGINE))
    assert circle(graph) == []
    assert max(floors(graph).values()) <= 12


def test_nothing_but_the_public_face_imports_tenants():
    graph = imports(ROOT, ENGINE)
    inside = {name for name in graph if district(name) == "tenants"}
    assert {name for name, imported in graph.items() if imported & inside} - inside == {ENGINE}


@pytest.mark.parametrize("package", FRONT_ENDS)
def test_front_ends_import_the_face_of_the_engine_only(package):
    graph = imports(ROOT, package)
    for name, imported in graph.items():
        assert {each for each in imported if each.split(".")[0] != package} <= FACE, name


@pytest.mark.parametrize("package", [ENGINE, *FRONT_ENDS])
def test_every_import_can_be_read(package):
    """No relative import, no module by its name as text, no way through `import lora_parallel` to what is inside."""
    for name, path in modules(ROOT, package).items():
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), name
            assert not (isinstance(node, ast.Import) and any(each.name.startswith(ENGINE) for each in node.names)), name
        assert f'import_module("{ENGINE}' not in path.read_text(), name


def test_front_ends_are_flat():
    for package in FRONT_ENDS:
        assert not [path for path in (ROOT / package).rglob("*.py") if path.parent != ROOT / package]


def test_every_district_says_what_goes_in_and_what_comes_out():
    for name, path in modules(ROOT, ENGINE).items():
        if path.name == "__init__.py" and name != ENGINE:
            said = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert "In: " in said, name
            assert "Out: " in said, name


def test_what_a_district_names_is_there():
    """In backticks: files, modules, functions and classes of the engine, or what users call."""
    texts = {path.relative_to(ROOT / ENGINE): path.read_text() for path in modules(ROOT, ENGINE).values()}
    names = {part.removesuffix(".py") for path in texts for part in (str(path), *path.parts)}
    names |= {name for text in texts.values() for name in re.findall(r"(?:def|class) (\w+)", text)}
    public = set(re.findall(r'"(\w+)"', texts[Path("__init__.py")]))
    others = {"from_pretrained", "save_pretrained", "_did_swap_in_out_features", f"{ENGINE}/__init__"}
    for path, text in texts.items():
        if path.match("*/__init__.py"):
            said = set(re.findall(r"`([\w/]+)(?:\.py)?`", ast.get_docstring(ast.parse(text))))
            assert not said - names - public - others, path


def written(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_an_import_that_runs_up_is_seen(tmp_path):
    """Break the rule on purpose, inside of a function too."""
    root = written(
        tmp_path,
        {
            f"{ENGINE}.low.__init__": "",
            f"{ENGINE}.low.a": "def f():\n    from lora_parallel.high.b import g\n",
            f"{ENGINE}.high.__init__": "",
            f"{ENGINE}.high.b": "import lora_parallel.low.c\n",
            f"{ENGINE}.low.c": "",
        },
    )
    graph = imports(root, ENGINE)
    assert circle(graph) == []  # no two files import each other; the districts do
    assert circle(between_districts(graph)) == ["high", "low", "high"]
    written(root, {f"{ENGINE}.low.c": "from lora_parallel.low import a\n"})
    assert circle(imports(root, ENGINE))[0] == f"{ENGINE}.high.b"
