"""SLURM's warning before it ends a job: saved and requeued between two steps, by all ranks together.

Lightning saves inside of the signal's handler. A sharded save is collective, and a rank may be told in the midst of a
forward, or a moment after the others: there it would find gathered weights, or wait for ranks that wait for it. So here
the handler only takes note, and Lightning's own runs after the step in which a rank has been told. Lightning's names
that are private are used in `watch` alone; `tests/lightning_lora/test_requeue.py` holds them to their meaning.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_lora.namespace import TrainerNamespace

__all__ = ["watch"]


def watch(trainer: Any, lightning: TrainerNamespace, device: torch.device) -> None:
    """Requeue between steps, in a job that SLURM may requeue; elsewhere nothing changes."""
    connector = trainer._signal_connector
    environment = trainer._accelerator_connector.cluster_environment
    if not (isinstance(environment, lightning.SLURMEnvironment) and environment.auto_requeue):
        return
    own = type(connector)._slurm_sigusr_handler_fn.__get__(connector)
    told: list[Any] = []

    class Requeue(lightning.Callback):  # type: ignore[name-defined]
        """After each optimizer step, whether a rank has been told; one small collective."""

        step = 0

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == self.step:  # within an accumulation: its gradients would be lost
                return
            self.step = trainer.global_step
            number = torch.tensor(int(told[0]) if told else 0, device=device)
            dist.all_reduce(number, dist.ReduceOp.MAX)
            if number.item():
                told.clear()
                own(number.item(), None)

    trainer.callbacks = [each for each in trainer.callbacks if type(each).__name__ != Requeue.__name__]
    trainer.callbacks.insert(0, Requeue())
    connector._slurm_sigusr_handler_fn = lambda signal, frame: told.append(signal)  # before it is registered
