"""A training loop on Accelerate, as in its documentation: nothing in it is about parallelism.

    python examples/accelerate_loop.py
    accelerate-lora launch --config_file examples/fsdp2_tp.yaml examples/accelerate_loop.py

The first is stock Accelerate in one process; the second, on four processes, prints the same losses. Run it again with
`--resume OUTPUT/step_40` to go on from there, on other processes if you like.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from tiny_base import BASE_MODEL, train_and_validation_rows
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup


def main(arguments: argparse.Namespace) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    base = BASE_MODEL
    set_seed(arguments.seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))

    rows, held_out = train_and_validation_rows(arguments.seed)
    batch_size = arguments.batch_size // accelerator.num_processes
    train_loader = DataLoader(rows, batch_size=batch_size)
    eval_loader = DataLoader(held_out, batch_size=batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=5 * accelerator.num_processes,
        num_training_steps=arguments.steps * accelerator.num_processes,
    )
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    step = 0
    if arguments.resume is not None:
        accelerator.load_state(arguments.resume)
        step = int(arguments.resume.name.removeprefix("step_"))
    batches = iter(accelerator.skip_first_batches(train_loader, 2 * step))
    model.train()
    with tqdm(range(step, arguments.steps), disable=not accelerator.is_main_process, unit="step") as bar:
        for step in bar:
            for _ in range(2):
                batch = next(batches)
                with accelerator.accumulate(model):
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            bar.set_postfix(loss=f"{accelerator.gather(loss.detach()).mean().item():.3f}")
            if (step + 1) % 20 == 0:
                accelerator.save_state(arguments.output / f"step_{step + 1}")

    model.eval()
    losses = []
    for batch in eval_loader:
        with torch.no_grad():
            loss = model(input_ids=batch, labels=batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch))))
    accelerator.print(f"held-out loss {torch.cat(losses).mean().item():.4f}")

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        arguments.output / "adapter",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.print(f"the adapter is in {arguments.output / 'adapter'}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/accelerate_loop"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16, help="rows over all processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="a folder that an earlier run saved")
    main(parser.parse_args())
