"""The table of every model: the rules that make small configs, what its inputs fit, and the page."""

from __future__ import annotations

import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.model import (
    COLUMNS,
    ONE,
    RESULTS,
    inputs_of,
    is_of_float32,
    keep,
    kind_of,
    main,
    mixed_rows,
    page,
    read_results,
    state_of,
    write_results,
)
from tests.oracle.model_rows import WithoutFloat32, model_classes, model_row, small_config, small_model, targets
from tests.oracle.rows import Cell, Step, one_process

FOUND = {
    "LlamaForCausalLM": {
        **{"inputs": "full", "dtype": "float64", ONE: 5.6, "transformers": "5.23.0", "commit": "abc"},
        **dict.fromkeys(COLUMNS, 8e-16),
    },
    "BertForMaskedLM": {
        **{"inputs": "full", "dtype": "float64", ONE: 5.6, "transformers": "5.23.0", "commit": "abc"},
        **{"2x1": "refused: tp=2: 'x' cannot. More.", "1x2": 'FAILED: KeyError: [1] | File "lora_parallel/b.py"'},
    },
    "T5ForConditionalGeneration": {ONE: "FAILED: an error", "transformers": "5.23.0", "commit": "abc"},
}


def config_of(name):
    return small_config(getattr(transformers, name).config_class())


def test_heads_keep_their_ratio_and_the_vocabulary_is_odd():
    llama, qwen, bert = map(config_of, ("LlamaForCausalLM", "Qwen2_5_VLForConditionalGeneration", "BertForMaskedLM"))
    assert (llama.num_attention_heads, llama.num_key_value_heads) == (4, 1)  # Llama 3 has 32 and 8, the class 32 and 32
    assert config_of("OlmoForCausalLM").num_key_value_heads == 4
    assert (qwen.text_config.num_attention_heads, qwen.text_config.num_key_value_heads) == (4, 1)  # of 64 and 8
    assert llama.vocab_size == bert.vocab_size == qwen.text_config.vocab_size == 131
    assert bert.hidden_dropout_prob == bert.attention_probs_dropout_prob == 0.0


def test_each_kind_of_layer_is_there_twice():
    gemma, jamba = config_of("Gemma3ForCausalLM"), config_of("JambaForCausalLM")
    kinds = ["sliding_attention", "full_attention"]
    assert [gemma.layer_types.count(kind) for kind in kinds] == [2, 2]
    assert gemma.num_hidden_layers == 4
    assert [jamba.layers_block_type.count(kind) for kind in set(jamba.layers_block_type)] == [2, 2]
    for name, kinds in (  # whose default values have one kind alone
        ("Lfm2ForCausalLM", {"Lfm2ShortConv", "Lfm2Attention"}),
        ("BambaForCausalLM", {"BambaMixer", "BambaAttention"}),
        ("RecurrentGemmaForCausalLM", {"RecurrentGemmaRecurrentBlock", "RecurrentGemmaAttention"}),
        ("GraniteMoeHybridForCausalLM", {"GraniteMoeHybridMambaLayer", "GraniteMoeHybridAttention"}),
        ("GraniteMoeSharedForCausalLM", {"GraniteMoeSharedMLP"}),
    ):
        found = Counter(type(module).__name__ for module in small_model(name).modules())
        assert all(found[kind] >= 2 for kind in kinds), name


def test_an_image_that_a_class_knows_as_frames_of_a_video_is_used():
    batch = model_row("InstructBlipVideoForConditionalGeneration full float64").batch()
    assert (batch["input_ids"] == 121).any(dim=1).all()


def test_lists_of_layer_numbers_follow_the_layers_that_are_kept():
    vision = config_of("Qwen3VLForConditionalGeneration").vision_config
    assert vision.depth == 4
    assert len(vision.deepstack_visual_indexes) == 2
    assert max(vision.deepstack_visual_indexes) < 4


def test_an_image_has_as_many_places_in_the_text_as_features():
    row = model_row("LlavaForConditionalGeneration full float64")
    batch = row.batch()
    model = small_model("LlavaForConditionalGeneration")
    with torch.no_grad():
        features = model.get_image_features(batch["pixel_values"].float()).pooler_output
    places = (batch["input_ids"] == model.config.image_token_id).sum(dim=1).tolist()
    assert places == [len(one) for one in features]
    assert all(len(tensor) % 4 == 0 for tensor in batch.values())


def test_a_row_computes_in_its_dtype_with_the_bound_of_it():
    for precision, bound in (("float64", 1e-12), ("float32", 1e-5)):
        row = model_row(f"LlamaForCausalLM text {precision}")
        assert row.tolerance == bound
        assert {p.dtype for p in row.build().parameters()} == {getattr(torch, precision)}


def test_casts_of_a_class_to_float32_are_left_out_of_a_mixed_row():
    values = torch.rand(3, dtype=torch.float64)
    with WithoutFloat32():
        cast = [values.float(), values.to(torch.float32), values.softmax(0, dtype=torch.float32)]
    assert {one.dtype for one in cast} == {torch.float64}
    assert values.float().dtype == torch.float32
    assert model_row("LlamaForCausalLM full mixed").tolerance == 1e-12


def test_a_layer_whose_name_is_a_number_is_named_in_full():
    """PEFT's "all-linear" would match the last part of its name with those of blocks."""
    assert targets(small_model("LlamaForCausalLM")) == "all-linear"
    names = targets(small_model("Qwen2VLForConditionalGeneration"))
    assert "model.visual.merger.mlp.0" in names
    assert "lm_head" not in names


def test_rows_that_are_not_computed_by_themselves_are_no_row():
    name = "LlamaForCausalLM text float64"
    whole = one_process(name)
    assert mixed_rows(name, whole) == ""
    off = {key: gradient * 1.1 for key, gradient in whole.gradients.items()}
    assert "in halves gradients differ by 9.1e-02" in mixed_rows(name, Step(whole.loss, off))


def test_what_casts_to_float32_may_be_worth_is_told_from_a_wrong_gradient():
    told = ["gradients differ by 1.8e-07", "gradients differ by 5.0e-01", "other gradients: ['a']", "one process: no"]
    assert [is_of_float32(Cell(failure=text)) for text in told] == [True, False, False, True]
    assert not is_of_float32(Cell(error=1e-16))


def test_the_table_lists_what_generates_and_usual_encoders():
    names = model_classes()
    assert len(names) > 300
    assert {"LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "ViTForImageClassification"} <= set(names)


@pytest.mark.parametrize(("value", "state"), [(None, "missing"), (1e-16, "right"), (0.0, "right")])
def test_a_number_is_right(value, state):
    assert state_of(value) == state


def test_the_page_says_what_a_row_has():
    assert inputs_of("LlavaForConditionalGeneration", "full") == "image"
    assert inputs_of("LlavaForConditionalGeneration", "text") == "text alone"
    assert inputs_of("WhisperForConditionalGeneration", "full") == "sound"
    assert inputs_of("LlamaForCausalLM", "full") == inputs_of("LlamaForCausalLM", "text") == "text"
    assert inputs_of("Phi4MultimodalForCausalLM", "full") == "text alone"


def test_shards_add_to_one_file_at_once(tmp_path):
    path = tmp_path / "results.json"
    names = [f"Class{number}" for number in range(40)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: keep(name, {ONE: 1.0}, path), names))
    assert read_results(path) == {name: {ONE: 1.0} for name in names}


@pytest.mark.parametrize("arguments", [["--shard", "5/4"], ["--shard", "x"], ["--columns", "3x3"]])
def test_arguments_that_say_nothing_are_refused(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["model", "--page", *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()


def test_the_page_is_made_of_the_data(tmp_path):
    write_results(FOUND, tmp_path / "results.json")
    assert read_results(tmp_path / "results.json") == FOUND
    assert len((tmp_path / "results.json").read_text().splitlines()) == len(FOUND) + 2
    text = page(FOUND, [*FOUND, "OPTForCausalLM"])
    assert "4 classes are listed; 2 train in one process, 1 do not, and 1 were not run yet." in text
    assert "| 2x1 | 1 | 1 | 0 | 0 |" in text
    assert "| 1x2 | 1 | 0 | 1 | 0 |" in text
    assert "| pp 2 | 1 | 0 | 0 | 1 |" in text
    assert "| BertForMaskedLM | text | float64 | refused (1) | **FAILED** | - | - | - | - |" in text
    assert "| 1 | tp=n: `x` cannot | 2x1: 1 | BertForMaskedLM |\n" in text
    assert r'File "lora\_parallel/b.py"' in text


def test_refusals_that_differ_in_names_are_of_one_kind():
    said = "refused: tp=2: the output of {} (A: shape (1, 2)) cannot be split, in {}. Use tp=1."
    kinds = {kind_of(said.format(*names)) for names in (("Qwen3", "model.layers.1"), ("Llama", "transformer.h.0.attn"))}
    assert kinds == {"tp=n: the output of the model cannot be split, in a layer"}


def test_results_name_no_folders_of_a_machine(tmp_path):
    write_results(
        FOUND | {"A": {ONE: "FAILED: x @ ['File \"/home/me/.venv/lib/torch/nn/linear.py\", line 1']"}}, tmp_path / "r"
    )
    assert read_results(tmp_path / "r")["A"] == {ONE: "FAILED: x @ ['File \"torch/nn/linear.py\", line 1']"}


def test_the_page_in_the_repository_is_that_of_its_data():
    results = json.loads(RESULTS.read_text())
    written = (Path(RESULTS).parents[2] / "docs" / "results" / "models.md").read_text()
    if {known["transformers"] for known in results.values()} != {transformers.__version__}:
        pytest.skip("another version of transformers has other classes")
    assert written == page(results, model_classes())
