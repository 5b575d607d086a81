"""Base models whose weights are the same bits on every processor: checkpoints hold a fingerprint of their base.

`torch.randn` and `torch.rand` differ in the last bits between a processor with AVX-512 and one without, so weights are
drawn as whole numbers, by the names of the parameters, and divided by a power of two. The float64 models compute in
float64 throughout: no normalisation, no rotary embedding and no loss in float32, whose rounding two processors do not
share either.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

VOCABULARY, POSITIONS = 32, 16
NAME = "base"
"""Name that models have in the files, in place of the path that they were read from."""

_OPT = {
    "hidden_size": 16,
    "word_embed_proj_dim": 16,
    "ffn_dim": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "dropout": 0.0,
    "use_cache": False,
    "tie_word_embeddings": False,
}
_GPT2 = {
    "n_embd": 16,
    "n_inner": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": POSITIONS,
    "vocab_size": VOCABULARY,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "use_cache": False,
    "tie_word_embeddings": False,
}
_NF4 = {**_LLAMA, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
"""Rows that two tp ranks can cut between blocks of 64 weights."""


def exact(shape: torch.Size, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Draw numbers from -1/2 to 1/2 that are whole numbers over 256."""
    return torch.randint(-128, 128, shape, generator=generator).to(dtype) / 256


def _filled(model: Any, scale: float = 1.0) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = exact(parameter.shape, generator, parameter.dtype)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + values / 8 if is_norm else values * scale)
    return model


def opt() -> Any:
    """Build a model of plain linear layers, float64."""
    return _filled(OPTForCausalLM(OPTConfig(**_OPT)).double())


def gpt2() -> Any:
    """Build a model with q, k and v fused in one layer, float64."""
    return _filled(GPT2LMHeadModel(GPT2Config(**_GPT2)).double())


def llama() -> Any:
    """Build the model that `write_llama` writes, float32."""
    return _filled(LlamaForCausalLM(LlamaConfig(**_LLAMA)))


def nf4() -> Any:
    """Build the model that `write_nf4` writes, float32 and not yet quantised."""
    return _filled(LlamaForCausalLM(LlamaConfig(**_NF4)), scale=0.25)


def write(folder: Path) -> None:
    """Write the bases that are read from files."""
    for name, build in (("llama", llama), ("nf4", nf4)):
        model = build()
        model.config.save_pretrained(folder / name)
        save_file(model.state_dict(), folder / name / "model.safetensors", {"format": "pt"})


def read(folder: Path, name: str, **settings: Any) -> Any:
    """Read a base as a script does, and give it a name that is no path."""
    model: Any = LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float32, **settings)
    model.name_or_path = model.config._name_or_path = NAME
    return model


def quantised(folder: Path) -> Any:
    """Read the base in NF4."""
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    return read(folder, "nf4", quantization_config=config)


def fill_adapters(model: nn.Module, seed: int = 1, scale: float = 0.5) -> None:
    """Give the factors of all adapters exact values that are not zero; with `scale` 0 zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(exact(parameter.shape, generator, parameter.dtype) * scale)
