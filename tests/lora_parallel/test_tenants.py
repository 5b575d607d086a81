"""Tenants of one sharded base, each against plain PEFT on its own samples in one process."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from lora_parallel import meta_init, parallelize
from lora_parallel.dropout import ForwardCount
from lora_parallel.gather import local
from lora_parallel.inject import adapt_dropout
from lora_parallel.mesh import dp_rank, dp_size
from lora_parallel.tenants import TenantPool
from lora_parallel.tenants.pool import described
from tests.lora_parallel.traffic import Traffic
from tests.oracle import causal_lm, full, on_mesh, ranks_of, relative_error, trained
from tests.quantised_rows import quantised
from tests.workers import Failure, attempt

ROWS, STEPS = 4, 3
CONFIGS: dict[str, dict[str, Any]] = {
    "ada": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "bea": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear", "lora_dropout": 0.3},
    "cyd": {"r": 2, "lora_alpha": 9, "target_modules": ["down_proj", "o_proj"], "use_rslora": True},
    "dan": {"r": 5, "lora_alpha": 5, "target_modules": ["gate_up_proj", "up_proj", "lm_head"], "lora_dropout": 0.1},
}
RATES = {"ada": 1e-2, "bea": 3e-3, "cyd": 2e-2, "dan": 5e-3}
SEEDS = {name: 10 + number for number, name in enumerate(CONFIGS)}


def config_of(name: str) -> LoraConfig:
    return LoraConfig(**CONFIGS[name], init_lora_weights=False, task_type="CAUSAL_LM")


def optimizer_of(name: str) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=RATES[name])


def batch(name: str, step: int) -> Tensor:
    """The rows of a tenant's step."""
    generator = torch.Generator().manual_seed(100 * SEEDS[name] + step)
    return torch.randint(0, 131, (ROWS, 12), generator=generator)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@cache
def alone(name: str, steps: int = STEPS) -> dict[str, Tensor]:
    """Plain PEFT on this tenant's samples, with the project's dropout."""
    base = causal_lm()
    torch.manual_seed(SEEDS[name])
    model = get_peft_model(base, config_of(name)).train()
    count = ForwardCount(running=True)
    adapt_dropout(model, SEEDS[name], count, 0)
    optimizer = optimizer_of(name)(trained(model).values())
    for step in range(steps):
        count.advance(True)
        ids = batch(name, step)
        loss_of(model(input_ids=ids).logits, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return plain(trained(model))


def plain(named: dict[str, Any]) -> dict[str, Tensor]:
    return {name.replace("base_model.model.", ""): full(p).clone() for name, p in named.items()}


def pool_of(mesh_text: str, **options: Any) -> tuple[Any, nn.Module, TenantPool]:
    mesh, config = on_mesh(mesh_text, require_adapters=False)
    model = parallelize(causal_lm(), mesh, config).train()
    return mesh, model, TenantPool(model, **options)


def values(model: nn.Module, name: str) -> dict[str, Tensor]:
    found = {n: p for n, p in model.named_parameters() if f".{name}." in n}
    return {n.replace(f".{name}.", ".default."): full(p).clone() for n, p in found.items()}


def add(pool: TenantPool, name: str) -> None:
    pool.add(name, config_of(name), optimizer_of(name), SEEDS[name])


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


@pytest.mark.parametrize("mesh", ["1x1", "2x1", "1x2", "2x2"])
@pytest.mark.parametrize("way", [train_in_turn, train_batched])
def test_each_tenant_trains_as_alone(pool, mesh, way):
    for found in pool.run(ranks_of(mesh), way, mesh):
        for name, got in found.items():
            assert relative_error(got, alone(name)) <= 1e-10, name


# ---------------------------------------------------------------------- coming and going


def tensors_alive() -> int:
    time.sleep(0.02)
    gc.collect()
    return sum(isinstance(each, Tensor) for each in gc.get_objects())


def random_operations(mesh_text: str) -> dict[str, Any]:
    """Tenants come, train and go at random; two stay, one of which trains; what each was is compared bit for bit."""
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
    for number in range(100):
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
            held = tensors_alive()
            for _ in range(5):
                if sizes and held > sizes[-1][0]:  # threads of gloo let go of theirs a little later
                    held = tensors_alive()
            hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
            sizes.append((held, len(list(model.parameters())), hooks))
    while steps < STEPS:
        train("bea", steps)
        steps += 1
    found = {"bea": values(model, "bea"), "ada": relative_error(values(model, "ada"), still), "changed": changed}
    for name in pool.names():
        pool.remove(name)
    after = {name: full(p) for name, p in model.named_parameters()}
    found["base"] = [name for name in before if not torch.equal(before[name], after.get(name, torch.zeros(0)))]
    return {**found, "sizes": sizes, "alive": alive, "more": sorted(after.keys() - before.keys())}


@pytest.mark.parametrize("mesh", ["2x2"])
def test_tenants_come_and_go_without_a_trace(pool, mesh):
    for found in pool.run(ranks_of(mesh), random_operations, mesh):
        assert relative_error(found["bea"], alone("bea")) <= 1e-10
        assert found["ada"] == 0.0
        assert (found["changed"], found["base"], found["more"]) == ([], [], [])
        assert len(found["sizes"]) > 3
        assert {parameters for _, parameters, _ in found["sizes"]} == {found["alive"]}  # nothing of any guest
        assert len(set(found["sizes"][1:])) == 1, found["sizes"]  # not of the first, before all is set up


# ---------------------------------------------------------------------- on disk


def part(mesh_text: str, folder: str, start: bool) -> dict[str, Tensor]:
    mesh, model, pool = pool_of(mesh_text)
    add(pool, "cyd")
    pool.add("bea", config_of("bea"), optimizer_of("bea"), SEEDS["bea"] if start else 0)
    if not start:
        pool.load("bea", folder)
    for step in range(2) if start else range(2, STEPS):
        ids = batch("bea", step).chunk(dp_size(mesh))[dp_rank(mesh)]
        with pool.train("bea"):
            loss_of(model(input_ids=ids).logits, ids).backward()
        pool.step("bea")
    pool.save("bea", folder)
    return values(model, "bea")


def test_a_tenant_goes_on_in_another_job_on_another_mesh(pool, tmp_path):
    for first, second in (("2x2", "1x2"), ("1x1", "2x2")):
        folder = str(tmp_path / f"{first} {second}")
        pool.run(ranks_of(first), part, first, folder, True)
        for got in pool.run(ranks_of(second), part, second, folder, False):
            assert relative_error(got, alone("bea")) <= 1e-10
        plainly = PeftModel.from_pretrained(causal_lm(), folder)
        read = {name: p for name, p in plainly.named_parameters() if "lora_" in name}
        assert relative_error(plain(read), alone("bea")) <= 1e-6  # PEFT loads in float32


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


@pytest.mark.parametrize("mesh", ["2x1", "1x2", "2x2"])
def test_a_step_of_more_tenants_communicates_no_more(pool, mesh):
    for one, two, four in pool.run(ranks_of(mesh), traffic, mesh):
        assert one == two == four
        assert one


# ---------------------------------------------------------------------- refusals


def refused(folder: str) -> dict[str, Any]:
    mesh, model, pool = pool_of("2x2")
    odd = dist.get_rank() == 1
    add(pool, "ada")
    found = {
        "unknown": attempt(lambda: pool.remove("zoe")),
        "unknown to train": attempt(lambda: pool.train("zoe").__enter__()),
        "duplicate": attempt(add, pool, "ada"),
        "no such modules": attempt(pool.add, "cyd", LoraConfig(target_modules=["qkv"]), optimizer_of("cyd"), 0),
        "dora": attempt(pool.add, "cyd", LoraConfig(target_modules=["q_proj"], use_dora=True), optimizer_of("cyd"), 0),
        "a head": attempt(pool.add, "cyd", LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), None, 0),
        "an optimizer that fails": attempt(pool.add, "cyd", config_of("cyd"), lambda parameters: 1 / 0, 0),
        "on one rank": attempt(lambda: add(pool, "bea") if odd else pool.step("ada") or pool.remove("ada")),
    }
    mesh, model, pool = pool_of("2x2")
    add(pool, "ada")
    ids = batch("ada", 0)
    with pool.train("ada"):
        loss = loss_of(model(input_ids=ids).logits, ids)
        found["inside"] = attempt(pool.remove, "ada")
        loss.register_hook(lambda _: found.update({"in a backward": attempt(pool.remove, "ada")}))
        loss.backward()
    found["waiting"] = attempt(pool.save, "ada", folder)
    pool.step("ada")
    pool.save("ada", folder)
    pool.add("dan", config_of("ada"), optimizer_of("dan"), 0)
    mesh, config = on_mesh("2x2", require_adapters=False)
    other = TenantPool(parallelize(causal_lm(seed=9), mesh, config))
    add(other, "ada")
    found["another base"] = attempt(other.load, "ada", folder)
    found["too few names"] = attempt(lambda: routed(pool, model, ["ada", "dan"], ids))
    found["lengths"] = attempt(lambda: routed(pool, model, ["ada", "dan"], ids, [10, 3]))
    found["other peers"] = attempt(lambda: pool.route(["dan" if odd else "ada"] * 4).__enter__())
    found["still"] = values(model, "ada").keys() == alone("ada").keys() and pool.names() == ["ada", "dan"]
    found["not bare"] = attempt(TenantPool, get_peft_model(causal_lm(), config_of("ada")))
    return found


def routed(pool: TenantPool, model: nn.Module, names: list[str], ids: Tensor, lengths: Any = None) -> None:
    with pool.route(names, lengths):
        model(input_ids=ids)


REFUSED = {
    "unknown": "there is no tenant 'zoe': the pool has 'ada'",
    "unknown to train": "there is no tenant 'zoe'",
    "duplicate": "there is a tenant 'ada' already",
    "no such modules": "qkv",
    "dora": "LoraConfig(use_dora=True)",
    "a head": "LoraConfig(modules_to_save=['lm_head'])",
    "an optimizer that fails": "division by zero",
    "on one rank": "ranks make different calls of the pool: rank 0 remove('ada')",
    "inside": "remove was called inside of train() or route()",
    "in a backward": "remove was called during a backward",
    "waiting": "gradients of 'ada' wait for a step",
    "another base": "was trained on another base model",
    "too few names": "route names 2 samples, and a layer is fed 4 rows",
    "lengths": "add up to 13 tokens, and a layer is fed 48",
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


def test_a_config_is_described_alike_in_every_process():
    """Sets are in another order where PYTHONHASHSEED is another."""
    names = [f"layer{number}" for number in range(40)]
    one, other = (LoraConfig(r=3, target_modules=order) for order in (names, names[::-1]))
    assert described(one) == described(other)
    assert described(one).startswith("LoraConfig(r=3, target_modules=['layer0', 'layer1', 'layer10', ")
    assert described(LoraConfig(r=4, target_modules=names)) != described(one)


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
    found["again"] = relative_error(values(model, "bea"), found["bea"])
    taken = [sum(part["adapter"] for name, part in each.memory().items() if name) for each in (pool, whole)]
    return {**found, "share": taken[0] / taken[1], "memory": pool.memory()}


@pytest.mark.parametrize("mesh", ["2x1", "2x2", "4x1", "2x2x1"])
def test_adapters_that_are_shared_out_train_alike(pool, tmp_path, mesh):
    for found in pool.run(ranks_of(mesh), sharded_batches, mesh, str(tmp_path / "bea")):
        assert found.pop("again") == 0.0
        ranks = int(mesh.split("x")[-2])
        assert found.pop("share") == pytest.approx(1 / ranks, rel=0.1)
        memory = found.pop("memory")
        assert memory.keys() == {"", *CONFIGS}
        assert all(memory[name]["optimizer"] >= 2 * memory[name]["adapter"] for name in CONFIGS)
        for name, got in found.items():
            assert relative_error(got, alone(name)) <= 1e-10, name


def budgeted() -> list[Any]:
    _, model, pool = pool_of("2x1")
    add(pool, "ada")
    with pool.train("ada"):
        model(input_ids=batch("ada", 0)).logits.sum().backward()
    pool._reduce("")
    used = pool.memory()["ada"]
    pool.step("ada")
    used["optimizer"] = pool.memory()["ada"]["optimizer"]
    _, _, tight = pool_of("2x1", budget=sum(used.values()))
    add(tight, "ada")
    refused = attempt(add, tight, "cyd")
    tight.remove("ada")
    return [refused, attempt(add, tight, "cyd"), tight.names(), attempt(pool_of, "2x1", budget=0)]


def test_a_tenant_that_does_not_fit_is_refused_and_a_removed_one_gives_back(pool):
    for refused, then, names, nothing in pool.run(2, budgeted):
        assert "of the budget of" in refused.message
        assert "the tenant 'cyd' takes" in refused.message
        assert then is None
        assert names == ["cyd"]
        assert "budget=0: give a positive number" in nothing.message


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
@pytest.mark.parametrize(("kind", "late"), [("nf4, double", True), ("int8", False), ("torchao int8", True)])
def test_tenants_on_a_quantised_base(pool, kind, late):
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
    for found in pool.run(4, one_step, "2x2", kind, late):
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
