"""Four fine-tunes of one base in one run: a LightningModule that trains four adapters from one mixed dataloader.

    python examples/tenants_lightning.py
    python examples/tenants_lightning.py --devices 4 --tp 2

The first is one process, the second four, two ways FSDP2 and two ways tensor parallelism. Each batch has rows of
several tenants; the base is computed once for all of them, and each row goes through its own tenant's adapter. At the
end a table shows what each adapter makes of each tenant's held-out text: each should be best at its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
import torch
from peft import LoraConfig
from report import quiet_libraries
from rich.console import Console
from rich.table import Table
from tenant_texts import STYLES, MixedRows, held_out, losses
from tiny_base import BASE_MODEL
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_lora import LoRAParallelStrategy
from lora_parallel import TenantPool

# As different as tenants may be.
TENANTS = {
    "plain": (LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"), 5e-3),
    "loud": (LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"), 1e-2),
    "quiet": (LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]), 1e-2),
    "brief": (LoraConfig(r=8, lora_alpha=64, use_rslora=True, target_modules="all-linear"), 2e-3),
}


class FourTenants(L.LightningModule):
    """Each tenant has its own adapter, optimizer and steps; the pool keeps them."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.base, self.model = base, None
        self.pool: TenantPool | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(self.base).train()

    def on_fit_start(self) -> None:
        """The strategy has sharded the model by now."""
        if self.pool is not None:
            return
        self.pool = TenantPool(self.model)
        for seed, (name, (config, rate)) in enumerate(TENANTS.items()):
            self.pool.add(name, config, lambda p, rate=rate: torch.optim.AdamW(p, lr=rate, weight_decay=0.0), seed)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        ids, tenants = batch
        names = [list(STYLES)[number] for number in tenants.tolist()]
        with self.pool.route(names):
            each = losses(self.model(input_ids=ids).logits, ids, names)
            self.manual_backward(sum(each.values()))
        for name in self.pool.names():
            self.pool.step(name)
        self.log("loss", torch.stack(list(each.values())).mean().detach(), prog_bar=True)

    def configure_optimizers(self) -> None:
        """The pool's."""


@torch.no_grad()
def table_of(pool: TenantPool, model: torch.nn.Module) -> Table:
    """What each tenant's adapter makes of each tenant's text. Collective."""
    model.eval()
    device = next(model.parameters()).device
    table = Table("adapter", *(f"{name} text" for name in STYLES), title="Held-out loss")
    for name in pool.names():
        row = []
        for rows in held_out().values():
            with pool.train(name):
                ids = rows.to(device)
                row.append(losses(model(input_ids=ids).logits, ids, [name] * len(ids))[name].item())
        table.add_row(name, *(f"{loss:.3f}" for loss in row))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="processes, one for each device")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size; FSDP2 shards over the rest")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="rows in a step, over all processes together")
    parser.add_argument("--output", type=Path, default=Path("outputs/tenants"))
    args = parser.parse_args()
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    quiet_libraries()

    base = BASE_MODEL
    trainer = L.Trainer(
        strategy=LoRAParallelStrategy(tensor_parallel_size=args.tp, require_adapters=False),
        devices=args.devices,
        max_epochs=1,
        limit_train_batches=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module = FourTenants(base)
    rows_per_process, rest = divmod(args.batch_size, args.devices // args.tp)
    if rest:
        raise SystemExit(f"--batch-size {args.batch_size} must be a multiple of {args.devices // args.tp}")
    trainer.fit(module, DataLoader(MixedRows(), batch_size=rows_per_process, drop_last=True))

    for name in module.pool.names():
        module.pool.save(name, output / name)
    table = table_of(module.pool, module.model)
    if trainer.is_global_zero:
        Console().print(table)
        Console().print(f"the adapters are in {output}, one folder each")


if __name__ == "__main__":
    main()
