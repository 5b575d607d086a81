"""`save_state` and `load_state`, `save_model`, `get_state_dict`: what is written, and what goes on from it."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration
from peft import PeftModel
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from accelerate_plugin.accelerator import AcceleratorOverrides
from tests.accelerate_plugin.harness import launched, plugin, rows_of
from tests.cases import cases
from tests.logs import listening
from tests.oracle import Case, causal_lm, differing, full, lora_config, ranks_of, reference, relative_error, trained
from tests.oracle.workers import Failure, attempt

CASE = Case(steps=6, lora={"modules_to_save": ["lm_head"]})
MESHES = ["2x2", "1x2", "4x1", "2x1", "1x1", "2x2x1", "1x4"]


class Counter:
    """What a script registers for checkpointing."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def decay(optimizer: torch.optim.Optimizer, factor: float) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule of the count of steps alone: an ExponentialLR would go on from the optimizer's own rate."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor**step)


class Script:
    """A training script that saves in mid-epoch and goes on."""

    def __init__(self, mesh: str, shuffle: bool = False, recompute: bool = False, **accelerator: Any) -> None:
        asked = plugin(mesh, activation_checkpointing=recompute) if mesh else None
        self.accelerator = Accelerator(fsdp_plugin=asked, cpu=not mesh, **accelerator)
        model = CASE.model()
        optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2, foreach=True)  # as on GPUs
        schedule = decay(optimizer, 0.9 ** (1 / self.accelerator.num_processes))
        loader: Any = DataLoader(rows_of(CASE), batch_size=CASE.rows // self.accelerator.num_processes, shuffle=shuffle)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, first: int, last: int, save: Path | None = None) -> list[float]:
        """Steps `first` to `last` of an epoch; a checkpoint after the last."""
        losses = []
        loader = self.accelerator.skip_first_batches(self.loader, first) if first else self.loader
        for step, batch in enumerate(loader, first):
            if step == last:
                break
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.counter.value += 1
            losses.append(self.accelerator.gather(loss.detach()).double().mean().item())
            if save is not None and step == last - 1:
                self.accelerator.save_state(save)
        return losses

    def adapters(self) -> dict[str, torch.Tensor]:
        return {name: full(p) for name, p in trained(self.model).items()}


def saved(mesh: str, folder: Path, shuffle: bool = False) -> list[Any]:
    with launched():
        script = Script(mesh, shuffle)
        losses = script.train(0, 3, folder / "state")
        losses += script.train(3, 6) if not shuffle else []
        return [losses, script.adapters()]


def resumed(mesh: str, folder: Path, shuffle: bool = False) -> list[Any]:
    with launched():
        script = Script(mesh, shuffle)
        script.accelerator.load_state(folder / "state")
        losses = script.train(3, 6)
        return [losses, script.adapters(), script.counter.value, script.schedule.get_last_lr()]


@pytest.fixture(scope="module")
def oracle() -> list[Any]:
    with launched():
        script = Script("")
        return [script.train(0, 6), script.adapters()]


@pytest.mark.parametrize(("mesh", "others"), cases(("2x2", ["1x2", "2x1"]), matrix=[("2x2", MESHES), ("1x2", MESHES)]))
def test_a_run_goes_on_on_any_mesh(pool, tmp_path, oracle, mesh, others):
    losses, adapters = oracle
    for answer in pool.run(ranks_of(mesh), saved, mesh, tmp_path):
        assert relative_error(answer[1], adapters) < 1e-10
    for other in others:
        for got, after, count, rate in pool.run(ranks_of(other), resumed, other, tmp_path):
            assert got == pytest.approx(losses[3:], abs=1e-6), other
            assert relative_error(after, adapters) < 1e-10, other
            assert count == 6
            assert rate == pytest.approx([1e-2 * 0.9**6])


def shuffled(mesh: str, folder: Path, seedable: bool) -> list[Any]:
    """Whole, and interrupted in the second epoch: the same batches."""
    answers = []
    settings = {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=seedable)}
    for stop in (False, True):
        with launched():
            torch.manual_seed(0)
            script = Script(mesh, True, **settings)
            losses = script.train(0, 6)
            if stop:
                losses += script.train(0, 2, folder / "state")
                torch.manual_seed(99)
                script = Script(mesh, True, **settings)
                script.accelerator.load_state(folder / "state")
            losses += script.train(2 if stop else 0, 6)
            if hasattr(script.loader, "set_epoch"):
                script.loader.set_epoch(2)  # as Accelerate asks of scripts that skip batches
            losses += script.train(0, 6)
            answers.append([losses, script.adapters()])
    return answers


@pytest.mark.parametrize(("mesh", "seedable"), cases(("1x2", False), matrix=[("2x2", False), ("2x2", True)]))
def test_shuffling_goes_on_in_mid_epoch(pool, tmp_path, mesh, seedable):
    for (losses, adapters), (again, after) in pool.run(ranks_of(mesh), shuffled, mesh, tmp_path, seedable):
        assert again == losses
        assert not differing(after, adapters)


def dealt(folder: Path, mesh: str, configuration: dict[str, Any], last: int) -> list[list[int]]:
    """Three epochs of rows, whole; and what is left of them after a checkpoint that is saved in the second epoch."""
    rows: list[list[int]] = []
    for stop in (False, True):
        with launched():
            torch.manual_seed(0)
            settings = {"dataloader_config": DataLoaderConfiguration(**configuration)}
            accelerator = Accelerator(fsdp_plugin=plugin(mesh), **settings)
            loader: Any = accelerator.prepare(DataLoader(list(range(24)), batch_size=2, shuffle=True))
            rows.append([row for batch in loader for row in batch.tolist()])
            for index, batch in enumerate(loader):
                rows[-1] += batch.tolist()
                if stop and index == last:
                    accelerator.save_state(folder)
                    break
            if stop:
                torch.manual_seed(99)
                accelerator = Accelerator(fsdp_plugin=plugin(mesh), **settings)
                loader = accelerator.prepare(DataLoader(list(range(24)), batch_size=2, shuffle=True))
                accelerator.load_state(folder)
                rows.append([row for batch in loader for row in batch.tolist()])
            else:
                rows[-1] += [row for batch in loader for row in batch.tolist()]
    return rows


@pytest.mark.parametrize("seedable", [False, True])
def test_the_next_epoch_is_shuffled_anew_where_one_is_saved_at_its_end(pool, tmp_path, seedable):
    for whole, before, after in pool.run(2, dealt, tmp_path, "2x1", {"use_seedable_sampler": seedable}, 5):
        assert len({*map(tuple, (whole[:12], whole[12:24], whole[24:]))}) == 3
        assert before + after == whole


@pytest.mark.parametrize("mesh", ["2x1", "1x2"])
def test_a_stateful_dataloader_goes_on_in_mid_epoch(pool, tmp_path, mesh):
    pytest.importorskip("torchdata")
    for whole, before, after in pool.run(2, dealt, tmp_path, mesh, {"use_stateful_dataloader": True}, 2):
        assert before + after == whole[: len(before + after)]
        assert len(before + after) == len(whole) * 2 // 3


def scheduled(folder: Path, loaders: bool) -> int:
    """Four updates of two processes, saved for one, of twice the rows by accumulation; return its count of steps."""
    # The loader of evaluations has a batch size of its own, which nothing depends on.
    for mesh, accumulate, evaluated in (("2x1", 1, 2), ("1x2", 2, 8)):
        with launched():
            accelerator = Accelerator(fsdp_plugin=plugin(mesh), gradient_accumulation_steps=accumulate)
            schedule = decay(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), 0.9)
            schedule = accelerator.prepare(schedule)
            if loaders:
                accelerator.prepare(*(DataLoader(list(range(16)), batch_size=each) for each in (4, evaluated)))
            if accumulate == 1:
                for _ in range(4):
                    schedule.step()
                accelerator.save_state(folder)
            else:
                accelerator.load_state(folder)
    return schedule.scheduler.last_epoch


@pytest.mark.parametrize("loaders", [True, False])
def test_a_schedule_goes_on_at_its_update_on_half_as_many_processes(pool, tmp_path, loaders):
    assert pool.run(2, scheduled, tmp_path, loaders) == [4, 4]


# ---------------------------------------------------------------------- what is written


def written(mesh: str, folder: Path) -> list[Any]:
    with launched():
        script = Script(mesh, recompute=True)
        script.train(0, 1)
        accelerator, model = script.accelerator, script.model
        accelerator.save_model(model, folder / "save_model")
        state = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            folder / "gathered",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=state,
        )
        accelerator.unwrap_model(model).save_pretrained(folder / "unwrapped", save_function=accelerator.save)
        script.accelerator.save_state(folder / "state")
        return [{name: (tuple(value.shape), value.device.type) for name, value in state.items()}, script.adapters()]


def test_saves_are_adapter_folders(pool, tmp_path):
    for rank, (state, adapters) in enumerate(pool.run(4, written, "2x2", tmp_path)):
        assert state == {name: (tuple(t.shape), "cpu" if rank == 0 else "meta") for name, t in adapters.items()}
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["adapter", "extra.pt", "meta.json", "state"]
    tokens = CASE.batches()[0]
    assert any("lm_head" in name for name in adapters)
    for folder in ("save_model", "gathered", "unwrapped", "state/adapter"):
        got = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert len(got) == len(adapters)
        loaded = PeftModel.from_pretrained(causal_lm(), tmp_path / folder)
        with torch.no_grad():
            logits = loaded(input_ids=tokens).logits
        gathered = CASE.model()
        for name, parameter in gathered.named_parameters():
            if name in adapters:
                parameter.data.copy_(adapters[name])
        with torch.no_grad():
            assert torch.equal(gathered(input_ids=tokens).logits, logits), folder


def after_a_forward() -> list[Any]:
    with launched():
        script = Script("2x1", mixed_precision="bf16")
        adapters = script.adapters()
        script.model(input_ids=CASE.batches()[0])
        return [script.accelerator.get_state_dict(script.model), adapters]


def test_the_state_dict_has_the_shards_of_weights_that_a_forward_has_gathered(pool):
    (state, adapters), _ = pool.run(2, after_a_forward)
    assert not differing(state, adapters)


def test_the_state_dict_has_the_adapter_that_does_not_train():
    with launched():
        model = CASE.model()
        model.add_adapter("second", lora_config())
        accelerator = Accelerator(fsdp_plugin=plugin("1x1"))
        names = accelerator.get_state_dict(accelerator.prepare(model)).keys()
    adapters = {name for name, _ in CASE.model().named_parameters() if ".lora_" in name}
    assert {name for name in names if ".second." in name} == {name.replace("default", "second") for name in adapters}
    assert adapters <= names


# ---------------------------------------------------------------------- names, limits, hooks, errors


def numbered(folder: Path) -> list[Any]:
    with launched():
        project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
        script = Script("2x1", project_config=project)
        heard: list[Any] = []

        def note(models: Any, weights: Any, place: str) -> None:
            heard.append(len(models))
            (Path(place) / "note.txt").write_text("a hook's own")

        script.accelerator.register_save_state_pre_hook(note)
        script.accelerator.register_load_state_pre_hook(lambda models, place: heard.append(Path(place).name))
        for step in range(3):
            script.train(step, step + 1)
            script.accelerator.save_state()
        adapters = script.adapters()
        script.train(3, 4)
        script.accelerator.load_state()
        project.iteration = 2
        return [heard, differing(script.adapters(), adapters), attempt(script.accelerator.save_state)]


def test_automatic_naming_and_a_limit(pool, tmp_path):
    for heard, changed, again in pool.run(2, numbered, tmp_path):
        assert heard == [1, 1, 1, "checkpoint_2"]
        assert not changed
        assert again.kind == "ValueError"
        assert "set accelerator.project_configuration.iteration to go on" in again.message
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    assert (tmp_path / "checkpoints" / "checkpoint_2" / "note.txt").read_text() == "a hook's own"


def refused(folder: Path) -> dict[str, Any]:
    answers = {}
    with launched():
        script = Script("2x1")
        accelerator = script.accelerator
        accelerator.save_state(folder / "state")
        (folder / "state" / "notes.txt").write_text("precious")
        accelerator.save_state(folder / "state")  # again, in its place
        answers["nothing there"] = attempt(accelerator.load_state, folder / "other")
        (folder / "mine").mkdir(exist_ok=True)
        (folder / "mine" / "notes.txt").write_text("precious")
        answers["not ours"] = attempt(accelerator.save_state, folder / "mine")
        answers["no checkpoint"] = attempt(accelerator.load_state, folder / "mine")
        answers["pickles"] = attempt(accelerator.save_state, folder / "pickled", safe_serialization=False)
        schedule = script.schedule.scheduler
        script.schedule.scheduler = torch.optim.lr_scheduler.CyclicLR(script.optimizer.optimizer, 0.1, 1.0)
        answers["another schedule"] = attempt(accelerator.load_state, folder / "state")
        script.schedule.scheduler = schedule
        accelerator._dataloaders[:] = [accelerator.prepare(DataLoader(rows_of(CASE), batch_size=2, shuffle=True))]
        answers["another order of rows"] = attempt(accelerator.load_state, folder / "state")
        accelerator._dataloaders[:] = [script.loader]
        accelerator._optimizers.clear()
        answers["no optimizer"] = attempt(accelerator.load_state, folder / "state")
        accelerator._optimizers.append(script.optimizer)
        accelerator.register_for_checkpointing(Counter())
        answers["another object"] = attempt(accelerator.load_state, folder / "state")
        script.counter.value = Counter()
        answers["no plain value"] = attempt(accelerator.save_state, folder / "object")
    with launched():
        answers["nothing prepared"] = attempt(Accelerator(fsdp_plugin=plugin("2x1")).load_state, folder / "state")
    return answers


def test_bad_checkpoints_are_one_error_on_every_rank(pool, tmp_path):
    kinds = {"nothing there": "FileNotFoundError", "not ours": "FileExistsError", "pickles": "TypeError"}
    texts = {
        "another schedule": "the saved schedule is none of CyclicLR",
        "another order of rows": "a dataloader shuffles in another way",
        "no optimizer": "holds the state of 1 optimizers, this Accelerator has 0",
        "another object": "holds 1 objects registered for checkpointing, this Accelerator has 2",
        "nothing prepared": "holds a model, and none was prepared",
    }
    for answers in pool.run(2, refused, tmp_path):
        for name, answer in answers.items():
            assert isinstance(answer, Failure), name
            assert answer.kind == kinds.get(name, "ValueError"), (name, answer.message)
            assert texts.get(name, "") in answer.message, name
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    assert (tmp_path / "state" / "notes.txt").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "state"]
    assert json.loads((tmp_path / "state" / "meta.json").read_text())["writer"] == "Accelerator"


def accumulated(accelerator: Accelerator) -> bool:
    """Return True if this micro-batch is the last of an update."""
    with accelerator.accumulate():
        return accelerator.sync_gradients


def without_a_model(folder: Path) -> list[Any]:
    """Save and load what a script registers, the random state and the micro-batch of an Accelerator without a model."""
    with launched(), listening("accelerate_plugin.checkpoint") as lines:
        accelerator = Accelerator(fsdp_plugin=plugin("2x1"), gradient_accumulation_steps=3)
        counter = Counter(5)
        accelerator.register_for_checkpointing(counter)
        updates = [accumulated(accelerator)]
        accelerator.save_state(folder)
        drawn = torch.rand(()).item()
        counter.value = 0
        accumulated(accelerator)
        accelerator.load_state(folder)
        updates += [accumulated(accelerator) for _ in range(2)]
        return [counter.value, torch.rand(()).item() == drawn, updates, list(lines)]


def test_what_a_script_registers_is_saved_without_a_model(pool, tmp_path):
    for rank, (value, same, updates, lines) in enumerate(pool.run(2, without_a_model, tmp_path / "state")):
        assert (value, same) == (5, True)
        assert updates == [False, False, True], "the third micro-batch ends an update"
        assert len(lines) == (rank == 0)
        assert all("no model was prepared, so that" in line for line in lines)


@pytest.mark.parametrize("kind", [Accelerator, type("Own", (Accelerator,), {"__module__": __name__})])
def test_an_accelerator_can_be_pickled(kind, monkeypatch):
    monkeypatch.setitem(globals(), "Own", kind)
    with launched():
        made = kind(fsdp_plugin=plugin("1x1"))
        copy = pickle.loads(pickle.dumps(made))
        assert type(copy).__name__ == type(made).__name__ == f"LoRAParallel{kind.__name__}"
        assert (copy.num_processes, copy.gradient_accumulation_steps) == (1, 1)
        assert isinstance(copy, AcceleratorOverrides)


def test_the_oracle_is_plain_peft(oracle):
    """But for the schedule."""
    assert oracle[0][0] == pytest.approx(reference(CASE).losses[0], abs=1e-9)


def apart(folder: Path) -> Any:
    """Rank 0 makes another call than rank 1; then both save."""
    with launched():
        script = Script("1x2")
        accelerator, model = script.accelerator, script.model
        if accelerator.is_main_process:
            failure = attempt(lambda: accelerator.get_state_dict(model))
        else:
            failure = attempt(lambda: accelerator.save_state(folder / "other"))
        accelerator.save_state(folder / "state")
        return [failure]


def test_processes_that_make_different_calls_are_told_of_both(pool, tmp_path):
    place = r"\(called at tests/accelerate_plugin/test_checkpoint.py:\d+\)"
    for (failure,) in pool.run(2, apart, tmp_path):
        assert isinstance(failure, Failure)
        assert re.search(
            rf"rank 0 accelerator.get_state_dict {place}, rank 1 accelerator.save_state {place}", failure.message
        )
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
