"""The jobs whose files are kept, by the names of their folders, and what their ranks run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version
from safetensors.torch import load_file, save_file

from tests.formats import bases, engine
from tests.formats.engine import EngineJob, Outcome, TenantsJob
from tests.formats.front_ends import AccelerateJob, FabricJob, LightningJob, TrainerJob

FOLDER = Path(__file__).parent
FULL_TRAINING = {"require_adapters": False}


@dataclass(frozen=True)
class Kept:
    """A job, and how close to what it computed a later version has to come."""

    job: Any
    base: Any
    """Builds the base that the adapters are loaded into by PEFT alone."""

    since: str = "0.2.0"
    """The version that first wrote these files."""

    loss: float = 1e-10
    adapters: float = 1e-10
    """Largest error of a loss, and largest relative error of an adapter by norm: in float64, 1e-15 is usual."""


SINGLE = {"loss": 1e-5, "adapters": 1e-4}
"""The bounds of float32, where 5e-7 and 3e-7 are usual."""

JOBS: dict[str, Kept] = {
    "2x2": Kept(EngineJob("2x2", engine.fused_and_a_norm, FULL_TRAINING), bases.gpt2),
    "2x1x2": Kept(EngineJob("2x1x2", engine.two_adapters, FULL_TRAINING, ("default", "idle")), bases.opt),
    "1x1cp2": Kept(EngineJob("1x1cp2", engine.an_embedding), bases.opt),
    "1x1pp2": Kept(EngineJob("1x1pp2", engine.a_head), bases.opt),
    "tenants": Kept(TenantsJob("2x1"), bases.opt),
    "nf4": Kept(EngineJob("1x2", engine.on_nf4), bases.nf4, **SINGLE),
    "lightning": Kept(LightningJob("2x2", one_file=False), bases.opt),
    "lightning_one_file": Kept(LightningJob("1x2", one_file=True), bases.opt),
    "fabric": Kept(FabricJob("1x2"), bases.opt),
    "accelerate": Kept(AccelerateJob("2x1"), bases.opt),
    "trainer": Kept(TrainerJob("2x1"), bases.llama, **SINGLE),
}


def versions() -> list[str]:
    """Return the versions of which there are files, oldest first."""
    return sorted((path.name for path in FOLDER.glob("[0-9]*")), key=Version)


def names(version: str) -> list[str]:
    """Return the names of the folders that a version has to have."""
    return [name for name, kept in JOBS.items() if Version(kept.since) <= Version(version)]


def write_job(name: str, bases_folder: Path, folder: Path) -> Outcome:
    """Write the files of a job. On every rank of its mesh."""
    job = JOBS[name].job
    return job.write(job.mesh, bases_folder, folder)


def resume_job(name: str, mesh: str, bases_folder: Path, folder: Path) -> Outcome:
    """Go on with a job on a mesh, from the files in a folder of its name. On every rank of the mesh."""
    return JOBS[name].job.resume(mesh, bases_folder, folder / name)


def record(outcome: Outcome, folder: Path) -> None:
    """Write what a job computed after its save."""
    adapters = {name: tensor.contiguous() for name, tensor in outcome.adapters.items()}
    save_file(adapters, folder / "expected.safetensors")
    values = {"losses": outcome.losses, "drawn": outcome.drawn}
    (folder / "expected.json").write_text(json.dumps(values, indent=2) + "\n")


def recorded(folder: Path) -> Outcome:
    """Read what `record` wrote."""
    values = json.loads((folder / "expected.json").read_text())
    return Outcome(values["losses"], load_file(folder / "expected.safetensors"), values["drawn"])
