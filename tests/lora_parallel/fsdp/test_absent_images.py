"""A batch in which one data-parallel rank has no image: its tower does not run there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from lora_parallel import parallelize
from lora_parallel.distributed.mesh import dp_rank
from tests.cases import cases
from tests.oracle import full, on_mesh, ranks_of, relative_error, trained
from tests.oracle.rows import fill
from tests.oracle.workers import Failure

IMAGE, PATCHES, TOKENS = 31, 4, 12
TEXT = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 33, "max_position_embeddings": 64}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


def image_model() -> nn.Module:
    """Return a tiny LLaVA in float64 with an adapter on every linear layer of text and tower."""
    torch.manual_seed(0)
    tower = CLIPVisionConfig(**SMALL, num_attention_heads=4, image_size=8, patch_size=4, projection_dim=16)
    text = LlamaConfig(**SMALL, **TEXT, pad_token_id=0)
    config = LlavaConfig(vision_config=tower, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1)
    model = get_peft_model(
        LlavaForConditionalGeneration(config).double(), LoraConfig(r=3, target_modules="all-linear")
    ).double()
    fill(model)
    return model.train()


def rows(image: bool) -> dict[str, Tensor]:
    """Return two rows, [2, 12], with an image each or without."""
    generator = torch.Generator().manual_seed(1 + image)
    ids = torch.randint(4, 30, (2, TOKENS), generator=generator)
    if not image:
        return {"input_ids": ids, "labels": ids}
    pixels = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = ids.clone()
    ids[:, 1 : 1 + PATCHES] = IMAGE
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels}


def with_a_dummy(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return rows without an image with one at padded tokens behind the first row."""
    more = torch.zeros(2, PATCHES, dtype=torch.long)
    more[0] = IMAGE
    return {
        "input_ids": torch.cat([batch["input_ids"], more], 1),
        "labels": torch.cat([batch["labels"], torch.full_like(more, -100)], 1),
        "attention_mask": torch.cat([torch.ones_like(batch["input_ids"]), torch.zeros_like(more)], 1),
        "pixel_values": torch.zeros(1, 3, 8, 8, dtype=torch.float64),
    }


def step(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the gradients of the mean of the batches' losses."""
    for batch in batches:
        (model(**batch).loss / len(batches)).backward()
    return {name: full(p.grad) for name, p in trained(model).items() if p.grad is not None}


def on_rank(mesh: str, dummy: bool, config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the gradients of a step in which the second dp rank has no image."""
    mesh_, settings = on_mesh(mesh, **config)
    model = parallelize(image_model(), mesh_, settings)
    has_image = dp_rank(mesh_) == 0
    batch = rows(has_image)
    return step(model, [with_a_dummy(batch) if dummy and not has_image else batch])


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2"]))
def test_a_rank_without_an_image_is_told_what_to_give_it(pool, mesh):
    for raised in pool.try_run(ranks_of(mesh), on_rank, mesh, False, {}):
        assert isinstance(raised, Failure)
        assert raised.kind == "RuntimeError"
        assert "vision_tower" in raised.message
        assert "Rows without an image do not run its tower" in raised.message


@pytest.mark.parametrize(
    ("mesh", "config", "dummy"),
    cases(("2x1", {}, True), ("2x1", {"shard_base": False}, False), matrix=[("2x2", {"shard_base": False}, False)]),
)
def test_both_remedies_are_right(pool, mesh, config, dummy):
    want = step(image_model(), [rows(True), rows(False)])
    assert any("vision_tower" in name and gradient.any() for name, gradient in want.items())
    for got in pool.run(ranks_of(mesh), on_rank, mesh, dummy, config):
        assert relative_error(got, want) < 1e-12
