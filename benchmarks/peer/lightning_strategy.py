"""Lightning's `ModelParallelStrategy`, with a plan of torch's styles as in its documentation, and PEFT."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.peer.jobs import MODELS, Job, Mesh, Rows, Run, adapted, gradients_of, make_optimizer, values_of

COLWISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")


def plan_of(block: nn.Module) -> dict[str, ParallelStyle]:
    """Return torch's styles for a block's layers and their adapters: those that have no rule stay whole.

    A plan that names the layer itself is refused, as a PEFT layer is no `nn.Linear`: the rules are for what is in it.
    """
    plan: dict[str, ParallelStyle] = {}
    there = dict(block.named_modules())
    for names, style, factor in ((COLWISE, ColwiseParallel, "lora_B"), (ROWWISE, RowwiseParallel, "lora_A")):
        for name in names:
            if name == "self_attn.o_proj" and "self_attn.q_proj" not in there:
                continue  # latent attention, which stays whole
            if f"{name}.base_layer" in there:
                plan[f"{name}.base_layer"] = style()
                plan[f"{name}.{factor}.default"] = style()
            elif name in there:
                plan[name] = style()
    return plan


class FineTune(lightning.LightningModule):
    """A language model with adapters."""

    def __init__(self, job: Job, mesh: Mesh, folder: Path) -> None:
        super().__init__()
        self.job, self.mesh, self.folder, self.run = job, mesh, folder, Run()
        self.model: Any = adapted(job, MODELS[job.model].load_base(folder / "base"), folder)

    def configure_model(self) -> None:
        """Shard, as in Lightning's page on two-dimensional parallelism."""
        if self.device_mesh is None:
            raise RuntimeError("configure_model needs the strategy's mesh")
        tp, dp = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        causal_lm = self.model.get_base_model()
        if tp.size() > 1:
            ends: dict[str, ParallelStyle] = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
            ends["lm_head"] = ColwiseParallel(output_layouts=Replicate())
            for name, style in ends.items():
                if isinstance(causal_lm.get_submodule(name), (nn.Linear, nn.Embedding)):  # no adapter is on it
                    parallelize_module(causal_lm, tp, {name: style})
            for block in causal_lm.model.layers:
                parallelize_module(block, tp, plan_of(block))
        if dp.size() > 1:
            for block in causal_lm.model.layers:
                fully_shard(block, mesh=dp)
            fully_shard(self.model, mesh=dp)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return make_optimizer(self.job, self.model.parameters())

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss."""
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """Log the loss."""
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Note the gradients of the first step, before clipping."""
        if self.global_step == 0:
            self.run.gradients = gradients_of(self.model.named_parameters())


def train(job: Job, mesh: Mesh, folder: Path) -> Run:
    """Run on every rank."""
    module = FineTune(job, mesh, folder)
    callbacks: list[Any] = []
    if job.checkpoint_at:
        callbacks.append(
            ModelCheckpoint(
                folder / "checkpoints", filename="{step}", every_n_train_steps=job.checkpoint_at, save_top_k=-1
            )
        )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=mesh.ranks,
        strategy=ModelParallelStrategy(
            data_parallel_size=mesh.dp, tensor_parallel_size=mesh.tp, save_distributed_checkpoint=not job.saves
        ),
        max_steps=job.steps,
        accumulate_grad_batches=job.accumulate,
        gradient_clip_val=job.clip or None,
        logger=False,
        enable_checkpointing=bool(job.checkpoint_at),
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # its own one shuffles
    )
    rows = job.rows // mesh.dp // job.accumulate
    rank = int(os.environ["RANK"]) // mesh.tp

    def loader(ids: Tensor, size: int) -> Any:
        """Return a data-parallel rank's share."""
        share = DistributedSampler(Rows(ids), num_replicas=mesh.dp, rank=rank, shuffle=False)
        return StatefulDataLoader(Rows(ids), batch_size=size, sampler=share)  # or a resumed epoch begins anew

    if job.evaluates:
        held_out = loader(job.evaluation_data(), job.rows // mesh.dp)
        module.run.evaluation = trainer.validate(module, held_out, verbose=False)[0]["val_loss"]
    else:
        checkpoint = folder / "checkpoints" / f"step={job.checkpoint_at}.ckpt"
        trainer.fit(
            module,
            loader(job.data(), rows),
            ckpt_path=str(checkpoint) if job.resumes else None,
        )
    if job.saves:
        trainer.save_checkpoint(folder / "full.ckpt")
        if dist.get_rank() == 0:
            whole = torch.load(folder / "full.ckpt", weights_only=False)["state_dict"]
            module.model.save_pretrained(
                folder / "adapter", state_dict={name.removeprefix("model."): value for name, value in whole.items()}
            )
    module.run.adapters = values_of(module.model.named_parameters())
    dist.barrier()
    return module.run
