"""Small models that read images, saved as folders with their processors, and rows with images in them.

`write_family` writes what a user downloads: config, weights, a tokenizer, an image processor and a chat template. The
images are of several sizes, and a row may have two: processors that cut an image into patches or tiles then give the
rows of a batch, and the data-parallel ranks, other numbers of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, ProcessorMixin, Qwen2_5_VLProcessor

from tests.oracle.trainer_rows import word_tokenizer

WORDS = 40
SIDE, PATCH = 16, 4
"""Sides of an image as the tower sees it, and of a patch."""

COLOURS = ("red", "green", "blue", "grey")
IMAGES_PER_ROW = (1, 2, 1, 1, 2, 1, 1, 1)
"""Number of images of each row, again and again: the two halves of a batch of 8 rows have 5 and 4."""

CHAT = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE {% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}</s>"
)

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER: dict[str, Any] = {**SIZES, "image_size": SIDE, "patch_size": PATCH}
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT: dict[str, Any] = {**SIZES, **ENDS, "num_key_value_heads": 2, "max_position_embeddings": 256}


@dataclass(frozen=True)
class Family:
    """Describe a family of models that read images."""

    model: str
    """Name of the model's class."""

    processor: str
    image_processor: str
    config: Callable[[dict[str, int]], dict[str, Any]]
    """Make the settings of the config, from the numbers of the tokenizer's words."""

    placeholder: str
    """The word that stands for an image in a text."""

    special: dict[str, str]
    """Words that stand for images or parts of them, by the names of the tokenizer's attributes."""

    resize: dict[str, Any]
    """Settings of the image processor."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the processor."""


SQUARE: dict[str, Any] = {"size": {"height": SIDE, "width": SIDE}}
FAMILIES: dict[str, Family] = {
    "LLaVA": Family(
        "LlavaForConditionalGeneration",
        "LlavaProcessor",
        "CLIPImageProcessorPil",
        lambda ids: {
            "vision_config": {"model_type": "clip_vision_model", **TOWER, "projection_dim": 16},
            "text_config": {"model_type": "llama", "vocab_size": len(ids), **TEXT},
            "image_token_id": ids["<image>"],
            "image_seq_length": (SIDE // PATCH) ** 2,
        },
        "<image>",
        {"image_token": "<image>"},
        {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE["size"]},
        {"patch_size": PATCH, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "Qwen2.5-VL": Family(
        "Qwen2_5_VLForConditionalGeneration",
        "ImagesOnly",
        "Qwen2VLImageProcessorPil",
        lambda ids: {
            "vision_config": {
                **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32},
                **{"patch_size": PATCH, "window_size": 16, "fullatt_block_indexes": [1]},
            },
            "text_config": {
                **{"vocab_size": len(ids), **TEXT},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            },
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "tie_word_embeddings": True,
        },
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start": "<|vision_start|>",
            "vision_end": "<|vision_end|>",
        },
        {"patch_size": PATCH, "size": {"shortest_edge": 64, "longest_edge": 400}},
    ),
    "Gemma 3": Family(
        "Gemma3ForConditionalGeneration",
        "Gemma3Processor",
        "Gemma3ImageProcessorPil",
        lambda ids: {
            "vision_config": {"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False},
            "text_config": {
                **{"model_type": "gemma3_text", "vocab_size": len(ids), **TEXT},
                **{"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16},
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "mm_tokens_per_image": 4,
            "image_token_id": ids["<image_soft_token>"],
            "boi_token_index": ids["<start_of_image>"],
            "eoi_token_index": ids["<end_of_image>"],
        },
        "<start_of_image>",
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        SQUARE,
        {"image_seq_length": 4},
    ),
    "Idefics3": Family(
        "Idefics3ForConditionalGeneration",
        "Idefics3Processor",
        "Idefics3ImageProcessorPil",
        lambda ids: {
            "vision_config": TOWER,
            "text_config": {"model_type": "llama", "vocab_size": len(ids), **TEXT},
            "scale_factor": 2,
            "image_token_id": ids["<image>"],
            "pad_token_id": 0,
        },
        "<image>",
        {
            "image_token": "<image>",
            "fake_token": "<fake_token_around_image>",
            "end_token": "<end_of_utterance>",
            "global_token": "<global-img>",
            **{f"tile_{i}_{j}": f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)},
        },
        {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}},
        {"image_seq_len": 4},
    ),
}


class ImagesOnly(Qwen2_5_VLProcessor):  # type: ignore[misc]
    """Do without the processor of videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.image_token_id = tokenizer.image_token, tokenizer.image_token_id
        self.video_token, self.video_token_id = tokenizer.video_token, tokenizer.video_token_id
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


# ---------------------------------------------------------------------- what a user downloads


def write_family(name: str, folder: Path) -> Path:
    """Write a small model of a family with random weights, and its processor; return the folder."""
    family = FAMILIES[name]
    processor = make_processor(name)
    model_class = getattr(transformers, family.model)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**family.config(processor.tokenizer.get_vocab())))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # norms and biases too: ones and zeros would hide errors
        mean = parameter.data.mean() if parameter.dim() == 1 else 0.0
        parameter.data = mean + torch.randn(parameter.shape, generator=generator) * 0.15
    model.tie_weights()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def make_processor(name: str) -> Any:
    """Return the processor of a family: its image processor, a tokenizer of a few words, and a chat template."""
    family = FAMILIES[name]
    tokenizer = word_tokenizer(WORDS, COLOURS, family.special.values(), extra_special_tokens=family.special)
    return _processor_class(family)(
        image_processor=getattr(transformers, family.image_processor)(**family.resize),
        tokenizer=tokenizer,
        chat_template=CHAT.replace("IMAGE", family.placeholder),
        **family.settings,
    )


def _processor_class(family: Family) -> Any:
    return globals().get(family.processor) or getattr(transformers, family.processor)


def load_processor(name: str, folder: Path) -> Any:
    """Return the processor of a family's folder, as a user gets it."""
    return _processor_class(FAMILIES[name]).from_pretrained(folder)


# ---------------------------------------------------------------------- rows


def pictures(count: int) -> list[dict[str, Any]]:
    """Return rows of a dataset: images, a question and an answer; the answer names the colour of the first image."""
    generator = np.random.default_rng(0)
    rows = []
    for row in range(count):
        images = []
        for _ in range(IMAGES_PER_ROW[row % len(IMAGES_PER_ROW)]):
            height, width = generator.integers(8, 25, 2)
            pixels = generator.integers(0, 96, (height, width, 3), dtype=np.uint8)
            colour = int(generator.integers(len(COLOURS)))
            pixels[..., slice(None) if colour == 3 else colour] += 128
            images.append((colour, Image.fromarray(pixels)))
        question = " ".join(f"w{index}" for index in generator.integers(8, WORDS, generator.integers(2, 6)))
        rows.append(
            {"images": [image for _, image in images], "question": question, "answer": COLOURS[images[0][0]]},
        )
    return rows


def conversations(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows as TRL takes them: a list of images, a prompt and a completion."""
    return [
        {
            "images": row["images"],
            "prompt": [{"role": "user", "content": row["question"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}],
        }
        for row in rows
    ]


def collate(processor: Any, rows: list[dict[str, Any]], answers_only: bool = False) -> dict[str, Tensor]:
    """Return a batch, as a user's collator makes it: labels are the words, or those of the answer and the end alone."""
    texts = [
        processor.apply_chat_template(
            [
                {
                    "role": "user",
                    "content": [{"type": "image"}] * len(row["images"]) + [{"type": "text", "text": row["question"]}],
                },
                {"role": "assistant", "content": row["answer"]},
            ],
        )
        for row in rows
    ]
    images = [row["images"] for row in rows]
    batch = processor(images=images, text=texts, padding=True, padding_side="right", return_tensors="pt")
    labels = batch["input_ids"].clone()
    labels[(labels >= WORDS) | (batch["attention_mask"] == 0)] = -100
    if answers_only:
        ends = batch["attention_mask"].sum(1, keepdim=True) - len(("answer", "end"))
        labels[torch.arange(labels.shape[1]) < ends] = -100
    return {**batch, "labels": labels}


def load_base(folder: Path) -> nn.Module:
    """Load the model of a folder in float32: where a front end says so, on meta."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
