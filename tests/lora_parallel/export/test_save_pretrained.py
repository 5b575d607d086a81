"""`save_pretrained` as users call it, on a sharded model, against the same call in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from lora_parallel import ParallelConfig, build_mesh, parallelize, save_adapter
from lora_parallel.export.save_pretrained import save_on_rank_zero
from tests.cases import cases
from tests.oracle import causal_lm, fill_adapters, full, lora_config, on_mesh, ranks_of
from tests.oracle.workers import Failure, attempt

WEIGHTS = "adapter_model.safetensors"


def peft_model() -> nn.Module:
    model = get_peft_model(causal_lm(dtype=torch.float32), lora_config())
    model.add_adapter("second", lora_config(r=2, target_modules=["q_proj"]))
    fill_adapters(model)
    return model


def with_add_adapter() -> nn.Module:
    """Transformers' own way: no PeftModel around it."""
    model = causal_lm(dtype=torch.float32)
    model.add_adapter(LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))
    fill_adapters(model)
    return model


def save_all(mesh_text: str, folder: Path) -> dict[str, Any]:
    mesh, config = on_mesh(mesh_text, require_adapters=False)
    model = parallelize(peft_model(), mesh, config)
    model.save_pretrained(folder / "peft")
    model.save_pretrained(str(folder / "one"), selected_adapters=["second"], is_main_process=mesh.get_rank() == 0)
    gathered = {name: full(p) for name, p in model.named_parameters() if "lora_" in name}
    if mesh.get_rank() == 0:  # as after accelerator.get_state_dict(model)
        state = get_peft_model_state_dict(model, gathered)
        model.save_pretrained(folder / "gathered", selected_adapters=["default"], state_dict=state)
    added = parallelize(with_add_adapter(), mesh, config)
    added.save_pretrained(folder / "added")
    whole = parallelize(causal_lm(dtype=torch.float32), mesh, config)
    whole.save_pretrained(folder / "whole")
    whole.save_pretrained(folder / "whole", True, None, False, "30KB")
    model.save_pretrained(folder / "by position", True, ["second"], False, True, push_to_hub=False, variant=None)
    odd = mesh.get_rank() == 1
    return {
        "another adapter on one rank": attempt(
            model.save_pretrained, folder / "none", selected_adapters=["second" if odd else "default"]
        ),
        "another folder on one rank": attempt(model.save_pretrained, folder / ("other" if odd else "none")),
        "embeddings on one rank": attempt(model.save_pretrained, folder / "none", save_embedding_layers=odd),
        "too many on one rank": attempt(model.save_pretrained, *([folder / "none"] * (9 if odd else 1))),
        "another adapter by save_adapter": attempt(
            save_adapter, model, folder / "none", "second" if odd else "default"
        ),
        "a pickle by position": attempt(model.save_pretrained, folder / "none", False),
        "of another format": attempt(whole.save_pretrained, folder / "none", save_original_format=False),
        "of another format for PEFT": attempt(added.save_pretrained, folder / "none", save_peft_format=False),
        "a variant": attempt(whole.save_pretrained, folder / "none", True, None, False, "5GB", "fp16"),
        "no such adapter": attempt(model.save_pretrained, folder / "none", selected_adapters=["third"]),
        "a pickle": attempt(model.save_pretrained, folder / "none", safe_serialization=False),
        "a URL": attempt(model.save_pretrained, "s3://bucket/none"),
        "to the hub": attempt(model.save_pretrained, folder / "none", push_to_hub=True),
    }


REFUSED = {
    "another adapter on one rank": (
        "ValueError",
        "selected_adapters is ['default'] on rank 0 and ['second'] on rank 1",
    ),
    "another folder on one rank": ("ValueError", "directory is '"),
    "embeddings on one rank": ("ValueError", "save_embedding_layers is False on rank 0 and True on rank 1"),
    "too many on one rank": ("TypeError", "too many positional arguments"),
    "another adapter by save_adapter": ("ValueError", "adapter_name is 'default' on rank 0 and 'second' on rank 1"),
    "a pickle by position": ("TypeError", "safe_serialization=False"),
    "of another format": ("TypeError", "save_original_format=False"),
    "of another format for PEFT": ("TypeError", "save_peft_format=False"),
    "a variant": ("TypeError", "variant='fp16'"),
    "no such adapter": ("ValueError", "no adapter 'third'"),
    "a pickle": ("TypeError", "safe_serialization=False"),
    "a URL": ("ValueError", "is a URL"),
    "to the hub": ("TypeError", "push_to_hub"),
}


def same(one: Path, other: Path) -> None:
    mine, theirs = load_file(one), load_file(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("mesh", ["2x2", "4x1", "1x4"])
def test_what_users_call(pool, tmp_path, mesh):
    for found in pool.run(4, save_all, mesh, tmp_path / "ours"):
        for name, (kind, text) in REFUSED.items():
            assert isinstance(found[name], Failure), name
            assert found[name].kind == kind
            assert text in found[name].message
    model = peft_model()
    model.save_pretrained(tmp_path / "theirs" / "peft")
    model.save_pretrained(tmp_path / "theirs" / "one", selected_adapters=["second"])
    with_add_adapter().save_pretrained(tmp_path / "theirs" / "added")
    for part in ("peft", "peft/second", "one/second", "added"):
        ours, theirs = tmp_path / "ours" / part, tmp_path / "theirs" / part
        same(ours / WEIGHTS, theirs / WEIGHTS)
        names = {path.name for path in theirs.iterdir()} - {"generation_config.json"}  # transformers' own addition
        assert {path.name for path in ours.iterdir()} == names, part
    same(tmp_path / "ours" / "gathered" / WEIGHTS, tmp_path / "theirs" / "peft" / WEIGHTS)
    assert not (tmp_path / "ours" / "none").exists()
    assert [path.name for path in (tmp_path / "ours" / "by position").glob("*/*.safetensors")] == [WEIGHTS]
    assert not (tmp_path / "ours" / "by position" / WEIGHTS).exists()

    ids = torch.arange(12)[None]
    loaded = PeftModel.from_pretrained(causal_lm(dtype=torch.float32), tmp_path / "ours" / "peft").eval()
    assert torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert not (tmp_path / "ours" / "whole" / "model.safetensors").exists(), "it would be read in place of the shards"
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "whole").eval()
    assert torch.equal(whole(input_ids=ids).logits, causal_lm(dtype=torch.float32).eval()(input_ids=ids).logits)


def saves_alone(mesh_text: str) -> dict[str, Any]:
    """Run a save on rank 0 that asks the model for what all ranks have parts of; three fail, one is after them."""
    mesh, config = on_mesh(mesh_text)
    model = parallelize(peft_model(), mesh, config)
    packed = parallelize(get_peft_model(causal_lm("phi3"), lora_config(target_modules=["qkv_proj"])), mesh, config)
    found: dict[str, Any] = {}

    def save() -> None:
        with torch.inference_mode():
            found["logits"] = model.eval()(input_ids=torch.arange(12)[None]).logits.clone()
            found["state"] = model.state_dict()
            found["layer"] = model.base_model.model.lm_head.state_dict(prefix="head.")  # type: ignore[union-attr]
        found["shapes"] = attempt(model, input_ids=torch.zeros(1, 2, 3, 4))  # caught by the save
        found["training"] = model.train()(input_ids=torch.arange(12)[None]).logits.detach()
        found["alone"] = attempt(save_adapter, model, "none")
        model.eval()

    save_on_rank_zero(model, save)
    found["in training"] = model.training
    found["refused"] = attempt(save_on_rank_zero, packed, lambda: packed.state_dict())
    found["failed"] = attempt(save_on_rank_zero, model, lambda: Path("none").rmdir())
    if mesh_text == "1x2":
        stages = ParallelConfig(pp=2, pp_microbatches=2)
        staged = parallelize(peft_model(), build_mesh(stages, "cpu"), stages)
        found["staged"] = attempt(save_on_rank_zero, staged, lambda: dict(staged.named_parameters()))
    found["forwards"] = model.train()(input_ids=torch.arange(12)[None]).logits.detach()
    return found


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x1", "2x2"]))
def test_what_a_save_on_rank_zero_calls_is_followed_by_the_others(pool, mesh):
    model = peft_model()
    want = model.eval()(input_ids=torch.arange(12)[None]).logits
    first, *others = pool.run(ranks_of(mesh), saves_alone, mesh)
    torch.testing.assert_close(first["logits"], want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first["training"], want, rtol=1e-4, atol=1e-5)
    state = model.state_dict()
    assert first["state"].keys() == state.keys()
    assert all(torch.equal(first["state"][name], value) for name, value in state.items())
    assert torch.equal(first["layer"]["head.weight"], state["base_model.model.lm_head.weight"])
    assert isinstance(first["shapes"], Failure)
    assert "save_adapter was called in a save that rank 0 runs alone" in first["alone"].message
    for rank, found in enumerate([first, *others]):
        torch.testing.assert_close(found["forwards"], want, rtol=1e-4, atol=1e-5)
        assert not found["in training"]
        start = "" if rank == 0 else "on rank 0: "
        if mesh.endswith("x2"):  # else a weight of three is stored as it is
            assert found["refused"].kind == "ValueError"
            assert found["refused"].message.startswith(f"{start}state_dict() in a save cannot gather ")
            assert "qkv_proj" in found["refused"].message
        assert found["failed"].kind == "FileNotFoundError"
        if mesh == "1x2":
            assert "under pp they list those of its stage" in found["staged"].message
        assert rank == 0 or set(found) <= {"in training", "refused", "failed", "forwards", "staged"}
