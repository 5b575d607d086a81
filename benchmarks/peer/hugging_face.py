"""transformers' own FSDP2 and tensor parallelism, by which it loads a checkpoint, with PEFT and its Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from benchmarks.peer.jobs import MODELS, Job, Mesh, Rows, Run, adapted, gradients_of, values_of


class Watch(TrainerCallback):
    """Note the gradients of the first step."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Note them, before the optimizer steps."""
        if state.global_step == 0:
            self.run.gradients = gradients_of(model.named_parameters())


def average_by_sum(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
    """Reduce over gloo, which has no average: the sum, divided."""
    if op != dist.ReduceOp.AVG:
        return all_reduce(tensor, op=op, **kwargs)
    work = all_reduce(tensor, **kwargs)
    tensor.div_(dist.get_world_size(kwargs.get("group")))
    return work


all_reduce = dist.all_reduce


def train(job: Job, mesh: Mesh, folder: Path) -> Run:
    """Run on every rank."""
    from accelerate import DistributedType, PartialState
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    dist.all_reduce = average_by_sum
    base = MODELS[job.model].load_base(
        folder / "base", distributed_config=DistributedConfig(tp_size=mesh.tp, fsdp_size=mesh.dp)
    )
    model = adapted(job, base, folder)
    run = Run()
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        max_steps=job.steps,
        per_device_train_batch_size=job.rows // mesh.dp // job.accumulate,
        per_device_eval_batch_size=job.rows // mesh.dp,
        gradient_accumulation_steps=job.accumulate,
        max_grad_norm=job.clip,
        learning_rate=job.rate,
        lr_scheduler_type="constant",
        optim="sgd" if job.optimizer == "sgd" else "adamw_torch",
        save_strategy="steps" if job.checkpoint_at else "no",
        save_steps=job.checkpoint_at or 500,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=[],
    )
    if mesh.tp > 1:
        # Accelerate takes a tensor-parallel size on accelerators only; over gloo nothing else keeps it from it.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = Trainer(
        model,
        arguments,
        data_collator=default_data_collator,
        train_dataset=Rows(job.data()),
        eval_dataset=Rows(job.evaluation_data()),
        callbacks=[Watch(run)],
    )
    if job.evaluates:
        run.evaluation = trainer.evaluate()["eval_loss"]
    checkpoint = folder / "trainer" / f"checkpoint-{job.checkpoint_at}"
    trainer.train(resume_from_checkpoint=str(checkpoint) if job.resumes else None)
    if job.saves:
        trainer.save_model(str(folder / "adapter"))
    run.adapters = values_of(trainer.model.named_parameters())
    torch.distributed.barrier()
    return run
