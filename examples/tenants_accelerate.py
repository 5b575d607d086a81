"""Four fine-tunes of one base in one run, in a loop on Accelerate.

    python examples/tenants_accelerate.py
    accelerate-lora launch --config_file examples/fsdp2_tp.yaml examples/tenants_accelerate.py

The first is one process, the second four. Each batch has rows of several tenants; the base is computed once for all of
them. In mid-run one tenant leaves, with its folder, and another takes its place.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig
from tenant_texts import STYLES, MixedRows, losses
from tiny_base import BASE_MODEL
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from accelerate_plugin import LoRAParallelPlugin
from lora_parallel import TenantPool


def main(arguments: argparse.Namespace) -> None:
    accelerator = Accelerator(fsdp_plugin=LoRAParallelPlugin(require_adapters=False))
    base = BASE_MODEL
    set_seed(arguments.seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    loader = DataLoader(MixedRows(arguments.seed), batch_size=arguments.batch_size // accelerator.num_processes)
    model, loader = accelerator.prepare(model, loader)
    model.train()

    pool = TenantPool(model)
    names = list(STYLES)
    for seed, name in enumerate(names):
        config = LoraConfig(r=4 * (seed + 1), lora_alpha=16, target_modules="all-linear")
        pool.add(name, config, lambda parameters: torch.optim.AdamW(parameters, lr=5e-3), init_seed=seed)

    with tqdm(range(arguments.steps), disable=not accelerator.is_main_process, unit="step") as bar:
        for step, (ids, tenants) in zip(bar, loader, strict=False):
            of_rows = [names[number] for number in tenants.tolist()]
            with pool.route(of_rows):
                each = losses(model(input_ids=ids).logits, ids, of_rows)
                accelerator.backward(sum(each.values()))
            for name in pool.names():
                pool.step(name)
            bar.set_postfix({name: f"{loss.item():.2f}" for name, loss in sorted(each.items())})
            if step == arguments.steps // 2:
                pool.save(names[0], arguments.output / names[0])
                pool.remove(names[0])
                names[0] = "newcomer"
                config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
                pool.add(names[0], config, lambda parameters: torch.optim.SGD(parameters, lr=0.1), init_seed=7)

    for name in pool.names():
        pool.save(name, arguments.output / name)
    memory = pool.memory()
    accelerator.print(f"bytes of the base on a rank: {memory['']['base']:,}")
    for name in pool.names():
        accelerator.print(f"{name}: {memory[name]}, in {arguments.output / name}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/tenants"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16, help="rows over all processes")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
