"""Folders whose keys are those of former releases of transformers are loaded as PEFT loads them in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lora_parallel import load_adapter, parallelize
from tests.cases import cases
from tests.oracle import fill_adapters, on_mesh, ranks_of

WEIGHTS = "adapter_model.safetensors"
SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 67, "use_cache": False},
}
VISION = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
IDS = torch.arange(10, 46).view(4, 9)


class Renamed(LlamaForCausalLM):
    """A model of the user's own, whose former name of the decoder PEFT knows by this attribute."""

    _checkpoint_conversion_mapping = {"^decoder": "model"}  # noqa: RUF012


def llava(kind: Any = LlavaForConditionalGeneration) -> Any:
    text, vision = LlamaConfig(**SIZES), CLIPVisionConfig(**VISION, image_size=16, patch_size=8)
    return kind(LlavaConfig(vision_config=vision, text_config=text, image_token_id=3))


def qwen() -> Any:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8)
    )


# (base, what it is adapted by, former names by those of today)
VLM = r".*language_model.*\.(q_proj|down_proj)"
FORMER: dict[str, Any] = {
    "vlm": (llava, VLM, {"model.model.language_model.": "model.language_model.model."}),
    "bare vlm": (lambda: llava(LlavaModel), VLM, {"model.language_model.": "model.language_model.model."}),
    "own mapping": (lambda: Renamed(LlamaConfig(**SIZES)), ["q_proj"], {"model.model.": "model.decoder."}),
}
EXPERTS = ["q_proj", "gate_proj", "up_proj", "down_proj"]


def base_of(kind: str) -> Any:
    torch.manual_seed(0)
    return (qwen if kind == "experts" else FORMER[kind][0])()


def write(kind: str, folder: Path) -> None:
    """Write an adapter as a former release of transformers has named its layers."""
    if kind == "experts":
        LoraConfig(r=2, lora_alpha=6, target_modules=EXPERTS, task_type="CAUSAL_LM").save_pretrained(folder)
        draw, tensors = torch.Generator().manual_seed(3), {}
        layers = {f"mlp.experts.{index}.{name}": name for index in range(4) for name in EXPERTS[1:]}
        for block in range(SIZES["num_hidden_layers"]):
            for layer, name in {"self_attn.q_proj": "q_proj", **layers}.items():
                rows, columns = {"q_proj": (32, 32), "down_proj": (32, 16)}.get(name, (16, 32))
                key = f"base_model.model.model.layers.{block}.{layer}.lora"
                tensors[f"{key}_A.weight"] = torch.randn(2, columns, generator=draw)
                tensors[f"{key}_B.weight"] = torch.randn(rows, 2, generator=draw)
        save_file(tensors, folder / WEIGHTS)
        return
    model = get_peft_model(base_of(kind), LoraConfig(r=4, target_modules=FORMER[kind][1]))
    fill_adapters(model)
    model.save_pretrained(folder)
    (now, former) = next(iter(FORMER[kind][2].items()))
    tensors = {key.replace(now, former): tensor for key, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)


def output(model: Any) -> torch.Tensor:
    result = model.eval()(input_ids=IDS)
    return (result.logits if hasattr(result, "logits") else result.last_hidden_state).detach() + 0


def loaded(mesh_text: str, kinds: list[str], root: Path) -> dict[str, tuple[float, float]]:
    """Return how far a loaded model is from PEFT's, and how far PEFT's is from its base."""
    mesh, config = on_mesh(mesh_text, **({"pp_microbatches": 2} if "pp" in mesh_text else {}))
    found = {}
    for kind in kinds:
        theirs = output(PeftModel.from_pretrained(base_of(kind), root / kind))
        effect = float((theirs - output(base_of(kind))).abs().max())
        lora = LoraConfig.from_pretrained(root / kind)
        lora.inference_mode = False
        model = base_of(kind)
        if kind == "bare vlm":
            model.add_adapter(lora)  # the base, whose class FSDP2 changes, holds the config itself
        else:
            model = get_peft_model(model, lora)
        model = parallelize(model, mesh, config)
        load_adapter(model, root / kind)
        found[kind] = float((output(model) - theirs).abs().max()), effect
    return found


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    cases(
        ("2x1", [*FORMER, "experts"]),
        ("1x1pp2", ["experts"]),
        matrix=[(mesh, [*FORMER, "experts"]) for mesh in ("1x1", "1x2", "2x2")],
    ),
)
def test_former_keys_are_loaded_as_peft_does(pool, tmp_path, mesh, kinds):
    for kind in kinds:
        (tmp_path / kind).mkdir()
        write(kind, tmp_path / kind)
    for found in pool.run(ranks_of(mesh), loaded, mesh, kinds, tmp_path):
        for kind, (error, effect) in found.items():
            assert effect > 0.01, kind
            assert error < 1e-4 * effect, (kind, error, effect)
