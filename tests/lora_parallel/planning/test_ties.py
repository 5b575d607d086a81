"""Tied parameters that train under tensor parallelism, where what holds them is computed in full."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_parallel import parallelize
from lora_parallel.distributed.mesh import dp_rank, dp_size
from tests.cases import cases
from tests.oracle import full, on_mesh, ranks_of, relative_error, trained
from tests.oracle.rows import DECODER, ENCODER, Batch, base_model, language, masked_language

# A head whose bias is tied to one that a module without a style holds, and layers that the user leaves whole.
WHOLE = dict.fromkeys(["lm_head", "model.embed_tokens"], "replicate")
KINDS: dict[str, tuple[dict[str, Any], Batch, dict[str, Any]]] = {
    "BertForMaskedLM": (ENCODER, masked_language(), {}),
    "AlbertForMaskedLM": ({**ENCODER, "embedding_size": 16}, masked_language(), {}),
    "LlamaForCausalLM": ({**DECODER, "tie_word_embeddings": True}, language(), {"tp_plan": WHOLE}),
}


def untrained(kind: str) -> nn.Module:
    return base_model(kind, KINDS[kind][0]).double().train()


def train(kind: str, model: nn.Module, share: int = 0, shares: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of the first step, and the parameters after two."""
    optimizer = torch.optim.SGD(trained(model).values(), lr=0.1)
    first: dict[str, Tensor] = {}
    for _ in range(2):
        optimizer.zero_grad()
        model(**{name: tensor.chunk(shares)[share] for name, tensor in KINDS[kind][1].items()}).loss.backward()
        first = first or {name: full(p.grad) for name, p in trained(model).items()}
        optimizer.step()
    return first, {name: full(p) for name, p in model.named_parameters(remove_duplicate=False)}


@cache
def in_one_process(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return train(kind, untrained(kind))


def on_ranks(mesh_text: str) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    mesh, _ = on_mesh(mesh_text)
    found = {}
    for kind in KINDS:
        _, config = on_mesh(mesh_text, require_adapters=False, **KINDS[kind][2])
        found[kind] = train(kind, parallelize(untrained(kind), mesh, config), dp_rank(mesh), dp_size(mesh))
    return found


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x1", "2x2"]))
def test_tied_parameters_that_are_whole_train_as_one(pool, mesh):
    for found in pool.run(ranks_of(mesh), on_ranks, mesh):
        for kind, (first, values) in found.items():
            want_first, want = in_one_process(kind)
            assert relative_error(first, want_first) <= 1e-11, kind
            assert relative_error(values, want) <= 1e-10, kind
