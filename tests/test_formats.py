"""Files that earlier versions wrote: each is loaded, and training goes on from it as it did there.

They are in `tests/formats/<version>`, written by `tests/formats/write.py`, and never change.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file

from tests.cases import cases
from tests.formats import bases
from tests.formats.engine import SAVED, EngineJob, Outcome, batch
from tests.formats.front_ends import Module
from tests.formats.jobs import FOLDER, JOBS, names, recorded, resume_job, versions
from tests.formats.write import write
from tests.oracle import ranks_of, relative_error, trained

VERSIONS = versions()


@pytest.fixture(scope="module")
def bases_folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bases")
    bases.write(path)
    return path


@pytest.fixture
def files(tmp_path, version) -> Path:
    """A copy of a version's files, so that no load can change them."""
    return Path(shutil.copytree(FOLDER / version, tmp_path / version))


def compare(name: str, got: Outcome, folder: Path) -> None:
    kept, want = JOBS[name], recorded(folder / name)
    assert got.losses == pytest.approx(want.losses, abs=kept.loss)
    assert relative_error(got.adapters, want.adapters) <= kept.adapters
    if isinstance(kept.job, EngineJob):
        both = min(len(got.drawn), len(want.drawn))  # other data-parallel ranks were not there
        assert got.drawn[:both] == want.drawn[:both]
        assert got.extra["step"] == SAVED
        assert got.extra["note"] == "kept"
        assert torch.equal(got.extra["seen"], batch(0))
        for key, tensor in want.adapters.items():
            in_folder = "lora_" in key or "modules_to_save" in key
            assert torch.equal(got.folder[key], tensor if in_folder else torch.zeros_like(tensor)), key


def test_there_are_files():
    assert VERSIONS, f"no folder of a version in {FOLDER}"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_has_the_files_of_each_job(version):
    """All names, and little in each: they are in the repository for good."""
    assert {path.name for path in (FOLDER / version).iterdir()} >= set(names(version))
    sizes = {file: file.stat().st_size for file in (FOLDER / version).rglob("*") if file.is_file()}
    assert max(sizes.values()) <= 200_000
    assert sum(sizes.values()) <= 1_000_000


HERE = [(name, "1x1") for name in JOBS if name != "trainer"]
HERE += [("1x1cp2", "1x1cp2"), ("1x1pp2", "1x1pp2"), ("2x2", "1x2"), ("2x1x2", "2x1"), ("trainer", "1x2")]
"""(name, mesh): which files are loaded on which mesh."""

MORE = [(name, mesh) for mesh in ("1x2", "2x1", "2x2") for name in JOBS if (name, mesh) not in HERE]
MORE += [(name, mesh) for name in ("2x2", "2x1x2", "lightning") for mesh in ("1x1cp2", "1x1pp2")]
MORE += [("2x1x2", "2x1x2")]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", cases(*HERE, matrix=[(each,) for each in MORE]), ids=" on ".join)
def test_training_goes_on_from_the_files(front_end_pool, files, bases_folder, version, case):
    name, mesh = case
    if name not in names(version):
        pytest.skip(f"{version} wrote no such files")
    for got in front_end_pool.run(ranks_of(mesh), resume_job, name, mesh, bases_folder, files):
        compare(name, got, files)


def without_the_optimizer(bases_folder: Path, folder: Path) -> Outcome:
    return JOBS["2x2"].job.resume("1x1", bases_folder, folder, optimizer_too=False)


@pytest.mark.parametrize("version", VERSIONS[-1:])
def test_what_is_not_loaded_is_seen(front_end_pool, files, bases_folder, version):
    """Or equal figures would say nothing of the optimizer's state."""
    (got,) = front_end_pool.run(1, without_the_optimizer, bases_folder, files / "2x2")
    want = recorded(files / "2x2")
    assert relative_error(got.adapters, want.adapters) > 1e-2
    assert got.losses[0] == pytest.approx(want.losses[0], abs=1e-10), "the adapters are loaded"
    assert got.losses[1] != pytest.approx(want.losses[1], abs=1e-4)


@pytest.mark.parametrize("version", VERSIONS)
def test_plain_peft_loads_the_adapters(version):
    folders = {
        (name, file.parent)
        for name in names(version)
        for file in (FOLDER / version / name).rglob("adapter_config.json")
    }
    assert {name for name, _ in folders} == set(names(version)) - {"lightning_one_file"}
    for name, folder in folders:
        loaded: Any = PeftModel.from_pretrained(JOBS[name].base(), folder)
        written = json.loads((folder / "adapter_config.json").read_text())
        read = PeftConfig.from_pretrained(folder).to_dict()
        assert {key: plain(read.get(key)) for key in written} == {key: plain(each) for key, each in written.items()}
        got, want = get_peft_model_state_dict(loaded), load_file(folder / "adapter_model.safetensors")
        assert got.keys() == want.keys(), folder
        for key, tensor in want.items():
            assert torch.equal(got[key].float(), tensor.float()), (folder, key)  # PEFT loads in float32


def plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (list, set)) else value


@pytest.mark.parametrize("version", VERSIONS)
def test_lightning_loads_the_module_in_one_process(version, files):
    """Either form, by `load_from_checkpoint`."""
    want = load_file(files / "lightning" / f"step={SAVED}.ckpt" / "adapter" / "adapter_model.safetensors")
    for name in ("lightning", "lightning_one_file"):
        module = Module.load_from_checkpoint(files / name / f"step={SAVED}.ckpt", fresh=True)
        got = {key.removeprefix("model.").replace(".default", ""): p.detach() for key, p in trained(module).items()}
        assert relative_error(got, want) <= 1e-15, name


@pytest.mark.matrix
def test_the_files_can_be_written_anew(front_end_pool, bases_folder, tmp_path):
    """For the next version, with what the code writes now."""
    folder = write(tmp_path, front_end_pool)
    for name, mesh in HERE:
        for got in front_end_pool.run(ranks_of(mesh), resume_job, name, mesh, bases_folder, folder):
            compare(name, got, folder)
