"""Log speed and memory of the whole mesh, let callbacks log, and act on signals between two steps.

Lightning acts inside its signal handlers: on SIGTERM it broadcasts from rank 0, on SLURM's signal it saves. A rank may
get the signal in the middle of a forward, a moment after other ranks, or alone: the ranks would wait for each other in
different collectives. So the handlers here only record the signals; after each optimizer step all ranks ask each other,
and read the answers of the step before. What follows is Lightning's own, on every rank: for SLURM's signal its handler,
for SIGTERM its `SIGTERMException`, at which `ModelCheckpoint(save_on_exception=True)` saves and the process exits with
0. Private names of Lightning are used in `watch` only; `tests/lightning_lora/test_signals.py` checks them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lora_parallel.integration import MeshMeter, begin_gather, parallelized

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as Base
else:
    Base = object


class MeshCallbackLogic(Base):
    """Log tokens a second, MFU, memory and the share of communication, as docs/speed.md defines them.

    The numbers go to all loggers of the Trainer every `log_every_n_steps` steps, under names that begin with "mesh/",
    and are in `metrics`. Time of validation is left out.

    Args:
        peak_flops: Operations a second that one device could do at best; None to look the device up.
        profile_every: One step of so many is profiled, for the share of communication; None for no step.
    """

    def __init__(self, peak_flops: float | None = None, profile_every: int | None = None) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}
        self._peak_flops, self._profile_every = peak_flops, profile_every
        self._meter: Any = None  # a MeshMeter, while a Trainer trains
        self._step: int | None = None  # number of steps done before the one that runs; None between steps

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        models = list(parallelized(pl_module).values()) or [pl_module]
        self._meter = MeshMeter(models, self._peak_flops, self._profile_every)
        self._step = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._step is None and self._meter is not None:  # this callback may have been added in mid-run
            self._step = trainer.global_step
            self._meter.begin_step()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self._meter is None or trainer.global_step == self._step:  # in mid-accumulation
            return
        self._step = None
        self._meter.end_step()
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self.metrics = self._meter.read()
            for logger in trainer.loggers:
                logger.log_metrics(self.metrics, step=trainer.global_step)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._meter is not None:
            self._meter.pause()

    def on_train_end(self, *args: Any) -> None:
        if self._meter is not None:
            self._meter.close()
        self._meter = None

    on_exception: Any = on_train_end


class Logging(partial[None]):
    """Call a method of the LightningModule, as `log` of a callback; Lightning's own would copy the module with it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Logging:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Logging, (_no_run,)


def _no_run(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("a callback that was pickled logs nothing until a Trainer runs it.")


log = logging.getLogger(__name__)


def watch(trainer: Any, lightning: SimpleNamespace) -> Callable[[], None]:
    """Act on signals between the steps of `fit`, until the function that is returned is called."""
    connector = trainer._signal_connector
    environment = trainer._accelerator_connector.cluster_environment
    requeue = type(connector)._slurm_sigusr_handler_fn.__get__(connector)
    terminate = type(connector)._sigterm_notifier_fn.__get__(connector)
    received = {"slurm": 0, "terminate": 0}

    class Signals(lightning.Callback):  # type: ignore[name-defined]
        """Ask all ranks after each step, by one small message, for their signals, and read the answer a step later."""

        step = 0
        answer: Callable[[], Any] | None = None

        def __reduce__(self) -> tuple[Any, ...]:
            return lightning.Callback, ()  # a copy asks nobody: its ranks may not be all there

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.step, self.answer = trainer.global_step, None

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == self.step:  # in mid-accumulation, whose gradients a save would lose
                return
            self.step = trainer.global_step
            slurm, terminated = self.answer().amax(0).tolist() if self.answer is not None else (0, 0)
            if slurm:
                received["slurm"] = 0
            self.answer = begin_gather(list(received.values()), "Trainer's step")
            if slurm:
                requeue(slurm, None)
            if terminated:
                _warn_if_nothing_saves(trainer, lightning)
                connector.received_sigterm = True  # the loops raise SIGTERMException as this step ends

    def record_terminate(signal: int, frame: Any) -> None:
        if trainer.state.fn == lightning.fitting:
            received["terminate"] = signal
        else:  # evaluation and prediction save nothing
            terminate(signal, frame)

    callback = Signals()
    trainer.callbacks.append(callback)  # last: the user's stay at their places
    # Lightning registers them later, by these names.
    handlers: dict[str, Any] = {"_sigterm_notifier_fn": record_terminate}
    if isinstance(environment, lightning.SLURMEnvironment) and environment.auto_requeue:
        handlers["_slurm_sigusr_handler_fn"] = lambda signal, frame: received.update(slurm=signal)
    vars(connector).update(handlers)

    def unwatch() -> None:
        trainer.callbacks = [other for other in trainer.callbacks if other is not callback]
        for name in handlers:
            delattr(connector, name)

    return unwatch


def _warn_if_nothing_saves(trainer: Any, lightning: SimpleNamespace) -> None:
    saves = any(
        isinstance(callback, lightning.OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False)
        for callback in trainer.callbacks
    )
    if trainer.is_global_zero and not saves:
        log.warning(
            "SIGTERM ends the run, and no callback saves it: add ModelCheckpoint(save_on_exception=True) to callbacks."
        )
