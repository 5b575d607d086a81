"""The rows of the oracle table whose base is quantised: against PEFT on the same quantised base, in float32."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

from tests.oracle import SEVEN
from tests.oracle.rows import DECODER, FUSED_SEVEN, Row, base_model, deeper, fill

# Widths that eight ranks can cut between blocks of 64.
SIZES = {**DECODER, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
FUSED = {**SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "partial_rotary_factor": 1.0}
SIX = [name for name in SEVEN if name != "k_proj"]  # one without an adapter
COMPUTED = "the quantiser's kernels compute in float32."
ROUNDING_OF_PRODUCTS = 5e-5
"""Largest relative error of a gradient where the quantiser's kernels compute."""


def formats() -> dict[str, Any]:
    """Transformers' configuration of each; made here, as the quantisers take long to import."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

    four = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    return {
        "nf4": transformers.BitsAndBytesConfig(**four, bnb_4bit_quant_type="nf4"),
        "nf4, double": transformers.BitsAndBytesConfig(
            **four, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        ),
        "fp4": transformers.BitsAndBytesConfig(**four, bnb_4bit_quant_type="fp4"),
        "int8": transformers.BitsAndBytesConfig(load_in_8bit=True),
        "torchao int8": transformers.TorchAoConfig(Int8WeightOnlyConfig()),
        "torchao int8 by group": transformers.TorchAoConfig(Int8WeightOnlyConfig(granularity=PerGroup(32))),
        "torchao float8": transformers.TorchAoConfig(Float8WeightOnlyConfig()),
        "torchao int4 by group": transformers.TorchAoConfig(
            IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
        ),
    }


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="quantised")


def quantised(kind: str, name: str = "LlamaForCausalLM", settings: Any = None, dtype: Any = torch.float32) -> nn.Module:
    """A base with random weights, by way of a file."""
    path = Path(_folder().name) / f"{name} {dtype} {deeper(settings or SIZES)['num_hidden_layers']}"
    if not path.exists():
        model: Any = base_model(name, settings or SIZES)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter *= 0.3
        path.mkdir()
        model.config.save_pretrained(path)
        save_file(model.to(dtype).state_dict(), path / "model.safetensors", {"format": "pt"})  # on every rank
    return getattr(transformers, name).from_pretrained(path, quantization_config=formats()[kind], dtype=dtype)


def _adapted(targets: list[str], *args: Any, **kwargs: Any) -> nn.Module:
    base = quantised(*args, **kwargs)
    torch.manual_seed(2)
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(kwargs.get("dtype", torch.float32))
    fill(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data *= 0.3  # `fill` makes updates larger than the base here, and blocks amplify rounding then
    return model.train()


def _row(kind: str, family: str = "llama", targets: list[str] = SEVEN, *args: Any, **kwargs: Any) -> Row:
    exact = kwargs.get("dtype") == torch.float64
    return Row(
        f"{family}, {kind}",
        "quantised",
        lambda: _adapted(targets, kind, *args, **kwargs),
        tolerance=1e-12 if exact else ROUNDING_OF_PRODUCTS,
        note="" if exact else COMPUTED,
    )


def quantised_rows() -> list[Row]:
    """Each format on a Llama; fused and normed layers in NF4."""
    plain = ("nf4", "nf4, double", "fp4", "int8", "torchao int8", "torchao int8 by group", "torchao int4 by group")
    return [
        *(_row(kind) for kind in plain),
        _row("torchao float8", dtype=torch.float64),
        _row("nf4", "qwen3", SIX, "Qwen3ForCausalLM", SIZES),
        _row("nf4", "phi3", FUSED_SEVEN, "Phi3ForCausalLM", FUSED),
    ]
