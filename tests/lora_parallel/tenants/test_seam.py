"""The engine runs without the folder of tenants."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("lora_parallel.tenants"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import lora_parallel, lora_parallel.integration
from tests.oracle import Case, on_mesh

mesh, config = on_mesh("1x1")
model = lora_parallel.parallelize(Case().model(), mesh, config)
(batch,) = Case(steps=1).batches()
model(input_ids=batch, labels=batch).loss.backward()
try:
    lora_parallel.TenantPool
except ModuleNotFoundError:
    print("trained")
"""


@pytest.mark.processes
def test_without_the_folder():
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout == "trained\n", done.stderr[-2000:]
