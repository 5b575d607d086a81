"""What may lie between a tenant's forward and its step, and on which models, against plain PEFT in one process."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_parallel import TenantPool, parallelize
from lora_parallel.adapters.injection import adapt_dropout
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.state import ForwardCount
from lora_parallel.tenants.layer import _grouped
from tests.cases import cases
from tests.oracle import causal_lm, differing, on_mesh, ranks_of, relative_error, trained
from tests.oracle.families import FAMILIES
from tests.oracle.tenant_rows import (
    MIXED,
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
)
from tests.oracle.workers import attempt

CLIP = 0.05
"""Far below the norms here."""


def apart(mesh_text: str, shard: bool, checkpointing: bool, late: bool) -> dict[str, dict[str, Tensor]]:
    """Tenant "ada" steps after each backward, "bea" after two, with clipping; "dan" trains by itself in between.

    `late`: backward is called when the context has ended and the next one's forward has been computed.
    """
    mesh, model, pool = pool_of(mesh_text, {"activation_checkpointing": checkpointing}, shard=shard)
    add(pool, "ada")
    add(pool, "bea")
    add(pool, "dan")
    norms = []
    for number in range(2 * STEPS):
        own = number < STEPS  # "ada" and "dan" are done after that
        names = ["ada", "bea"] if own else ["bea"]
        ids = torch.cat([batch(name, number).chunk(dp_size(mesh))[dp_rank(mesh)] for name in names])
        with pool.route([name for name in names for _ in range(len(ids) // len(names))]):
            logits = model(input_ids=ids).logits
            parts = zip(logits.chunk(len(names)), ids.chunk(len(names)), (0.5,) if not own else (1, 0.5), strict=True)
            loss = sum(loss_of(*each) * share for *each, share in parts)
            if not late:
                loss.backward()
        if own:
            others = batch("dan", number).chunk(dp_size(mesh))[dp_rank(mesh)]
            with pool.train("dan"):
                other = loss_of(model(input_ids=others).logits, others)
                if late:
                    loss.backward()
                else:
                    other.backward()
            if late:
                model.eval()  # what is recomputed was in training
                other.backward()
                model.train()
            pool.step("ada")
            pool.step("dan")
        elif late:
            loss.backward()
        if number % 2:
            norms.append(pool.step("bea", max_norm=CLIP).item())
    assert min(norms) > 2 * CLIP
    return {name: values(model, name) for name in pool.names()}


MESHES = [("1x2", False), ("2x1", True), ("2x2", False), ("2x2", True), ("2x1x2", False)]


@pytest.mark.parametrize(
    ("mesh", "shard", "checkpointing", "late"),
    cases(
        *(("1x2", False, True, False), ("2x1", True, True, True)),
        matrix=[(*each, *more) for each in MESHES for more in product((True, False), repeat=2)],
    ),
)
def test_tenants_step_when_they_like(pool, mesh, shard, checkpointing, late):
    for found in pool.run(ranks_of(mesh), apart, mesh, shard, checkpointing, late):
        for name, got in found.items():
            want = alone("bea", STEPS, 2, CLIP) if name == "bea" else alone(name)
            assert relative_error(got, want) <= 1e-10, name


def failing(mesh_text: str, shard: bool) -> dict[str, dict[str, Tensor]]:
    """Steps of "ada" fail in all ways, on every rank; "bea", whose gradients wait meanwhile, is not touched."""
    mesh, model, pool = pool_of(mesh_text, shard=shard)
    for name in ("ada", "bea"):
        add(pool, name)

    def rows(name: str, number: int) -> Tensor:
        return batch(name, number).chunk(dp_size(mesh))[dp_rank(mesh)]

    def backward(name: str, number: int, share: float = 1) -> None:
        ids = rows(name, number)
        with pool.train(name):
            (loss_of(model(input_ids=ids).logits, ids) * share).backward()

    backward("bea", 0, 0.5)
    backward("ada", 0)
    pool.step("ada", max_norm=CLIP)
    backward("bea", 1, 0.5)
    with pytest.raises(ValueError, match="route names 1 samples"), pool.route(["ada"]):
        model(input_ids=torch.cat([rows("ada", 1)] * 2))
    base = next(layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer.out_features == 44)
    handle = base.register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward("ada", 1)
    handle.remove()
    if shard:
        handle = base.register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # another that dies
            backward("ada", 1)
        handle.remove()
        pool.step("ada", max_norm=CLIP)  # at once: nothing is there to step with
        assert pool.steps("ada") == 1
    with pool.train("ada"):
        loss_of(model(input_ids=rows("ada", 2)).logits, rows("ada", 2)).backward()
        pool.zero_grad("ada")
        loss_of(model(input_ids=rows("ada", 1)).logits, rows("ada", 1)).backward()
    handle = pool.optimizer("ada").register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pool.step("ada", max_norm=CLIP)
    handle.remove()
    pool.step("ada", max_norm=CLIP)
    assert pool.steps("ada") == 2
    pool.step("bea")
    return {name: values(model, name) for name in pool.names()}


@pytest.mark.parametrize(
    ("mesh", "shard"), cases(("2x1", True), ("1x2", False), matrix=[("2x2", False), ("2x1", False), ("1x1", False)])
)
def test_a_step_that_fails_leaves_nothing(pool, mesh, shard):
    for found in pool.run(ranks_of(mesh), failing, mesh, shard):
        assert relative_error(found["ada"], alone("ada", 2, 1, CLIP)) <= 1e-10
        assert relative_error(found["bea"], alone("bea", 1, 2)) <= 1e-10


def hidden(mesh_text: str, shard: bool, dies: bool, together: bool) -> dict[str, Any]:
    """The loss of "cyd" is of a hidden state that a hook has seen; backward of both tenants comes at the end.

    `dies`: half-way through the forward of "cyd", the one whose backward comes last.
    """
    mesh, model, pool = pool_of(mesh_text, {"activation_checkpointing": True}, shard=shard)
    seen: list[Tensor] = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output))
    inside: list[Tensor] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: inside.append(output[0]))
    for name in ("cyd", "bea"):
        add(pool, name)
    ids = {name: batch(name, 0).chunk(dp_size(mesh))[dp_rank(mesh)] for name in ("cyd", "bea")}
    with pool.train("cyd"):
        model(input_ids=ids["cyd"])
        one = seen[0].square().mean()
    with pool.train("bea"):
        other = loss_of(model(input_ids=ids["bea"]).logits, ids["bea"])
    if dies:
        inside[0].register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError) if dies else nullcontext():
        (one + other if together else one).backward()
    if not together:
        other.backward()  # what another backward left is not its own
    for name in ("cyd", "bea"):
        pool.step(name)
    return {**{name: values(model, name) for name in pool.names()}, "steps": [pool.steps("cyd"), pool.steps("bea")]}


@pytest.mark.parametrize(("dies", "together"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("mesh", "shard"), cases(("2x1", True), matrix=[("1x2", False)]))
def test_a_recompute_is_of_its_own_forward_wherever_the_loss_is_from(pool, mesh, shard, dies, together):
    """And of a backward that dies, nothing is left of any tenant that took part."""
    base = causal_lm()
    torch.manual_seed(SEEDS["cyd"])
    model = get_peft_model(base, config_of("cyd")).train()
    seen: list[Tensor] = []
    model.base_model.model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output))
    optimizer = optimizer_of("cyd")(list(trained(model).values()))
    model(input_ids=batch("cyd", 0))
    if not dies:
        seen[0].square().mean().backward()
        optimizer.step()
    want = plain(trained(model))
    for found in pool.run(ranks_of(mesh), hidden, mesh, shard, dies, together):
        steps = [int(not dies), int(not (dies and together))]
        assert found["steps"] == steps
        assert relative_error(found["cyd"], want) <= 1e-10
        assert relative_error(found["bea"], alone("bea", steps[1])) <= 1e-10


def removed_before_backward(checkpointing: bool) -> dict[str, Any]:
    """Tenant "bea" is gone, or is another of that name, when the backward of its forward comes."""
    mesh, model, pool = pool_of("2x1", {"activation_checkpointing": checkpointing})
    ids = torch.cat([batch(name, 0).chunk(dp_size(mesh))[dp_rank(mesh)] for name in MIXED])
    found: dict[str, Any] = {}
    for again in (False, True):
        for name in MIXED:
            if name not in pool.names():
                add(pool, name)
        with pool.route([name for name in MIXED for _ in range(len(ids) // 2)]):
            logits = model(input_ids=ids).logits
            loss = sum(loss_of(*each) for each in zip(logits.chunk(2), ids.chunk(2), strict=True))
        pool.remove("bea")
        if again:
            add(pool, "bea")
        found[f"backward {again}"] = [attempt(loss.backward)]
        pool.step("ada")
        if again:
            pool.step("bea")
            found["steps"] = (pool.steps("ada"), pool.steps("bea"))
            found["bea"] = values(model, "bea")
        else:
            found["ada"] = values(model, "ada")
    return found


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_tenant_removed_between_forward_and_backward(pool, checkpointing):
    """Where the forward is computed again this is refused; otherwise the others go on. What comes later under its name
    has nothing of it.
    """
    for found in pool.run(2, removed_before_backward, checkpointing):
        for again in (False, True):
            (raised,) = found[f"backward {again}"]
            if checkpointing:
                assert "is recomputed for the tenants ['bea'], which were removed after the forward" in raised.message
            else:
                assert raised is None
        assert found["steps"] == ((0, 0) if checkpointing else (2, 0))
        assert relative_error(found["ada"], alone("ada", 0 if checkpointing else 1)) <= 1e-10
        assert not differing(found["bea"], alone("bea", 0))


def backward_in_a_backward(mesh_text: str) -> dict[str, Tensor]:
    """A hook asks for a gradient of another tenant's forward while that of "ada" is computed."""
    mesh, model, pool = pool_of(mesh_text)
    for name in MIXED:
        add(pool, name)
    ids = {name: batch(name, 0).chunk(dp_size(mesh))[dp_rank(mesh)] for name in MIXED}
    with pool.train("bea"):
        logits = model(input_ids=ids["bea"]).logits
        other = loss_of(logits, ids["bea"])
    with pool.train("ada"):
        loss = loss_of(model(input_ids=ids["ada"]).logits, ids["ada"])
    loss.register_hook(lambda _: torch.autograd.grad(other, logits, retain_graph=True) and None)
    loss.backward()
    other.backward()
    for name in MIXED:
        pool.step(name)
    return {name: values(model, name) for name in MIXED}


@pytest.mark.parametrize("mesh", ["1x1", "1x2"])
def test_a_backward_inside_of_another_is_not_one_that_died(pool, mesh):
    for found in pool.run(ranks_of(mesh), backward_in_a_backward, mesh):
        for name in MIXED:
            assert relative_error(found[name], alone(name, 1)) <= 1e-10


def partly_in_evaluation(checkpointing: bool) -> dict[str, Tensor]:
    """A part of a block in training is in evaluation; the model is when its backward comes."""
    mesh, model, pool = pool_of("2x1", {"activation_checkpointing": checkpointing})
    add(pool, "bea")
    model.model.layers[0].self_attn.eval()
    ids = batch("bea", 0).chunk(dp_size(mesh))[dp_rank(mesh)]
    with pool.train("bea"):
        loss = loss_of(model(input_ids=ids).logits, ids)
    model.eval()
    loss.backward()
    pool.step("bea")
    return values(model, "bea")


def test_what_is_recomputed_drops_where_the_forward_did(pool):
    for found, want in zip(
        pool.run(2, partly_in_evaluation, True), pool.run(2, partly_in_evaluation, False), strict=True
    ):
        assert relative_error(found, want) <= 1e-12
        assert relative_error(found, alone("bea", 1)) > 1e-3, "all of it dropped"


def reentrant() -> list[Any]:
    _, model, pool = pool_of("1x2")
    add(pool, "ada")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()

    with pool.train("ada"):
        return [attempt(model, input_ids=batch("ada", 0))]


def test_reentrant_checkpoints_are_refused(pool):
    for found in pool.run(2, reentrant):
        assert "with use_reentrant=False" in found[0].message


# ---------------------------------------------------------------------- models


TARGETS = {"bea": "all-linear", "dan": None}
"""None: the family's own. Of mixtral, PEFT takes the experts to be linear, which tenants are not on."""


def lora(family: str, name: str) -> LoraConfig:
    targets = FAMILIES[family].targets if family == "mixtral" else TARGETS[name] or FAMILIES[family].targets
    return LoraConfig(r=3, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")


def base_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    row = FAMILIES[family]
    model = row.model_class()(
        getattr(transformers, row.config)(**row.settings, experts_implementation="eager")
    )  # others take no float64
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the base's own draws from each rank's random state
    return model.double().train()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def step_of(mesh_text: str, families: list[str]) -> dict[str, dict[str, dict[str, Tensor]]]:
    """A batched step of two tenants on each family."""
    mesh, config = on_mesh(mesh_text, require_adapters=False)
    found = {}
    for family in families:
        model = parallelize(base_of(family), mesh, config)
        pool = TenantPool(model)
        for name in TARGETS:
            pool.add(name, lora(family, name), sgd, SEEDS[name])
        ids = torch.cat([batch(name, 0).chunk(dp_size(mesh))[dp_rank(mesh)] % 101 for name in TARGETS])
        with pool.route([name for name in TARGETS for _ in range(len(ids) // 2)]):
            logits = model(input_ids=ids).logits
            sum(loss_of(*each) for each in zip(logits.chunk(2), ids.chunk(2), strict=True)).backward()
        for name in TARGETS:
            pool.step(name)
        found[family] = {name: values(model, name) for name in TARGETS}
    return found


DENSE = ["llama-tied", "qwen3", "phi3", "gemma3", "gpt-neox", "gpt2", "falcon", "mixtral"]


@pytest.mark.matrix
@pytest.mark.parametrize(("mesh", "families"), cases(("2x2", DENSE), matrix=[("1x4", ["llama", "phi3"])]))
def test_tenants_of_other_models(pool, mesh, families):
    """On 1x4 there are more tp ranks than heads of keys and values."""
    want: dict[str, dict[str, Any]] = {}
    for family in families:
        for name in TARGETS:
            torch.manual_seed(0)
            base = base_of(family)
            torch.manual_seed(SEEDS[name])
            model = get_peft_model(base, lora(family, name)).train()
            ids = batch(name, 0) % 101
            loss_of(model(input_ids=ids).logits, ids).backward()
            sgd(list(trained(model).values())).step()
            want.setdefault(family, {})[name] = plain(trained(model))
    for found in pool.run(ranks_of(mesh), step_of, mesh, families):
        for family, tenants in found.items():
            for name, got in tenants.items():
                bound = 1e-6 if family == "mixtral" else 1e-10  # its router computes in float32
                assert relative_error(got, want[family][name]) <= bound, (family, name)


def opt() -> nn.Module:
    """Feeds fc1 and fc2 all tokens in one dim."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101}
    config = transformers.OPTConfig(**sizes, word_embed_proj_dim=32, dropout=0.0, max_position_embeddings=64)
    return transformers.OPTForCausalLM(config).double().train()


FLAT = LoraConfig(r=3, target_modules=["fc1", "fc2", "q_proj"], lora_dropout=0.3, init_lora_weights=False)


def flat(mesh_text: str) -> dict[str, Tensor]:
    """Three rows, of which the last data-parallel rank has one more than the others; then four, as many on each."""
    mesh, config = on_mesh(mesh_text, require_adapters=False)
    model = parallelize(opt(), mesh, config)
    pool = TenantPool(model)
    for name in ("ada", "bea"):
        pool.add(name, FLAT, sgd, SEEDS[name])
    rank, size = dp_rank(mesh), dp_size(mesh)
    mine = (batch("bea", 0) % 101)[:3][rank : 3 if rank == size - 1 else rank + 1]
    with pool.route(["bea"] * len(mine)):
        loss_of(model(input_ids=mine).logits, mine).backward()
    pool.step("bea")
    mine = (batch("bea", 1) % 101).chunk(size)[rank]
    with pool.train("bea"):
        loss_of(model(input_ids=mine).logits, mine).backward()
    pool.step("bea")
    return values(model, "bea")


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["1x1", "2x2"]))
def test_rows_that_a_model_flattens_are_dropped_and_weighted_as_alone(pool, mesh):
    base = opt()
    torch.manual_seed(SEEDS["bea"])
    model = get_peft_model(base, FLAT).train()
    count = ForwardCount(running=True)
    adapt_dropout(model, SEEDS["bea"], count, 0)
    for ids in (batch("bea", 0)[:3] % 101, batch("bea", 1) % 101):
        count.advance(True)
        loss_of(model(input_ids=ids).logits, ids).backward()
        optimizer = sgd(list(trained(model).values()))
        optimizer.step()
        optimizer.zero_grad()
    want = plain(trained(model))
    for found in pool.run(ranks_of(mesh), flat, mesh):
        assert relative_error(found, want) <= 1e-10


class Patches(nn.Module):
    """Flattens the patches of its images, and is normalised over the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.norm = nn.Linear(12, 5).double(), nn.BatchNorm1d(5).double()

    def forward(self, pixels: Tensor) -> Tensor:
        patches = pixels.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
        return self.norm(self.patch(patches)).view(len(pixels), -1)


def of_images() -> dict[str, Any]:
    mesh, config = on_mesh("1x1", require_adapters=False)
    model = parallelize(Patches(), mesh, config).train()
    pool = TenantPool(model)
    pool.add("ada", LoraConfig(target_modules=["patch"], init_lora_weights=False), sgd, 0)
    pool.add("bea", LoraConfig(target_modules=["patch"]), sgd, 0)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)

    def routed() -> Tensor:
        with pool.route(["bea", "ada"]):
            return model(x)

    found = {"mixed": [attempt(routed)], "mixed alone": [attempt(lambda: pool.train("ada").__enter__())]}
    model.eval()
    found["changed"] = (routed() - model(x)).abs().amax(1).bool().tolist()
    return found


def test_images_whose_patches_are_flattened_and_normalised(pool):
    (found,) = pool.run(1, of_images)
    for key in ("mixed", "mixed alone"):
        assert "norm is a BatchNorm1d in training: it mixes the rows of all tenants" in found[key][0].message
    assert found["changed"] == [False, True]


class Odd(nn.Module):
    """A layer that is fed positions, one that has two names, and one with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.one = nn.Linear(6, 8), nn.Linear(8, 8)
        self.other = self.one
        self.own, self.pooler = nn.Linear(8, 8), nn.Linear(8, 8)
        self.own.forward = lambda x: nn.functional.linear(x, self.own.weight) * 2  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.own(self.other(self.one(x)) + self.positions(torch.ones(9, 6)).mean(0)) * self.pooler(x[:, 0])[:, None]
        )


def odd() -> dict[str, Any]:
    mesh, config = on_mesh("1x1", require_adapters=False)
    model = parallelize(Odd(), mesh, config)
    pool = TenantPool(model)
    x = torch.randn(3, 2, 8)
    before = model(x).detach()
    found = {"two names": attempt(pool.add, "ada", LoraConfig(target_modules=["one"]), sgd, 0)}
    pool.add("bea", LoraConfig(target_modules=["positions"]), sgd, 0)
    pool.add("cyd", LoraConfig(target_modules=["own"], init_lora_weights=False), sgd, 0)
    pool.add("dan", LoraConfig(target_modules=["pooler"], init_lora_weights=False), sgd, 0)
    with pool.route(["dan", "cyd", "dan"]):
        found["pooled"] = (model(x) - before).abs().amax((1, 2)).bool().tolist()
    with pool.route(["cyd"] * 3):
        found["adapted"] = not torch.equal(model(x), before)
    with pool.route(["bea"] * 3):
        found["positions"] = attempt(model, x)
    pool.remove("cyd")
    found["own forward"] = torch.equal(model(x), before)
    return found


def test_layers_that_cannot_be_told_whose_tokens_they_are_fed(pool):
    (found,) = pool.run(1, odd)
    assert "which the model has under another name too" in found["two names"].message
    assert "positions is fed 9 tokens in one dim, which are not those of 3 rows of 2" in found["positions"].message
    assert found["adapted"]
    assert found["pooled"] == [True, True, True]
    assert found["own forward"]


# ---------------------------------------------------------------------- precision


def in_sixteen_bits(mesh_text: str, dtype: torch.dtype, settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    """A step of one tenant of two in a batch; of the engine's own adapter; and of it in float64."""
    mesh, config = on_mesh(mesh_text, require_adapters=False, **settings)
    ids = batch("bea", 0).chunk(dp_size(mesh))[dp_rank(mesh)]
    lora = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)

    model = parallelize(causal_lm(dtype=dtype), mesh, config).train()
    pool = TenantPool(model)
    for name in ("ada", "bea"):
        pool.add(name, lora, sgd, SEEDS["bea"])
    with pool.route([name for name in ("bea", "ada") for _ in range(len(ids))]):
        logits = model(input_ids=torch.cat([ids, ids])).logits
        (loss_of(logits[: len(ids)], ids) + loss_of(logits[len(ids) :], ids) * 0).backward()
    pool.step("bea")
    found = [values(model, "bea")]

    for base_dtype, more in ((dtype, settings), (torch.float64, {})):
        _, config = on_mesh(mesh_text, seed=SEEDS["bea"], **more)
        model = parallelize(causal_lm(dtype=dtype).to(base_dtype), mesh, config, lora_config=lora).train()
        optimizer = sgd(list(trained(model).values()))
        loss_of(model(input_ids=ids).logits, ids).backward()
        optimizer.step()
        found.append(plain(trained(model)))
    return found


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["1x1", "2x2"]))
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [(torch.bfloat16, {}), (torch.float32, {"param_dtype": torch.bfloat16})],
    ids=["bfloat16 base", "param_dtype"],
)
def test_tenants_in_sixteen_bits(pool, mesh, dtype, settings):
    for tenant, engine, exact in pool.run(ranks_of(mesh), in_sixteen_bits, mesh, dtype, settings):
        assert {p.dtype for p in tenant.values()} == {p.dtype for p in engine.values()} == {torch.float32}
        assert relative_error(tenant, exact) <= 2 * relative_error(engine, exact)


def dropped_in_sixteen_bits(route: bool) -> dict[str, Tensor]:
    mesh, config = on_mesh("1x1", require_adapters=False)
    model = parallelize(causal_lm(dtype=torch.bfloat16), mesh, config).train()
    pool, ids = TenantPool(model), batch("bea", 0)
    pool.add("bea", config_of("bea"), sgd, SEEDS["bea"])
    with pool.route(["bea"] * len(ids)) if route else pool.train("bea"):
        loss_of(model(input_ids=ids).logits, ids).backward()
    pool.step("bea")
    return values(model, "bea")


@pytest.mark.parametrize("route", [True, False])
def test_dropout_is_of_what_was_cast(pool, route):
    """PEFT casts to the adapter's float32 first: its mask and its scale are not rounded to the base's bfloat16."""
    base = causal_lm(dtype=torch.bfloat16)
    torch.manual_seed(SEEDS["bea"])
    model, count, ids = get_peft_model(base, config_of("bea")).train(), ForwardCount(running=True), batch("bea", 0)
    adapt_dropout(model, SEEDS["bea"], count, 0)
    count.advance(True)
    optimizer = sgd(list(trained(model).values()))
    loss_of(model(input_ids=ids).logits, ids).backward()
    optimizer.step()
    (found,) = pool.run(1, dropped_in_sixteen_bits, route)
    assert relative_error(found, plain(trained(model))) <= 1e-6


def of_two_dtypes(mesh_text: str, folder: str) -> dict[str, dict[str, Tensor]]:
    """In one batch, "ada" in the base's float64 and "eve", who is "ada" in float32."""
    mesh, model, pool = pool_of(mesh_text)
    add(pool, "ada")
    pool.add("eve", config_of("ada"), optimizer_of("ada"), SEEDS["ada"], dtype=torch.float32)
    for step in range(STEPS):
        ids = batch("ada", step).chunk(dp_size(mesh))[dp_rank(mesh)]
        with pool.route([name for name in ("eve", "ada") for _ in range(len(ids))]):
            logits = model(input_ids=torch.cat([ids, ids])).logits
            (loss_of(logits[: len(ids)], ids) + loss_of(logits[len(ids) :], ids)).backward()
        pool.step("ada")
        pool.step("eve")
    pool.save("eve", folder)
    return {name: values(model, name) for name in pool.names()}


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["1x1", "2x2"]))
def test_tenants_of_two_dtypes_in_one_batch(pool, tmp_path, mesh):
    base = causal_lm()
    torch.manual_seed(SEEDS["ada"])
    model = get_peft_model(base, config_of("ada")).train()
    for parameter in trained(model).values():
        parameter.data = parameter.data.float()
    optimizer = optimizer_of("ada")(list(trained(model).values()))
    for step in range(STEPS):
        ids = batch("ada", step)
        loss_of(model(input_ids=ids).logits, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    want = plain(trained(model))
    for found in pool.run(ranks_of(mesh), of_two_dtypes, mesh, str(tmp_path / "eve")):
        assert {p.dtype for p in found["eve"].values()} == {torch.float32}
        assert relative_error(found["eve"], want) <= 1e-5  # float32 rounds
        assert relative_error(found["ada"], alone("ada")) <= 1e-10
    assert {p.dtype for p in load_file(tmp_path / "eve" / "adapter_model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("features", [(16, 24), (12, 24), (16, 20), (13, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_products_of_several_tenants(monkeypatch, dtype, features):
    """By groups of tokens where torch can (bfloat16, widths of 16 bytes), padded otherwise: each one's own product."""
    grouped = []
    own = nn.functional.grouped_mm
    monkeypatch.setattr(nn.functional, "grouped_mm", lambda *a, **k: (grouped.append(1), own(*a, **k))[1])
    torch.manual_seed(0)
    fed = [torch.randn(size, features[0]).to(dtype).requires_grad_() for size in (5, 1, 9)]
    factors = [[torch.randn(r, features[0]), torch.randn(features[1], r)] for r in (3, 8, 5)]
    factors = [[each.to(dtype).requires_grad_() for each in both] for both in factors]
    leaves, scales = [*fed, *(each for both in factors for each in both)], [2.0, 0.5, 1.0]
    got = _grouped(fed, factors, scales)
    want = torch.cat([(x @ A.T) @ B.T * scale for x, (A, B), scale in zip(fed, factors, scales, strict=True)])
    weights = torch.randn_like(got)
    assert bool(grouped) == (dtype == torch.bfloat16 and features == (16, 24))
    bound = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    gradients = [torch.autograd.grad(y, leaves, weights) for y in (got, want)]
    for mine, theirs in zip((got, *gradients[0]), (want, *gradients[1]), strict=True):
        assert relative_error({"": mine.detach()}, {"": theirs.detach()}) <= bound


@pytest.mark.parametrize("features", [(6, 10), (16, 24)], ids=["padded", "grouped"])
def test_scales_are_not_rounded_to_the_dtype(features):
    """A rounded scale is a bias of all elements alike, which the rounding of each does not hide in their mean."""
    scale, rank = 9.2376, 4
    draw = torch.Generator().manual_seed(0)
    x, A, B = (
        torch.rand(*shape, generator=draw, dtype=torch.float64).bfloat16()
        for shape in ((500, features[0]), (rank, features[0]), (features[1], rank))
    )
    got = _grouped([x], [(A, B)], [scale]).double()
    want = ((x.double() @ A.double().T).bfloat16().double() @ B.double().T).bfloat16().double() * scale
    assert abs((got / want).mean() - 1) < 3e-4
    assert abs(torch.tensor(scale).bfloat16().item() / scale - 1) > 1e-3
