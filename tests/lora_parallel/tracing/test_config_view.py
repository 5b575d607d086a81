"""What is laid over a config is seen by one module, and the rest stays shared."""

from __future__ import annotations

import pytest
import torch
from transformers import Phi3Config

from lora_parallel import parallelize
from lora_parallel.tracing.inputs import ConfigView, viewed_with
from tests.oracle import causal_lm, on_mesh


def test_the_rest_is_the_shared_ones_whatever_it_is_changed_to():
    shared = Phi3Config(num_attention_heads=8, pad_token_id=0)
    seen = viewed_with(shared, ConfigView({"num_attention_heads": 4}))
    assert isinstance(seen, Phi3Config)
    assert (seen.num_attention_heads, shared.num_attention_heads) == (4, 8)
    shared._attn_implementation = "eager"
    assert seen._attn_implementation == "eager"
    seen.rope_note = 7
    assert shared.rope_note == 7
    assert viewed_with(shared, 3) == 3


def switched():
    """Another attention after sharding: logits, and one process's."""
    ids = torch.arange(12)[None]
    found = []
    for sharded in (True, False):
        model = causal_lm("phi3", attn_implementation="eager").requires_grad_(False).eval()
        if sharded:
            mesh, config = on_mesh("1x2", require_adapters=False)
            model = parallelize(model, mesh, config)
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            found.append(model(input_ids=ids).logits)
    return found


def test_the_attention_implementation_can_be_changed_afterwards(pool):
    for got, want in pool.run(2, switched):
        assert torch.allclose(got, want, rtol=1e-10)


@pytest.mark.parametrize("reshard", [True, False])
def test_an_optimizer_made_after_an_evaluation_trains(pool, reshard):
    """Evaluation without gradients leaves no gathered weights, in any unit."""
    for trains in pool.run(2, evaluated_first, reshard):
        assert trains


def evaluated_first(reshard):
    mesh, config = on_mesh("2x1", require_adapters=False, reshard_after_forward=reshard)
    model = parallelize(causal_lm(), mesh, config)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(input_ids=ids, labels=ids).loss.item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    known = {id(parameter) for parameter in model.parameters()}
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        model(input_ids=ids, labels=ids)
    optimizer.step()
    with torch.no_grad():
        after = model(input_ids=ids, labels=ids).loss.item()
    return after < before and known == {id(parameter) for parameter in model.parameters()}
