"""Fine-tune a language model with LoRA: an ordinary LightningModule, on one device or sharded over many.

One process:

    python examples/lightning_sft.py

Four processes, the model sharded two ways by FSDP2 and two ways by tensor parallelism:

    python examples/lightning_sft.py --strategy lora_fsdp2_tp --tp 2 --devices 4

Both take the same steps on the same data and print the same losses; `FineTune` below does not know which one it is.
The second run differs in one argument of `Trainer`. On a machine without a GPU the processes are CPU processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from peft import LoraConfig, get_peft_model
from report import Report, quiet_libraries
from tiny_base import BASE_MODEL, train_and_validation_rows
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from transformers import AutoModelForCausalLM

from lora_parallel import save_adapter


class FineTune(L.LightningModule):
    """LoRA on a causal language model of Hugging Face's: nothing in it is about parallelism."""

    def __init__(self, base: Path, learning_rate: float = 5e-3, r: int = 8) -> None:
        super().__init__()
        self.base, self.learning_rate, self.r = base, learning_rate, r
        self.model = None

    def configure_model(self) -> None:
        """Load the model here, and no process ever holds all of it: `lora_fsdp2_tp` lets each rank read its slices."""
        if self.model is not None:
            return
        config = LoraConfig(
            r=self.r,
            lora_alpha=2 * self.r,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            task_type="CAUSAL_LM",
        )
        self.model = get_peft_model(AutoModelForCausalLM.from_pretrained(self.base), config)
        self.model.train()  # from_pretrained returns a model in eval mode

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> dict:
        adapter = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(adapter, lr=self.learning_rate, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.learning_rate, total_steps=self.trainer.max_steps, pct_start=0.1
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SaveAdapter(L.Callback):
    """Writes the adapter, and only the adapter, in PEFT's format when training ends.

    `save_adapter` is collective: all ranks call it and rank 0 writes. On one device it does what
    `model.save_pretrained` does.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        save_adapter(pl_module.model, self.directory)


def make_strategy(name: str, tp: int, compile_blocks: bool) -> str | Strategy:
    """What `Trainer(strategy=...)` gets. This is all that changes between one device and many."""
    if name != "lora_fsdp2_tp":
        return name
    import lightning_lora  # registers "lora_fsdp2_tp", which is tensor parallelism over 2

    if tp == 2 and not compile_blocks:
        return name
    return lightning_lora.LoRAParallelStrategy(tensor_parallel_size=tp, compile=compile_blocks)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto", help="auto, lora_fsdp2_tp, or any other of Lightning's")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size under lora_fsdp2_tp")
    parser.add_argument("--compile", action="store_true", help="compile each block of the model, under lora_fsdp2_tp")
    parser.add_argument("--devices", type=int, default=1, help="processes, one for each device")
    parser.add_argument("--accelerator", default="auto", help="auto, cpu or gpu")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed, bf16-true or 64-true")
    parser.add_argument("--max-steps", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=16, help="rows in a step, over all processes together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/lightning_sft"))
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    quiet_libraries()

    train_rows, validation_rows = train_and_validation_rows(args.seed)
    report = Report(BASE_MODEL, output / "adapter", validation_rows[:4], args.max_steps)

    trainer = L.Trainer(
        strategy=make_strategy(args.strategy, args.tp, args.compile),
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        max_steps=args.max_steps,
        val_check_interval=max(1, args.max_steps // 4),
        check_val_every_n_epoch=None,  # count steps for validation, not epochs
        num_sanity_val_steps=0,
        enable_progress_bar=False,  # the report has one for the whole run
        enable_model_summary=False,
        enable_checkpointing=False,  # SaveAdapter saves what the run is for
        log_every_n_steps=1,
        logger=False,
        default_root_dir=output,
        callbacks=[SaveAdapter(output / "adapter"), report],
    )

    # The ranks of one tensor-parallel group see the same rows, so only the others divide the batch. Lightning gives
    # each rank its rows in an order drawn from the global seed; this sampler draws the same one for one process.
    tp = args.tp if args.strategy == "lora_fsdp2_tp" else 1
    rows_per_process, rest = divmod(args.batch_size, trainer.world_size // tp)
    if rest or not rows_per_process:
        raise SystemExit(f"--batch-size {args.batch_size} must be a multiple of {trainer.world_size // tp}")
    order = RandomSampler(train_rows, generator=torch.Generator().manual_seed(args.seed))
    train_loader = DataLoader(train_rows, batch_size=rows_per_process, sampler=order, drop_last=True)
    validation_loader = DataLoader(validation_rows, batch_size=rows_per_process)

    L.seed_everything(args.seed, verbose=False)  # the adapters are drawn here
    module = FineTune(BASE_MODEL)
    trainer.validate(module, validation_loader, verbose=False)
    trainer.fit(module, train_loader, validation_loader)

    if trainer.is_global_zero:
        report.print(picture=output / "loss.png", question="What does pathlib.Path.read_lines do?")


if __name__ == "__main__":
    main()
