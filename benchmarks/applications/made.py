"""Make small models, a tokenizer, data and configuration files of meshes, which all applications use."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from accelerate_plugin import cli
from benchmarks.applications.cases import MESHES

__all__ = ["make", "write_mesh"]

ANIMALS = "cat dog owl fox bee ant cow pig hen rat elk bat".split()
VERBS = "eats sees likes hears finds wants".split()
FOODS = "bread apples honey seeds grass fish corn nuts".split()
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\\n' + message['content'] }}<|im_end|>{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>{{ 'assistant\\n' }}{% endif %}"
)
ROWS = 64
LENGTH = 12
"""Tokens of each answer in `equal`."""
WORDS = 384
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
DECODER = {"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 2, "initializer_range": 0.1}


def make(folder: Path) -> None:
    """Write everything into a folder, the same each time."""
    chance = random.Random(0)
    tokenizer = _tokenizer([_text(chance) for _ in range(400)])
    torch.manual_seed(0)
    for name, model in {
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, **DECODER)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SIZES, **DECODER)),
        "bert": BertModel(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
    }.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [(f"what does the {chance.choice(ANIMALS)} want?", _text(chance), _sentence(chance)) for _ in range(ROWS)]
    words = " ".join(answer for _, answer, _ in rows).split()
    drawn = (" ".join(chance.sample(words, LENGTH)) for _ in count())
    answers = islice((each for each in drawn if len(tokenizer(each)["input_ids"]) == LENGTH), ROWS)
    equal = [(ask, answer) for (ask, _, _), answer in zip(rows, answers, strict=True)]
    _write(folder / "messages", ({"messages": [_said("user", a), _said("assistant", b)]} for a, b, _ in rows))
    _write(folder / "equal", ({"messages": [_said("user", a), _said("assistant", b)]} for a, b in equal))
    _write(
        folder / "preference",
        (
            {"prompt": [_said("user", a)], "chosen": [_said("assistant", b)], "rejected": [_said("assistant", c)]}
            for a, b, c in rows
        ),
    )
    _write(folder / "alpaca", ({"instruction": a, "input": "", "output": b} for a, b, _ in rows))
    _write(folder / "text", ({"text": f"{a} {b}"} for a, b, _ in rows))
    _write(folder / "pairs", ({"anchor": a, "positive": b, "label": len(b) / 200} for a, b, _ in rows))
    for mesh, processes in MESHES.items():
        write_mesh(folder / f"mesh{mesh}.yaml", processes)


def write_mesh(file: Path, processes: int) -> None:
    """Write the configuration file of a mesh with tp 2."""
    options = f"--num_processes {processes} --num_machines 1 --tp_size 2 --dp_replicate_size 1 --mixed_precision no"
    cli.config(["--config_file", str(file), *options.split(), "--activation_checkpointing", "no"])


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _write(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _sentence(chance: random.Random) -> str:
    first, second = (f"the {chance.choice(ANIMALS)} {chance.choice(VERBS)} {chance.choice(FOODS)}" for _ in range(2))
    return f"{first} and {second}"


def _text(chance: random.Random) -> str:
    return " ".join(_sentence(chance) for _ in range(chance.randint(1, 3)))


def _tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with ChatML as its template."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator([*texts, *["user assistant system\n"] * 20], trainer)
    tokens = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "extra_special_tokens": SPECIAL[1:2]}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=256, padding_side="right", **tokens)
    fast.chat_template = CHAT
    return fast
