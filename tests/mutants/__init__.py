"""Breakages of the product as data: each is a text of it, another text in its place, and a test that must fail then.

    make mutants
    make mutants SHARD=2/4 ARGS="-k gather"

`BREAKAGES` is what a file here holds. A new guard against silently wrong numbers, collective, style, backward, field of
a checkpoint, replaced function of another package or pass of `parallelize` comes with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

ROOT = Path(__file__).parents[2]

PACKAGES = ("accelerate_plugin", "lightning_lora", "lora_parallel", "lora_parallel_autoload")

KINDS = {
    "guard": "Guards against silently wrong numbers and lost work",
    "collective": "Collectives",
    "style": "Placements of a style, and its collectives",
    "backward": "Backwards of an `autograd.Function`",
    "checkpoint": "Fields of what is saved",
    "replaced": "Replaced functions of other packages",
    "pass": "Passes of `parallelize`, and what a step does",
}
"""Say what a breakage breaks, by its kind."""


@dataclass(frozen=True)
class Mutant:
    """One breakage."""

    kind: str
    harm: str
    """Say what a user would get, in a sentence."""
    test: str
    """The test that must fail: its id, in what `make test` runs. All cases of a function count where it has several."""
    old: str
    """A text that stands in the product once, whichever file it is in."""
    new: str
    """Replace that text by this one."""


class MutantError(ValueError):
    """A breakage that does not fit the product."""


def product_files() -> list[Path]:
    """Return the files of the product, code and data: all but tests, examples, docs and benchmarks."""
    files = [p for name in PACKAGES for p in (ROOT / f"{name}.py", *sorted((ROOT / name).rglob("*")))]
    return [p for p in files if p.suffix in (".py", ".json") and p.is_file()]


def mutants() -> list[Mutant]:
    """Return all breakages, in the order of their files."""
    names = sorted(each.name for each in iter_modules([str(Path(__file__).parent)]) if not each.name.startswith("_"))
    return [mutant for name in names for mutant in import_module(f"{__name__}.{name}").BREAKAGES]


def place_of(mutant: Mutant, texts: dict[Path, str]) -> Path:
    """Return the one file of `texts` that has the breakage's old text.

    Raises:
        MutantError: The text is in none, or more than once; or the breakage changes nothing.
    """
    found = {path: count for path, text in texts.items() if (count := text.count(mutant.old))}
    if sum(found.values()) != 1:
        where = ", ".join(f"{path} ({count})" for path, count in found.items()) or "no file"
        raise MutantError(f"this text must stand once in the product, and stands in {where}:\n{mutant.old}")
    if mutant.new == mutant.old or mutant.kind not in KINDS:
        raise MutantError(f"nothing is broken, or kind {mutant.kind!r} is none of {', '.join(KINDS)}:\n{mutant.old}")
    (path,) = found
    return path
