"""Make the base model of the examples, in `examples/base_model`: a byte-level Llama of 0.7 million parameters.

    python examples/make_base_model.py

It is trained on the Python language reference, which the interpreter carries for ``help()``, for a minute or two. The
folder is part of the repository: this script says where it comes from, and makes another one.
"""

from __future__ import annotations

import torch
from tiny_base import BASE_MODEL, SEQUENCE_LENGTH, encode
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


def base_text() -> str:
    """The Python language reference: about 460 kB of English with some code in it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """For trainers that want one: a token is one byte; bytes 0 and 3, which no text has, pad and end one."""
    characters = bytes_to_unicode()
    tokenizer = Tokenizer(BPE({character: byte for byte, character in characters.items()}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=characters[0], eos_token=characters[3], clean_up_tokenization_spaces=False
    )


def pretrained(steps: int, batch_size: int = 16, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=304,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=512,
            # A byte-level model of plain text has no special tokens; generation pads with byte 0, which never occurs.
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    text = encode(base_text())
    # Muon for the matrices inside the layers, AdamW for the rest: in a minute it gets much further than AdamW alone.
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01), torch.optim.AdamW(others, lr=8e-3)]
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.02, total_iters=steps) for o in optimizers]
    with tqdm(range(steps), desc="making the base model", unit="step") as bar:
        for _ in bar:
            starts = torch.randint(len(text) - SEQUENCE_LENGTH, (batch_size, 1))
            batch = text[starts + torch.arange(SEQUENCE_LENGTH)]
            loss = model(input_ids=batch, labels=batch).loss
            model.zero_grad()
            loss.backward()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            bar.set_postfix(loss=f"{loss.item():.2f}")
    return model


if __name__ == "__main__":
    pretrained(steps=400).save_pretrained(BASE_MODEL)
    byte_tokenizer().save_pretrained(BASE_MODEL)
    print(f"saved to {BASE_MODEL}")
