"""Tenants of one sharded base, each against plain PEFT on its own samples in one process."""

from __future__ import annotations

import gc
import os
import random
import shutil
import time
import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora import config as peft_config
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lora_parallel import clip_grad_norm_, export_merged, meta_init, parallelize
from lora_parallel.distributed.dtensors import local
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.tenants.pool import TenantPool
from lora_parallel.tenants.tenant import describe_config
from tests.cases import cases
from tests.lora_parallel.traffic import Traffic
from tests.oracle import causal_lm, differing, full, half_sum_of_squares, on_mesh, ranks_of, relative_error, trained
from tests.oracle.quantised_rows import quantised
from tests.oracle.tenant_rows import (
    CONFIGS,
    ROWS,
    SEEDS,
    STEPS,
    add,
    alone,
    batch,
    config_of,
    loss_of,
    optimizer_of,
    plain,
    pool_of,
    values,
    with_optimizer,
)
from tests.oracle.workers import Failure, attempt

KASA = ["kasa"] if hasattr(peft_config, "KasaConfig") else []  # came with peft 0.21


def train_in_turn(mesh_text: str) -> dict[str, dict[str, Tensor]]:
    mesh, model, pool = pool_of(mesh_text)
    for name in CONFIGS:
        add(pool, name)
    for step in range(STEPS):
        for name in CONFIGS:
            ids = batch(name, step).chunk(dp_size(mesh))[dp_rank(mesh)]
            with pool.train(name):
                loss_of(model(input_ids=ids).logits, ids).backward()
            pool.step(name)
    return {name: values(model, name) for name in CONFIGS}


def train_with(mesh_text: str, shard: bool) -> dict[str, dict[str, Tensor]]:
    mesh, model, pool = pool_of(mesh_text, shard=shard)
    pool.add("ada", config_of("ada"), with_optimizer("ada", torch.optim.Adafactor), SEEDS["ada"])
    pool.add("bea", config_of("bea"), with_optimizer("bea", torch.optim.Rprop), SEEDS["bea"])
    for step in range(STEPS):
        for name in ("ada", "bea"):
            ids = batch(name, step).chunk(dp_size(mesh))[dp_rank(mesh)]
            with pool.train(name):
                loss_of(model(input_ids=ids).logits, ids).backward()
        for name in ("ada", "bea"):
            pool.step(name)
    return {name: values(model, name) for name in ("ada", "bea")}


@pytest.mark.parametrize(("mesh", "shard"), cases(("1x2", False), ("2x2", True), matrix=[("2x2", False)]))
def test_steps_on_full_tensors_and_on_shards_are_those_of_one_process(pool, mesh, shard):
    for found in pool.run(ranks_of(mesh), train_with, mesh, shard):
        assert relative_error(found["ada"], alone("ada", optimizer=torch.optim.Adafactor)) <= 1e-10
        assert relative_error(found["bea"], alone("bea", optimizer=torch.optim.Rprop)) <= 1e-10


def stepped_in_other_orders() -> Any:
    mesh, model, pool = pool_of("1x2")
    for name in ("ada", "bea", "cyd"):
        pool.add(name, config_of(name), with_optimizer(name, torch.optim.Adafactor), SEEDS[name])
        with pool.train(name):
            loss_of(model(input_ids=batch(name, 0)).logits, batch(name, 0)).backward()
    pool.step("ada")  # it sums the gradients of all: later steps would wait for no other rank
    names = ["cyd", "bea"] if mesh.get_local_rank("tp") else ["bea", "cyd"]
    return attempt(lambda: [pool.step(name) for name in names])


def test_ranks_that_step_full_tensors_of_other_tenants_are_told(pool):
    for failure in pool.try_run(2, stepped_in_other_orders):
        assert isinstance(failure, Failure)
        assert "step('bea'" in failure.message
        assert "step('cyd'" in failure.message


def train_batched(mesh_text: str) -> dict[str, dict[str, Tensor]]:
    """All tenants' rows in one forward, dealt out unevenly: the last data-parallel rank has none of the first's."""
    mesh, model, pool = pool_of(mesh_text)
    for name in CONFIGS:
        add(pool, name)
    batched(mesh, model, pool)
    return {name: values(model, name) for name in CONFIGS}


def batched(mesh: Any, model: nn.Module, pool: TenantPool) -> None:
    for step in range(STEPS):
        mine = dealt(step, dp_size(mesh))[dp_rank(mesh)]
        ids = torch.stack([batch(name, step)[row] for name, row in mine])
        names = [name for name, _ in mine]
        with pool.route(names):
            logits = model(input_ids=ids).logits
            here = {name: torch.tensor([n == name for n in names]) for name in dict.fromkeys(names)}
            sum(loss_of(logits[rows], ids[rows]) for rows in here.values()).backward()
        for name in CONFIGS:
            pool.step(name)


def dealt(step: int, ranks: int) -> list[list[tuple[str, int]]]:
    """Each rank's samples: all of them in order of rank for each tenant, but of no even number."""
    hands: list[list[tuple[str, int]]] = [[] for _ in range(ranks)]
    for number, name in enumerate(CONFIGS):
        for row in range(ROWS):
            hands[0 if number == 0 else min(row * (1 + number % 2) * ranks // (2 * ROWS), ranks - 1)].append(
                (name, row)
            )
    order = torch.Generator().manual_seed(step)
    for hand in hands:
        tenants = torch.randperm(len(CONFIGS), generator=order).tolist()
        names = list(CONFIGS)
        hand.sort(key=lambda each: tenants[names.index(each[0])] if step else 0)
    for rank, hand in enumerate(hands):  # none without a sample
        if not hand:
            hand.append(hands[0].pop())
            del rank
    return hands


@pytest.mark.parametrize("mesh", cases("2x2", matrix=["1x1", "2x1", "1x2"]))
@pytest.mark.parametrize("way", [train_in_turn, train_batched])
def test_each_tenant_trains_as_alone(pool, mesh, way):
    for found in pool.run(ranks_of(mesh), way, mesh):
        for name, got in found.items():
            assert relative_error(got, alone(name)) <= 1e-10, name


# ---------------------------------------------------------------------- coming and going


def tensors_alive() -> list[Tensor]:
    time.sleep(0.02)
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Tensor)]


class NewTensors:
    """Count the tensors that were made since; what an earlier job of this process has left may go at any time."""

    def __init__(self) -> None:
        self.earlier = {id(each): weakref.ref(each) for each in tensors_alive()}

    def __len__(self) -> int:
        return sum(self.earlier.get(id(each), lambda: None)() is not each for each in tensors_alive())


def random_operations(mesh_text: str) -> dict[str, Any]:
    """Tenants come, train and go at random; two stay, one of which trains; what each was is compared bit for bit."""
    tensors = NewTensors()
    mesh, model, pool = pool_of(mesh_text)
    draw = random.Random(5)
    before = {name: full(p).clone() for name, p in model.named_parameters()}
    for name in ("ada", "bea"):
        add(pool, name)
    still, steps, changed = values(model, "ada"), 0, []
    alive = len(list(model.parameters()))
    rows = dp_size(mesh)

    def train(name: str, step: int) -> None:
        ids = batch(name, step).chunk(rows)[dp_rank(mesh)]
        with pool.train(name):
            loss_of(model(input_ids=ids).logits, ids).backward()
        pool.step(name)

    sizes: list[tuple[int, int, int]] = []
    for number in range(70):
        guests = [name for name in pool.names() if name not in ("ada", "bea")]
        choice = draw.choice(["add", "remove", "train", "bea"])
        known = {name: [local(p).clone() for p in pool.parameters(name)] for name in pool.names()}
        touched = None
        if choice == "add" and len(guests) < 2:
            touched = next(name for name in ("cyd", "dan") if name not in guests)
            add(pool, touched)
        elif choice == "remove" and guests:
            touched = draw.choice(guests)
            pool.remove(touched)
        elif choice == "train" and guests:
            touched = draw.choice(guests)
            train(touched, number % STEPS)
        elif choice == "bea" and steps < STEPS:
            touched = "bea"
            train("bea", steps)
            steps += 1
        changed += [
            name
            for name in pool.names()
            if name != touched
            and not all(torch.equal(local(p), t) for p, t in zip(pool.parameters(name), known[name], strict=True))
        ]
        del known
        for name in ("cyd", "dan"):
            if name in pool.names() and not number % 10:
                pool.remove(name)
        if not number % 10 and steps == STEPS:
            add(pool, "cyd")  # what is remembered of the last tenant, and of the last step, is of this one
            train("cyd", 0)
            pool.remove("cyd")
            held = len(tensors)
            for _ in range(5):
                if sizes and held > sizes[-1][0]:  # threads of gloo let go of theirs a little later
                    held = len(tensors)
            hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
            sizes.append((held, len(list(model.parameters())), hooks))
    while steps < STEPS:
        train("bea", steps)
        steps += 1
    found = {"bea": values(model, "bea"), "ada": differing(values(model, "ada"), still), "changed": changed}
    for name in pool.names():
        pool.remove(name)
    after = {name: full(p) for name, p in model.named_parameters()}
    found["told"] = hasattr(model, "peft_config")
    found["base"] = [name for name in before if not torch.equal(before[name], after.get(name, torch.zeros(0)))]
    return {**found, "sizes": sizes, "alive": alive, "more": sorted(after.keys() - before.keys())}


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x2"]))
def test_tenants_come_and_go_without_a_trace(pool, mesh):
    for found in pool.run(ranks_of(mesh), random_operations, mesh):
        assert relative_error(found["bea"], alone("bea")) <= 1e-10
        assert not found["ada"]
        assert not found["told"]
        assert (found["changed"], found["base"], found["more"]) == ([], [], [])
        assert len(found["sizes"]) > 3
        assert {parameters for _, parameters, _ in found["sizes"]} == {found["alive"]}  # nothing of any guest
        assert len(set(found["sizes"][1:])) == 1, found["sizes"]  # not of the first, before all is set up


# ---------------------------------------------------------------------- on disk


def part(mesh_text: str, folder: str, start: bool, shard: bool) -> dict[str, Tensor]:
    mesh, model, pool = pool_of(mesh_text, shard=shard)
    add(pool, "cyd")
    pool.add("bea", config_of("bea"), optimizer_of("bea"), SEEDS["bea"] if start else 0)
    if not start:
        pool.load("bea", folder)
    assert pool.steps("bea") == (0 if start else 2)
    for step in range(2) if start else range(2, STEPS):
        ids = batch("bea", step).chunk(dp_size(mesh))[dp_rank(mesh)]
        with pool.train("bea"):
            loss_of(model(input_ids=ids).logits, ids).backward()
        pool.step("bea")
    pool.save("bea", folder)
    return values(model, "bea")


def test_a_tenant_goes_on_in_another_job_on_another_mesh(pool, tmp_path):
    for first, second, shards in (
        ("2x2", "1x2", (False, False)),
        ("1x1", "2x1", (False, True)),
        ("2x1", "1x2", (True, False)),
    ):
        folder = str(tmp_path / f"{first} {second}")
        pool.run(ranks_of(first), part, first, folder, True, shards[0])
        for got in pool.run(ranks_of(second), part, second, folder, False, shards[1]):
            assert relative_error(got, alone("bea")) <= 1e-10
        plainly = PeftModel.from_pretrained(causal_lm(), folder)
        read = {name: p for name, p in plainly.named_parameters() if "lora_" in name}
        assert relative_error(plain(read), alone("bea")) <= 1e-6  # PEFT loads in float32


def twice(folder: str) -> dict[str, Any]:
    """Saves of two tenants and of two steps, damaged in all ways, and one that is cut off."""
    _, model, pool = pool_of("1x2")
    add(pool, "ada")
    add(pool, "bea")
    here, found = Path(folder), {}

    def train() -> None:
        for name in ("ada", "bea"):
            with pool.train(name):
                model(input_ids=batch(name, 0)).logits.square().mean().backward()
            pool.step(name)

    def only_here(change: Any) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            change()
        dist.barrier()

    pool.save("ada", here / "ada")
    pool.save("bea", here / "ada" / "bea")  # PEFT would look there for "bea" in "ada"
    found["of another"] = attempt(pool.load, "bea", here / "ada")
    train()
    (old,) = (here / "ada").glob("tenant_state-*")
    kept = old.read_bytes()
    before, moments = values(model, "ada"), full(next(iter(pool.optimizer("ada").state.values()))["exp_avg"])
    pool.save("ada", here / "ada")
    states = list((here / "ada").glob("tenant_state-*"))
    assert len(states) == 1
    assert states != [old]

    train()
    own = os.replace

    def cut_off(source: Any, target: Any) -> None:
        if Path(target).name == "adapter_model.safetensors":
            raise OSError("the disk is gone")
        own(source, target)

    os.replace = cut_off  # type: ignore[assignment]
    found["cut off"] = attempt(pool.save, "ada", here / "ada")
    os.replace = own  # type: ignore[assignment]
    pool.load("ada", here / "ada")
    found["changed"] = differing(values(model, "ada"), before)
    again = full(next(iter(pool.optimizer("ada").state.values()))["exp_avg"])
    found["and its moments"] = (again - moments).abs().max().item(), pool.steps("ada")

    pool.save("ada", here / "ada")
    (path,) = (here / "ada").glob("tenant_state-*")
    good = path.read_bytes()
    whole = torch.load(path, weights_only=True)
    moment = next(each for each in whole["tensors"].values() if each.numel() > 1)
    place = good.index(moment.numpy().tobytes()) + 5
    for what, change in {
        "shortened": lambda: path.write_bytes(good[: len(good) // 2]),
        "a flipped bit": lambda: path.write_bytes(good[:place] + bytes([good[place] ^ 8]) + good[place + 1 :]),
        "empty": lambda: path.write_bytes(b""),
        "other contents": lambda: torch.save([1], path),
        "of another release": lambda: torch.save({**whole, "format": 7}, path),
        "without moments": lambda: torch.save({**whole, "tensors": {}}, path),
        "with smaller moments": lambda: torch.save(
            {**whole, "tensors": {key: each[:1] for key, each in whole["tensors"].items()}}, path
        ),
        "of two saves": lambda: (path.unlink(), old.write_bytes(kept)),
    }.items():
        only_here(change)
        found[what] = attempt(pool.load, "ada", here / "ada")
    only_here(lambda: (old.unlink(), path.write_bytes(good)))
    pool.load("ada", here / "ada")
    pool.remove("ada")
    pool.add("ada", config_of("ada"), optimizer_of("ada"), 0, dtype=torch.float32)
    found["in another dtype"] = attempt(pool.load, "ada", here / "ada")
    pool.remove("ada")
    pool.add("ada", LoraConfig(**{**CONFIGS["ada"], "lora_dropout": 0.5}), optimizer_of("ada"), 0)
    found["with another dropout"] = attempt(pool.load, "ada", here / "ada")
    return found


DAMAGED = {
    "of another": "was trained with r=3",
    "cut off": "the disk is gone",
    "shortened": "is damaged",
    "a flipped bit": "has other bytes than were written",
    "empty": "is damaged",
    "other contents": "is damaged",
    "of another release": "has format 7; this release reads 1",
    "without moments": "is damaged (KeyError",
    "with smaller moments": "is damaged",
    "of two saves": "the files are of different saves",
    "in another dtype": "has dtype torch.float64, the model's has torch.float32",
    "with another dropout": "was trained with lora_dropout=0.0",
}


def test_a_folder_is_of_one_save_and_whole(pool, tmp_path):
    for found in pool.run(2, twice, str(tmp_path)):
        assert not found.pop("changed")
        assert found.pop("and its moments") == (0, 1)
        assert found.keys() == DAMAGED.keys()
        for what, text in DAMAGED.items():
            assert isinstance(found[what], Failure), what
            assert text in found[what].message, (what, found[what].message)


# ---------------------------------------------------------------------- what is communicated


def traffic(mesh_text: str) -> list[Counter[Any]]:
    """Collectives of a batched step of one, two and four tenants."""
    _, model, pool = pool_of(mesh_text)
    found = []
    for number in (1, 2, 4):
        for name in [name for name in CONFIGS if name not in pool.names()][: number - len(pool.names())]:
            pool.add(name, LoraConfig(r=2, target_modules="all-linear"), optimizer_of(name), 0)
        names = (pool.names() * 4)[:4]
        ids = batch("ada", 0)
        for _ in range(2):
            with Traffic() as seen:
                with pool.route(names):
                    model(input_ids=ids).logits.sum().backward()
                for name in pool.names():
                    pool.step(name)
        found.append(Counter(seen.calls))
    return found


@pytest.mark.parametrize("mesh", cases("2x1", "1x2", matrix=["2x2"]))
def test_a_step_of_more_tenants_communicates_no_more(pool, mesh):
    for one, two, four in pool.run(ranks_of(mesh), traffic, mesh):
        assert one == two == four
        assert one


# ---------------------------------------------------------------------- refusals


def asked(**settings: Any) -> LoraConfig:
    return LoraConfig(target_modules=["q_proj"], **settings)


def refused(folder: str) -> dict[str, Any]:
    mesh, model, pool = pool_of("2x2")
    odd = dist.get_rank() == 1
    add(pool, "ada")
    found = {
        "unknown": attempt(lambda: pool.remove("zoe")),
        "unknown to train": attempt(lambda: pool.train("zoe").__enter__()),
        "duplicate": attempt(add, pool, "ada"),
        "one module too many": attempt(
            pool.add, "cyd", LoraConfig(target_modules=["q_proj", "v_porj"]), optimizer_of("cyd"), 0
        ),
        "a seed of more than 64 bits": attempt(pool.add, "cyd", config_of("cyd"), optimizer_of("cyd"), 2**70),
        "no such modules": attempt(pool.add, "cyd", LoraConfig(target_modules=["qkv"]), optimizer_of("cyd"), 0),
        "dora": attempt(pool.add, "cyd", LoraConfig(target_modules=["q_proj"], use_dora=True), optimizer_of("cyd"), 0),
        "a head": attempt(pool.add, "cyd", LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), None, 0),
        "an embedding": attempt(pool.add, "cyd", LoraConfig(target_modules=["embed_tokens"]), optimizer_of("cyd"), 0),
        "a name inside": attempt(pool.add, "mlp", config_of("cyd"), optimizer_of("cyd"), 0),
        "a name of torch's": attempt(pool.add, "keys", config_of("cyd"), optimizer_of("cyd"), 0),
        "a dtype": attempt(pool.add, "cyd", config_of("cyd"), optimizer_of("cyd"), 0, torch.int8),
        "a path": attempt(pool.add, "c/y", config_of("cyd"), optimizer_of("cyd"), 0),
        "another init": attempt(
            pool.add, "cyd", LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), optimizer_of("cyd"), 0
        ),
        "an optimizer that fails": attempt(pool.add, "cyd", config_of("cyd"), lambda parameters: 1 / 0, 0),
        "an optimizer that fails on one rank": attempt(
            pool.add, "cyd", config_of("cyd"), lambda parameters: 1 / 0 if odd else optimizer_of("cyd")(parameters), 0
        ),
        "no optimizer": attempt(pool.add, "cyd", config_of("cyd"), lambda parameters: parameters, 0),
        "another rate on one rank": attempt(
            pool.add, "cyd", config_of("cyd"), lambda p: torch.optim.SGD(p, lr=0.1 + odd), 0
        ),
        "a seed": attempt(pool.add, "cyd", config_of("cyd"), optimizer_of("cyd"), 1.5),
        "an optimizer of others": attempt(
            pool.add, "cyd", config_of("cyd"), lambda p: optimizer_of("cyd")([p[0].detach().clone()]), 0
        ),
        "a closure": attempt(pool.add, "cyd", config_of("cyd"), torch.optim.LBFGS, 0),
        "alora": attempt(pool.add, "cyd", asked(alora_invocation_tokens=[5]), optimizer_of("cyd"), 0),
        **{
            name: attempt(pool.add, "cyd", asked(kasa_config=peft_config.KasaConfig()), optimizer_of("cyd"), 0)
            for name in KASA
        },
        "not there then": attempt(pool.remove, "cyd"),
        "another pool": attempt(TenantPool, model),
        "on one rank": attempt(lambda: add(pool, "bea") if odd else pool.step("ada") or pool.remove("ada")),
    }
    mesh, model, pool = pool_of("2x2")
    add(pool, "ada")
    ids = batch("ada", 0)
    found["an optimizer by itself"] = attempt(pool.optimizer("ada").step)
    with pool.train("ada"):
        loss = loss_of(model(input_ids=ids).logits, ids)
        found["inside"] = attempt(pool.remove, "ada")
        loss.register_hook(lambda _: found.update({"in a backward": attempt(pool.remove, "ada")}))
        loss.backward()
    found["clipped"] = attempt(clip_grad_norm_, model.parameters(), 1.0)
    found["waiting"] = attempt(pool.save, "ada", folder)
    found["waiting to load"] = attempt(pool.load, "ada", folder)
    pool.step("ada")
    pool.save("ada", folder)
    pool.add("dan", config_of("cyd"), optimizer_of("dan"), 0)
    mesh, config = on_mesh("2x2", require_adapters=False)
    other = TenantPool(parallelize(causal_lm(seed=9), mesh, config))
    add(other, "ada")
    found["another base"] = attempt(other.load, "ada", folder)
    found["too few names"] = attempt(lambda: routed(pool, model, ["ada", "dan"], ids))
    found["too few names on one rank"] = attempt(
        lambda: routed(pool, model, ["ada"] * (2 if dp_rank(mesh) else 4), ids)
    )
    found["lengths on one rank"] = attempt(
        lambda: routed(pool, model, ["ada", "dan"], ids, [24, 24] if odd else [-4, 52])
    )
    found["another adapter inside"] = attempt(lambda: switched_inside(pool, model, ids))
    found["no whole lengths"] = attempt(lambda: routed(pool, model, ["ada", "dan"], ids, [24.0, 24.0]))
    found["merged"] = attempt(export_merged, model, f"{folder}-merged")
    with pool.route(["ada", "dan"]):
        found["merged of two"] = attempt(export_merged, model, f"{folder}-merged")
    found["a text"] = attempt(lambda: routed(pool, model, "ada", ids))  # type: ignore[arg-type]
    found["a norm"] = attempt(pool.step, "ada", float("nan"))
    found["a step inside"] = attempt(lambda: stepped_inside(pool))
    found["a step of another on one rank"] = attempt(lambda: stepped(pool, model, ids, "zoe" if odd else "ada"))
    found["lengths"] = attempt(lambda: routed(pool, model, ["ada", "dan"], ids, [10, 3]))
    found["other peers"] = attempt(lambda: pool.route(["dan" if odd else "ada"] * 4).__enter__())
    found["still"] = values(model, "ada").keys() == alone("ada").keys() and pool.names() == ["ada", "dan"]
    found["still"] &= truthful(pool, model)
    found["zeroed on one rank"] = attempt(lambda: (odd and pool.zero_grad("ada"), pool.remove("zoe")))
    _, _, pool = pool_of("2x2")
    add(pool, "ada")
    found["clipped on one rank"] = attempt(lambda: (pool.step("ada", 1.0 if odd else None), pool.remove("ada")))
    found["not bare"] = attempt(TenantPool, get_peft_model(causal_lm(), config_of("ada")))
    return found


def truthful(pool: TenantPool, model: Any) -> bool:
    """Whether PEFT's own records say which adapters there are, and which are active."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]

    def active() -> set[str]:
        return {name for layer in layers for name in layer.active_adapters}

    with pool.train("dan"):
        inside, said = active(), model.active_adapters()
    if list(model.peft_config) != ["ada", "dan"] or said != ["dan"]:
        return False
    return (inside, active()) == ({"dan"}, set())


def routed(pool: TenantPool, model: nn.Module, names: list[str], ids: Tensor, lengths: Any = None) -> None:
    with pool.route(names, lengths):
        model(input_ids=ids)


def stepped(pool: TenantPool, model: nn.Module, ids: Tensor, name: str, trained: str = "ada") -> None:
    with pool.train(trained):
        model(input_ids=ids).logits.sum().backward()
    try:
        pool.step(name)
    finally:
        pool.zero_grad(trained)


def stepped_inside(pool: TenantPool) -> None:
    with pool.train("ada"):
        pool.step("ada")


def switched_inside(pool: TenantPool, model: Any, ids: Tensor) -> None:
    with pool.train("ada"):
        model.set_adapter("dan")
        model(input_ids=ids)


REFUSED = {
    "unknown": "there is no tenant 'zoe': the pool has 'ada'",
    "unknown to train": "there is no tenant 'zoe'",
    "duplicate": "there is a tenant 'ada' already",
    "no such modules": "qkv",
    "one module too many": "the base lacks ['v_porj'], or the config excludes them: the adapter would be on ['q_proj']",
    "a seed of more than 64 bits": "init_seed=1180591620717411303424: give a whole number of 64 bits",
    "merged": "export_merged: the tenants [] are active, of ['ada', 'dan']: call it inside of pool.train(name)",
    "merged of two": "export_merged: the tenants ['ada', 'dan'] are active, of ['ada', 'dan']",
    "dora": "LoraConfig(use_dora=True)",
    "a head": "LoraConfig(modules_to_save=['lm_head'])",
    "an embedding": "would be on model.embed_tokens, which is a Embedding",
    "a name inside": "a tenant's name is 'mlp', which is a name inside of the model",
    "a name of torch's": "a tenant's name is 'keys'",
    "a dtype": "dtype=torch.int8: give a floating-point",
    "a path": "a tenant's name is 'c/y': give letters",
    "another init": "LoraConfig(init_lora_weights='pissa') is computed from the base weights",
    "an optimizer that fails": "division by zero",
    "an optimizer that fails on one rank": "division by zero",
    "no optimizer": "optimizer(...) gave a list",
    "another rate on one rank": "\"SGD([{'params': 8, 'lr': 0.1, ",
    "a seed": "init_seed=1.5: give a whole number of 64 bits",
    "an optimizer of others": "gave a AdamW of other parameters than it was given",
    "a closure": "gave a LBFGS, whose step computes the loss anew",
    "alora": "LoraConfig(alora_invocation_tokens=[5])",
    **dict.fromkeys(KASA, "LoraConfig(kasa_config="),
    "not there then": "there is no tenant 'cyd': the pool has 'ada'",
    "another pool": "a base has one pool",
    "on one rank": "rank 0 step('ada', max_norm=None) with gradients of [] and then remove('ada'), with",
    "inside": "remove was called inside of train() or route()",
    "in a backward": "remove was called during a backward",
    "an optimizer by itself": "the optimizer of the tenant 'ada' was told to step, but gradients are in the pool",
    "clipped": "gradients of 'ada' wait in the pool: clip with pool.step('ada', max_norm=...)",
    "waiting": "save: gradients of 'ada' wait for a step",
    "waiting to load": "load: gradients of 'ada' wait for a step",
    "another adapter inside": "PEFT's active adapters are ['dan'], and the samples are of ['ada']",
    "another base": "was trained on another base model",
    "too few names": "route names 2 samples, and model.layers.0.self_attn.q_proj is fed 4 rows",
    "too few names on one rank": "route names 2 samples, and model.layers.0.self_attn.q_proj is fed 4 rows",
    "a step inside": "step was called inside of train() or route()",
    "a step of another on one rank": "ranks make different calls of the pool: rank 0 step('ada'",
    "lengths": "add up to 13 tokens, and model.layers.0.self_attn.q_proj is fed 48",
    "zeroed on one rank": "rank 1 zero_grad('ada') and then remove('zoe'), with tenants ['ada', 'dan']",
    "lengths on one rank": "route has the lengths [-4, 52]: give the tokens of each sample",
    "no whole lengths": "route has the lengths [24.0, 24.0]",
    "a text": "route('ada') names no samples",
    "clipped on one rank": "ranks make different calls of the pool: rank 0 step('ada', max_norm=None)",
    "a norm": "max_norm=nan: give a positive number",
    "other peers": "name other samples",
    "not bare": "was not parallelized",
}


def test_what_cannot_be_is_refused_on_every_rank(pool, tmp_path):
    for found in pool.run(4, refused, str(tmp_path / "folder")):
        assert found.pop("still")
        assert found.keys() == REFUSED.keys()
        for name, text in REFUSED.items():
            assert isinstance(found[name], Failure), name
            assert text in found[name].message, (name, found[name].message)


def with_peft_s_switches(mesh_text: str, folder: str) -> dict[str, Any]:
    _, model, pool = pool_of(mesh_text)
    assert isinstance(model, PreTrainedModel)
    ids, found = batch("ada", 0), {}
    with torch.no_grad():
        base = model(input_ids=ids).logits
    add(pool, "ada")
    stepped(pool, model, ids, "ada")
    with pool.train("ada"), torch.no_grad():
        adapted = model(input_ids=ids).logits
        model.disable_adapters()
        found["disabled"] = torch.equal(model(input_ids=ids).logits, base)
        model.enable_adapters()
        found["enabled"] = torch.equal(model(input_ids=ids).logits, adapted) and not torch.equal(adapted, base)
    pool.save("ada", f"{folder}/ada")
    with pool.train("ada"):
        export_merged(model, f"{folder}/merged")
    found["merged"] = attempt(next(layer for layer in model.modules() if isinstance(layer, LoraLayer)).merge).message
    attention = model.get_submodule("model.layers.0.self_attn").eval()
    add(pool, "bea")
    model.delete_adapter("bea")
    found["deleted"] = attempt(pool.step, "ada").message
    found["modes"] = {module.training for module in attention.modules()} == {False} and model.lm_head.training
    return found


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["1x1", "2x2"]))
def test_peft_s_switches_do_what_they_say(pool, tmp_path, mesh):
    for found in pool.run(ranks_of(mesh), with_peft_s_switches, mesh, str(tmp_path)):
        assert "a tenant's adapter cannot be merged into a base that others share" in found.pop("merged")
        assert "the model has the adapters ['ada'], and the tenants are ['ada', 'bea']" in found.pop("deleted")
        assert found == {"disabled": True, "enabled": True, "modes": True}
    want = PeftModel.from_pretrained(causal_lm(), str(tmp_path / "ada")).merge_and_unload().state_dict()
    got = load_file(tmp_path / "merged" / "model.safetensors")
    for name, merged in got.items():
        torch.testing.assert_close(merged, want[name], rtol=1e-12, atol=1e-14)
    assert not torch.equal(
        got["model.layers.0.self_attn.q_proj.weight"], causal_lm().model.layers[0].self_attn.q_proj.weight
    )


def with_a_penalty(mesh_text: str, shard: bool) -> Any:
    mesh, model, pool = pool_of(mesh_text, shard=shard)
    for name in ("ada", "bea"):
        add(pool, name)
    ids = batch("ada", 0)
    mine = ids.chunk(dp_size(mesh))[dp_rank(mesh)]
    for _ in range(2):
        with pool.train("ada"):
            penalty = sum(half_sum_of_squares(parameter) for parameter in pool.parameters("ada"))
            (loss_of(model(input_ids=mine).logits, mine) + penalty).backward()
        pool.step("ada")
    return values(model, "ada")


@pytest.mark.parametrize(
    ("mesh", "shard"), cases(("2x1", True), matrix=[("1x1", False), ("2x2", False), ("2x2", True)])
)
def test_a_penalty_on_a_tenant_s_parameters_counts_once(pool, mesh, shard):
    base = causal_lm()
    torch.manual_seed(SEEDS["ada"])
    model = get_peft_model(base, config_of("ada")).train()
    optimizer, ids = optimizer_of("ada")(list(trained(model).values())), batch("ada", 0)
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model(input_ids=ids).logits, ids)
        (loss + sum(half_sum_of_squares(parameter) for parameter in trained(model).values())).backward()
        optimizer.step()
    for got in pool.run(ranks_of(mesh), with_a_penalty, mesh, shard):
        assert relative_error(got, plain(trained(model))) <= 1e-10


def with_a_loss_of_a_norm(mesh_text: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of a layer inside of a checkpointed block, and of another tenant's forward, in one backward."""
    found = []
    for late in (True, False):
        mesh, model, pool = pool_of(mesh_text, {"activation_checkpointing": True})
        for name in ("ada", "bea"):
            add(pool, name)
        kept: list[Tensor] = []
        norm = model.get_submodule("model.layers.1.post_attention_layernorm")
        norm.register_forward_hook(lambda module, args, output, kept=kept: kept.append(output))
        losses = []
        for name in ("ada", "bea"):
            ids = batch(name, 0).chunk(dp_size(mesh))[dp_rank(mesh)]
            with pool.train(name):
                logits = model(input_ids=ids).logits
                losses.append(kept[-1].square().mean() if name == "ada" else loss_of(logits, ids))
                if not late:
                    losses.pop().backward()
        if late:
            torch.stack(losses).sum().backward()
        for name in ("ada", "bea"):
            pool.step(name)
        found.append({f"{name} {key}": value for name in ("ada", "bea") for key, value in values(model, name).items()})
    return found[0], found[1]


@pytest.mark.parametrize("mesh", ["1x1", "1x2"])
def test_a_loss_of_a_layer_in_a_checkpointed_block(pool, mesh):
    for late, at_once in pool.run(ranks_of(mesh), with_a_loss_of_a_norm, mesh):
        assert relative_error(late, at_once) <= 1e-10


def after_a_forward() -> list[str]:
    mesh, config = on_mesh("2x1", require_adapters=False)
    model = parallelize(causal_lm(), mesh, config).train()
    model(input_ids=batch("ada", 0))  # without a backward: FSDP2 keeps what is gathered of the root
    TenantPool(model)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_a_base_is_frozen_after_a_forward_too(pool):
    assert pool.run(2, after_a_forward) == [[], []]


def in_inference_mode(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    _, model, pool = pool_of("1x2")
    add(pool, "ada")
    ids = batch("ada", 0)
    with pool.train("ada"):
        loss_of(model(input_ids=ids).logits, ids).backward()
    pool.step("ada")
    with torch.inference_mode():
        pool.save("ada", folder)
        pool.remove("ada")
        add(pool, "ada")
        pool.load("ada", folder)
    ids = batch("ada", 1)
    with pool.route(["ada"] * ROWS):
        with torch.inference_mode():
            model(input_ids=ids)
        loss_of(model(input_ids=ids).logits, ids).backward()
    pool.step("ada")
    return values(model, "ada"), alone("ada", steps=2)


def test_inference_mode_leaves_tenants_trainable(pool, tmp_path):
    for got, want in pool.run(2, in_inference_mode, str(tmp_path / "ada")):
        assert relative_error(got, want) <= 1e-10


def on_disks_of_their_own(root: str) -> Any:
    _, model, pool = pool_of("2x1")
    add(pool, "ada")
    stepped(pool, model, batch("ada", 0), "ada")
    pool.save("ada", Path(root) / "0" / "ada")
    rank, before = dist.get_rank(), os.getcwd()
    if rank == 1:
        shutil.copytree(Path(root) / "0", Path(root) / "1")
        for state in (Path(root) / "1" / "ada").glob("tenant_state-*"):
            state.unlink()
    dist.barrier()
    os.chdir(Path(root) / str(rank))
    try:
        return [attempt(pool.load, "ada", "ada")], pool.steps("ada")
    finally:
        os.chdir(before)


def test_a_state_that_some_ranks_lack_is_refused(pool, tmp_path):
    for (failure,), steps in pool.run(2, on_disks_of_their_own, str(tmp_path)):
        assert "the training state in the folder is" in failure.message
        assert steps == 1


def test_a_config_is_described_alike_in_every_process():
    """Sets are in another order where PYTHONHASHSEED is another."""
    names = [f"layer{number}" for number in range(40)]
    one, other = (LoraConfig(r=3, target_modules=order) for order in (names, names[::-1]))
    assert describe_config(one) == describe_config(other)
    assert describe_config(one).startswith("LoraConfig(r=3, target_modules=['layer0', 'layer1', 'layer10', ")
    assert describe_config(LoraConfig(r=4, target_modules=names)) != describe_config(one)


# ---------------------------------------------------------------------- memory


def sharded_batches(mesh_text: str, folder: str) -> dict[str, Any]:
    """As `train_batched`, adapters shared out over dp; then one goes to disk and comes back."""
    mesh, model, pool = pool_of(mesh_text, shard=True)
    _, _, whole = pool_of(mesh_text)
    for name in CONFIGS:
        add(pool, name)
        add(whole, name)
    batched(mesh, model, pool)
    found: dict[str, Any] = {name: values(model, name) for name in CONFIGS}
    pool.save("bea", folder)
    pool.load("bea", folder)
    found["changed"] = differing(values(model, "bea"), found["bea"])
    taken = [sum(part["adapter"] for name, part in each.memory().items() if name) for each in (pool, whole)]
    return {**found, "share": taken[0] / taken[1], "memory": pool.memory()}


@pytest.mark.parametrize("mesh", cases("2x2", matrix=["2x1", "4x1", "2x2x1"]))
def test_adapters_that_are_shared_out_train_alike(pool, tmp_path, mesh):
    for found in pool.run(ranks_of(mesh), sharded_batches, mesh, str(tmp_path / "bea")):
        assert not found.pop("changed")
        ranks = int(mesh.split("x")[-2])
        assert found.pop("share") == pytest.approx(1 / ranks, rel=0.1)
        memory = found.pop("memory")
        assert memory.keys() == {"", *CONFIGS}
        assert all(memory[name]["optimizer"] >= 2 * memory[name]["adapter"] for name in CONFIGS)
        for name, got in found.items():
            assert relative_error(got, alone(name)) <= 1e-10, name


def gathered() -> list[int]:
    """What is gathered of a tenant that is shared out: in its context, with a loss that is kept after it, without."""
    mesh, model, pool = pool_of("2x1", shard=True)
    add(pool, "ada")
    ids, sizes = batch("ada", 0).chunk(2)[dp_rank(mesh)], []
    with pool.train("ada"):
        loss = loss_of(model(input_ids=ids).logits, ids)
        sizes.append(pool.memory()["ada"]["gathered"])
    sizes.append(pool.memory()["ada"]["gathered"])
    with pool.train("ada"):
        other = loss_of(model(input_ids=ids).logits, ids)
    sizes.append(pool.memory()["ada"]["gathered"])
    (loss + other).backward()
    del loss, other
    sizes.append(pool.memory()["ada"]["gathered"])
    return [*sizes, sum(whole.nbytes for whole in values(model, "ada").values())]


def test_what_is_gathered_is_told_as_long_as_it_is_there(pool):
    for inside, kept, two, gone, whole in pool.run(2, gathered):
        assert (inside, kept, two, gone) == (whole, whole, 2 * whole, 0)


def let_go() -> int:
    """How much of a tenant is there when it has been removed, before Python looks for cycles."""
    _, model, pool = pool_of("1x1")
    add(pool, "ada")
    stepped(pool, model, batch("ada", 0), "ada")
    held = [weakref.ref(each) for each in (pool.optimizer("ada"), *pool.parameters("ada"))]
    gc.collect()
    gc.disable()
    try:
        pool.remove("ada")
        return sum(each() is not None for each in held)
    finally:
        gc.enable()


def test_what_is_removed_is_gone_at_once(pool):
    assert pool.run(1, let_go) == [0]


def most_held(mesh_text: str, shard: bool) -> int:
    """The most that a tenant holds while it adds to gradients that another's step has had summed."""
    _, model, pool = pool_of(mesh_text, shard=shard)
    add(pool, "cyd")
    add(pool, "dan")
    held = []
    for name, steps in (("cyd", "cyd"), ("cyd", None), ("dan", "dan"), ("cyd", None)):
        with pool.train(name):
            model(input_ids=batch(name, 0)).logits.sum().backward()
            held.append(sum(pool.memory()["cyd"].values()))
        if steps is not None:
            pool.step(steps)
    return max(held)


def died(mesh_text: str) -> tuple[int, Any]:
    """What a tenant leaves whose backward died."""
    _, model, pool = pool_of(mesh_text, shard=True)
    add(pool, "ada")
    for name in ("bea", "bea"):  # what is remembered of the last step is of this one
        tensors = NewTensors()
        add(pool, name)
        handle = pool.parameters(name)
        layer = next(module for module in model.modules() if isinstance(module, LoraLayer))
        hook = layer.register_full_backward_hook(lambda *_: 1 / 0)
        with pool.train(name):
            attempt(lambda name=name: model(input_ids=batch(name, 0)).logits.sum().backward())
        hook.remove()
        del handle, layer
        pool.remove(name)
    return len(tensors), attempt(TenantPool, model)


def test_a_tenant_that_died_leaves_nothing(pool):
    for left, another in pool.run(2, died, "2x1"):
        assert left == 0
        assert "a base has one pool" in another.message


def budgeted(mesh_text: str, shard: bool, folder: str) -> dict[str, Any]:
    most = most_held(mesh_text, shard)
    _, model, pool = pool_of(mesh_text, shard=shard, budget=most)
    found = {"fits": attempt(add, pool, "cyd"), "names": pool.names()}
    tensors = NewTensors()
    big = LoraConfig(r=500, target_modules="all-linear")
    found["made"] = []
    found["too big"] = attempt(pool.add, "dan", big, lambda p: found["made"].extend(p) or optimizer_of("dan")(p), 0)
    found["made"] = {parameter.is_meta for parameter in found["made"]}
    found["one more"] = attempt(add, pool, "ada")
    found["left"] = len(tensors)
    pool.remove("cyd")
    found["then"] = attempt(add, pool, "cyd")
    _, _, tight = pool_of(mesh_text, shard=shard, budget=most - 1)
    found["one byte less"] = attempt(add, tight, "cyd")
    pool.remove("cyd")
    for name, amsgrad in (("ams", True), ("eva", False)):
        pool.add(name, LoraConfig(r=1, target_modules=["q_proj"]), partial(torch.optim.AdamW, amsgrad=amsgrad), 0)
    stepped(pool, model, batch("ada", 0), "ams", "ams")
    pool.save("ams", folder)
    pool.load("ams", folder)
    found["more state"] = attempt(pool.load, "eva", folder)
    found["nothing"] = attempt(pool_of, mesh_text, budget=0)
    found["a text"] = attempt(pool_of, mesh_text, budget="1GB")
    return found


@pytest.mark.parametrize(("mesh", "shard"), cases(("2x1", True), matrix=[("2x1", False), ("1x2", False)]))
def test_a_budget_is_what_a_tenant_may_hold_at_most(pool, tmp_path, mesh, shard):
    """On 1x2 the ranks' shares of "dan" differ in size: whoever refuses, all do."""
    for found in pool.run(2, budgeted, mesh, shard, str(tmp_path / "ams")):
        assert (found["fits"], found["then"], found["names"]) == (None, None, ["cyd"])
        assert "the tenant 'dan' takes up to" in found["too big"].message
        assert "the tenant 'ada' takes up to" in found["one more"].message
        assert found["made"] == {True}
        assert found["left"] == 0
        assert "of the budget of" in found["one byte less"].message
        assert "bytes on a rank, and 'eva' was counted for" in found["more state"].message
        assert "budget=0: give a positive number" in found["nothing"].message
        assert "budget='1GB': give a positive number" in found["a text"].message


# ---------------------------------------------------------------------- other bases


def stochastic(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def one_step(mesh_text: str, kind: str, late: bool) -> dict[str, dict[str, Tensor]]:
    mesh, config = on_mesh(mesh_text, require_adapters=False)
    quantised(kind)  # makes its file
    with meta_init() if late else nullcontext():
        base = quantised(kind)
    model = parallelize(base, mesh, config).train()
    pool = TenantPool(model)
    for name in ("ada", "bea"):
        pool.add(name, LoraConfig(r=3, target_modules="all-linear"), stochastic, SEEDS[name])
    ids = torch.cat([batch(name, 0).chunk(dp_size(mesh))[dp_rank(mesh)] for name in ("ada", "bea")])
    names = [name for name in ("ada", "bea") for _ in range(len(ids) // 2)]
    with pool.route(names):
        logits = model(input_ids=ids).logits
        sum(loss_of(*each) for each in zip(logits.chunk(2), ids.chunk(2), strict=True)).backward()
    for name in pool.names():
        pool.step(name)
    return {name: values(model, name) for name in pool.names()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mesh", "kind", "late"),
    cases(
        *(("2x2", "nf4, double", True), ("1x2", "int8", False), ("1x2", "torchao int8", True)),
        matrix=[("2x2", "int8", False), ("2x2", "torchao int8", True)],
    ),
)
def test_tenants_on_a_quantised_base(pool, mesh, kind, late):
    want = {}
    for name in ("ada", "bea"):
        base = quantised(kind)
        torch.manual_seed(SEEDS[name])
        model = get_peft_model(base, LoraConfig(r=3, target_modules="all-linear")).train()
        optimizer = stochastic(trained(model).values())
        ids = batch(name, 0)
        loss_of(model(input_ids=ids).logits, ids).backward()
        optimizer.step()
        want[name] = plain(trained(model))
    for found in pool.run(ranks_of(mesh), one_step, mesh, kind, late):
        for name, got in found.items():
            assert relative_error(got, want[name]) <= 1e-4, name


class Steps(nn.Module):
    """Token by token, so that a segment of a packed row is computed as by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 16).double(), nn.Linear(16, 12).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


LENGTHS = [5, 7, 5]


def packed(together: bool) -> dict[str, dict[str, Tensor]]:
    """Three segments of two tenants in one row, or each tenant's as rows of its own."""
    mesh, config = on_mesh("1x2", require_adapters=False, tp_plan={"first": "colwise", "second": "rowwise"})
    model = parallelize(Steps(), mesh, config).train()
    pool = TenantPool(model)
    lora = {"r": 3, "target_modules": ["first", "second"], "init_lora_weights": False, "lora_dropout": 0.3}
    for name in ("ada", "bea"):
        pool.add(name, LoraConfig(**lora), stochastic, SEEDS[name])
    x = torch.randn(sum(LENGTHS), 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    first, second, third = x.split(LENGTHS)
    if together:
        with pool.route(["ada", "bea", "ada"], LENGTHS):
            y = model(x[None])[0].square().mean(-1).split(LENGTHS)
            (torch.cat([y[0], y[2]]).mean() + y[1].mean()).backward()
    else:
        for name, rows in (("ada", torch.stack([first, third])), ("bea", second[None])):
            with pool.route([name] * len(rows)):
                model(rows).square().mean().backward()
    for name in pool.names():
        pool.step(name)
    return {name: values(model, name) for name in pool.names()}


def test_segments_of_a_packed_row_are_samples(pool):
    """Also to their dropout."""
    for got, want in zip(pool.run(2, packed, True), pool.run(2, packed, False), strict=True):
        for name in ("ada", "bea"):
            assert relative_error(got[name], want[name]) <= 1e-12


class Sometimes(Steps):
    """Goes through its second layer only for inputs that say so."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        return self.second(y) if x.sum() > 0 else y


def reached_on_one_rank() -> tuple[int, dict[str, Tensor]]:
    mesh, config = on_mesh("2x1", require_adapters=False)
    model = parallelize(Sometimes(), mesh, config).train()
    pool = TenantPool(model)
    for name, target in (("ada", "first"), ("bea", "second")):
        pool.add(name, LoraConfig(r=3, target_modules=[target], init_lora_weights=False), stochastic, SEEDS[name])
    with pool.route(["ada", "bea"]):
        model(torch.full((2, 4, 12), -1.0 if dist.get_rank() else 1.0, dtype=torch.float64)).square().mean().backward()
    before = values(model, "bea")
    pool.step("bea")
    after = values(model, "bea")
    assert all(not torch.equal(after[key], before[key]) for key in before)
    return pool.steps("bea"), after


class Before(Steps):
    """Goes through another layer first for inputs that say so."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(12, 12).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.before(x) if x.sum() > 0 else x)


class Turned(Steps):
    """Feeds its second layer the columns for inputs that say so."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        return self.second(y.transpose(0, 1)).transpose(0, 1) if x.sum() > 0 else self.second(y)


def unlike() -> dict[str, Any]:
    """Ranks go different ways through the adapted layers of a model."""
    mesh, config = on_mesh("2x1", require_adapters=False)
    rank = dist.get_rank()
    x = torch.full((2, 4, 12), -1.0 if rank else 1.0, dtype=torch.float64)
    found: dict[str, Any] = {}
    for kind, targets in ((Before, ["before", "second"]), (Turned, ["first", "second"])):
        model = parallelize(kind(), mesh, config).train()
        pool = TenantPool(model)
        pool.add("ada", LoraConfig(r=3, target_modules=targets, init_lora_weights=False), stochastic, SEEDS["ada"])

        def through(pool: TenantPool = pool, model: nn.Module = model) -> None:
            with pool.route(["ada"] * 2):
                model(x).square().mean().backward()

        found[kind.__name__] = [attempt(through)]
        pool.step("ada")
        found[f"{kind.__name__} steps"] = pool.steps("ada")
    pool.add("bea", LoraConfig(target_modules=["first"]), stochastic, 0)

    def switched() -> None:
        with pool.route(["ada", "ada"]):
            if rank:
                next(layer for layer in model.modules() if isinstance(layer, LoraLayer)).set_adapter("bea")
            model(-x.abs())

    found["switched"] = [attempt(switched)]
    with pool.route(["ada", "ada"]):  # what is called when the model's forward is over has no end to wait for
        model(-x.abs())
        found["after the forward"] = [attempt(model.first, x[:1])]
    with pool.route(["ada"] * 2, torch.tensor([4, 4])):
        found["lengths"] = model(-x.abs()).shape
    return found


def test_ranks_go_their_ways_through_adapted_layers(pool):
    """None of them waits for another, and what goes wrong on one is raised on all."""
    for rank, found in enumerate(pool.run(2, unlike)):
        assert found["Before"] == [None]
        assert found["Before steps"] == 1
        assert "route names 2 samples, and second is fed 4 rows" in found["Turned"][0].message
        assert found["Turned"][0].message.startswith("on rank 0: ") == bool(rank)
        assert found["Turned steps"] == 0
        assert (
            "first: PEFT's active adapters are ['bea'], and the samples are of ['ada']" in found["switched"][0].message
        )
        assert "route names 2 samples, and first is fed 1 rows" in found["after the forward"][0].message
        assert found["lengths"] == (2, 4, 12)


def test_a_tenant_that_one_rank_alone_reaches_steps_on_all(pool):
    (steps, first), (others, second) = pool.run(2, reached_on_one_rank)
    assert steps == others == 1
    assert not differing(first, second)
