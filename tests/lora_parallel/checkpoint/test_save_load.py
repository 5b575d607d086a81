"""Checkpoints on disk: what is in them, which are kept, and what is refused, on every rank and with nothing changed."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from lora_parallel import (
    export_merged,
    latest_checkpoint,
    load_adapter,
    load_checkpoint,
    parallelize,
    save_adapter,
    save_checkpoint,
    storage,
    wait_for_save,
)
from lora_parallel.checkpoint.states import check_optimizer, group_names, optimizer_state, restored
from lora_parallel.distributed.dtensors import local
from tests.cases import cases
from tests.oracle import Case, causal_lm, fill_adapters, lora_config, on_mesh, ranks_of, trained
from tests.oracle.rows import rows
from tests.oracle.workers import SCRIPT_LIMIT, Failure, attempt

CASE = Case()
Pair = tuple[nn.Module, torch.optim.Optimizer]


def made(mesh_text: str, case: Case = CASE, steps: int = 1, model: nn.Module | None = None, **config: Any) -> Pair:
    """A model on a mesh and its optimizer, after some steps."""
    mesh, settings = on_mesh(mesh_text, **config)
    model = parallelize(case.model() if model is None else model, mesh, settings)
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        ids = torch.arange(24).view(2, 12)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model, optimizer


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of this rank's part of everything that a checkpoint holds."""
    tensors = [local(p) for p in trained(model).values()]
    for states in optimizer.state.values():
        tensors += [local(value) for value in states.values()]
    return [tensor.clone() for tensor in tensors]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------------- every rank's own values


ONE = {"num_hidden_layers": 1}
FILLED = {
    "factors": (Case(sizes=ONE).model, {}),
    "embeddings": (
        Case(lora={"target_modules": ["embed_tokens", "lm_head", "q_proj", "down_proj"]}, sizes=ONE).model,
        {},
    ),
    "a saved head": (Case(lora={"modules_to_save": ["lm_head"]}, sizes=ONE).model, {}),
    "biases": (Case(lora={"bias": "all"}, sizes={**ONE, "attention_bias": True, "mlp_bias": True}).model, {}),
    "ranks": (Case(lora={"rank_pattern": {"q_proj": 1}, "use_rslora": True}, sizes=ONE).model, {}),
    "dora": (Case(lora={"use_dora": True}, sizes=ONE).model, {}),
    "empty biases": (lambda: rows()["a Linear with an empty bias, bias='all'"].build(), {}),
    "tokens": (lambda: rows()["trainable_token_indices, tied"].build(), {}),
    "everything": (Case(adapters=False, sizes=ONE).model, {"require_adapters": False}),
}


def fill_and_load(mesh_text: str, kinds: list[str], folder: Path) -> dict[str, bool]:
    """Fill each rank's slices with values that no other rank has (but for its replicas), save, zero, load."""
    found = {}
    for kind in kinds:
        build, config = FILLED[kind]
        model, optimizer = made(mesh_text, model=build(), **config)
        tensors = [p.detach() for p in trained(model).values()]
        for states in optimizer.state.values():
            tensors += [value.detach() for value in states.values() if value.dim()]
        for index, tensor in enumerate(tensors):
            number = dist.get_rank()
            if isinstance(tensor, DTensor):  # replicas share the first one's number
                shards = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
                number = sum(10 * (place + 1) * 7**at for at, (place, p) in enumerate(shards) if not p.is_replicate())
            else:
                number = 0
            shape = local(tensor).shape
            local(tensor).copy_(number + torch.arange(local(tensor).numel()).view(shape) / 1000 + index)
        before = snapshot(model, optimizer)
        save_checkpoint(model, optimizer, folder / kind)
        with torch.no_grad():
            for tensor in tensors:
                local(tensor).zero_()
        assert not same(before, snapshot(model, optimizer))
        load_checkpoint(model, optimizer, folder / kind)
        found[kind] = same(before, snapshot(model, optimizer))
    return found


CUT_TWICE = ["factors", "everything"]
OF_FSDP = ["ranks", "empty biases"]


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    cases(
        ("2x2", CUT_TWICE),
        ("2x1", OF_FSDP),
        ("1x2", [kind for kind in FILLED if kind not in (*CUT_TWICE, *OF_FSDP)]),
        matrix=[
            *((mesh, list(FILLED)) for mesh in ("2x2", "4x1", "2x1x2")),
            ("1x4", [kind for kind in FILLED if kind != "ranks"]),
        ],
    ),
)
def test_each_rank_gets_its_own_slices_back(pool, tmp_path, mesh, kinds):
    for found in pool.run(ranks_of(mesh), fill_and_load, mesh, kinds, tmp_path):
        assert found == dict.fromkeys(kinds, True)


def untouched_parameters(folder: Path) -> list[bool]:
    """An adapter that no batch reaches has no gradient and no state; of r = 1 over two ranks one shard is empty."""
    model = get_peft_model(causal_lm(), lora_config(r=1, target_modules=["q_proj", "lm_head"]))
    model.add_adapter("idle", lora_config(r=1, target_modules=["q_proj"]))
    fill_adapters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    mesh, config = on_mesh("2x1", require_adapters=False)
    model = parallelize(model, mesh, config)
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    ids = torch.arange(24).view(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with_state = [parameter in optimizer.state for parameter in trained(model).values()]
    assert any(with_state)
    assert not all(with_state)
    before = snapshot(model, optimizer)
    save_checkpoint(model, optimizer, folder / "a")
    optimizer.state.clear()
    load_checkpoint(model, optimizer, folder / "a")
    after = [parameter in optimizer.state for parameter in trained(model).values()]
    return [same(before, snapshot(model, optimizer)), with_state == after]


def test_empty_shards_and_parameters_without_a_gradient(pool, tmp_path):
    assert pool.run(2, untouched_parameters, tmp_path) == [[True, True]] * 2


def after_a_forward(folder: Path) -> list[bool]:
    """The root's unit, which holds the adapters of embedding and head, stays gathered after a forward."""
    model, optimizer = made("2x1", model=FILLED["embeddings"][0]())
    want = snapshot(model, optimizer)
    model(input_ids=torch.arange(12)[None])
    gathered = any(not isinstance(p, DTensor) for p in trained(model).values())
    save_checkpoint(model, optimizer, folder / "a")
    optimizer.state.clear()
    load_checkpoint(model, optimizer, folder / "a")
    return [gathered, same(want, snapshot(model, optimizer))]


def test_a_save_after_a_forward_that_no_backward_follows(pool, tmp_path):
    for gathered, equal in pool.run(2, after_a_forward, tmp_path):
        assert equal
        assert gathered, "nothing was in the way"


def in_inference_mode(folder: Path) -> list[bool]:
    """As after an evaluation, in the same context."""
    model, optimizer = made("2x1", Case(dtype=torch.float32))
    with torch.inference_mode():
        save_adapter(model, folder / "adapter")
        save_checkpoint(model, optimizer, folder / "checkpoint")
        export_merged(model, folder / "merged")
        inside = torch.is_inference_mode_enabled()
    other, fresh = made("2x1", Case(dtype=torch.float32), steps=0)
    with torch.inference_mode():
        load_adapter(other, folder / "adapter")
        load_checkpoint(other, fresh, folder / "checkpoint")
    kept = same(snapshot(model, optimizer), snapshot(other, fresh))
    other(input_ids=torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
    fresh.step()
    return [inside, kept, not same(snapshot(model, optimizer), snapshot(other, fresh))]


def test_inference_mode_is_no_hindrance(pool, tmp_path):
    assert pool.run(2, in_inference_mode, tmp_path) == [[True, True, True]] * 2


def before_the_first_step(folder: Path) -> list[bool]:
    model, optimizer = made("2x1", steps=0)
    before = snapshot(model, optimizer)
    for parameter in trained(model).values():
        parameter.grad = torch.zeros_like(parameter)
    save_checkpoint(model, optimizer, folder / "a")
    kept = not optimizer.state and same(before, snapshot(model, optimizer))
    model, optimizer = made("2x1", steps=2)
    load_checkpoint(model, optimizer, folder / "a")
    return [kept, not optimizer.state, same(before, snapshot(model, optimizer))]


def test_a_save_before_the_first_step(pool, tmp_path):
    """Torch's own function would step the optimizer."""
    assert pool.run(2, before_the_first_step, tmp_path) == [[True, True, True]] * 2


# ---------------------------------------------------------------------- what is in the folder


def save_one(mesh_text: str, path: Path) -> torch.Tensor:
    model, optimizer = made(mesh_text, Case(dtype=torch.float32))
    save_checkpoint(model, optimizer, path, extra={"step": 1})
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(12)[None]).logits


def test_the_layout(pool, tmp_path):
    path = tmp_path / "step-1"
    pool.run(4, save_one, "2x2", path)
    assert {entry.name for entry in path.iterdir()} == {"adapter", "state", "extra.pt", "meta.json"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]
    meta = json.loads((path / "meta.json").read_text())
    assert meta["format"] == 2
    assert meta["mesh"] == {"dp_replicate": 1, "dp_shard": 2, "tp": 2}
    assert meta["versions"].keys() >= {"torch", "peft"}
    files = {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}
    assert files.keys() - meta["files"].keys() == {"meta.json", "adapter/README.md"}
    assert meta["files"].items() <= files.items()
    assert meta["checksums"].keys() == meta["files"].keys()
    keys = dcp.FileSystemReader(path / "state").read_metadata().state_dict_metadata
    assert keys
    assert all(".lora_" in key for key in keys), "the base is in it"
    torch.load(path / "extra.pt", weights_only=True)


def shown(path: Path) -> str:
    """Return what a save prints that takes as long as one of many bytes."""
    model, optimizer = made("2x1", Case(dtype=torch.float32))
    with patch.object(storage, "_SHORT", 0.0), redirect_stderr(io.StringIO()) as said:
        save_checkpoint(model, optimizer, path)
    return said.getvalue()


def test_rank_0_shows_the_bytes_of_its_shards(pool, tmp_path):
    first, second = pool.run(2, shown, tmp_path / "step-1")
    assert "Saving states: 100%" in first
    assert "Saving: 100%" in first, "the adapter"
    assert "B/s" in first
    assert second == ""


def test_plain_peft_loads_the_adapter(pool, tmp_path):
    logits = pool.run(1, save_one, "1x1", tmp_path / "step-1")[0]
    base = causal_lm(dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, tmp_path / "step-1" / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(plain(input_ids=torch.arange(12)[None]).logits, logits)


# ---------------------------------------------------------------------- retention


def save_many(folder: Path) -> list[Any]:
    model, optimizer = made("2x1")
    seen: list[Any] = []
    for name in ("zeta", "alpha", "omega", "beta"):  # neither names nor clocks say which is the newest
        save_checkpoint(model, optimizer, folder / name, keep_last=2)
        dist.barrier()
        newest = latest_checkpoint(folder)
        seen.append((newest and newest.name, sorted(path.name for path in folder.iterdir())))
        dist.barrier()
    return seen


def test_the_newest_are_kept(pool, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "meta.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "meta.json").write_text("[" * 200_000)
    others = ["adapter", "nested", "notes"]
    for seen in pool.run(2, save_many, tmp_path):
        assert seen == [
            ("zeta", sorted([*others, "zeta"])),
            ("alpha", sorted([*others, "alpha", "zeta"])),
            ("omega", sorted([*others, "alpha", "omega"])),
            ("beta", sorted([*others, "beta", "omega"])),
        ]


def test_only_complete_ones_are_found(pool, tmp_path):
    assert latest_checkpoint(tmp_path / "nothing") is None
    assert latest_checkpoint(tmp_path) is None
    pool.run(2, save_many, tmp_path)
    assert latest_checkpoint(tmp_path) == tmp_path / "beta"
    state = next((tmp_path / "beta" / "state").glob("*.distcp"))
    whole = state.read_bytes()
    state.write_bytes(whole[:-1])
    assert latest_checkpoint(tmp_path) == tmp_path / "omega"
    state.write_bytes(whole)
    (tmp_path / "beta" / "extra.pt").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "omega"
    (tmp_path / "omega" / "meta.json").write_text("{")
    assert latest_checkpoint(tmp_path) is None


def test_what_may_not_be_read_is_passed_over(tmp_path, monkeypatch):
    """As lost+found at the root of a disk, to whoever is not the superuser."""
    (tmp_path / "lost+found").mkdir()
    real = Path.stat

    def stat(path: Path, **kwargs: Any) -> os.stat_result:
        if path.parent.name == "lost+found":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **kwargs)

    monkeypatch.setattr(Path, "stat", stat)
    assert latest_checkpoint(tmp_path) is None


def save_over_the_dead(folder: Path) -> list[str]:
    model, optimizer = made("2x1")
    save_checkpoint(model, optimizer, folder / "new")
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_job_left_is_swept(pool, tmp_path):
    (tmp_path / ".step-7.writing" / "adapter").mkdir(parents=True)
    (tmp_path / ".step-7.writing" / "adapter" / "half").write_text("half")
    assert pool.run(2, save_over_the_dead, tmp_path) == [["new"], ["new"]]


# ---------------------------------------------------------------------- in the background


class Slow:
    """DCP's writer, slowed down: notes when it begins and ends."""

    def __init__(self, monkeypatched: Any) -> None:
        self.own, self.running, self.most = monkeypatched, 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.3)
        try:
            return self.own(*args, **kwargs)
        finally:
            self.running -= 1


def one_in_flight(folder: Path) -> dict[str, Any]:
    own = dcp.FileSystemWriter.write_data
    slow = Slow(own)
    dcp.FileSystemWriter.write_data = lambda self, *args: slow(self, *args)  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    try:
        model, optimizer = made("2x1")
        began = time.monotonic()
        save_checkpoint(model, optimizer, folder / "a", async_save=True)
        found["returns before it is written"] = not (folder / "a").exists()
        found["seconds"] = time.monotonic() - began
        save_checkpoint(model, optimizer, folder / "b", async_save=True)
        found["the second waits for the first"] = (folder / "a").is_dir() and not (folder / "b").exists()
        load_checkpoint(model, optimizer, folder / "a")
        found["a load waits"] = (folder / "b").is_dir()
        found["most"] = slow.most
        wait_for_save()
    finally:
        dcp.FileSystemWriter.write_data = own  # type: ignore[method-assign]
    return found


def test_one_save_at_most_is_in_flight(pool, tmp_path):
    for found in pool.run(2, one_in_flight, tmp_path):
        assert found.pop("most") == 1
        assert found.pop("seconds") < 0.3 + 5
        assert all(found.values()), found


def fails_in_the_background(folder: Path) -> list[Any]:
    """The disk is full on the last rank; training goes on until the next save."""
    own = dcp.FileSystemWriter.write_data

    def full_disk(self: Any, *args: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise OSError(28, "No space left on device")
        return own(self, *args)

    model, optimizer = made("2x1")
    dcp.FileSystemWriter.write_data = full_disk  # type: ignore[method-assign]
    try:
        save_checkpoint(model, optimizer, folder / "a", async_save=True)
        failures = [attempt(wait_for_save)]
        save_checkpoint(model, optimizer, folder / "a", async_save=True)
        failures.append(attempt(save_checkpoint, model, optimizer, folder / "b"))
    finally:
        dcp.FileSystemWriter.write_data = own  # type: ignore[method-assign]
    save_checkpoint(model, optimizer, folder / "b")
    dist.barrier()
    return [*failures, sorted(path.name for path in folder.iterdir())]


def test_an_error_in_the_background_is_raised_at_the_next_call(pool, tmp_path):
    for *failures, left in pool.run(2, fails_in_the_background, tmp_path):
        for failure in failures:
            assert isinstance(failure, Failure)
            assert failure.kind == "OSError"
            assert "No space left" in failure.message
        assert left == ["b"]


SCRIPT = """
    import sys, time
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed import destroy_process_group
    from tests.lora_parallel.checkpoint.test_save_load import made
    from lora_parallel import save_checkpoint

    dist.init_process_group("gloo")
    own = dcp.FileSystemWriter.write_data
    dcp.FileSystemWriter.write_data = lambda self, *args: (time.sleep(0.5), own(self, *args))[1]
    model, optimizer = made("2x1")
    save_checkpoint(model, optimizer, sys.argv[1], async_save=True)
    if sys.argv[2] == "destroy":
        dist.destroy_process_group()
    elif sys.argv[2] == "destroy by name":
        destroy_process_group()
        assert destroy_process_group is dist.destroy_process_group is dist.distributed_c10d.destroy_process_group
        assert destroy_process_group.__module__ == "torch.distributed.distributed_c10d"
"""


@pytest.mark.matrix
@pytest.mark.parametrize("end", cases("destroy by name", matrix=["exit", "destroy"]))
@pytest.mark.processes
def test_a_save_in_flight_is_finished_at_exit(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*run, script, tmp_path / "checkpoints" / "last", end],
        check=True,
        timeout=SCRIPT_LIMIT,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert latest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "last"


# ---------------------------------------------------------------------- bad input


def edited(meta: Path, **changes: Any) -> None:
    """As of format 1, which had no digest of meta.json."""
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 1, **changes}))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def flip(file: Path) -> None:
    """Another byte in the middle, in the same length."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)


def zero_the_end(path: Path, checked: bool) -> None:
    """Of extra.pt, as a file system leaves it that lost what it had not written yet."""
    data = (path / "extra.pt").read_bytes()
    (path / "extra.pt").write_bytes(data[:-2000] + bytes(2000))
    if not checked:
        edited(path / "meta.json", checksums={})


DAMAGE: dict[str, tuple[Any, str, str]] = {
    "nothing there": (shutil.rmtree, "FileNotFoundError", "there is no checkpoint at"),
    "no meta.json": (lambda path: (path / "meta.json").unlink(), "ValueError", "is not a checkpoint that this library"),
    "meta.json is cut": (lambda path: cut(path / "meta.json", 40), "ValueError", "meta.json is damaged"),
    "meta.json nested too deep": (
        lambda path: (path / "meta.json").write_text("[" * 200_000),
        "ValueError",
        "meta.json is damaged",
    ),
    "meta.json of another kind": (lambda path: (path / "meta.json").write_text("[]"), "ValueError", "meta.json is"),
    "a later format": (lambda path: edited(path / "meta.json", format=3), "ValueError", "format 3; this version reads"),
    "another writer": (
        lambda path: edited(path / "meta.json", writer="Trainer"),
        "ValueError",
        "written by Lightning's Trainer",
    ),
    "adapter is cut": (
        lambda path: cut(path / "adapter" / "adapter_model.safetensors", 99),
        "ValueError",
        "adapter_model.safetensors has 99 bytes",
    ),
    "extra.pt is cut": (lambda path: cut(path / "extra.pt", 99), "ValueError", "extra.pt has 99 bytes"),
    "a byte of the adapter": (
        lambda path: flip(path / "adapter" / "adapter_model.safetensors"),
        "ValueError",
        "adapter_model.safetensors has other bytes than were written",
    ),
    "a byte of extra.pt": (lambda path: flip(path / "extra.pt"), "ValueError", "extra.pt has other bytes"),
    "extra.pt ends in zeros": (lambda path: zero_the_end(path, True), "ValueError", "extra.pt has other bytes"),
    "extra.pt without a checksum": (
        lambda path: zero_the_end(path, False),
        "ValueError",
        "extra.pt cannot be read",
    ),
    "state is cut": (
        lambda path: cut(next((path / "state").glob("*.distcp")), 99),
        "ValueError",
        "has 99 bytes",
    ),
    "no state": (lambda path: shutil.rmtree(path / "state"), "ValueError", "is missing"),
    "no adapter": (lambda path: shutil.rmtree(path / "adapter"), "ValueError", "is missing"),
}


def try_damaged(good: Path, root: Path) -> dict[str, Any]:
    model, optimizer = made("2x1", steps=2)
    before = snapshot(model, optimizer)
    found: dict[str, Any] = {}
    for name in DAMAGE:
        failure = attempt(load_checkpoint, model, optimizer, root / name.replace(" ", "-"))
        found[name] = failure, same(before, snapshot(model, optimizer))
    load_checkpoint(model, optimizer, good)
    found["good"] = not same(before, snapshot(model, optimizer))
    return found


def test_a_damaged_checkpoint_is_refused(pool, tmp_path):
    good = tmp_path / "good" / "step-1"
    pool.run(2, save_one_of_case, good)
    for name, (damage, _, _) in DAMAGE.items():
        path = tmp_path / name.replace(" ", "-")
        shutil.copytree(good, path)
        damage(path)
    for found in pool.run(2, try_damaged, good, tmp_path):
        assert found.pop("good")
        for name, (_, kind, text) in DAMAGE.items():
            failure, unchanged = found[name]
            assert isinstance(failure, Failure), f"{name} was accepted"
            assert (failure.kind, unchanged) == (kind, True), (name, failure)
            assert text in failure.message, (name, failure.message)


def other_on_one_rank(folder: Path) -> Any:
    model, optimizer = made("2x1")
    for step in (1, 2):
        save_checkpoint(model, optimizer, folder / f"step-{step}")
    return [attempt(load_checkpoint, model, optimizer, folder / f"step-{2 - dist.get_rank()}")]


def test_ranks_that_found_different_checkpoints(pool, tmp_path):
    for (failure,) in pool.run(2, other_on_one_rank, tmp_path):
        assert isinstance(failure, Failure)
        assert failure.kind == "ValueError"
        assert "checkpoint is 'step-2 (" in failure.message
        assert "'step-1 (" in failure.message


class Counted(nn.Module):
    """A state that is no buffer."""

    calls, rows = 0, torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.rows = self.rows + len(x)
        return x

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "rows": self.rows}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls, self.rows = state["calls"], state["rows"]


class Counting(torch.optim.SGD):
    """Keeps a state that is of no parameter."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index]


class Normed(nn.Module):
    """Running statistics, in the base and in a module that is saved with the adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 8)
        self.norm = nn.Sequential(nn.BatchNorm1d(8), Counted())
        self.head = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.head(self.norm(self.up(x)))


def normed() -> nn.Module:
    return get_peft_model(Normed(), LoraConfig(r=2, target_modules=["up"], modules_to_save=["head"])).train()


def with_buffers(folder: Path) -> list[bool]:
    mesh, config = on_mesh("2x1")
    model, fresh = parallelize(normed(), mesh, config), parallelize(normed(), mesh, config)
    optimizer = Counting(trained(model).values(), lr=0.1)
    # A schedule's rate may be a number of NumPy's.
    optimizer.param_groups[0]["lr"] = np.float64(0.05)
    for _ in range(3):
        model(torch.randn(16, 6, generator=torch.Generator().manual_seed(2))).square().mean().backward()
        optimizer.step()
    buffers = dict(model.named_buffers())
    changed = [name for name, b in fresh.named_buffers() if not torch.equal(b, buffers[name])]
    save_checkpoint(model, optimizer, folder / "a", {"scheduler": {"rates": [np.float64(0.05)], "step": np.int64(3)}})
    rate = Counting(trained(fresh).values(), lr=9)
    extra = load_checkpoint(fresh, rate, folder / "a")
    counted, was = fresh.get_submodule("base_model.model.norm.1"), model.get_submodule("base_model.model.norm.1")
    counts = [was.calls, counted.calls == was.calls, torch.equal(counted.rows, was.rows), rate.state["steps"]]
    back = all(torch.equal(b, buffers[name]) for name, b in fresh.named_buffers())
    failures = []
    for part in (nn.Identity(), Counted()):
        other = normed()
        other.base_model.model.norm[1] = part
        other.base_model.model.up.base_layer.mine = Counted() if isinstance(part, Counted) else None
        failures.append(attempt(load_checkpoint, parallelize(other, mesh, config), None, folder / "a"))
    was.rows = next(p.detach() for p in trained(model).values())
    failures.append(attempt(save_checkpoint, model, None, folder / "b"))
    was.rows = object()
    failures.append(attempt(save_checkpoint, model, None, folder / "b"))
    on_shards = torch.optim.SGD(trained(model).values())
    on_shards.state["mine"] = torch.zeros(2)  # type: ignore[index]
    was.rows = None
    failures.append(attempt(save_checkpoint, model, on_shards, folder / "b"))
    return [len(changed) >= 7, back, rate.param_groups[0]["lr"] == 0.05, extra, counts, failures]


STATE_REFUSED = [
    "base_model.model.norm.1._extra_state is not in both",
    "base_model.model.up.base_layer.mine._extra_state is not in both",
    "base_model.model.norm.1._extra_state in the state dict is or holds a DTensor",
    "base_model.model.norm.1._extra_state in the state dict is what torch.load(weights_only=True) does not read back",
    "SGD keeps a state 'mine' of no parameter that holds a tensor",
]


def test_buffers_go_on_where_they_were(pool, tmp_path):
    for *kept, failures in pool.run(2, with_buffers, tmp_path):
        assert kept == [True, True, True, {"scheduler": {"rates": [0.05], "step": 3}}, [3, True, True, 3]]
        for failure, text in zip(failures, STATE_REFUSED, strict=True):
            assert isinstance(failure, Failure), text
            assert failure.kind == "ValueError"
            assert text in failure.message
    assert not (tmp_path / "b").exists()
    own = normed()
    own.save_pretrained(tmp_path / "peft")
    want, got = (
        load_file(path / "adapter_model.safetensors") for path in (tmp_path / "peft", tmp_path / "a" / "adapter")
    )
    assert got.keys() == want.keys()
    assert any("running_mean" in key for key in got)


def longer_base(folder: Path) -> list[Any]:
    """A base whose first layers are those of another one."""
    lora = {"layers_to_transform": [0, 1]}
    short, optimizer = made("2x1", model=get_peft_model(causal_lm(), lora_config(**lora)))
    save_checkpoint(short, optimizer, folder / "a")
    base = causal_lm(num_hidden_layers=4)
    base.load_state_dict(causal_lm().state_dict(), strict=False)
    longer, other = made("2x1", model=get_peft_model(base, lora_config(**lora)))
    save_checkpoint(longer, other, folder / "b")
    return [
        attempt(load_checkpoint, longer, other, folder / "a"),
        attempt(load_checkpoint, short, optimizer, folder / "b"),
    ]


def test_a_larger_base_is_another_one_and_so_is_a_smaller_one(pool, tmp_path):
    for failures in pool.run(2, longer_base, tmp_path):
        for failure in failures:
            assert isinstance(failure, Failure)
            assert "was trained on another base model" in failure.message


def other_layers(folder: Path) -> list[Any]:
    """A model of one layer more, and one of one layer less, that both train without adapters."""
    models = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))) for count in (2, 1)]
    for model in models:
        parallelize(model, *on_mesh("1x1", require_adapters=False))
        save_checkpoint(model, None, folder / str(len(model)))
    return [attempt(load_checkpoint, model, None, folder / str(3 - len(model))) for model in models]


def test_a_model_with_more_trained_layers_is_another_one_and_so_is_one_with_less(pool, tmp_path):
    ((more, less),) = pool.run(1, other_layers, tmp_path)
    for failure, text in ((more, "2 are not in it (first: ['1.bias'])"), (less, "2 of it do not train here")):
        assert isinstance(failure, Failure)
        assert "other parameters train than in" in failure.message
        assert text in failure.message


def frozen_later(folder: Path) -> list[bool]:
    """What trained for a while, and is frozen now, is no part of the base."""

    def build(steps: int) -> Pair:
        model, optimizer = made("2x1", Case(adapters=False), steps=steps, require_adapters=False)
        embeddings = model.get_input_embeddings().weight.requires_grad_(False)
        optimizer.param_groups[0]["params"].remove(embeddings)
        optimizer.state.pop(embeddings, None)
        return model, optimizer

    (model, optimizer), (fresh, other) = build(1), build(0)
    want, got = (local(each.get_input_embeddings().weight) for each in (model, fresh))
    changed = not torch.equal(want, got)
    save_checkpoint(model, optimizer, folder / "a")
    load_checkpoint(fresh, other, folder / "a")
    return [changed, torch.equal(want, got), same(snapshot(model, optimizer), snapshot(fresh, other))]


def test_what_was_frozen_after_it_trained_is_restored(pool, tmp_path):
    assert pool.run(2, frozen_later, tmp_path) == [[True, True, True]] * 2


def save_one_of_case(path: Path) -> None:
    model, optimizer = made("2x1")
    save_checkpoint(model, optimizer, path)


class Stateful(torch.optim.SGD):
    """Keeps a state that is neither a shard nor a value, though it steps on shards."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = torch.zeros(parameter.shape[0] + 1)


def mismatched(good: Path, root: Path) -> dict[str, tuple[Any, bool]]:
    """Models and optimizers that are not those of the checkpoint, and saves that cannot be."""
    found: dict[str, tuple[Any, bool]] = {}

    def load(name: str, model: nn.Module, optimizer: Any) -> None:
        before = [local(p).clone() for p in trained(model).values()]
        failure = attempt(load_checkpoint, model, optimizer, good)
        found[name] = failure, same(before, [local(p) for p in trained(model).values()])

    def save(name: str, *args: Any, **kwargs: Any) -> None:
        failure = attempt(save_checkpoint, *args, **kwargs)
        dist.barrier()
        found[name] = failure, not (root / "new").exists() and not (root / ".new.writing").exists()
        dist.barrier()

    other_base = causal_lm(seed=5)
    found_model = get_peft_model(other_base, lora_config())
    load("another base", *made("2x1", model=found_model))
    load("a base of another dtype", *made("2x1", Case(dtype=torch.float32)))
    load("a base of other sizes", *made("2x1", Case(sizes={"intermediate_size": 48})))
    load("an adapter of another r", *made("2x1", Case(lora={"r": 4})))
    load("an adapter of other layers", *made("2x1", Case(lora={"target_modules": ["q_proj"]})))
    two = CASE.model()
    two.add_adapter("second", lora_config(r=2))
    load("one adapter more", *made("2x1", model=two, require_adapters=False))
    narrow = CASE.model()
    for parameter in trained(narrow).values():
        parameter.data = parameter.data.float()
    load("an adapter of another dtype", *made("2x1", model=narrow, steps=0))
    model, optimizer = made("2x1")
    parameters = list(trained(model).values())
    load("another optimizer", model, torch.optim.SGD(parameters, lr=1))
    load("other groups", model, torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}]))
    load("fewer parameters", model, torch.optim.AdamW(parameters[:3]))
    load("two optimizers", model, [optimizer, torch.optim.AdamW(parameters)])
    load("no optimizer at all", model, model)
    failure = attempt(load_checkpoint, model, optimizer, latest_checkpoint(root / "nowhere"))
    found["no checkpoint"] = failure, True
    load("not parallelized", get_peft_model(causal_lm(), lora_config()), None)

    new = root / "new"
    save("a folder that is there", model, optimizer, root / "there")
    save("a file that is there", model, optimizer, root / "file")
    save("inside of a file", model, optimizer, root / "file" / "new")
    save("extra that is no plain value", model, optimizer, new, extra={"path": Path("x")})
    lists = torch.optim.AdamW(parameters)
    for parameter in parameters:
        lists.state[parameter]["history"] = [torch.zeros(local(parameter).shape)]
    save("a state that is a list of parts", model, lists, new)
    odd = torch.optim.AdamW(parameters)
    odd.param_groups[0]["where"] = Path("x")
    save("a setting that is no plain value", model, odd, new)
    save("extra that is a shard", model, optimizer, new, extra={"p": parameters[0].detach()})
    save("extra that is no dict", model, optimizer, new, extra=5)
    save("a URL", model, optimizer, "s3://bucket/new")
    save("a hidden name", model, optimizer, root / ".new")
    save("an optimizer on one rank only", model, optimizer if dist.get_rank() else None, new)
    save("another folder on one rank", model, optimizer, root / f"new-{dist.get_rank()}")
    save("keep_last of none", model, optimizer, new, keep_last=0)
    save("a foreign optimizer", model, torch.optim.AdamW([nn.Parameter(torch.ones(2))]), new)
    save("a state that is no shard", model, Stateful(parameters), new)
    save("a model that is not", get_peft_model(causal_lm(), lora_config()), None, new)
    save("no optimizer, but something", model, "optimizer", new)
    load_checkpoint(model, optimizer, good)

    model.merge_adapter()
    save("while merged", model, optimizer, new)
    load("into what is merged", model, optimizer)
    found["an adapter while merged"] = attempt(save_adapter, model, new), not new.exists()
    found["an adapter into what is merged"] = attempt(load_adapter, model, good / "adapter"), True
    model.unmerge_adapter()  # not quite what it was, and yet the same base
    save_checkpoint(model, optimizer, root / "unmerged")
    load_checkpoint(*made("2x1"), root / "unmerged")
    return found


_MERGED = ("ValueError", "is merged into the base of base_model.model.model.layers.0.self_attn.q_proj: call unmerge_ad")
MISMATCHED = {
    "an adapter of another dtype": (
        "ValueError",
        "lora_A.weight has dtype torch.float64, the model's has torch.float32",
    ),
    "while merged": _MERGED,
    "into what is merged": _MERGED,
    "an adapter while merged": _MERGED,
    "an adapter into what is merged": _MERGED,
    "another base": ("ValueError", "was trained on another base model"),
    "a base of another dtype": ("ValueError", "was trained on another base model"),
    "a base of other sizes": ("ValueError", "was trained on another base model"),
    "an adapter of another r": ("ValueError", "r=3, the model's adapter has r=4"),
    "an adapter of other layers": ("ValueError", "are unexpected"),
    "one adapter more": ("ValueError", "holds the adapters ['default'], the model has ['default', 'second']"),
    "another optimizer": ("ValueError", "is a AdamW, the one to fill a SGD"),
    "other groups": ("ValueError", "has 1 parameter groups, the one to fill 2"),
    "fewer parameters": ("ValueError", "parameter group 0 of the AdamW"),
    "two optimizers": ("ValueError", "the state of 1 optimizers, and 2 are given"),
    "no optimizer at all": ("TypeError", "optimizer is a "),
    "no checkpoint": ("FileNotFoundError", "directory is None: there is no checkpoint to load"),
    "not parallelized": ("ValueError", "was not parallelized"),
    "a folder that is there": ("FileExistsError", "exists and is not empty, and is not overwritten"),
    "a file that is there": ("FileExistsError", "exists and is not empty, and is not overwritten"),
    "inside of a file": ("NotADirectoryError", "file"),
    "extra that is no plain value": ("ValueError", "extra['path'] holds what torch.load(weights_only=True)"),
    "a state that is a list of parts": ("ValueError", "keeps the state 'history' of"),
    "a setting that is no plain value": ("ValueError", "an optimizer has settings or states that"),
    "extra that is a shard": ("ValueError", "'extra' holds a DTensor"),
    "extra that is no dict": ("TypeError", "extra is a int: give a dict"),
    "a URL": ("ValueError", "is a URL: only local paths"),
    "a hidden name": ("ValueError", "a name that starts with a dot"),
    "an optimizer on one rank only": ("ValueError", "optimizers is [] on rank 0 and ['0'] on rank 1"),
    "another folder on one rank": ("ValueError", "new-1' on rank 1: call it with the same on every rank"),
    "keep_last of none": ("ValueError", "keep_last=0"),
    "a foreign optimizer": ("ValueError", "that is not the model's"),
    "a state that is no shard": ("ValueError", "keeps the state 'rows' of"),
    "a model that is not": ("ValueError", "was not parallelized"),
    "no optimizer, but something": ("TypeError", "optimizer is a str"),
}


def test_what_does_not_fit_is_refused(pool, tmp_path):
    good = tmp_path / "good" / "step-1"
    pool.run(2, save_one_of_case, good)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine too")
    for found in pool.run(2, mismatched, good, tmp_path):
        assert found.keys() == MISMATCHED.keys()
        for name, (kind, text) in MISMATCHED.items():
            failure, unchanged = found[name]
            assert isinstance(failure, Failure), f"{name} was accepted"
            assert failure.kind == kind, (name, failure.trace)
            assert text in failure.message, (name, failure.message)
            assert unchanged, name
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine"]
    assert (tmp_path / "file").read_text() == "mine too"


def saved_whole(folder: Path) -> None:
    """A state of another shape than its parameter, of an optimizer that steps on shards, where these are whole."""
    model, optimizer = made("1x1", steps=1)
    for states in optimizer.state.values():
        states["history"] = [torch.ones(5)]
    save_checkpoint(model, optimizer, folder / "history")
    load_checkpoint(model, optimizer, folder / "history")
    save_checkpoint(*made("1x1", Case(adapters=False), require_adapters=False), folder / "everything")


def loaded_sharded(folder: Path) -> list[tuple[Any, bool]]:
    model, optimizer = made("2x1", steps=0)
    before = snapshot(model, optimizer)
    failure = attempt(load_checkpoint, model, optimizer, folder / "history")
    unchanged = same(before, snapshot(model, optimizer))
    model, _ = made("2x1", Case(adapters=False, dtype=torch.float32), steps=0, require_adapters=False)
    return [(failure, unchanged), (attempt(load_checkpoint, model, None, folder / "everything"), True)]


def test_what_was_whole_is_not_put_beside_shards(pool, tmp_path):
    pool.run(1, saved_whole, tmp_path)
    texts = ["AdamW that was saved keeps the state 'history'", "and dtype torch.float64"]
    for found in pool.run(2, loaded_sharded, tmp_path):
        for (failure, unchanged), text in zip(found, texts, strict=True):
            assert isinstance(failure, Failure), text
            assert (failure.kind, unchanged) == ("ValueError", True)
            assert text in failure.message


def test_an_optimizer_that_joins_its_parameters_resumes_with_them_in_the_same_order():
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    names = dict(zip(parameters, ("first", "second"), strict=True))
    saved, same, other = (torch.optim.LBFGS(each) for each in (parameters, parameters, parameters[::-1]))
    record = optimizer_state(saved, names).record
    check_optimizer(same, names, group_names(same, names, None), record)
    with pytest.raises(ValueError, match="LBFGS that was saved has its parameters in another order"):
        check_optimizer(other, names, group_names(other, names, None), record)


@pytest.mark.parametrize("fused", [False, True])
def test_step_counts_go_where_the_saved_settings_want_them(fused):
    """Those of a fused optimizer beside the parameter (the meta device stands in for a GPU), whatever is resumed."""
    names = {nn.Parameter(torch.empty(2, device="meta")): "p"}
    saved, fresh = (torch.optim.AdamW(names) for _ in range(2))
    saved.param_groups[0]["fused"], fresh.param_groups[0]["fused"] = fused, not fused
    saved.state[next(iter(names))]["step"] = torch.tensor(3.0)
    restored(fresh, names, optimizer_state(saved, names).record, lambda *_: torch.empty(0))()
    assert fresh.param_groups[0]["fused"] == fused
    assert fresh.state[next(iter(names))]["step"].device.type == ("meta" if fused else "cpu")


def packed(folder: Path) -> Any:
    """Two matrices fused in one weight, each split over tp: a rank holds two rectangles."""
    model, _ = made("1x2", Case(adapters=False), require_adapters=False)
    mesh, _ = on_mesh("1x2")
    placements = [_StridedShard(0, split_factor=2)]
    data = DTensor.from_local(torch.ones(20), mesh["tp"], placements, run_check=False, shape=(40,), stride=(1,))
    model.model.norm.weight = nn.Parameter(data)
    failure = attempt(save_checkpoint, model, None, folder / "new")
    dist.barrier()
    return failure, sorted(path.name for path in folder.iterdir())


def test_a_packed_placement_is_never_written_as_one_chunk(pool, tmp_path):
    for failure, left in pool.run(2, packed, tmp_path):
        assert isinstance(failure, Failure)
        assert "is not one rectangle of the full tensor" in failure.message
        assert left == []
