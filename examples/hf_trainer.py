"""transformers' Trainer, as in its documentation: nothing in it is about parallelism.

    python examples/hf_trainer.py
    accelerate-lora launch --config_file examples/fsdp2_tp.yaml examples/hf_trainer.py --batch-size 8

The first is stock Trainer in one process, the second runs on four; both take batches of 16 rows and log the same
losses. Each checkpoint has a PEFT adapter in it, and `--resume` goes on from the newest, on other processes if you
like.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from peft import LoraConfig, get_peft_model
from tiny_base import BASE_MODEL, train_and_validation_rows
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed


def as_dataset(rows: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in rows]


def main(arguments: argparse.Namespace) -> None:
    base = BASE_MODEL
    set_seed(arguments.seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    rows, held_out = train_and_validation_rows(arguments.seed)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(arguments.output),
            per_device_train_batch_size=arguments.batch_size,
            per_device_eval_batch_size=arguments.batch_size,
            max_steps=60,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=20,
            save_steps=20,
            save_total_limit=2,
            load_best_model_at_end=True,
            report_to=[],
            seed=arguments.seed,
        ),
        train_dataset=as_dataset(rows),
        eval_dataset=as_dataset(held_out),
    )
    trainer.train(resume_from_checkpoint=arguments.resume or None)
    trainer.save_model(str(arguments.output / "adapter"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/hf_trainer"))
    parser.add_argument("--batch-size", type=int, default=16, help="rows of one process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    main(parser.parse_args())
