"""This project's engine."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.peer.jobs import (
    MODELS,
    Job,
    Mesh,
    Run,
    adapted,
    gradients_of,
    labels_of,
    make_optimizer,
    micro_batches,
    values_of,
)


def train(job: Job, mesh: Mesh, folder: Path) -> Run:
    """Run on every rank."""
    from lora_parallel import (
        ParallelConfig,
        build_mesh,
        clip_grad_norm_,
        load_checkpoint,
        no_sync,
        parallelize,
        save_adapter,
        save_checkpoint,
    )

    dist.init_process_group("gloo")
    config = ParallelConfig(dp_shard=mesh.dp, tp=mesh.tp)
    devices = build_mesh(config, "cpu")
    model = parallelize(adapted(job, MODELS[job.model].load_base(folder / "base"), folder), devices, config)
    rank = dist.get_rank() // mesh.tp
    run = Run()
    if job.evaluates:
        ids = job.evaluation_data().chunk(mesh.dp)[rank]
        with torch.no_grad():
            loss = model.eval()(input_ids=ids, labels=labels_of(ids)).loss
        dist.all_reduce(loss)
        run.evaluation = loss.item() / mesh.ranks
        model.train()
    optimizer = make_optimizer(job, model.parameters())
    first = 0
    if job.resumes:
        first = load_checkpoint(model, optimizer, folder / "checkpoint")["step"]
    for step in range(first, job.steps):
        micros = list(micro_batches(job, step, rank, mesh.dp))
        for index, micro in enumerate(micros):
            with contextlib.nullcontext() if index == len(micros) - 1 else no_sync(model):
                (model(input_ids=micro, labels=labels_of(micro)).loss / job.accumulate).backward()
        if step == 0:
            run.gradients = gradients_of(model.named_parameters())
        if job.clip:
            clip_grad_norm_([p for p in model.parameters() if p.requires_grad], job.clip)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == job.checkpoint_at:
            save_checkpoint(model, optimizer, folder / "checkpoint", extra={"step": step + 1})
    if job.saves:
        save_adapter(model, folder / "adapter")
    run.adapters = values_of(model.named_parameters())
    return run
