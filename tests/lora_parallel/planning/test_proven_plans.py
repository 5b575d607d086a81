"""Plans of known classes, proven on few blocks: equal to those of all blocks, which all else is proven on."""

from __future__ import annotations

import json
from types import MethodType
from typing import Any

import pytest
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from benchmarks import classes
from lora_parallel.planning import plan as planner
from lora_parallel.planning import proven_plans
from lora_parallel.planning.plan import resolve_plan
from lora_parallel.runtime.description import end_after_set_up
from lora_parallel.tracing.prove_feature_slices import Structure
from tests.cases import cases
from tests.oracle.rows import base_model

LLAMA = {"model.layers.*.self_attn.o_proj": "rowwise", "model.layers.*.mlp.down_proj": "rowwise"} | {
    f"model.layers.*.{name}": "colwise"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
}
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
BLOCKS = 6


def llama(kind: str = "LlamaForCausalLM", **settings: Any) -> Any:
    return base_model(kind, {**SIZES, "vocab_size": 32, "num_hidden_layers": BLOCKS, **settings})


def run_on(monkeypatch: pytest.MonkeyPatch, known: dict[str, str] | None = LLAMA, version: str | None = None) -> Any:
    """Return a function that plans a model, and returns the plan and the number of blocks that its proof ran."""
    kept: list[Structure] = []
    own = planner.find_structure
    found = {version or transformers.__version__: {"LlamaForCausalLM": known} if known else {}}
    monkeypatch.setattr(proven_plans, "_plans", lambda: found.get(transformers.__version__, {}))
    monkeypatch.setattr(planner, "find_structure", lambda *args, **kw: kept.append(own(*args, **kw)) or kept[-1])

    def plan(model: nn.Module, *args: Any) -> tuple[Any, int]:
        resolved = resolve_plan(model, *args)
        return resolved, sum(name.endswith("q_proj") for name in kept.pop().tracer.modules)

    return plan


def test_the_file_holds_plans_of_classes_of_transformers():
    plans = json.loads(proven_plans.FILE.read_text())["5.23.0"]
    assert plans["LlamaForCausalLM"] == LLAMA
    assert all(hasattr(transformers, name) and plan for name, plan in plans.items())
    assert {style for plan in plans.values() for style in plan.values()} == {"colwise", "rowwise"}


KEPT = ["Phi3ForCausalLM", "Gemma3ForCausalLM"]
OTHERS = [
    "BertForMaskedLM",
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",
    "GptOssForCausalLM",
    "LlavaForConditionalGeneration",
]
OTHERS += ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM"]


@pytest.mark.parametrize("name", cases(*KEPT, matrix=OTHERS))
def test_few_blocks_show_the_plan_of_all(name):
    """Take the class's own default config, so that sizes, kinds of blocks and experts are those that people have."""
    assert classes.known_plan(name) == json.loads(proven_plans.FILE.read_text())["5.23.0"][name]


@pytest.mark.matrix
def test_a_class_whose_few_blocks_show_another_plan_is_not_known():
    assert classes.known_plan("T5ForConditionalGeneration") == "few blocks do not show its plan"


@pytest.mark.parametrize("tp", [2, 4])
def test_a_known_plan_is_proven_on_three_blocks(monkeypatch, tp):
    """With adapters on all layers of a block, on other layers of another, and on none of the others."""
    targets = [f"model.layers.1.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")]
    targets += [f"model.layers.4.{name}" for name in ("self_attn.v_proj", "mlp.down_proj")]
    model = get_peft_model(llama(num_attention_heads=8), LoraConfig(target_modules=targets))
    few, blocks = run_on(monkeypatch)(model, None, tp, True)
    assert blocks == 5  # two of the four without adapters, both with some, and the last one
    every, blocks = run_on(monkeypatch, None)(model, None, tp, True)
    assert (blocks, classes.differing([few], [every])) == (BLOCKS, [])
    assert len(few.sequences[0].modules) == 2 * BLOCKS


def test_blocks_that_train_as_a_whole_are_left_out_too(monkeypatch):
    """PEFT puts a wrapper around each of them, which has no name of its own."""
    saved = [f"layers.{index}" for index in range(1, 5)]
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], modules_to_save=saved))
    few, blocks = run_on(monkeypatch)(model, None, 2)
    every, all_blocks = run_on(monkeypatch, None)(model, None, 2)
    assert blocks < all_blocks
    assert classes.differing([few], [every]) == []


@pytest.mark.parametrize(
    "change",
    [
        {"known": {**LLAMA, "model.layers.*.self_attn.k_proj": "rowwise"}},
        {"known": {key: style for key, style in LLAMA.items() if "gate" not in key}},
        {"version": "another"},
    ],
)
def test_an_entry_that_is_not_what_the_blocks_show_and_another_version_are_proven_on_all(monkeypatch, change):
    found, blocks = run_on(monkeypatch, **change)(llama(), None, 2)
    assert blocks == BLOCKS
    assert {name: style.name for name, style in found.styles.values()}["model.layers.3.self_attn.k_proj"] == "colwise"


def test_a_subclass_and_the_users_own_plan_are_proven_on_all(monkeypatch):
    plan = run_on(monkeypatch)
    subclass = type("LlamaForCausalLM", (transformers.LlamaForCausalLM,), {})
    assert plan(subclass(llama().config), None, 2)[1] == BLOCKS
    assert (
        plan(llama(), {"*.up_proj": "replicate", "*.gate_proj": "replicate", "*.down_proj": "replicate"}, 2)[1]
        == BLOCKS
    )


def test_check_proves_the_plan_on_all(monkeypatch):
    with end_after_set_up():
        assert run_on(monkeypatch)(llama(), None, 2)[1] == BLOCKS


def test_a_wrong_plan_of_transformers_is_corrected(monkeypatch):
    """On few blocks as on all."""
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", {"layers.*.self_attn.o_proj": "colwise"})
    found, blocks = run_on(monkeypatch)(llama(), None, 2)
    styles = {name: style.name for name, style in found.styles.values()}
    assert (blocks, styles["model.layers.3.self_attn.o_proj"]) == (3, "rowwise")


def replace_activation(model: Any) -> None:
    mlp = model.model.layers[3].mlp
    kind = type(mlp.act_fn)
    mlp.act_fn.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, x: kind.forward(self, x).cumsum(-1)})


def replace_forward(model: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj((self.gate_proj(x) * self.up_proj(x)).cumsum(-1))

    mlp = model.model.layers[3].mlp
    mlp.forward = MethodType(forward, mlp)


@pytest.mark.parametrize("change", [replace_activation, replace_forward])
def test_a_block_that_was_changed_is_proven_itself(monkeypatch, change):
    """Its features depend on each other, so that they cannot be cut."""
    model = llama()
    change(model)
    found, _ = run_on(monkeypatch)(model, None, 2)
    styles = {name: style.name for name, style in found.styles.values()}
    assert [styles[f"model.layers.{block}.mlp.down_proj"] for block in (2, 3)] == ["rowwise", "colwise_gather_output"]
