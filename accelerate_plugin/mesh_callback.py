"""Log the speed and the memory of a Trainer's run on the whole mesh, with what Trainer itself logs."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from accelerate_plugin.accelerator_init import Original
from lora_parallel.integration import MeshMeter, parallelized

__all__ = ["MeshCallback", "log"]


class MeshCallback(TrainerCallback):
    """Log tokens a second, MFU, memory and the share of communication, as docs/metrics.md defines them.

        trainer = Trainer(..., callbacks=[MeshCallback()])

    The numbers are in `state.log_history` and go wherever `report_to` says, every `logging_steps` steps, under names
    that begin with "mesh/". Time of evaluation and of saving is left out.

    Args:
        peak_flops: Operations a second that one device could do at best; None to look the device up.
        profile_every: One step of so many is profiled, for the share of communication; None for no step.
    """

    def __init__(self, peak_flops: float | None = None, profile_every: int | None = None) -> None:
        self._peak_flops, self._profile_every = peak_flops, profile_every
        self._meter: MeshMeter | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self._close()  # of a run that has failed
        models = list(parallelized(model).values()) or [model]
        self._meter = MeshMeter(models, self._peak_flops, self._profile_every)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._meter is not None:
            self._meter.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._meter is not None:
            self._meter.end_step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pause()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close()

    def read(self) -> dict[str, float]:
        """Return the numbers of the steps since the last call. Collective."""
        return {} if self._meter is None else self._meter.read()

    def _pause(self) -> None:
        if self._meter is not None:
            self._meter.pause()

    def _close(self) -> None:
        if self._meter is not None:
            self._meter.close()
        self._meter = None


def log(original: Original, self: Any, logs: dict[str, float], start_time: float | None = None) -> None:
    """Log, and add the numbers of each `MeshCallback` to the entry of a training step.

    Callbacks get an entry after those of `report_to` have sent theirs, too late to add to it.
    """
    if "loss" in logs:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, MeshCallback):
                logs.update(callback.read())
    original(self, logs, start_time)
