"""Modules called by themselves, while FSDP2 holds their weights in shards, compute as in one process, or refuse."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lora_parallel import parallelize
from lora_parallel.distributed.mesh import dp_rank, dp_size
from tests.cases import cases
from tests.oracle import SEVEN, Case, fill_adapters, full, on_mesh, ranks_of, relative_error, trained
from tests.oracle.workers import Failure, attempt

CASES = {
    "plain": Case(steps=1),
    "tied": Case(steps=1, sizes={"tie_word_embeddings": True}),
    "adapted ends": Case(steps=1, lora={"target_modules": [*SEVEN, "embed_tokens", "lm_head"]}),
}
TWO_STEPS = Case(steps=2, lora=CASES["adapted ends"].lora)


def parts(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """What can be called beside the model itself; run without gradients."""
    base: Any = model.get_base_model()  # type: ignore[operator]
    hidden = torch.linspace(-1, 1, ids.numel() * 40, dtype=torch.float64).view(*ids.shape, 40)
    rotary = base.model.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    return {
        "embedding": lambda: model.get_input_embeddings()(ids),  # type: ignore[operator]
        "a block": lambda: base.model.layers[1](hidden, position_embeddings=rotary),
        "norm": lambda: base.model.norm(hidden),
        "head": lambda: base.lm_head(hidden),
        "model.forward": lambda: model.forward(input_ids=ids).logits,
        "base": lambda: base(input_ids=ids).logits,
        "trunk": lambda: base.model(input_ids=ids).last_hidden_state,
        "generate": lambda: base.generate(input_ids=ids[:1, :4], max_new_tokens=5, do_sample=False, pad_token_id=0),
    }


def soft_prompt_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """As of code that embeds by itself."""
    embedded = model.get_input_embeddings()(ids)  # type: ignore[operator]
    prompt = torch.linspace(-1, 1, 2 * 40, dtype=torch.float64).view(1, 2, 40).expand(len(ids), 2, 40)
    labels = torch.cat([torch.full((len(ids), 2), -100), ids], dim=1)
    return model(inputs_embeds=torch.cat([prompt, embedded], dim=1), labels=labels).loss


def called(mesh_text: str, name: str) -> dict[str, Any]:
    mesh, config = on_mesh(mesh_text)
    (batch,) = CASES[name].batches()
    ids = batch.chunk(dp_size(mesh))[dp_rank(mesh)]
    found: dict[str, Any] = {"rank": dp_rank(mesh)}
    model = parallelize(CASES[name].model(), mesh, config)
    if name != "adapted ends":
        loss = attempt(soft_prompt_loss, model, ids)
        found["soft prompt"] = loss if isinstance(loss, Failure) else attempt(loss.backward)
        found["gradients"] = {n: full(p.grad) for n, p in trained(model).items()}
        model.zero_grad()
    for part, call in parts(model, ids).items():
        with torch.no_grad():
            found[part] = attempt(call)
        if part != "generate":
            raised = attempt(lambda call=call: call().sum().backward())
            found[f"{part} in training"] = raised.message if isinstance(raised, Failure) else raised
            model.zero_grad()
    if mesh_text != "2x1":
        found["q_proj"] = attempt(
            model.get_base_model().model.layers[0].self_attn.q_proj, torch.ones(1, 2, 40).double()
        )
    model(input_ids=ids, labels=ids).loss.backward()
    found["afterwards"] = {n: full(p.grad) for n, p in trained(model).items()}
    return found


def two_steps(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of a second step, with a forward that no backward follows ahead of the first one's end."""
    optimizer = torch.optim.SGD(trained(model).values(), lr=0.1)
    for ids in batches:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients = {n: full(p.grad) for n, p in trained(model).items()}
        model(input_ids=ids)
        optimizer.step()
    return gradients


def looked_between(mesh_text: str, reshard_after_forward: bool) -> dict[str, Tensor]:
    mesh, config = on_mesh(mesh_text, reshard_after_forward=reshard_after_forward)
    model = parallelize(TWO_STEPS.model(), mesh, config)
    return two_steps(model, [batch.chunk(dp_size(mesh))[dp_rank(mesh)] for batch in TWO_STEPS.batches()])


@pytest.mark.parametrize(("mesh", "reshard"), cases(("2x1", True), ("2x1", False), matrix=[("2x2", True)]))
def test_weights_that_a_forward_left_gathered_are_not_those_of_the_next(pool, mesh, reshard):
    """A forward for a metric, without no_grad: the head's adapter has trained when the next one comes."""
    want = two_steps(TWO_STEPS.model(), TWO_STEPS.batches())
    for got in pool.run(ranks_of(mesh), looked_between, mesh, reshard):
        assert relative_error(got, want) <= 1e-12


@cache
def one_process(name: str) -> dict[str, Any]:
    (batch,) = CASES[name].batches()
    found: dict[str, Any] = {}
    for key, loss_of in (
        ("gradients", soft_prompt_loss),
        ("afterwards", lambda model, ids: model(input_ids=ids, labels=ids).loss),
    ):
        model = CASES[name].model()
        loss_of(model, batch).backward()
        found[key] = {n: p.grad for n, p in trained(model).items()}
    return found


@pytest.mark.parametrize(
    ("mesh", "name"),
    cases(
        ("2x2", "plain"),
        ("2x1", "tied"),
        ("2x1", "adapted ends"),
        matrix=[("2x2", "tied"), ("2x2", "adapted ends"), ("2x1", "plain")]
        + [(mesh, name) for mesh in ("1x2", "2x2x1") for name in CASES],
    ),
)
def test_what_is_called_by_itself_computes_as_in_one_process(pool, mesh, name):
    (batch,) = CASES[name].batches()
    want = one_process(name)
    for found in pool.run(ranks_of(mesh), called, mesh, name):
        size = 1 if mesh == "1x2" else 2 if mesh in ("2x1", "2x2") else 4
        ids = batch.chunk(size)[found["rank"]]
        with torch.no_grad():
            for part, call in parts(CASES[name].model(), ids).items():
                got = found[part]
                assert isinstance(got, Tensor), (part, got)
                wanted = call()
                if part == "generate":
                    assert torch.equal(got[:, : wanted.shape[1]], wanted)
                else:
                    assert relative_error({part: got}, {part: wanted}) <= 1e-12, part
        if name != "adapted ends":
            assert found["soft prompt"] is None, found["soft prompt"]
            assert relative_error(found["gradients"], want["gradients"]) <= 1e-12
        for part in ("model.forward", "base", "trunk"):
            raised = found[f"{part} in training"]
            assert raised is None if mesh == "1x2" else "call the model that was parallelized" in raised, (part, raised)
        if mesh != "1x2" and name == "adapted ends":
            assert "embed_tokens was called by itself in training" in found["embedding in training"]
        if "q_proj" in found and mesh == "2x2":
            assert "q_proj was called by itself, while FSDP2 holds" in found["q_proj"].message
        assert relative_error(found["afterwards"], want["afterwards"]) <= 1e-12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.a(x))


class Tied(nn.Module):
    """Three blocks, of which the last has the first one's weight."""

    _no_split_modules: ClassVar[list[str]] = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.layers[2].a.weight = self.layers[0].a.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def tied() -> nn.Module:
    torch.manual_seed(0)
    model = get_peft_model(Tied().double(), LoraConfig(r=2, target_modules=["a"])).double()
    fill_adapters(model)
    return model.train()


class Querying(nn.Module):
    """A trunk with a parameter of its own beside its blocks, as the query tokens of BLIP-2, and a frozen scalar."""

    _no_split_modules: ClassVar[list[str]] = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.head = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.linspace(-1, 1, 16))
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.query
        for layer in self.layers:
            x = layer(x)
        return x


class Scaled(nn.Module):
    """Its first parameter is one that FSDP2 leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).view(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) * self.scale


def querying() -> nn.Module:
    torch.manual_seed(0)
    model = get_peft_model(Querying(), LoraConfig(r=2, target_modules=["a"])).double()
    fill_adapters(model)
    return model.train()


def called_with_own_parameters(mesh_text: str) -> dict[str, Any]:
    mesh, config = on_mesh(mesh_text)
    model = parallelize(querying(), mesh, config)
    base = model.get_base_model()
    found: dict[str, Any] = {}
    for part in ("trunk", "head"):
        with torch.no_grad():
            found[part] = attempt(getattr(base, part), TIED_DATA)
    found["trunk in training"] = attempt(base.trunk, TIED_DATA.clone().requires_grad_())
    found["model"] = model(TIED_DATA).detach()
    return found


def test_a_module_with_parameters_of_its_own_beside_blocks(pool):
    plain = querying().get_base_model()
    want = {"trunk": plain.trunk(TIED_DATA), "head": plain.head(TIED_DATA), "model": plain(TIED_DATA)}
    for found in pool.run(2, called_with_own_parameters, "2x1"):
        raised = found.pop("trunk in training")
        assert isinstance(raised, Failure)
        assert "trunk was called by itself in training" in raised.message
        assert relative_error(found, {name: value.detach() for name, value in want.items()}) <= 1e-12


TIED_DATA = torch.linspace(-1, 1, 4 * 3 * 16, dtype=torch.float64).view(4, 3, 16)


def tied_steps(model: nn.Module, data: Tensor, parts: list[str]) -> tuple[dict[str, Tensor], list[Any]]:
    """The gradients of the second of two steps, and what came of calling parts ahead of each."""
    optimizer = torch.optim.SGD(trained(model).values(), lr=0.5)
    came = []
    for _ in range(2):
        for part in parts:
            with torch.no_grad():
                came.append(attempt(model.get_submodule(part), data))
        optimizer.zero_grad()
        model(data).pow(2).mean().backward()
        gradients = {n: full(p.grad) for n, p in trained(model).items()}
        optimizer.step()
    return gradients, came


def tied_on_mesh(mesh_text: str) -> tuple[dict[str, Tensor], list[Any]]:
    mesh, config = on_mesh(mesh_text)
    model = parallelize(tied(), mesh, config)
    data = TIED_DATA.chunk(dp_size(mesh))[dp_rank(mesh)]
    layers = "base_model.model.layers"
    return tied_steps(model, data, [f"{layers}.2.a", f"{layers}.0", f"{layers}.1"])


@pytest.mark.parametrize("mesh", ["2x1", "2x1x1"])
def test_a_layer_that_is_tied_to_another_blocks_is_not_called_by_itself(pool, mesh):
    """FSDP2 takes both layers for one unit, and would go on in the middle of it."""
    want, _ = tied_steps(tied(), TIED_DATA, [])
    for got, came in pool.run(2, tied_on_mesh, mesh):
        for index, answer in enumerate(came):
            if index % 3 == 2:
                assert isinstance(answer, Tensor)
                continue
            refused = f"base_model.model.layers.{[2, 0][index % 3]}.a was called outside of the model's forward"
            assert isinstance(answer, Failure), (index, answer)
            assert refused in answer.message
            assert "call the model that was parallelized" in answer.message
        assert relative_error(got, want) <= 1e-12
