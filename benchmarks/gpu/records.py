"""Keep what each step came to in a file of its own, so that nothing finished is lost, or run again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.outcomes import Status
from benchmarks.gpu.steps import Step

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("lora_parallel", "lightning_lora", "accelerate_plugin", "benchmarks", "examples", "tests")


@dataclass
class Record:
    """What one step came to."""

    step: str
    status: Status
    figures: dict[str, Any] = field(default_factory=dict)
    detail: str = ""
    """One line: what was wrong, or refused."""

    output: str = ""
    """The last lines that the processes printed, of a step that went wrong."""

    seconds: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    date: str = ""


@dataclass(frozen=True)
class Records:
    """The records of one kind of machine and one state of the code, in a folder that may hold others' too."""

    folder: Path
    environment: Mapping[str, str]
    """The device and the versions: a record under others is another record."""

    code: str
    """What identifies the code, see `code_identity`."""

    def path(self, step: Step) -> Path:
        does = {name: value for name, value in asdict(step).items() if name not in ("seconds", "fallbacks")}
        known = {"step": does, "environment": dict(self.environment), "code": self.code}
        digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
        name = "".join(letter if letter.isalnum() else "-" for letter in step.name)
        return self.folder / f"{name}-{digest}.json"

    def find(self, step: Step) -> Record | None:
        path = self.path(step)
        return Record(**json.loads(path.read_text())["record"]) if path.exists() else None

    def keep(self, step: Step, record: Record) -> None:
        """Write the record beside its place and rename it, so that it is there as a whole or not at all."""
        path = self.path(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}.tmp")
        content = {"record": asdict(record), "environment": dict(self.environment), "code": self.code}
        written.write_text(json.dumps(content, indent=1))
        os.replace(written, path)


def code_identity(root: Path = ROOT) -> str:
    """A digest of the Python files that steps run.

    It stands for the commit, where there is one, and tells changes that are not committed from it; a copy of the tree
    without its history has the same.
    """
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
