"""QLoRA: an adapter on a base in 4 bits, in an ordinary LightningModule, on one device or sharded over many.

    python examples/qlora.py
    python examples/qlora.py --strategy lora_fsdp2_tp --devices 4

The first is plain Lightning, PEFT and bitsandbytes in one process. The second runs on four, two ways FSDP2 and two ways
tensor parallelism: each reads its slices of the checkpoint and quantises those, so that none ever holds the model. Both
print the same losses, and how many bytes of the base a process holds. Needs `pip install bitsandbytes`, or `[dev]`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning_sft import SaveAdapter, make_strategy
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from report import quiet_libraries
from tiny_base import BASE_MODEL, train_and_validation_rows
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, RandomSampler
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
    # Four bits go by blocks of 64 features, and down_proj of this small model has 304; larger models need no exception.
    llm_int8_skip_modules=["lm_head", "down_proj"],
)


class QLoRA(L.LightningModule):
    """Nothing in it is about parallelism. The model is built where Lightning asks for large ones."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.base, self.model = base, None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        base = AutoModelForCausalLM.from_pretrained(self.base, quantization_config=FOUR_BITS)
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
        torch.manual_seed(0)
        config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(base, config).train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)


class Print(L.Callback):
    """The bytes of the base that this process holds, and the loss now and then."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        held = [p.to_local() if isinstance(p, DTensor) else p for p in pl_module.parameters() if not p.requires_grad]
        rank_zero_info(f"bytes of the base in this process: {sum(each.nbytes for each in held):,}")

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step % 20 == 0:
            rank_zero_info(f"step {trainer.global_step}: loss {trainer.callback_metrics['loss']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto", help="auto or lora_fsdp2_tp")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size under lora_fsdp2_tp")
    parser.add_argument("--devices", type=int, default=1, help="processes, one for each device")
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16, help="rows in a step, over all processes together")
    parser.add_argument("--output", type=Path, default=Path("outputs/qlora"))
    args = parser.parse_args()
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    quiet_libraries()

    base = BASE_MODEL
    trainer = L.Trainer(
        strategy=make_strategy(args.strategy, args.tp),
        devices=args.devices,
        max_steps=args.max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=output,
        callbacks=[SaveAdapter(output / "adapter"), Print()],
    )
    rows, _ = train_and_validation_rows(seed=0)
    ranks = trainer.world_size // (args.tp if args.strategy == "lora_fsdp2_tp" else 1)
    rows_per_process, rest = divmod(args.batch_size, ranks)
    if rest or not rows_per_process:
        raise SystemExit(f"--batch-size {args.batch_size} must be a multiple of {ranks}")
    order = RandomSampler(rows, generator=torch.Generator().manual_seed(0))
    trainer.fit(QLoRA(base), DataLoader(rows, batch_size=rows_per_process, sampler=order, drop_last=True))


if __name__ == "__main__":
    main()
