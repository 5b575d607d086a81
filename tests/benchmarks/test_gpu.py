"""The script for machines with GPUs, on a CPU: a part of its steps, and what becomes of those that end badly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from benchmarks.gpu import __main__ as script
from benchmarks.gpu import ranks, run, speed
from benchmarks.gpu.outcomes import violations
from benchmarks.gpu.page import MARK, write_page
from benchmarks.gpu.records import ROOT, Record, Records, code_identity
from benchmarks.gpu.run import run_all
from benchmarks.gpu.speed import llama_flops
from benchmarks.gpu.steps import LLAMA_8B, TINY, Step, meshes_for, steps, world_size_of
from benchmarks.gpu.trace import by_kind, exposed, length
from benchmarks.gpu.training import PRECISIONS, adapted, cast, judged, llama, train

DOCS = ROOT / "docs" / "results" / "gpu.md"


def step(function: str, name: str = "", **changes: Any) -> Step:
    return Step(name or function, "check", f"tests.benchmarks.gpu_steps:{function}", **changes)


def records(folder: Path) -> Records:
    return Records(folder, {"device": "CPU", "torch": "1"}, "a")


def ran(chosen: list[Step], folder: Path, seconds: float = 600) -> list[Record]:
    return list(run_all(chosen, records(folder), "cpu", seconds, told=lambda line: None))


def run_script(monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["gpu", "--device", "cpu", "--quick", "--output", str(output), *arguments])
    return script.main()


# ---------------------------------------------------------------------- steps that end in each way


@pytest.mark.matrix
@pytest.mark.processes
def test_a_step_ends_in_one_of_these_ways(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 1.0)
    calls = str(tmp_path / "calls")
    chosen = [
        step("counted", options={"file": calls}),
        step("counted", "wrong", options={"file": calls, "error": 2.0, "bound": 1.0}),
        step("counted", "no number", options={"file": calls, "error": float("nan"), "bound": 1.0}),
        step("fails"),
        step("fails", "one of two", options={"rank": "1"}, world_size=2),
        step("hangs", seconds=4),
        step("dies"),
        step("refused"),
        step("lacks"),
        step("large", options={"layers": 8}, fallbacks=({"layers": 6}, {"layers": 4})),
        step("large", "too large", options={"layers": 8}, fallbacks=({"layers": 6},)),
        step("lingers"),
    ]
    found = {record.step: record for record in ran(chosen, tmp_path)}
    assert {name: record.status for name, record in found.items()} == {
        "counted": "passed",
        "wrong": "failed",
        "no number": "failed",
        "fails": "failed",
        "one of two": "failed",
        "hangs": "timed out",
        "dies": "failed",
        "refused": "not supported",
        "lacks": "not installed",
        "large": "passed",
        "too large": "out of memory",
        "lingers": "passed",
    }
    assert found["wrong"].detail == "something: 2.0e+00 is above the bound of 1.0e+00"
    assert "ValueError: it broke" in found["fails"].detail
    assert "gpu_steps.py" in found["fails"].output  # the stack
    assert found["one of two"].detail == "rank 1: ValueError: it broke"
    assert "until here" in found["hangs"].output
    assert "waits_for_nothing" in found["hangs"].output  # where it hung
    assert found["hangs"].seconds < 30
    assert "SIGKILL" in found["dies"].detail
    assert found["refused"].detail == "the library says no"
    assert found["large"].figures == {"layers": 4}
    assert "layers 6" in found["large"].detail
    assert "did not end" in found["lingers"].detail


@pytest.mark.matrix
@pytest.mark.processes
def test_ranks_that_are_fresh_processes_as_on_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 1.0)
    monkeypatch.setitem(ranks.START_METHODS, "cpu", "spawn")
    calls = tmp_path / "calls"
    chosen = [step("counted", options={"file": str(calls)}), step("fails", options={"rank": "1"}, world_size=2)]
    assert [record.status for record in ran(chosen, tmp_path)] == ["passed", "failed"]
    assert len(calls.read_text().splitlines()) == 1


@pytest.mark.processes
def test_a_rank_does_not_outlive_the_script(tmp_path):
    file = tmp_path / "pid"
    program = (
        "from benchmarks.gpu.ranks import START_METHODS, run_step; from benchmarks.gpu.steps import Step\n"
        "START_METHODS['cpu'] = 'spawn'\n"
        f"step = Step('x', 'check', 'tests.benchmarks.gpu_steps:tells_and_hangs', {{'file': {str(file)!r}}})\n"
        "run_step(step, 'cpu', step.options, 100)"
    )
    running = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    eventually(lambda: file.exists() and file.read_text())
    running.kill()  # as a limit of a job's time does
    running.wait()
    eventually(lambda: not alive(int(file.read_text())))


def eventually(holds: Any, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.processes
def test_a_rerun_runs_what_has_not_settled(tmp_path, monkeypatch):
    monkeypatch.setitem(ranks.START_METHODS, "cpu", "fork")  # a server of forks would import what these do not need
    monkeypatch.setattr(run, "LEAST_SECONDS", 1.0)
    calls = {name: tmp_path / name for name in ("good", "bad")}
    chosen = [
        step("counted", "good", options={"file": str(calls["good"])}),
        step("counted", "bad", options={"file": str(calls["bad"]), "error": 2.0, "bound": 1.0}),
    ]
    assert [record.status for record in ran(chosen, tmp_path)] == ["passed", "failed"]
    assert [record.status for record in ran(chosen, tmp_path)] == ["passed", "failed"]
    assert [len(file.read_text().splitlines()) for file in calls.values()] == [1, 2]
    # A step that the run's own time cuts off has not failed.
    cut = ran([step("hangs", seconds=100)], tmp_path, seconds=2)
    assert [(record.status, "the time of the run ended" in record.detail) for record in cut] == [("not run", True)]
    # Without time nothing is begun, and what is known is told.
    more = [*chosen, step("counted", "new", options={"file": str(calls["good"])})]
    assert [record.status for record in ran(more, tmp_path, seconds=0)] == ["passed", "failed", "not run"]
    assert [len(file.read_text().splitlines()) for file in calls.values()] == [1, 2]


def test_a_record_is_of_one_step_with_its_options_on_one_machine_with_one_code(tmp_path):
    kept, first = records(tmp_path), step("counted", options={"file": "x"})
    kept.keep(first, Record(first.name, "passed", {"errors": {}}))
    assert kept.find(first) == Record(first.name, "passed", {"errors": {}})
    assert kept.find(replace(first, options={"file": "y"})) is None
    assert replace(kept, code="b").find(first) is None
    assert replace(kept, environment={"device": "CPU", "torch": "2"}).find(first) is None
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]  # nothing half written


def test_the_code_is_known_by_its_files(tmp_path):
    (tmp_path / "lora_parallel").mkdir()
    file = tmp_path / "lora_parallel" / "a.py"
    file.write_text("x = 1\n")
    before = code_identity(tmp_path)
    file.write_text("x = 2\n")
    assert code_identity(tmp_path) != before


# ---------------------------------------------------------------------- the command


@pytest.mark.matrix
@pytest.mark.processes
@pytest.mark.timeout(3600)  # four steps, each with processes of its own and a deadline for them
def test_a_part_of_the_steps(tmp_path, monkeypatch, capsys):
    before = DOCS.read_text()
    chosen = [
        "--steps",
        "bf16*",
        "oracle 1x2 bf16",
        "tenants*bf16",
        "speed 1x1",
    ]
    assert run_script(monkeypatch, tmp_path, "--minutes", "50", *chosen) == 0
    assert "4 steps, 0 went wrong, 0 not run" in capsys.readouterr().out
    page = (tmp_path / "gpu.md").read_text()
    for told in (
        "on a CPU, with tiny shapes",
        "| oracle 1x2 bf16 | passed |",
        "| demo | not run |",
        "| ours |",
        "| PEFT |",
        "| PEFT + torch.compile |",
        "- Liger: not installed",
    ):
        assert told in page
    assert (tmp_path / "gpu.png").exists()
    assert DOCS.read_text() == before  # a proof never looks like a result
    kept = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "records").iterdir())
    assert len(kept) == 4
    assert run_script(monkeypatch, tmp_path, *chosen) == 0
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "records").iterdir()) == kept


@pytest.mark.processes
def test_the_command_fails_with_a_step(tmp_path, monkeypatch, capfd):
    planned = [step("fails"), step("refused")]
    monkeypatch.setitem(ranks.START_METHODS, "cpu", "fork")
    monkeypatch.setattr(script, "steps", lambda device, gpus, quick: planned)
    assert run_script(monkeypatch, tmp_path) == 1
    out = capfd.readouterr().out
    assert "failed: fails: ValueError: it broke" in out
    assert "2 steps, 1 went wrong, 0 not run" in out
    page = (tmp_path / "gpu.md").read_text()
    assert "| fails | **failed** |" in page
    assert "ValueError: it broke" in page
    assert "| refused | **not supported** |" in page


def test_steps_that_do_not_exist_are_listed(tmp_path, monkeypatch, capsys):
    assert run_script(monkeypatch, tmp_path, "--steps", "nothing") == 2
    assert "oracle 1x1 float64" in capsys.readouterr().out


# ---------------------------------------------------------------------- what needs no process


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_that_lacks_a_part_is_seen_in_every_precision(precision):
    kind = PRECISIONS[precision]
    want = train(cast(adapted(llama()), kind, "cpu", torch.float64), "cpu")
    plain = train(cast(adapted(llama()), kind, "cpu", kind.computed), "cpu")
    assert not violations(judged(plain, plain, want, kind))
    name = next(name for name in plain.gradients if "lora_A" in name)
    wrong = replace(plain, gradients={**plain.gradients, name: 0.9 * plain.gradients[name]})
    assert any("gradients" in text for text in violations(judged(wrong, plain, want, kind)))


def test_an_error_above_its_bound_is_a_violation():
    figures = {"errors": {"a": [1.0, 1.0], "b": [1.1, 1.0], "c": [float("inf"), float("inf")]}}
    assert [text.partition(":")[0] for text in violations(figures)] == ["b", "c"]


@pytest.mark.parametrize(
    ("gpus", "quick", "meshes"),
    [
        (1, False, ["1x1"]),
        (2, True, ["1x1", "2x1", "1x2"]),
        (3, False, ["1x1", "2x1", "1x2"]),
        (4, False, ["1x1", "2x1", "1x2", "4x1", "1x4", "2x2"]),
        (8, True, ["1x1", "2x1", "1x2", "8x1", "2x4", "1x8", "2x2x2", "4x2"]),
    ],
)
def test_meshes_are_those_that_the_devices_allow(gpus, quick, meshes):
    assert meshes_for(gpus, quick) == meshes
    planned = steps("cuda", gpus, quick)
    alone = [each for each in planned if not each.name.endswith("ranks share a GPU")]
    assert max(each.world_size for each in alone) == max(world_size_of(mesh) for mesh in meshes)
    assert (len(alone) < len(planned)) == (gpus == 1)
    assert len({each.name for each in planned}) == len(planned)


def test_exposed_communication_is_that_beside_no_other_kernel():
    def event(name: str, start: float, duration: float, cat: str = "kernel") -> dict[str, Any]:
        return {"name": name, "ts": start, "dur": duration, "cat": cat}

    events = [
        event("gemm", 0, 1000),
        event("ncclDevKernel_AllGather", 500, 1000),  # half of it beside a product
        event("gemm", 1200, 100),
        event("ncclDevKernel_ReduceScatter", 3000, 500),
        event("nccl:all_gather", 0, 9000, "gpu_user_annotation"),
        event("aten::mm", 0, 9000, "cpu_op"),
        {"name": "metadata"},
    ]
    assert exposed(events) == {"kernels": 2.0, "communication": 1.5, "exposed": 0.9}
    assert length([]) == 0


def test_kernels_are_told_apart_by_their_names():
    """The names are in the form that torch, cuBLAS, CUTLASS, Triton and NCCL give theirs."""
    names = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_TNT": "products of matrices",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>": "products of matrices",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass>": "attention",
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda>": "copies, casts",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "elementwise",
        "void at::native::reduce_kernel<512, 1, at::native::MeanOps>": "reductions",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer, clipping",
        "triton_red_fused__to_copy_add_mul_2": "Triton",
        "ncclDevKernel_AllGather_RING_LL": "communication",
        "something_else": "other",
    }
    for name, kind in names.items():
        assert by_kind([{"name": name, "ts": 0, "dur": 500, "cat": "kernel"}]) == {kind: [0.5, 1]}
    assert by_kind([{"name": "gemm", "ts": 0, "dur": 500, "cat": "cpu_op"}]) == {}


def test_flops_are_counted_as_by_the_peer():
    with torch.device("meta"):
        model = nn.ParameterList([nn.Parameter(torch.empty(8_030_261_248), requires_grad=False)])
        model.append(nn.Parameter(torch.empty(41_943_040)))
    assert llama_flops(LLAMA_8B, 32, model) / 1e9 == pytest.approx(32.25, abs=0.01)


def test_a_peer_that_breaks_is_named_and_the_others_are_timed(monkeypatch):
    class Fake:
        def __init__(self, error: Exception | None = None) -> None:
            self.model = nn.ParameterList([nn.Parameter(torch.ones(2), requires_grad=each) for each in (True, False)])
            self.error = error

        def forward_backward(self, tokens: torch.Tensor) -> torch.Tensor:
            if self.error is not None:
                raise self.error
            return torch.ones(())

        def update(self) -> torch.Tensor:
            return torch.ones(())

    options = {"mesh": "1x1", "peers": (), "ours": (), "autocast": False, "rows": 2, "shape": TINY, "layers": 1}
    options |= {"rounds": 2, "warmup": 0, "backend": ""}
    found = [("ours", Fake()), ("Liger", Fake(ValueError("no kernel"))), ("PEFT", Fake())]
    monkeypatch.setattr(speed, "sides", lambda *args: found)
    figures = speed.speed("cpu", **options)
    assert list(figures["sides"]) == ["ours", "PEFT"]
    assert figures["refused"] == {"Liger": "failed: ValueError: no kernel"}
    assert figures["tokens"] == 2 * TINY["sequence"]
    for name, error in (("ours", ValueError("no kernel")), ("Liger", torch.OutOfMemoryError("fewer layers"))):
        broken = [(name, Fake(error))]
        monkeypatch.setattr(speed, "sides", lambda *args, broken=broken: broken)
        with pytest.raises(type(error)):
            speed.speed("cpu", **options)


def test_packages_that_are_too_old_are_named():
    found = {"torch": "2.11.0+cu130", "peft": "0.19.9", "transformers": "99"}
    told = script.lacking(found)
    assert "peft >= 0.20.0 is needed, and 0.19.9 is installed." in told
    assert "liger-kernel is not installed: what needs it is reported so." in told
    assert not any(line.split()[0] == "torch" or "transformers" in line for line in told)


def test_wheels_of_a_folder_go_first(tmp_path, monkeypatch):
    (tmp_path / "none").mkdir()
    with pytest.raises(SystemExit, match=r"none: there is no \*.whl in this folder"):
        script.use_wheels(tmp_path / "none", tmp_path / "packages")
    wheel = tmp_path / "liger_kernel-99.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "liger_kernel-99.0.dist-info"
        archive.writestr("liger_kernel/__init__.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: liger-kernel\nVersion: 99.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    script.use_wheels(tmp_path, tmp_path / "packages")
    assert script.describe("cpu")[0]["liger-kernel"] == "99.0"
    assert os.environ["PYTHONPATH"] == f"{tmp_path / 'packages'}{os.pathsep}elsewhere"


def test_the_results_replace_what_follows_the_mark(tmp_path):
    page = tmp_path / "docs" / "results" / "gpu.md"
    page.parent.mkdir(parents=True)
    page.write_text(f"# Before\n\n{MARK}\nold\n")
    rate = Step("rate", "rate", "")
    timed = Step("speed 1x1", "speed", "")
    kernels = {"exposed": 0.0, "communication": 0.0, "kinds": {"attention": [1.25, 3]}}
    figures = {
        "sides": {
            "ours": {"seconds": [[0.1, 0.2]] * 3, "peak bytes": 2**30, "kernels": None},
            "PEFT": {"seconds": [[0.1, 0.3]] * 3, "peak bytes": 2**31, "kernels": kernels},
        },
        "refused": {"ours, compile": "not supported: not | yet"},
        "tokens": 1000,
        "linear weights": 10**6,
        "llama flops": 2e9,
        "world size": 1,
        "layers": 2,
        "of layers": 32,
        "sequence": 1000,
    }
    rows = [Record("rate", "passed", {"tflops": 0.04, "size": 8}), Record(timed.name, "passed", figures)]
    write_page(page, [rate, timed], rows, {"device": "1 x GPU"})
    text = page.read_text()
    assert text.startswith("# Before\n")
    assert "old" not in text
    # 4 FLOPs x 1e6 weights x 1000 tokens in 0.2 s are half of 0.04 TFLOP/s.
    assert "| 1x1 | ours | 2 of 32, 1000 | 200.0 (200.0 to 200.0) | 5,000 | 50.0% | 10 | 1.00 | 1.0 |" in text
    assert "| 1x1 | PEFT | 2 of 32, 1000 | 300.0 (300.0 to 300.0) | 3,333 | 33.3% | 6.67 | 1.50 | 2.0 |" in text
    assert "| speed to plain PEFT's (ours) | >= 1.3 | 1.50 |" in text
    assert "- ours, compile: not supported: not &#124; yet" in text
    assert "| 1x1 | PEFT | 1.2 (3) |" in text
    json.dumps(figures)
    pytest.importorskip("matplotlib")
    assert (tmp_path / "docs" / "assets" / "gpu.png").exists()
