"""Save and requeue a SLURM job between two steps, on all ranks together, when SLURM signals that it will end the job.

Lightning saves inside the signal handler. A sharded save is collective, and a rank may get the signal in the middle of
a forward, or a moment after other ranks: the save would find gathered weights, or the ranks would wait for each other
in different collectives. So the handler here only records the signal, and Lightning's own handler runs on every rank
after the step in which a rank got the signal. Private names of Lightning are used in `watch` only;
`tests/lightning_lora/test_requeue.py` checks that they do what is assumed here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_lora.namespace import TrainerNamespace

__all__ = ["watch"]


def watch(trainer: Any, lightning: TrainerNamespace, device: torch.device) -> None:
    """Save and requeue a job between steps, if Lightning requeues it under SLURM; change nothing for other jobs.

    Args:
        trainer: The Trainer, whose signal handler is replaced and who gets a callback.
        lightning: The names of the Trainer's namespace.
        device: The device that ranks communicate on.
    """
    connector = trainer._signal_connector
    environment = trainer._accelerator_connector.cluster_environment
    if not (isinstance(environment, lightning.SLURMEnvironment) and environment.auto_requeue):
        return
    own = type(connector)._slurm_sigusr_handler_fn.__get__(connector)
    told: list[Any] = []

    class Requeue(lightning.Callback):  # type: ignore[name-defined]
        """Ask after each optimizer step, by one small all-reduce, if a rank got the signal; if so, save and requeue."""

        step = 0

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == self.step:  # in mid-accumulation, whose gradients a save would lose
                return
            self.step = trainer.global_step
            number = torch.tensor(int(told[0]) if told else 0, device=device)
            dist.all_reduce(number, dist.ReduceOp.MAX)
            if number.item():
                told.clear()
                own(number.item(), None)

    trainer.callbacks = [each for each in trainer.callbacks if type(each).__name__ != Requeue.__name__]
    trainer.callbacks.insert(0, Requeue())
    connector._slurm_sigusr_handler_fn = lambda signal, frame: told.append(signal)  # Lightning registers it later
