"""Test that a launcher says last which rank failed first, with its error and what to do about it."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lora_parallel_failures import hint, repeat_failure

RANK = """
import os, sys, time
from lora_parallel_failures import record_failure
record_failure()
if os.environ["RANK"] == "1":
    raise ValueError("{text}")
time.sleep(3)
raise RuntimeError("gloo: Connection closed by peer")
"""
LAUNCHER = """
import sys
import atexit
from lora_parallel_failures import repeat_failure
from torch.distributed.run import main
atexit.register(repeat_failure)
main(["--standalone", "--nproc-per-node", "2", *sys.argv[1:]])
"""


@pytest.mark.processes
def test_the_error_of_a_rank_is_the_last_thing_that_its_launcher_says(tmp_path):
    (tmp_path / "rank.py").write_text(RANK.format(text="Torch not compiled with CUDA enabled"))
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "rank.py")], capture_output=True, text=True, timeout=120
    )
    _, said = ended.stderr.split("Root Cause (first observed failure):")
    *_, failed, advice = said.strip().splitlines()
    assert ended.returncode == 1
    assert failed == "Rank 1 failed: ValueError: Torch not compiled with CUDA enabled"
    assert advice.startswith("Hint: there is no GPU here")


def test_an_error_is_recorded_and_printed_as_it_was(monkeypatch, tmp_path):
    """Hold that the file has the last line of the trace alone, as torchrun prints it of each rank, and the rank all."""
    file, printed = tmp_path / "error.json", []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(sys, "excepthook", lambda *error: printed.append(error))
    from lora_parallel_failures import record_failure

    record_failure()

    def fail():
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong") as raised:
        fail()
    trace = raised.value.__traceback__
    sys.excepthook(ValueError, raised.value, trace)
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: wrong"
    assert message["extraInfo"]["py_callstack"].count("test_failures.py") == 1
    assert printed == [(ValueError, raised.value, trace)]
    assert raised.value.__traceback__ is trace


def test_a_rank_that_has_written_no_error_comes_before_those_that_torchrun_has_ended(capsys, monkeypatch):
    """A rank ends with a code (`sys.exit(3)`), and torchrun ends the other one by SIGTERM."""
    failures = {
        0: SimpleNamespace(message="Signal 15 (SIGTERM) received by PID 7", exitcode=-15, timestamp=1),
        1: SimpleNamespace(message="<NONE>", exitcode=3, timestamp=2),
    }
    monkeypatch.setattr(sys, "last_value", SimpleNamespace(failures=failures), raising=False)
    repeat_failure()
    assert capsys.readouterr().err == "\nRank 1 failed: it ended with code 3\n"


def test_an_error_without_advice_has_no_hint():
    assert hint("ValueError: wrong") == ""
