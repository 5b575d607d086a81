"""Ranks keep what they would make anew, also where a test breaks the planner on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from lora_parallel import meta_init
from lora_parallel.layers.styles import STYLES
from lora_parallel.planning import plan
from tests.logs import listening
from tests.lora_parallel.test_sensitivity import cut_fused_layers_in_chunks, take_a_partial_gradient_for_whole
from tests.oracle import Case, caches, causal_lm, differing, reference, relative_error, sharded
from tests.oracle.caches import copied, keep_plans, kept
from tests.oracle.workers import attempt

SMALL = {"num_hidden_layers": 1}
PLAIN = Case(steps=1, sizes=SMALL)
GROUPED = Case(steps=1, sizes={**SMALL, "num_key_value_heads": 1})
FUSED = {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
PHI3 = Case(family="phi3", steps=1, lora=FUSED, sizes=SMALL)
NORMS = Case(family="qwen3", steps=1, lora={"modules_to_save": ["q_norm"]}, sizes=SMALL)


def traced(runs: list[tuple[Case, dict[str, Any]]]) -> list[tuple[dict[str, torch.Tensor], int]]:
    """The gradients of each run, and how many models were traced for its plan."""
    calls: list[int] = []
    own = plan.find_structure

    def find_structure(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    found = []
    with patch.object(plan, "find_structure", find_structure):
        for case, config in runs:
            calls.clear()
            found.append((sharded(case, "1x2", **config).gradients, len(calls)))
    return found


def test_a_plan_is_made_once_and_trains_as_one_process_does(pool):
    cases = [PLAIN, PLAIN, GROUPED, GROUPED, PLAIN]
    for answers in pool.run(2, traced, [(case, {}) for case in cases]):
        assert [calls for _, calls in answers] == [1, 0, 1, 0, 0]
        for case, (gradients, _) in zip(cases, answers, strict=True):
            assert relative_error(gradients, reference(case).gradients) <= 1e-12


def test_other_arguments_have_plans_of_their_own(pool):
    configs: list[dict[str, Any]] = [{}, {"sequence_parallel": True}, {"tp_plan": {"*.q_proj": "replicate"}}]
    for answers in pool.run(2, traced, [(PLAIN, config) for config in configs * 2]):
        assert [calls for _, calls in answers] == [1, 1, 1, 0, 0, 0]


def breaking(case: Case, mistake: Callable[[pytest.MonkeyPatch], None]) -> list[dict[str, torch.Tensor]]:
    """The gradients before, while and after the planner is broken."""
    before = sharded(case, "1x2").gradients
    with pytest.MonkeyPatch.context() as broken:
        mistake(broken)
        during = sharded(case, "1x2").gradients
    return [before, during, sharded(case, "1x2").gradients]


@pytest.mark.parametrize(
    ("case", "mistake"), [(PHI3, cut_fused_layers_in_chunks), (NORMS, take_a_partial_gradient_for_whole)]
)
def test_a_broken_plan_is_seen_after_a_right_one_was_kept(pool, case, mistake):
    want = reference(case).gradients
    for before, during, after in pool.run(2, breaking, case, mistake):
        assert relative_error(before, want) <= 1e-12
        assert relative_error(during, want) > 1e-3
        assert relative_error(after, want) <= 1e-12


def test_a_copy_is_the_model_that_would_be_built():
    want = causal_lm.__wrapped__().state_dict()
    state = torch.get_rng_state()
    first = causal_lm()
    assert torch.equal(torch.get_rng_state(), state)
    assert not differing(first.state_dict(), want)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    first.config.hidden_size = 0
    second = causal_lm()
    assert torch.equal(torch.get_rng_state(), state)
    assert not differing(second.state_dict(), want)
    assert second.config.hidden_size == 40


def test_models_are_built_anew_where_they_would_differ():
    assert causal_lm(dtype=torch.float32).dtype is torch.float32
    assert causal_lm(vocab_size=7).config.vocab_size == 7
    with meta_init():
        assert causal_lm().device.type == "meta"
    with torch.device("meta"):
        assert causal_lm().device.type == "meta"
    assert causal_lm().device.type == "cpu"


def test_a_model_whose_classes_have_changed_is_built_anew(monkeypatch):
    causal_lm()
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", {"layers.*.mlp.up_proj": "colwise"})
    assert causal_lm()._tp_plan.keys() == causal_lm.__wrapped__()._tp_plan.keys()
    drawn = LlamaForCausalLM._init_weights

    def twice(self: Any, module: torch.nn.Module) -> None:
        drawn(self, module)
        drawn(self, module)

    monkeypatch.setattr(LlamaForCausalLM, "_init_weights", twice)
    assert not differing(causal_lm().state_dict(), causal_lm.__wrapped__().state_dict())
    monkeypatch.undo()
    assert not differing(causal_lm().state_dict(), causal_lm.__wrapped__().state_dict())


def replaced_by_objects() -> list[str]:
    """Return what objects raise that stand in for a function of the planner, and for one of the model's author."""

    def fail(why: str, *args: Any) -> None:
        raise ArithmeticError(why)

    found = []
    sharded(PLAIN, "1x2")
    for why in ("first", "second"):
        with patch.object(plan, "keep_small_whole", partial(fail, why)):
            found.append(attempt(sharded, PLAIN, "1x2").message)
    with patch.object(modeling_llama, "apply_rotary_pos_emb", partial(fail, "third")):
        found.append(attempt(sharded, PLAIN, "1x2").kind)
    return found


def test_an_object_in_the_place_of_a_function_is_seen(pool):
    assert pool.run(2, replaced_by_objects) == [["first", "second", "ArithmeticError"]] * 2


def logged() -> list[list[str]]:
    found = []
    for _ in range(2):
        with listening("lora_parallel.planning.passes") as lines:
            sharded(PLAIN, "1x2", tp_plan={"*.q_proj": "colwise_gather_output"})
        found.append(list(lines))
    return found


def test_a_plan_that_was_kept_is_logged_again(pool):
    for first, second in pool.run(2, logged):
        assert first == second
    assert any("q_proj" in line for line in pool.run(2, logged)[0][0])


def test_the_switch_turns_all_of_it_off(monkeypatch):
    plan = import_module("lora_parallel.planning.plan")
    own = plan.resolve_plan
    calls: list[int] = []

    def build() -> torch.nn.Module:
        calls.append(1)
        return torch.nn.Linear(2, 2)

    monkeypatch.setattr(caches, "ON", False)
    keep_plans()
    assert plan.resolve_plan is own
    made, counted = copied(build), kept(lambda: calls.append(1))
    for _ in range(2):
        made()
        counted()
    assert len(calls) == 4


def with_another_table(case: Case) -> list[dict[str, torch.Tensor]]:
    """The gradients before and while a style of the engine's table says another thing."""
    before = sharded(case, "1x2").gradients
    with patch.dict(STYLES, colwise=replace(STYLES["colwise"], partial_roles=frozenset())):
        return [before, sharded(case, "1x2").gradients]


def test_a_broken_table_is_seen_after_a_right_plan_was_kept(pool):
    want = reference(PLAIN).gradients
    for before, during in pool.run(2, with_another_table, PLAIN):
        assert relative_error(before, want) <= 1e-12
        assert relative_error(during, want) > 1e-3
