"""`shard_base=False`: the base whole on every data-parallel rank, and FSDP2 has the adapters alone.

That the numbers are those of one process is in `tests/lora_parallel/test_parallelize.py`, and for every family and
feature in the column "2x2 whole" of the oracle table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from lora_parallel import load_checkpoint, meta_init, parallelize, read_plan, save_adapter, save_checkpoint
from lora_parallel.adapters.inspection import adapter_parameters
from lora_parallel.distributed.dtensors import local
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.fsdp import unit_order
from tests import oracle
from tests.cases import cases
from tests.lora_parallel.traffic import Traffic
from tests.oracle import Case, causal_lm, full, lora_config, on_mesh, ranks_of, relative_error, trained
from tests.oracle.workers import Failure, attempt

CASE = Case(steps=2, lora={"modules_to_save": ["lm_head"]})


@dataclass
class Found:
    gathers: int
    """All-gathers over dp_shard in a step, whatever the number of blocks."""
    reductions: int
    gathered: int
    """Elements that they give."""
    adapters: int
    """Elements of what trains that a rank computes with."""
    base: int
    """Elements of the base that the rank holds."""
    slices: int
    """Elements of the base that this tp rank computes with."""


def step_of(mesh_text: str, shard_base: bool) -> Found:
    mesh, config = on_mesh(mesh_text, shard_base=shard_base)
    model = parallelize(CASE.model(), mesh, config)
    elements: list[int] = []
    gather = unit_order.all_gather_into

    def noted(output: Any, *args: Any, **kwargs: Any) -> Any:
        elements.append(output.numel())
        return gather(output, *args, **kwargs)

    for batch in CASE.batches():
        mine = batch.chunk(dp_size(mesh))[dp_rank(mesh)]
        elements.clear()
        with Traffic() as traffic, patch.object(unit_order, "all_gather_into", noted):
            model(input_ids=mine, labels=mine).loss.backward()
    adapters = adapter_parameters(model)
    base = {name: p for name, p in model.named_parameters() if name not in adapters}
    tp = mesh["tp"].size()

    def slice_of(parameter: Any) -> int:
        over_tp = parameter.placements[-1] if isinstance(parameter, DTensor) and tp > 1 else None
        return parameter.numel() // (tp if over_tp is not None and over_tp.is_shard() else 1)

    group = mesh.get_group("dp_shard")
    return Found(
        traffic.count("all_gather", group),
        traffic.count("reduce_scatter", group),
        sum(elements),
        sum(slice_of(p) for p in adapters.values()),
        sum(local(p).numel() for p in base.values()),
        sum(slice_of(p) for p in base.values()),
    )


@pytest.mark.parametrize("mesh", cases("2x2", matrix=["2x1", "2x2x1"]))
def test_one_gather_of_what_trains_and_none_of_the_base(pool, mesh):
    """With a sharded base there is one for each block, forward and backward, and the root's."""
    for whole, cut in zip(
        pool.run(ranks_of(mesh), step_of, mesh, False), pool.run(ranks_of(mesh), step_of, mesh, True), strict=True
    ):
        assert (whole.gathers, whole.reductions) == (1, 1)
        assert whole.gathered <= 1.02 * whole.adapters  # shards are padded to be equal
        blocks = CASE.model().config.num_hidden_layers
        assert (cut.gathers, cut.reductions) == (2 * blocks + 1, blocks + 1)
        assert cut.gathered > 2 * whole.gathered
        assert cut.base < whole.base
        if mesh != "2x2":  # there a vocabulary of 131 rows is cut into 66 and 65
            assert whole.base == whole.slices


def read_by_ranks(path: Path, mesh_text: str) -> tuple[int, int, bool]:
    """Bytes of the base that a rank reads and owns, and whether the model then computes what the whole one does."""
    mesh, config = on_mesh(mesh_text, shard_base=False)

    def built() -> Any:
        with meta_init():
            return get_peft_model(LlamaForCausalLM.from_pretrained(path), lora_config())

    plan = read_plan(parallelize(built(), mesh, config, materialize=False))
    model = parallelize(built(), mesh, config).eval()
    adapters = adapter_parameters(model)
    owned = sum(local(p).numel() * p.element_size() for n, p in model.named_parameters() if n not in adapters)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        same = torch.allclose(model(input_ids=ids).logits, LlamaForCausalLM.from_pretrained(path)(ids).logits)
    return sum(read.bytes for read in plan if read.file is not None), owned, same


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2"]))
def test_each_rank_reads_the_slice_of_its_tp_rank(pool, tmp_path, mesh):
    causal_lm(tie_word_embeddings=True).save_pretrained(tmp_path)
    for read, owned, same in pool.run(ranks_of(mesh), read_by_ranks, tmp_path, mesh):
        assert read == owned
        assert same


def checkpoints(folder: str) -> list[Any]:
    """Two steps with the base whole, then the same two with it sharded, and the other way round."""
    found: list[Any] = []
    for shard_base in (False, True, False):
        mesh, config = on_mesh("2x1", shard_base=shard_base)
        model: Any = parallelize(CASE.model(), mesh, config)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if found:
            load_checkpoint(model, optimizer, f"{folder}-{len(found) - 1}")
        for batch in CASE.batches():
            mine = batch.chunk(dp_size(mesh))[dp_rank(mesh)]
            model(input_ids=mine, labels=mine).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(model, optimizer, f"{folder}-{len(found)}")
        save_adapter(model, f"{folder}-adapter-{len(found)}")
        found.append({name: full(p) for name, p in trained(model).items()})
    return found


def test_a_checkpoint_knows_nothing_of_it(pool, tmp_path):
    (sharded_later, *_) = pool.run(2, checkpoints, str(tmp_path / "step"))
    plain: Any = CASE.model()
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    for want in sharded_later:
        for batch in CASE.batches():
            plain(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert relative_error(want, {name: p.detach() for name, p in trained(plain).items()}) < 1e-10
    loaded = PeftModel.from_pretrained(CASE.model().unload(), tmp_path / "step-adapter-2")
    got = {name: p.detach() for name, p in loaded.named_parameters() if "lora_" in name}
    assert relative_error(got, {name: sharded_later[2][name] for name in got}) < 1e-15


@dataclass(frozen=True)
class OfTwoDtypes(Case):
    """Saved norms in float32 in each block, beside adapters in float64."""

    def model(self) -> Any:
        model = super().model()
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.data = parameter.data.float()
        return model


def of_two_dtypes(mesh: str) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    options = [{}, {"shard_base": False}] + [COMPILED] * ("p" not in mesh)
    runs = [oracle.sharded(NORMS, mesh, **each) for each in options]
    return [(run.losses, oracle.over_stages(run.gradients, mesh)) for run in runs]


NORMS = OfTwoDtypes(steps=2, lora={"modules_to_save": ["input_layernorm"]})
COMPILED: dict[str, Any] = {"compile": {"backend": "aot_eager", "fullgraph": True}}


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["1x2", "2x2", "2x1x2", "2x1pp2", "2x1cp2"]))
def test_a_block_that_trains_in_two_dtypes_is_as_in_one_process(pool, mesh):
    """And compiled: such a block runs eagerly."""
    want = oracle.reference(NORMS)
    for runs in pool.run(ranks_of(mesh), of_two_dtypes, mesh):
        for losses, gradients in runs:
            assert losses == pytest.approx(want.losses, abs=1e-6)
            assert relative_error(gradients, want.gradients) < 1e-6


def with_a_head_in_bfloat16(shard_base: bool) -> dict[str, torch.Tensor]:
    """Train adapters in float32, as PEFT has them on a base in bfloat16, beside a saved head in the base's dtype."""
    mesh, config = on_mesh("2x1", shard_base=shard_base)
    model: Any = causal_lm(dtype=torch.bfloat16)
    model = parallelize(get_peft_model(model, lora_config(modules_to_save=["lm_head"])), mesh, config)
    batch = torch.arange(24).view(2, 12)[dp_rank(mesh)][None]
    model(input_ids=batch, labels=batch).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


def test_what_trains_in_two_dtypes(pool):
    first, second = pool.run(2, with_a_head_in_bfloat16, False)
    for sharded in pool.run(2, with_a_head_in_bfloat16, True):
        assert sharded.keys() == first.keys()
        assert all(torch.equal(sharded[name], tensor) for name, tensor in first.items())
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16, torch.float32}
    assert all(
        torch.equal(second[name], tensor) and tensor.any() for name, tensor in first.items() if "lora_A" not in name
    )


STAGES = "2x1pp2"


def in_stages() -> oracle.Run:
    run = oracle.sharded(CASE, STAGES, shard_base=False, pp_microbatches=2)
    run.gradients, run.adapters = (oracle.over_stages(each, STAGES) for each in (run.gradients, run.adapters))
    return run


@pytest.mark.matrix
def test_stages_of_a_pipeline_have_theirs_whole(pool):
    want = oracle.reference(CASE)
    for got in pool.run(ranks_of(STAGES), in_stages):
        assert got.losses == pytest.approx(want.losses, abs=1e-6)
        assert relative_error(got.gradients, want.gradients) <= 1e-12
        assert relative_error(got.adapters, want.adapters) <= 1e-10


def refusals() -> dict[str, Any]:
    mesh, config = on_mesh("2x1", shard_base=False, param_dtype=torch.bfloat16)
    found = {"dtype": attempt(parallelize, CASE.model(), mesh, config)}
    mesh, config = on_mesh("2x1", shard_base=False)
    model: Any = parallelize(CASE.model(), mesh, config)
    model.get_base_model().model.norm.weight.requires_grad_(True)
    ids = torch.arange(12).view(1, 12)
    found["merge"] = attempt(model.merge_adapter)
    return {**found, "unfrozen": attempt(model, input_ids=ids, labels=ids)}


def test_what_would_be_wrong_is_refused(pool):
    """FSDP2 casts what it shards alone, and reduces no gradient of a weight that is on every rank."""
    for found in pool.run(2, refusals):
        assert isinstance(found["dtype"], Failure)
        assert "shard_base=False: base_model.model.model.embed_tokens.weight is torch.float64" in found["dtype"].message
        assert isinstance(found["merge"], Failure)
        assert "q_proj cannot be merged with shard_base=False: save the adapter" in found["merge"].message
        assert isinstance(found["unfrozen"], Failure)
        assert "was frozen when the model was parallelized" in found["unfrozen"].message
