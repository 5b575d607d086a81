"""Models that are already in memory: equal copies cost nothing, of unequal ones rank 0's wins, others are refused."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from peft import get_peft_model
from torch import nn

from lora_parallel import parallelize
from lora_parallel.loading.meta_init import adopt_rank_zero, tensors_of
from tests.lora_parallel.traffic import Traffic
from tests.oracle import causal_lm, fill_adapters, full, lora_config, mesh_of, on_mesh
from tests.oracle.workers import Failure, attempt


class Parts(nn.Module):
    """A parameter, a transposed one, a tied one, and buffers of other dtypes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.same = nn.Parameter(torch.ones(3))
        self.transposed = nn.Parameter(torch.randn(4, 3, generator=generator).t())
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.a.weight.data = torch.randn(2, 2, generator=generator)
        self.a.bias.data = self.b.bias.data = torch.zeros(2)
        self.b.weight = self.a.weight
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("flags", torch.tensor([seed > 0, True]), persistent=False)
        self.register_buffer("empty", torch.zeros(0))


def adopted(seeds):
    model = Parts(seeds[dist.get_rank()])
    logging.getLogger("lora_parallel").setLevel(logging.ERROR)
    with Traffic() as traffic:
        sent = adopt_rank_zero(tensors_of(model), mesh_of("2x2"))
    state = {name: full(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    return sent, state, model.b.weight is model.a.weight, traffic.count("broadcast")


def test_rank_zero_wins_where_copies_differ(pool):
    want = dict([*Parts(0).named_parameters(), *Parts(0).named_buffers()])
    for sent, state, tied, broadcasts in pool.run(4, adopted, (0, 0, 5, 0)):  # one rank is enough
        assert sent == broadcasts == 4  # transposed, the tied weight once, and the two buffers
        assert tied
        assert state.keys() == want.keys()
        assert all(torch.equal(state[name], want[name].detach()) for name in want)


def test_equal_copies_are_not_sent(pool):
    for sent, _, _, broadcasts in pool.run(4, adopted, (3, 3, 3, 3)):
        assert sent == broadcasts == 0


def unseeded(mesh_text):
    """Another base and other adapters on every rank; built by the user, and injected."""
    mesh, config = on_mesh(mesh_text)
    rank = dist.get_rank()
    built = get_peft_model(causal_lm(seed=rank), lora_config())
    fill_adapters(built, seed=rank)
    built = parallelize(built, mesh, config)
    injected = parallelize(causal_lm(seed=rank), mesh, config, lora_config=lora_config())
    return [{name: full(p) for name, p in model.named_parameters()} for model in (built, injected)]


def test_unseeded_models_become_those_of_rank_zero(pool):
    built = get_peft_model(causal_lm(seed=0), lora_config())
    fill_adapters(built, seed=0)
    injected = causal_lm(seed=0)
    torch.manual_seed(0)
    injected = get_peft_model(injected, lora_config()).get_base_model()
    want = [{name: full(p) for name, p in model.named_parameters()} for model in (built, injected)]
    for found in pool.run(4, unseeded, "2x2"):
        for got, expected in zip(found, want, strict=True):
            assert got.keys() == expected.keys()
            assert all(torch.equal(got[name], expected[name]) for name in expected)


def different_structures():
    """What rank 1 builds otherwise, and the error of each rank."""
    rank = dist.get_rank()
    mesh, config = on_mesh("1x2")

    def built(**changes):
        model = get_peft_model(causal_lm(**changes.pop("sizes", {})), lora_config(**changes))
        return model

    def trained(model):
        model.get_base_model().lm_head.weight.requires_grad_(True)
        return model

    models = {
        "layers": built(sizes={"num_hidden_layers": 2 + rank}),
        "width": built(sizes={"intermediate_size": 44 + 4 * rank}),
        "dtype": built(sizes={"dtype": torch.float64 if rank else torch.float32}),
        "r": built(r=3 + rank),
        "targets": built(target_modules=["q_proj", "v_proj" if rank else "k_proj"]),
        "requires_grad": trained(built()) if rank else built(),
    }
    return {what: attempt(parallelize, model, mesh, config) for what, model in models.items()}


def test_other_structures_are_refused_on_every_rank(pool):
    for found in pool.run(2, different_structures):
        for what, error in found.items():
            assert isinstance(error, Failure), what
            assert error.kind == "ValueError", (what, error)
            assert "ranks [1] built a model that differs from rank 0's" in error.message, (what, error.message)


def random_states():
    mesh, config = on_mesh("2x2", require_adapters=False, tp_plan={})
    model = nn.Sequential(nn.Linear(4, 4))
    torch.manual_seed(dist.get_rank())
    parallelize(model, mesh, config)
    return torch.rand(3).tolist()


def test_tp_peers_share_the_random_state_of_the_first(pool):
    for rank, found in enumerate(pool.run(4, random_states)):
        torch.manual_seed(rank // 2 * 2)
        assert found == torch.rand(3).tolist()
