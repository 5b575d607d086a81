"""Ranks that should hold the same: what differs is told at a save, by how much, and nothing is lost for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lora_parallel import parallelize, save_adapter
from lora_parallel.distributed.dtensors import local
from tests.cases import cases
from tests.logs import listening
from tests.oracle import Case, on_mesh, ranks_of, trained

WITH_A_NORM = Case(lora={"modules_to_save": ["norm"]})
DRIFT = 1e-9


def saved_with_a_drift(mesh_text: str, folder: str, drifts: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
    mesh, config = on_mesh(mesh_text)
    model = parallelize(WITH_A_NORM.model(), mesh, config)
    parameters = {name: p for name, p in trained(model).items() if ".model.norm." in name}
    with torch.no_grad(), listening("lora_parallel.distributed.replicas") as texts:
        for parameter in parameters.values() if drifts else ():
            local(parameter).add_(DRIFT * mesh.get_local_rank("tp"))
        save_adapter(model, folder)
    return texts, {name: local(p).clone() for name, p in parameters.items()}


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x2", "2x1x2"]))
@pytest.mark.parametrize("drifts", [True, False])
def test_what_differs_between_ranks_is_told_and_the_first_ranks_values_are_saved(pool, mesh, drifts, tmp_path):
    found: list[Any] = pool.run(ranks_of(mesh), saved_with_a_drift, mesh, str(tmp_path / "adapter"), drifts)
    texts = found[0][0]
    assert not any(others for others, _ in found[1:])
    if drifts:
        assert len(texts) == 1
        assert "norm.modules_to_save.default.weight should be equal on ranks [0, 1" in texts[0]
        assert "and differs by 1.0e-09" in texts[0]
        assert "an adapter folder gets the values of rank 0" in texts[0]
    else:
        assert not texts
    ((name, own),) = found[0][1].items()
    file = load_file(Path(tmp_path, "adapter", "adapter_model.safetensors"))
    (saved,) = (value for key, value in file.items() if key.endswith("model.norm.weight"))
    assert torch.equal(saved[: len(own)], own), name
