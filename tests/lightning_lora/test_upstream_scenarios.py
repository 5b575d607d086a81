"""Hold what Lightning's own tests expect of any strategy: run a script under plain Lightning and under ours.

Each scenario is a function of a mesh that returns what a user sees; without a mesh it runs under plain Lightning, which
is the oracle.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricTracker

from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import ROWS, Points, loader, share, tidy, trainer, tuner
from tests.oracle import ranks_of

Tuner = tuner()


class Regression(Tuner):  # type: ignore[misc,valid-type]
    """Small layers with adapters, and hooks that a scenario overrides."""

    def __init__(self) -> None:
        super().__init__(m.perceptron, loss=m.squared_error)
        self.seen: list[Any] = []

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(self, batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.model(batch["x"])


def run_of(mesh: str | None, folder: str, **options: Any) -> pl.Trainer:
    """A Trainer of two steps, whose checkpoints go to a folder of this mesh's own."""
    lora = options.pop("lora", None)
    return trainer(mesh, lora, **{"max_steps": 2, "default_root_dir": f"{folder}/{mesh}", **options})


def data(mesh: str | None, batches: int = 4) -> DataLoader:
    return loader(Points(batches * ROWS), mesh)


# ---------------------------------------------------------------------- attributes


def dtype_of_float64(mesh: str | None, folder: str) -> Any:
    return dtypes(mesh, folder, "64-true")


def dtype_of_bfloat16(mesh: str | None, folder: str) -> Any:
    return dtypes(mesh, folder, "bf16-true")


def dtypes(mesh: str | None, folder: str, precision: Any) -> Any:
    """The dtype that a module makes its own tensors in, in evaluation and in training."""

    class Asks(Regression):
        def on_validation_start(self) -> None:
            self.seen.append(self.dtype)

        def on_train_start(self) -> None:
            self.seen.append(self.dtype)

    module = Asks()
    run = run_of(mesh, folder, precision=precision)
    run.validate(module, data(mesh), verbose=False)
    run.fit(module, data(mesh))
    return module.seen


def callbacks_in_a_hook(mesh: str | None, folder: str) -> Any:
    """A callback finds itself and its neighbours at their places in the Trainer's list."""
    seen = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append([trainer.callbacks.index(each) for each in own])

    own = [Looks(), pl.Callback()]
    run_of(mesh, folder, callbacks=own).fit(Regression(), data(mesh))
    return seen


# ---------------------------------------------------------------------- batches, of a process alone


def order(mesh: str | None, folder: str, given: DataLoader) -> Any:
    """The rows of each batch of two epochs, with Lightning's own samplers where it takes any."""

    class Notes(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.append(batch["x"][:, 0].tolist())
            return super().training_step(batch, batch_idx)

    module = Notes()
    run = run_of(mesh, folder, use_distributed_sampler=True, max_steps=-1, max_epochs=2)
    pl.seed_everything(3)
    run.fit(module, given)
    return module.seen


def order_of_a_shuffled_loader(mesh: str | None, folder: str) -> Any:
    return order(mesh, folder, DataLoader(Points(2 * ROWS), batch_size=ROWS, shuffle=True))


def order_of_a_loader_that_is_not_shuffled(mesh: str | None, folder: str) -> Any:
    return order(mesh, folder, DataLoader(Points(2 * ROWS), batch_size=ROWS))


def order_of_a_batch_sampler_of_the_users(mesh: str | None, folder: str) -> Any:
    return order(mesh, folder, data(mesh, 2))


def random_numbers_of_two_runs(mesh: str | None, folder: str) -> Any:
    """A second run goes on with the random numbers after those of the first."""

    class Draws(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.append(torch.rand(1).item())
            return super().training_step(batch, batch_idx)

    module = Draws()
    pl.seed_everything(3)
    run_of(mesh, folder).fit(module, data(mesh))
    run_of(mesh, folder).fit(module, data(mesh))
    return module.seen


def batches_before_the_fit(mesh: str | None, folder: str) -> Any:
    """The number of batches of a Trainer that has not started yet."""
    run, module = run_of(mesh, folder, use_distributed_sampler=True), Regression()
    run.strategy.connect(module)
    run._data_connector.attach_data(module, train_dataloaders=DataLoader(Points(4 * ROWS), batch_size=ROWS // 2))
    run.fit_loop.setup_data()
    return run.num_training_batches


# ---------------------------------------------------------------------- evaluation, which trains nothing


class Scaled(Regression):
    """A parameter of its own, outside of its model, with which it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 3.0))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.scale * self.loss(self, batch))


def validation_with_a_parameter_of_its_own(mesh: str | None, folder: str) -> Any:
    return list(run_of(mesh, folder).validate(Scaled(), data(mesh), verbose=False))


class Constant(pl.LightningModule):
    """A baseline to compare with, which has no parameters."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", batch["y"].square().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.zeros_like(batch["y"])


def module_without_parameters_in_test(mesh: str | None, folder: str) -> Any:
    return list(run_of(mesh, folder).test(Constant(), data(mesh), verbose=False))


def module_without_parameters_in_predict(mesh: str | None, folder: str) -> Any:
    return len(run_of(mesh, folder).predict(Constant(), data(mesh)) or [])


def validation_beside_a_callback_of_the_fit(mesh: str | None, folder: str) -> Any:
    run = run_of(mesh, folder, callbacks=[StochasticWeightAveraging(1e-2)])
    return list(run.validate(Regression(), data(mesh), verbose=False))


def validation_with_sync_batchnorm(mesh: str | None, folder: str) -> Any:
    run = run_of(mesh, folder, sync_batchnorm=True)
    return list(run.validate(Regression(), data(mesh), verbose=False))


def module_without_parameters_in_fit(mesh: str | None, folder: str) -> Any:
    """A pass over the data, in which only hooks are at work."""

    class Counts(Constant):
        rows = 0

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.rows += len(batch["y"])

        def configure_optimizers(self) -> None:
            return None

    module = Counts()
    run_of(mesh, folder, max_steps=-1, max_epochs=1, lora={"require_adapters": False}).fit(module, data(mesh))
    return module.rows


# ---------------------------------------------------------------------- checkpoints


def checkpoint_read_before_the_run(mesh: str | None, folder: str) -> Any:
    """A Trainer that has not started reads what an earlier one saved."""
    first = run_of(mesh, folder)
    first.fit(Regression(), data(mesh))
    first.save_checkpoint(f"{folder}/{mesh}/first.ckpt")
    return run_of(mesh, folder).strategy.load_checkpoint(f"{folder}/{mesh}/first.ckpt")["global_step"]


class Counter(nn.Identity):
    """A module with a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"mine": 1}

    def set_extra_state(self, state: dict[str, int]) -> None: ...


class Normalised(Regression):
    """A model with running statistics, a metric whose state is saved, and a state of a kind of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.BatchNorm1d(12, affine=False), Counter(), self.model)
        self.mean = MeanMetric()
        self.mean.persistent(True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.mean.update(batch["x"])
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.append(checkpoint["state_dict"])


def saved_by(mesh: str | None, folder: str) -> dict[str, Any]:
    run, module = run_of(mesh, folder), Normalised()
    run.fit(module, data(mesh))
    run.save_checkpoint(f"{folder}/{mesh}/seen.ckpt")
    return module.seen[0]


def buffers_in_the_hook(mesh: str | None, folder: str) -> Any:
    """The dictionary that `on_save_checkpoint` is given has the buffers."""
    return {name: tensor.tolist() for name, tensor in saved_by(mesh, folder).items() if "running" in name}


def other_states_in_the_hook(mesh: str | None, folder: str) -> Any:
    state = saved_by(mesh, folder)
    return [round(float(state["mean.mean_value"]), 4), float(state["mean.weight"]), state["model.1._extra_state"]]


class WithoutWeights(Regression):
    """Takes the weights out of the checkpoint that its hook is given."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]
        checkpoint["mine"] = 1


def hook_that_takes_the_weights_out(mesh: str | None, folder: str) -> Any:
    run, module = run_of(mesh, folder), WithoutWeights()
    run.fit(module, data(mesh))
    run.save_checkpoint(f"{folder}/{mesh}/taken.ckpt")
    return run.global_step


def one_file_under_another_name(mesh: str | None, folder: str) -> Any:
    """A file that is saved again takes the place of the one before."""
    run, module = run_of(mesh, folder, lora={"save_distributed_checkpoint": False}), Regression()
    run.fit(module, data(mesh))
    path = f"{folder}/{mesh}.pt"
    run.save_checkpoint(path)
    run.fit_loop.epoch_loop.max_steps = 4
    run.fit(module, data(mesh))
    run.save_checkpoint(path)
    return torch.load(path, weights_only=True)["global_step"]


SCENARIOS: list[Callable[[str | None, str], Any]] = [
    dtype_of_float64,
    dtype_of_bfloat16,
    callbacks_in_a_hook,
    order_of_a_shuffled_loader,
    order_of_a_loader_that_is_not_shuffled,
    order_of_a_batch_sampler_of_the_users,
    random_numbers_of_two_runs,
    batches_before_the_fit,
    validation_with_a_parameter_of_its_own,
    module_without_parameters_in_test,
    module_without_parameters_in_predict,
    module_without_parameters_in_fit,
    validation_beside_a_callback_of_the_fit,
    validation_with_sync_batchnorm,
    checkpoint_read_before_the_run,
    buffers_in_the_hook,
    other_states_in_the_hook,
    hook_that_takes_the_weights_out,
    one_file_under_another_name,
]


def both(scenario: Callable[[str | None, str], Any], folder: str) -> list[Any]:
    """Return what a user sees under plain Lightning and under the strategy, in one process."""
    found = []
    for mesh in (None, "1x1"):
        with tidy():
            found.append(scenario(mesh, folder))
    return found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_one_process_is_as_under_plain_lightning(pool, tmp_path, scenario):
    ((want, got),) = pool.run(1, both, scenario, str(tmp_path))
    assert got == want


def before_the_processes(mesh: str) -> dict[str, Any]:
    """Return how a Trainer divides the data before it has started and afterwards, and how the mesh does."""
    with tidy():
        run = trainer(mesh)
        before = run.strategy.distributed_sampler_kwargs
        pl.seed_everything(1, workers=True)
        prepared = run.strategy.process_dataloader(DataLoader(Points(ROWS)))
        run.validate(Regression(), data(mesh), verbose=False)
        after = run.strategy.distributed_sampler_kwargs
    size, rank = share(mesh)
    return {
        "before": before,
        "after": after,
        "workers": prepared.worker_init_fn.keywords["rank"],
        "want": {"num_replicas": size, "rank": rank},
    }


class Tracked(Regression):
    """A metric of which a tracker makes a copy for each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(MeanMetric(), maximize=True)

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.tracker.update(batch["x"].mean())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        copy = pickle.loads(pickle.dumps(self.tracker[-1].clone()))
        self.seen.append([round(float(metric.compute()), 5) for metric in (self.tracker[-1], copy)])


def tracked(mesh: str | None) -> Any:
    module = Tracked()
    with tidy():
        trainer(mesh, max_epochs=2).fit(module, data(mesh))
    return module.seen


@pytest.mark.parametrize("mesh", ["2x2"])
def test_a_copy_of_a_metric_syncs_as_the_metric_does(pool, mesh):
    want = tracked(None)
    for found in pool.run(ranks_of(mesh), tracked, mesh):
        assert found == want


@pytest.mark.parametrize("mesh", ["2x2"])
def test_shares_of_the_data_are_known_before_the_processes_start(pool, mesh):
    for found in pool.run(ranks_of(mesh), before_the_processes, mesh):
        assert found["before"] == found["after"] == found["want"]
        assert found["workers"] == found["want"]["rank"]
