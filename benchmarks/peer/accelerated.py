"""Accelerate's FSDP2, and the tensor parallelism that it takes from transformers, with PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.peer.jobs import MODELS, Job, Mesh, Rows, Run, adapted, gradients_of, make_optimizer, values_of


def train(job: Job, mesh: Mesh, folder: Path) -> Run:
    """Run on every rank."""
    from accelerate import Accelerator, DistributedType, PartialState
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from peft.utils.other import fsdp_auto_wrap_policy

    PartialState(cpu=True)
    # Accelerate enters FSDP2 on accelerators only (state.py); over gloo nothing else keeps it from it.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="FULL_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=job.accumulate,
        fsdp_plugin=plugin if mesh.dp > 1 else None,
        parallelism_config=ParallelismConfig(dp_shard_size=mesh.dp, tp_size=mesh.tp),
    )
    options: dict[str, Any] = {}
    if mesh.tp > 1:  # as in examples/torch_native_parallelism/nd_parallel.py
        options = {"tp_size": mesh.tp, "tp_plan": "auto", "device_mesh": accelerator.torch_device_mesh}
    model = adapted(job, MODELS[job.model].load_base(folder / "base", **options), folder)
    if mesh.dp > 1:  # as in PEFT's page on FSDP
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    rows = job.rows // mesh.dp // job.accumulate
    model, optimizer, loader, held_out = accelerator.prepare(
        model,
        make_optimizer(job, model.parameters()),
        DataLoader(Rows(job.data()), batch_size=rows),
        DataLoader(Rows(job.evaluation_data()), batch_size=job.rows // mesh.dp),
    )
    run = Run()
    if job.evaluates:
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(model(**batch).loss) for batch in held_out]
        run.evaluation = torch.stack(losses).mean().item()
        model.train()
    first = 0
    if job.resumes:
        accelerator.load_state(str(folder / "checkpoint"))
        first = job.checkpoint_at
        loader = accelerator.skip_first_batches(loader, first * job.accumulate)
    step = first
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                if step == 0:
                    run.gradients = gradients_of(model.named_parameters())
                if job.clip:
                    accelerator.clip_grad_norm_(model.parameters(), job.clip)
                step += 1
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and step == job.checkpoint_at:
            accelerator.save_state(str(folder / "checkpoint"))
    if job.saves:
        accelerator.unwrap_model(model).save_pretrained(
            folder / "adapter",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
    run.adapters = values_of(model.named_parameters())
    dist.barrier()
    return run
