"""Tokens, operations, memory and communication of a step, of the whole mesh."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from lora_parallel import parallelize
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.metrics import MeshMeter, covered, token_flops, tokens_of
from tests.cases import cases
from tests.oracle import Case, on_mesh

CASE = Case(steps=3, sizes={"tie_word_embeddings": True, "num_hidden_layers": 1})
STAGED = replace(CASE, sizes={"tie_word_embeddings": True})  # two blocks, one for each stage
TOKENS = CASE.rows * 12
SECONDS, PEAK = 2.0, 1e6


def case_of(mesh: str) -> Case:
    return STAGED if "pp" in mesh else CASE


def measured(text: str) -> list[Any]:
    """Train three steps, of which the second is profiled; an evaluation between them is not counted."""
    settings = {"pp_microbatches": 2} if "pp" in text else {}
    mesh, config = on_mesh(text, **settings)
    model = parallelize(case_of(text).model(), mesh, replace(config, activation_checkpointing=True))
    meter = MeshMeter([model], PEAK, profile_every=2)
    found = []
    for batch in CASE.batches():
        mine = batch.chunk(dp_size(mesh))[dp_rank(mesh)]
        meter.begin_step()
        model(input_ids=mine, labels=mine).loss.backward()
        meter.end_step()
        with torch.no_grad():
            model(input_ids=mine)
        meter._seconds, meter._since = SECONDS, None
        found.append(meter.read())
    meter.close()
    assert not model._forward_pre_hooks.keys() & {hook.id for hook in meter._hooks}
    return [token_flops([model]), found]


@pytest.mark.parametrize("mesh", cases("2x2", matrix=["1x2pp2", "1x2cp2", "2x1x2"]))
def test_a_batch_counts_once_whoever_works_on_it(pool, mesh):
    want = token_flops([case_of(mesh).model()])
    answers = pool.run(4, measured, mesh)
    for flops, (first, profiled, last) in answers:
        assert flops == want
        assert first["mesh/tokens_per_second"] == TOKENS / SECONDS
        operations = TOKENS * want.training(12)
        assert first["mesh/mfu"] == pytest.approx(operations / SECONDS / (4 * PEAK), rel=1e-3)
        assert first["mesh/memory_max_bytes"] >= first["mesh/memory_min_bytes"] > 1e7
        assert profiled["mesh/tokens_per_second"] == 0  # its time says nothing, so it is left out
        assert 0 < profiled["mesh/communication_share"] < 1
        assert "mesh/communication_share" not in first
        assert last["mesh/tokens_per_second"] == TOKENS / SECONDS
    assert all(found == answers[0][1] for _, found in answers)  # the same on every rank


def test_one_process_communicates_with_nobody():
    model = CASE.model()
    meter = MeshMeter([model], profile_every=1)
    meter.begin_step()
    model(CASE.batches()[0]).logits.sum().backward()
    meter.end_step()
    found = meter.read()
    assert found["mesh/communication_share"] == 0
    assert "mesh/mfu" not in found  # nobody has said what the CPU could do
    meter.close()


def test_tokens_of_a_forward():
    ids, features = torch.zeros(4, 12, dtype=torch.long), torch.zeros(4, 12, 8)
    assert tokens_of((), {"attention_mask": ids[:2], "input_ids": ids}) == (48, 12)
    assert tokens_of((), {"inputs_embeds": features}) == (48, 12)
    assert tokens_of((features[:, 0],), {}) == (4, 1)
    assert tokens_of((), {"use_cache": False}) == (0, 0)


def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CPU) -> Any:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device)


def test_collectives_that_overlap_count_once():
    events = [
        event("gloo:all_reduce", 0, 10),
        event("gloo:all_gather", 5, 12),
        event("aten::mm", 12, 100),
        event("gloo:all_reduce", 6, 8),
        event("ncclDevKernel_AllReduce", 20, 25, DeviceType.CUDA),
        event("nccl:all_reduce", 0, 90),  # the host's part of a collective on a GPU
    ]
    assert covered(events) == 17
