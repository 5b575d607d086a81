"""Fine-tune Gemma by TRL: `python -m benchmarks.gemma.trl_sft MADE OUT ROWS`."""

from __future__ import annotations

import sys
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer


def main(made: Path, out: Path, rows: int) -> None:
    """Train for six steps with `rows` rows of a process each, and save the adapter."""
    SFTTrainer(
        model=str(made / "model"),
        args=SFTConfig(
            output_dir=str(out),
            per_device_train_batch_size=rows,
            max_length=64,
            max_steps=6,
            save_steps=6,
            logging_steps=1,
            learning_rate=1e-3,
            report_to=[],
            bf16=False,
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
        ),
        train_dataset=load_dataset("json", data_files=str(made / "text.jsonl"), split="train"),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    ).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
