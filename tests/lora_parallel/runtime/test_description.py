"""What a run says in its first lines, held against the bytes that ranks hold and against the whole model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

from lora_parallel import parallelize
from lora_parallel.distributed.dtensors import local
from lora_parallel.distributed.torch_private import fake_process_group
from lora_parallel.integration import describe
from lora_parallel.runtime import description
from lora_parallel.sizes import coordinates, rank_lines
from tests.logs import listening
from tests.oracle import Case, causal_lm, on_mesh, ranks_of

CASES = {
    "adapters": ("2x2", Case()),
    "one key and value head": ("1x2", Case(sizes={"num_key_value_heads": 1})),
    "pipeline": ("1x2pp2", Case()),
    "full fine-tuning": ("2x1", Case(adapters=False, dtype=torch.float32)),
}
"""Two tp ranks store the same rows of the one head."""

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def told(name: str) -> tuple[str, list[str], dict[bool, int]]:
    """The description, what was logged, and the bytes of parameters that this rank holds, frozen and trained."""
    mesh, case = CASES[name]
    logger = logging.getLogger(description.__name__)
    logger.setLevel(logging.INFO)
    try:
        with listening(description.__name__) as lines:
            model = parallelize(case.model(), *on_mesh(mesh, require_adapters=case.adapters, **pipeline(mesh)))
    finally:
        logger.setLevel(logging.NOTSET)
    return describe(model), lines, sizes(model.parameters())


def pipeline(mesh: str) -> dict[str, Any]:
    return {"pp_microbatches": 2} if "pp" in mesh else {}


def sizes(parameters: Iterable[torch.Tensor]) -> dict[bool, int]:
    found = {False: 0, True: 0}
    for each in parameters:
        found[each.requires_grad] += local(each).numel() * each.element_size()
    return found


def printed(text: str, line: str) -> list[float]:
    """The two numbers of bytes in a line of the table."""
    found = re.search(rf"^ +{line} +([\d.]+) (\w+) +([\d.]+) (\w+)$", text, re.MULTILINE)
    assert found is not None, text
    return [float(found[1]) * UNITS[found[2]], float(found[3]) * UNITS[found[4]]]


@pytest.fixture(scope="module")
def tell(pool) -> Callable[[str], list[Any]]:
    """Run a case once, and return what its ranks are told."""
    return cache(lambda name: pool.run(ranks_of(CASES[name][0]), told, name))


@pytest.mark.parametrize("name", [*CASES])
def test_the_description_has_the_bytes_of_the_model(tell, name):
    answers = tell(name)
    text, logged, held = answers[0]
    whole = sizes(CASES[name][1].model().parameters())
    for line, trains, factor in (
        ("frozen parameters", False, 1),
        ("trained parameters", True, 1),
        ("gradients of those", True, 1),
        ("states of AdamW", True, 2),
    ):
        here, there = printed(text, line)
        assert here == pytest.approx(held[trains] * factor, rel=1e-2, abs=6), line
        if name != "pipeline":
            assert there == pytest.approx(whole[trains] * factor, rel=1e-2, abs=6), line
    assert logged == [f"INFO {text}"]
    assert all(not other for _, other, _ in answers[1:])  # the first rank alone
    assert len(text.splitlines()) <= 25


def test_the_description_has_mesh_and_plan(tell):
    text = tell("adapters")[0][0]
    assert "LlamaForCausalLM on dp_shard 2 x tp 2, 4 ranks (cpu)" in text
    assert re.search(r"^lightning-lora \S+, torch \S+, peft \S+, transformers \S+$", text, re.MULTILINE)
    assert re.search(r"^  dp_shard +0  0  1  1\n  tp +0  1  0  1\n  batch +0  0  1  1$", text, re.MULTILINE)
    assert re.search(r"^  model\.layers\.\*\.self_attn\.q_proj +colwise +2$", text, re.MULTILINE)
    assert re.search(r"^  model\.layers\.\*\.mlp\.down_proj +rowwise +2$", text, re.MULTILINE)
    assert "\nadapter 'default' (r=3), LoRA on 14 layers: down_proj 2, gate_proj 2, up_proj 2, k_proj 2," in text
    assert "\n  dtype: frozen float64, trained float64\n" in text


def told_of_wrong_names() -> list[str]:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_prj", "1.mlp.up_proj"], modules_to_save=["lm_head", "haed"])
    model = get_peft_model(causal_lm(Case().family, torch.float64), config)
    left_out = {"target_modules": ["up_proj", "q_proj"], "exclude_modules": ["q_proj"]}
    model.add_adapter("other", LoraConfig(r=4, rank_pattern={"up_porj": 2, "1.mlp.*": 4}, **left_out))
    return describe(parallelize(model, *on_mesh("1x1"))).splitlines()


def test_names_that_match_no_layer_are_said(pool):
    lines = pool.run(1, told_of_wrong_names)[0]
    start = next(index for index, line in enumerate(lines) if line.startswith("adapter"))
    assert sorted(lines[start:]) == [
        "  no layer is adapted by 'haed' of modules_to_save: if it should be, correct the name",
        "  no layer is adapted by 'up_porj' of rank_pattern: if it should be, correct the name",
        "  no layer is adapted by 'v_prj' of target_modules: if it should be, correct the name",
        "adapter 'default' (r=2), LoRA on 3 layers: q_proj 2, up_proj 1",
        "adapter 'default' (r=2), modules_to_save on 1 layer: lm_head 1",
        "adapter 'other' (r=4), LoRA on 2 layers: up_proj 2",
    ]


def test_the_description_has_the_pipeline(tell):
    texts = [answer[0] for answer in tell("pipeline")]
    assert all("LoRA on 14 layers: down_proj 2" in text for text in texts)  # of all stages
    for rank, text in enumerate(texts):
        assert f"pipeline: 1f1b, 2 stages, 2 micro-batches; this rank is {rank // 2} of 2 on pp" in text
        assert f"bytes of rank {rank} " in text
        assert "its stages" in text


def test_nothing_is_told_on_a_simulated_rank():
    assert not dist.is_initialized()
    with fake_process_group(4, 0):
        assert not description._is_first()
    assert description._is_first()


def test_a_model_that_is_not_sharded_is_refused():
    with pytest.raises(ValueError, match="Linear was not parallelized"):
        describe(torch.nn.Linear(1, 1))


def test_ranks_are_where_the_mesh_has_them():
    sizes = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2}
    mesh = torch.arange(16).view(*sizes.values())
    for rank in range(16):
        assert mesh[tuple(coordinates(sizes, rank).values())] == rank


def test_many_ranks_are_a_rule():
    assert [*rank_lines({"dp_replicate": 2, "dp_shard": 8, "tp": 4})] == [
        "rank = 32 x dp_replicate + 4 x dp_shard + tp, each counted from 0",
        "ranks that differ in tp alone share a batch",
    ]
    assert [*rank_lines({"dp_shard": 1})] == []
