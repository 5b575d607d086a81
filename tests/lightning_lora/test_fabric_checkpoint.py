"""`fabric.save` and `fabric.load`: what is in a checkpoint, that a resumed loop goes on, and what does not fit."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from lora_parallel.distributed.dtensors import local
from tests.cases import cases
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import ROWS, Tokens, fabric, global_means, loader, tidy, trainer, tuner
from tests.oracle import fill_adapters, full, ranks_of, relative_error, trained
from tests.oracle.workers import Failure, attempt


class Loop:
    """A model with dropout, an optimizer and a schedule, set up for a mesh."""

    def __init__(self, mesh: str, seed: int = 1, build: Any = None, lightning: str = "lightning.fabric", **lora: Any):
        self.mesh, self.losses = mesh, []
        self.fabric = fabric(mesh, lightning, lora=lora, precision="64-true")
        model = build() if build is not None else m.adapted(lora_dropout=0.1)
        fill_adapters(model, seed)
        self.model, self.optimizer = self.fabric.setup(model.train(), torch.optim.AdamW(model.parameters(), lr=1e-2))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def state(self, step: int) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "step": step}

    def train(self, first: int, last: int) -> Loop:
        for batch in list(loader(Tokens(last * ROWS), self.mesh))[first:last]:
            loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
            self.fabric.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.losses.append(loss.detach())
        return self

    def outcome(self) -> tuple[dict[str, Tensor], list[float], float]:
        weights = {name: full(p) for name, p in trained(self.model.module).items()}
        return weights, global_means(self.losses), self.optimizer.param_groups[0]["lr"]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=Tokens(2, seed=77).ids).logits


def write(mesh: str, folder: str, lightning: str) -> dict[str, Any]:
    """Two steps, a checkpoint, two steps more; then a resumed loop that began with other adapters."""
    path = f"{folder}/two"
    with tidy():
        loop = Loop(mesh, lightning=lightning).train(0, 2)
        loop.fabric.save(path, {**loop.state(2), "note": {"text": "kept"}})
        loop.fabric.save(path, {**loop.state(2), "note": {"text": "again"}})
        saved = logits(loop.model)
        loop.model.train()
        whole = loop.train(2, 4).outcome()
        resumed = Loop(mesh, seed=9, lightning=lightning)
        state = resumed.state(0)
        with torch.inference_mode():  # as an evaluation's; what is made in it could not be trained with
            remainder = resumed.fabric.load(path, state)
        return {
            "whole": whole,
            "resumed": resumed.train(2, 4).outcome(),
            "step": state["step"],
            "remainder": remainder,
            "logits": saved,
        }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def resume(mesh: str, path: str, weights_only: bool | None = None) -> tuple[Any, ...]:
    with tidy():
        loop = Loop(mesh, seed=9)
        loop.fabric.load(path, loop.state(0), weights_only=weights_only)
        return loop.train(2, 4).outcome()


@pytest.mark.parametrize(
    ("mesh", "lightning", "others"),
    cases(
        ("2x2", "lightning.fabric", ["1x2"]),
        ("2x1", "lightning_fabric", []),
        matrix=[("2x2", "lightning.fabric", ["1x4", "1x1"]), ("2x2", "lightning_fabric", [])],
    ),
)
def test_a_resumed_loop_equals_an_uninterrupted_one(pool, mesh, lightning, others, tmp_path):
    """Bit for bit, dropout and schedule included; and what lies on the disk."""
    answers = pool.run(ranks_of(mesh), write, mesh, str(tmp_path), lightning)
    for found in answers:
        weights, losses, rate = found["whole"]
        again, later, resumed_rate = found["resumed"]
        assert same(again, weights)
        assert later == losses[2:]
        assert rate == resumed_rate == 1e-2 / 5
        assert found["step"] == 2
        assert found["remainder"] == {"note": {"text": "again"}}

    path = tmp_path / "two"
    assert os.listdir(tmp_path) == ["two"], "something was left beside it"
    assert {entry.name for entry in path.iterdir()} == {"adapter", "state", "extra.pt", "meta.json"}
    plain = PeftModel.from_pretrained(m.plain().double(), path / "adapter")
    torch.testing.assert_close(answers[0]["logits"], logits(plain), rtol=0, atol=1e-9)

    weights, losses, _ = answers[0]["whole"]
    for other in others:
        for again, later, _ in pool.run(ranks_of(other), resume, other, str(path)):
            assert later == pytest.approx(losses[2:], abs=1e-6)
            assert relative_error(again, weights) <= 1e-9


def several(mesh: str, folder: str) -> dict[str, Any]:
    """Two models and an optimizer of both; full fine-tuning; a LightningModule; an optimizer that has not stepped."""
    found: dict[str, Any] = {}
    batch = next(iter(loader(Tokens(ROWS), mesh)))
    with tidy():
        run = fabric(mesh, precision="64-true")

        def pair(seed: int) -> tuple[Any, Any, Any]:
            built = [m.adapted(), m.injected()]
            for model in built:
                fill_adapters(model, seed)
            one = run.setup_module(built[0])
            every = torch.optim.AdamW([*one.module.parameters(), *built[1].parameters()], lr=1e-2)
            other, every = run.setup(built[1], every)
            return one, other, every

        one, other, every = pair(1)
        loss = sum(each(input_ids=batch["input_ids"], labels=batch["labels"]).loss for each in (one, other))
        run.backward(loss)
        every.step()
        run.save(f"{folder}/pair", {"one": one, "other": other, "every": every})
        third, fourth, again = pair(2)
        run.load(f"{folder}/pair", {"other": fourth})
        found["only the second"] = equal(fourth, other) and not equal(third, one)
        run.load(f"{folder}/pair", {"one": third, "every": again, "other": fourth, "more": 0}, strict=False)
        found["both"] = equal(third, one)
        moments = [[full(s["exp_avg"]) for s in each.optimizer.state.values()] for each in (every, again)]
        found["moments"] = len(moments[0]) > 0 and all(torch.equal(a, b) for a, b in zip(*moments, strict=True))

        loops = [Loop(mesh, seed, m.plain, require_adapters=False) for seed in (1, 2)]
        loops[0].train(0, 1)
        loops[0].fabric.save(f"{folder}/full", loops[0].state(1))
        for p in loops[1].model.parameters():
            nn.init.zeros_(p)
        loops[1].fabric.load(f"{folder}/full", loops[1].state(0))
        found["full"] = equal(loops[0].model, loops[1].model) and not os.path.exists(f"{folder}/full/adapter")

        fresh = Loop(mesh)
        fresh.fabric.save(f"{folder}/fresh", fresh.state(0))
        before = fresh.outcome()[0]
        fresh.train(0, 2)
        fresh.fabric.load(f"{folder}/fresh", fresh.state(0))
        found["not stepped"] = same(before, fresh.outcome()[0]) and not fresh.optimizer.optimizer.state

        module = run.setup_module(tuner()(m.adapted))
        run.save(f"{folder}/module", {"module": module})
        fill_adapters(twin := tuner()(m.adapted), seed=5)
        twin = run.setup_module(twin)
        run.load(f"{folder}/module", {"module": twin})
        found["LightningModule"] = equal(twin, module)
    return found


def equal(one: nn.Module, other: nn.Module) -> bool:
    return same(*({name: full(p) for name, p in trained(each).items()} for each in (one, other)))


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2"]))
def test_what_can_be_in_a_state(pool, mesh, tmp_path):
    for found in pool.run(ranks_of(mesh), several, mesh, str(tmp_path)):
        assert all(found.values()), found


def moved(folder: str) -> tuple[list[int], bool]:
    """Save as two data-parallel ranks, and go on as one: the next rows of the loader, and whether the same is drawn."""
    from tests.lightning_lora.test_loader_position import loader as position

    rank = torch.distributed.get_rank()
    with tidy():
        loop = Loop("2x1")
        rows = position(rank, 2, DistributedSampler, 0)
        next(iter(rows))
        torch.manual_seed(7)
        loop.fabric.save(f"{folder}/two", {**loop.state(0), "rows": rows})
        drawn = torch.rand(()).item()
        loop, rows = Loop("1x2"), position(0, 1, DistributedSampler, 0)
        torch.manual_seed(99)
        loop.fabric.load(f"{folder}/two", {**loop.state(0), "rows": rows})
        same = torch.rand(()).item() == drawn
        return next(iter(rows)).tolist(), same


def test_rows_and_random_numbers_go_on_on_another_number_of_ranks(pool, tmp_path):
    assert pool.run(2, moved, str(tmp_path)) == [(list(range(12, 24)), True)] * 2


REFUSED: dict[str, tuple[str, str]] = {
    "filter": ("TypeError", "filter (for model)"),
    "storage options": ("TypeError", "does not support storage_options={'cached': True}"),
    "no model": ("ValueError", "holds no model that Fabric has set up"),
    "not set up": ("ValueError", "holds no model that Fabric has set up"),
    "foreign optimizer": ("ValueError", "Put all models whose parameters it holds"),
    "nested": ("ValueError", "state['both'] has a"),
    "load nothing": ("TypeError", "needs the objects to fill"),
    "load raw": ("TypeError", "load weights before fabric.setup"),
    "load a missing one": ("FileNotFoundError", "there is no checkpoint"),
    "load a key too many": ("KeyError", "state['epoch'] is not in"),
    "load into the wrong kind": ("ValueError", "holds a sharded model or an optimizer under this name"),
    "load another name": ("ValueError", "is a model that was set up"),
    "load other groups": ("ValueError", "has 1 parameter groups, the one to fill 2"),
    "load a Trainer's": ("ValueError", "was written by Lightning's Trainer"),
    "load objects": ("ValueError", "weights_only=False"),
    "resume Fabric's in Trainer": ("ValueError", "was written by fabric.save"),
    "a model twice": ("ValueError", "state['model'] and state['ema'] are the same model"),
    "a name with a dot": ("ValueError", "state['my.model'] is a model, and no model can have that name"),
    "a name with a slash": ("ValueError", "state['/model'] is a model"),
    "a name of a method": ("ValueError", "state['forward'] is a model"),
    "an empty name": ("ValueError", "state[''] is a model"),
    "a number": ("ValueError", "state[3] is a model"),
    "load an optimizer on one rank": ("ValueError", "state is {'model': 'model'} on rank 0"),
    "load into what refuses": ("RuntimeError", "no thanks"),
    "one rank": ("ValueError", "holds no model that Fabric has set up"),
}


class Refusing:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("no thanks")


def refused(folder: str) -> dict[str, Any]:
    """What each attempt raises; then a save and a load work."""
    found: dict[str, Any] = {}
    path, last = f"{folder}/good", torch.distributed.get_rank() == 1
    with tidy():
        loop = Loop("2x1")
        run, state = loop.fabric, loop.state(1)
        run.save(path, {**state, "plain": nn.Linear(2, 2)})
        loop.train(0, 1)
        other = run.setup_module(m.adapted())
        grouped = torch.optim.AdamW([{"params": [p]} for p in list(trained(loop.model).values())[:2]])
        run.save(f"{folder}/objects", {"model": loop.model, "path": Path("x")})
        module = tuner()(m.adapted)
        made = trainer("2x1", max_epochs=1)
        made.fit(module, loader(Tokens(ROWS), "2x1"))
        made.save_checkpoint(f"{folder}/trainer.ckpt")
        attempts: dict[str, Any] = {
            "filter": lambda: run.save(path, state, filter={"model": lambda name, value: True}),
            "storage options": lambda: run.strategy.save_checkpoint(path, state, storage_options={"cached": True}),
            "no model": lambda: run.save(path, {"step": 1}),
            "not set up": lambda: run.save(path, {"model": m.adapted()}),
            "foreign optimizer": lambda: run.save(path, {"model": other, "optimizer": loop.optimizer}),
            "nested": lambda: run.save(path, {**state, "both": [loop.model.module]}),
            "load nothing": lambda: run.load(path),
            "load raw": lambda: run.load_raw(path, loop.model),
            "load a missing one": lambda: run.load(f"{folder}/nowhere", state),
            "load a key too many": lambda: run.load(path, {**state, "epoch": 1}),
            "load into the wrong kind": lambda: run.load(path, {"model": loop.model, "optimizer": 5}),
            "load another name": lambda: run.load(path, {"plain": loop.model}),
            "load other groups": lambda: run.load(path, {"model": loop.model, "optimizer": grouped}),
            "load a Trainer's": lambda: run.load(f"{folder}/trainer.ckpt", state),
            "load objects": lambda: run.load(f"{folder}/objects", {"model": loop.model}),
            "resume Fabric's in Trainer": lambda: trainer("2x1", max_epochs=2).fit(
                module, loader(Tokens(ROWS), "2x1"), ckpt_path=path
            ),
            "a model twice": lambda: run.save(path, {**state, "ema": loop.model}),
            "a name with a dot": lambda: run.save(path, {"my.model": loop.model}),
            "a name with a slash": lambda: run.save(path, {"/model": loop.model}),
            "a name of a method": lambda: run.save(path, {"forward": loop.model}),
            "an empty name": lambda: run.save(path, {"": loop.model}),
            "a number": lambda: run.save(path, {3: loop.model}),
            "load an optimizer on one rank": lambda: run.load(
                path, {"model": loop.model, **({"optimizer": loop.optimizer} if last else {})}
            ),
            "load into what refuses": lambda: run.load(path, {"model": loop.model, "schedule": Refusing()}),
            "one rank": lambda: run.save(path, {"step": 1} if last else state),
        }
        before = shards(loop.model)
        for name, each in attempts.items():
            found[name] = attempt(each)
            assert same(before, shards(loop.model)), name
        found["good"] = list(run.load(path, loop.state(0)))
        found["trusted"] = run.load(f"{folder}/objects", {"model": loop.model}, weights_only=False)
    return found


def shards(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of what trains."""
    return {name: local(p).detach().clone() for name, p in trained(model).items()}


def test_refused(pool, tmp_path):
    for rank, found in enumerate(pool.run(2, refused, str(tmp_path))):
        assert found.pop("good") == ["plain"]
        assert found.pop("trusted") == {"path": Path("x")}
        assert found.keys() == REFUSED.keys()
        for name, (kind, text) in REFUSED.items():
            failure = found[name]
            assert isinstance(failure, Failure), f"{name} was accepted on rank {rank}"
            assert failure.kind == kind, (name, rank, failure.kind, failure.message)
            assert text in failure.message, (name, rank, failure.message)


def apart(folder: str) -> Any:
    """Rank 0 makes another call than rank 1; then both save."""
    with tidy():
        loop = Loop("1x2")
        if loop.fabric.global_rank == 0:
            failure = attempt(lambda: loop.fabric.save(f"{folder}/other", loop.state(0)))
        else:
            failure = attempt(lambda: loop.fabric.barrier())
        loop.fabric.save(f"{folder}/state", loop.state(0))
    return [failure]


def test_processes_that_make_different_calls_are_told_of_both(pool, tmp_path):
    place = r"\(called at tests/lightning_lora/test_fabric_checkpoint.py:\d+\)"
    for (failure,) in pool.run(2, apart, str(tmp_path)):
        assert isinstance(failure, Failure)
        assert re.search(rf"rank 0 fabric.save {place}, rank 1 barrier {place}", failure.message)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
