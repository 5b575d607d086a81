"""Fine-tune Gemma by Lightning: `python -m benchmarks.gemma.lightning_fit MADE OUT DEVICES`; 4 devices are 2x2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_lora import LoRAParallelStrategy
from lora_parallel import save_adapter

STEPS, ROWS, TOKENS = 6, 8, 64


class FineTune(lightning.LightningModule):
    """LoRA on Gemma; nothing in it is about parallelism."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        """Load the model, of which each rank reads its slices."""
        if self.model is None:
            base = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
            config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
            self.model = get_peft_model(base, config).train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of token ids, `[rows, 64]`."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW of the adapter."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)


class Record(Callback):
    """Note the loss of each step, and write it and the adapter as transformers' Trainer does."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.log_history: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any) -> None:
        """Note the loss."""
        self.log_history.append({"loss": float(trainer.callback_metrics["loss"])})

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Write losses and adapter."""
        save_adapter(module.model, self.out / "adapter")
        if trainer.is_global_zero:
            (self.out / "trainer_state.json").write_text(json.dumps({"log_history": self.log_history}))


def rows_of(made: Path) -> list[Tensor]:
    """Return the beginnings of paragraphs, token ids, `[64]` each."""
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    texts = [json.loads(line)["text"] for line in (made / "text.jsonl").read_text().splitlines()]
    rows = [tokenizer(text)["input_ids"][:TOKENS] for text in texts]
    return [torch.tensor(row) for row in rows if len(row) == TOKENS][: STEPS * ROWS]


def main(made: Path, out: Path, devices: int) -> None:
    """Train for six steps of eight rows, and save the adapter."""
    strategy = LoRAParallelStrategy(tensor_parallel_size=2) if devices > 1 else "auto"
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_steps=STEPS,
        gradient_clip_val=1.0,
        callbacks=[Record(out)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
        default_root_dir=out,
    )
    lightning.seed_everything(0, verbose=False)
    rows = rows_of(made)
    # On a mesh Lightning draws the order of the rows from the seed, whatever the loader says; this is the same order.
    order = RandomSampler(rows, generator=torch.Generator().manual_seed(0))
    trainer.fit(FineTune(made / "model"), DataLoader(rows, ROWS // max(1, devices // 2), sampler=order))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
