"""Refuse what a proof on chunks of the tokens cannot hold, without ranks."""

from __future__ import annotations

from typing import Any

import pytest
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from lora_parallel.layers.layer_parameters import clean_names
from lora_parallel.tracing.inputs import TraceError
from lora_parallel.tracing.prove_token_chunks import _Proof
from lora_parallel.tracing.tracer import tracer_of
from tests.oracle import SIZES, lora_config


class TwoPasses(LlamaForCausalLM):
    """The trunk twice in a forward, as contrastive losses and R-Drop have it."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> CausalLMOutput:
        there, back = (self.model(input_ids=ids).last_hidden_state for ids in (input_ids, input_ids.flip(1)))
        return CausalLMOutput(logits=self.lm_head(there) + self.lm_head(back))


@pytest.mark.parametrize("method", ["ulysses", "all_gather"])
def test_a_trunk_that_is_called_twice_is_refused(method):
    """Divide no gradients by cp of what is called after the first time, and so before the second one."""
    model = get_peft_model(TwoPasses(LlamaConfig(**SIZES)), lora_config())
    proof = _Proof(tracer_of(model, clean_names(model)), 2, 1, method)
    with pytest.raises(TraceError, match="a forward calls model more than once"):
        proof.places()
