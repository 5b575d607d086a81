"""TRL's SFTTrainer, as in its documentation: nothing in it is about parallelism. Needs `[trl]` or `[dev]`.

    python examples/trl_sft.py
    accelerate-lora launch --config_file examples/fsdp2_tp.yaml examples/trl_sft.py --batch-size 8

The first is stock TRL in one process, the second runs on four; both take batches of 16 rows and log the same
losses. What comes out is a PEFT adapter folder with a tokenizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from tiny_base import BASE_MODEL, questions_and_answers
from trl import SFTConfig, SFTTrainer


def main(arguments: argparse.Namespace) -> None:
    base = BASE_MODEL
    pairs = [text.strip().split("\nA: ") for text in questions_and_answers()]
    dataset = Dataset.from_list(
        [{"prompt": f"{question}\nA:", "completion": f" {answer}"} for question, answer in pairs]
    )
    split = dataset.train_test_split(test_size=64, seed=arguments.seed)
    trainer = SFTTrainer(
        model=str(base),
        args=SFTConfig(
            output_dir=str(arguments.output),
            per_device_train_batch_size=arguments.batch_size,
            per_device_eval_batch_size=arguments.batch_size,
            max_length=128,
            max_steps=40,
            learning_rate=5e-3,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=20,
            save_steps=20,
            report_to=[],
            bf16=False,
            seed=arguments.seed,
        ),
        train_dataset=split["train"],
        eval_dataset=split["test"],
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train(resume_from_checkpoint=arguments.resume or None)
    trainer.save_model(str(arguments.output / "adapter"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/trl_sft"))
    parser.add_argument("--batch-size", type=int, default=16, help="rows of one process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    main(parser.parse_args())
