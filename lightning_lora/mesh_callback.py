"""Log the speed and the memory of a run on the whole mesh to Trainer's loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lora_parallel.integration import MeshMeter, parallelized

__all__ = ["MeshCallbackLogic"]

if TYPE_CHECKING:  # at run time the class is mixed into either namespace's Callback
    from lightning.pytorch.callbacks import Callback as Base
else:
    Base = object


class MeshCallbackLogic(Base):
    """Log tokens a second, MFU, memory and the share of communication, as docs/metrics.md defines them.

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
        self._meter: MeshMeter | None = None
        self._step: int | None = None
        """Number of steps done before the step that runs; None between steps."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        models = list(parallelized(pl_module).values()) or [pl_module]
        self._meter = MeshMeter(models, self._peak_flops, self._profile_every)
        self._step = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._step is None and self._meter is not None:
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

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._meter is not None:
            self._meter.close()
        self._meter = None
