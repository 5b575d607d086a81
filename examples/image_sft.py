"""TRL's SFTTrainer on a model that reads images: nothing in it is about parallelism. Needs `[trl]` or `[dev]`.

    python examples/image_sft.py
    accelerate-lora launch --config_file examples/fsdp2_tp.yaml examples/image_sft.py --batch-size 4

The first is stock TRL in one process, the second runs on four; both take batches of 8 rows and log the same losses.
The rows are pictures of one colour and its name. The base model stands for one that you download: a LLaVA of 50,000
random parameters in OUTPUT/base, with an image processor and a tokenizer of twelve words.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200), "grey": (120, 120, 120)}
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "which", "colour", "?", *COLOURS]
CHAT = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }} </s>{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% if message.role == 'assistant' %}</s>{% endif %}{% endif %}{% endfor %}"
)
SIDE, PATCH = 16, 4


def make_base(folder: Path) -> None:
    """Write a small LLaVA and its processor."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.add_special_tokens([AddedToken("<image>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    size = {"height": SIDE, "width": SIDE}
    LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size),
        tokenizer,
        patch_size=PATCH,
        num_additional_image_tokens=1,  # the tower's class token, which "default" leaves out
        vision_feature_select_strategy="default",
        chat_template=CHAT,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH, **sizes},
        text_config={"model_type": "llama", "vocab_size": len(WORDS), **sizes, **ends},
        image_token_id=WORDS.index("<image>"),
        image_seq_length=(SIDE // PATCH) ** 2,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)


def pictures(count: int, seed: int) -> Dataset:
    """Return rows of a picture, a question about it, and the answer."""
    generator = np.random.default_rng(seed)
    rows = []
    for name in generator.choice(list(COLOURS), count):
        noise = generator.normal(0, 20, (SIDE, SIDE, 3))
        rows.append(
            {
                "image": Image.fromarray((noise + COLOURS[name]).clip(0, 255).astype(np.uint8)),
                "prompt": [{"role": "user", "content": "which colour ?"}],
                "completion": [{"role": "assistant", "content": str(name)}],
            }
        )
    return Dataset.from_list(rows)


def main(arguments: argparse.Namespace) -> None:
    base = arguments.output / "base"
    with PartialState().main_process_first():
        if not base.exists():
            make_base(base)
    trainer = SFTTrainer(
        model=str(base),
        args=SFTConfig(
            output_dir=str(arguments.output),
            per_device_train_batch_size=arguments.batch_size,
            per_device_eval_batch_size=arguments.batch_size,
            max_length=None,  # a cut could divide an image
            max_steps=arguments.steps,
            learning_rate=1e-2,
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            report_to=[],
            bf16=False,
            seed=arguments.seed,
        ),
        train_dataset=pictures(256, arguments.seed),
        eval_dataset=pictures(32, arguments.seed + 1),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),  # of the tower too
    )
    trainer.train(resume_from_checkpoint=arguments.resume or None)
    trainer.save_model(str(arguments.output / "adapter"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/image_sft"))
    parser.add_argument("--batch-size", type=int, default=8, help="rows of one process")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    main(parser.parse_args())
