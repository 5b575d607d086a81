"""LoRA dropout: the same elements on any mesh, and statistics that cannot be told from `nn.Dropout`'s."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lora_parallel import no_sync, parallelize
from lora_parallel.adapters.dropout import TopologyInvariantDropout
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.state import ForwardCount, state_of
from tests.cases import cases
from tests.oracle import (
    SEVEN,
    Case,
    causal_lm,
    fill_adapters,
    full,
    lora_config,
    on_mesh,
    ranks_of,
    relative_error,
    trained,
)

# The same on every mesh. A program is a list of steps on one model; what differs beside the mesh must not show.
BATCHES = Case(steps=3).batches()


def double_loss(model, ids):
    """In float64, which transformers' own is not."""
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(mesh_text, p, joint=False, evaluate=False, checkpointing=False, accumulate=False, seed=0, targets=SEVEN):
    """Losses (of the global batch) and gradients of two steps on one batch, then one that adds two others."""
    mesh, config = on_mesh(mesh_text, activation_checkpointing=checkpointing, seed=seed)
    model = get_peft_model(causal_lm(), lora_config(lora_dropout=p, target_modules=targets))
    fill_adapters(model)
    model = parallelize(model.train(), mesh, config)
    first, second, third = (batch.chunk(dp_size(mesh))[dp_rank(mesh)] for batch in BATCHES)

    def look_elsewhere():
        if evaluate:
            model.eval()
            with torch.no_grad():
                model(input_ids=third)
            model.train()

    losses, gradients = [], []

    def finish():
        gradients.append({name: full(q.grad) for name, q in trained(model).items()})
        model.zero_grad()

    for _ in range(2):
        look_elsewhere()
        loss = double_loss(model, first)
        look_elsewhere()
        loss.backward()
        losses.append(loss.item())
        finish()
    if joint:
        one = model(input_ids=second).logits
        two = double_loss(model, third)
        loss = nn.functional.cross_entropy(one[:, :-1].flatten(0, 1), second[:, 1:].flatten()) + two
        loss.backward()
        losses.append(loss.item())
    else:
        if accumulate:
            with no_sync(model):
                loss = double_loss(model, second)
                loss.backward()
        else:
            loss = double_loss(model, second)
            loss.backward()
        look_elsewhere()
        other = double_loss(model, third)
        other.backward()
        losses.append(loss.item() + other.item())
    finish()
    return losses, gradients, state_of(model).forward_count.done


def train_all(mesh_text, variants):
    return [train(mesh_text, **variant) for variant in variants]


@cache
def single(pool, p, **changes):
    ((answer,),) = pool.run(1, train_all, "1x1", [{"p": p, **changes}])
    return answer


def error_of(got, want):
    """The largest relative error of a gradient, over the steps."""
    return max(relative_error(g, w) for g, w in zip(got, want, strict=True))


VARIANTS = [
    {"p": 0.1},
    {"p": 0.1, "checkpointing": True, "evaluate": True},
    {"p": 0.3, "joint": True},
    {"p": 0.1, "joint": True, "checkpointing": True},
    {"p": 0.3, "accumulate": True, "evaluate": True},
    {"p": 0.3, "targets": [*SEVEN, "lm_head"]},
]
ALL_AT_ONCE = [
    {"p": 0.1, "joint": True, "checkpointing": True, "evaluate": True},
    {"p": 0.3, "accumulate": True, "targets": [*SEVEN, "lm_head"]},
]
"""Variants of `make test` on four ranks, each with several of the options."""


@pytest.mark.parametrize(
    ("mesh", "variants"),
    cases(
        *(("1x1", VARIANTS[1:4]), ("2x2", ALL_AT_ONCE)),
        matrix=[
            *((mesh, VARIANTS) for mesh in ("1x2", "2x2")),
            *((mesh, VARIANTS[1:4]) for mesh in ("2x1", "1x4", "4x1", "2x2x2")),
        ],
    ),
)
def test_every_mesh_drops_the_same_elements(pool, mesh, variants):
    """Against our own 1x1 run, without checkpointing, evaluation, accumulation, and with a backward each."""
    answers = pool.run(ranks_of(mesh), train_all, mesh, variants)
    for i, variant in enumerate(variants):
        plain = {"targets": tuple(variant["targets"])} if "targets" in variant else {}
        want_losses, want, want_count = single(pool, variant["p"], **plain)
        ranks_losses = [answer[i][0] for answer in answers]
        assert [sum(step) / len(answers) for step in zip(*ranks_losses, strict=True)] == pytest.approx(
            want_losses, rel=1e-12
        ), variant
        for answer in answers:
            assert error_of(answer[i][1], want) <= 1e-12, variant
            assert answer[i][2] == want_count == 4, variant


def test_what_the_comparison_would_see(pool):
    """Another p, another seed, and the next step's mask on the same batch all show."""
    losses, gradients, _ = single(pool, 0.1)
    assert abs(losses[0] - losses[1]) > 1e-4
    assert error_of(gradients[1:2], gradients[:1]) > 1e-2
    for other in (single(pool, 0.0), single(pool, 0.3), single(pool, 0.1, seed=1)):
        assert abs(losses[0] - other[0][0]) > 1e-4
        assert error_of(other[1], gradients) > 1e-2
    assert single(pool, 0.0)[0][0] == pytest.approx(single(pool, 0.0)[0][1], rel=1e-12)


def modules_of(mesh_text):
    """The dropouts of a model with two adapters: the key and p of each, and whether it trains."""
    mesh, config = on_mesh(mesh_text, seed=4)
    model = get_peft_model(causal_lm(), lora_config(lora_dropout=0.1))
    model.add_adapter("second", lora_config(lora_dropout=0.2, target_modules=["q_proj"]))
    model.add_adapter("none", lora_config(lora_dropout=0.0, target_modules=["q_proj"]))
    model = parallelize(model.eval(), mesh, config)
    layer = model.get_base_model().model.layers[1].self_attn.q_proj
    return {
        adapter: (type(module).__name__, getattr(module, "name", None), getattr(module, "p", None), module.training)
        for adapter, module in layer.lora_dropout.items()
    }, {m.seed for m in model.modules() if isinstance(m, TopologyInvariantDropout)}


def test_every_adapter_has_a_key_of_its_own(pool):
    name = "model.layers.1.self_attn.q_proj"
    for found, seeds in pool.run(2, modules_of, "1x2"):
        assert found == {
            "default": ("TopologyInvariantDropout", name, 0.1, False),
            "second": ("TopologyInvariantDropout", f"{name}:second", 0.2, False),
            "none": ("Identity", None, None, False),
        }
        assert seeds == {4}


# One module, in one process.


def dropout(p=0.1, name="layer", seed=0, dp=0, offset=0, count=1):
    module = TopologyInvariantDropout(p, name, seed, ForwardCount(current=count, running=True), dp, offset)
    return module.train()


def mask(shape, **key):
    return dropout(**key).dropped(torch.Size(shape), torch.device("cpu"))


def test_the_mask_depends_on_the_global_place_only():
    whole = mask((4, 6, 10))
    assert torch.equal(torch.cat([mask((2, 6, 10), dp=0), mask((2, 6, 10), dp=1)]), whole)
    assert torch.equal(torch.cat([mask((4, 6, 7)), mask((4, 6, 3), offset=7)], dim=-1), whole)
    assert torch.equal(mask((4, 6, 10)), whole)
    assert torch.equal(mask((4, 3, 10)), whole[:, :3])
    assert torch.equal(mask((4, 2, 3, 10)).flatten(1, 2), whole)
    assert torch.equal(mask((4, 10)), whole[:, 0])  # rows without tokens
    for other in ({"name": "other"}, {"seed": 1}, {"count": 2}, {"dp": 1}, {"offset": 1}):
        assert not torch.equal(mask((4, 6, 10), **other), whole), other
    assert mask((0, 6, 10)).shape == (0, 6, 10)
    assert mask((4, 6, 0)).shape == (4, 6, 0)


def test_forward_scales_what_it_keeps():
    module = dropout(p=0.25)
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    y = module(x)
    dropped = module.dropped(x.shape, x.device)
    assert torch.equal(y, torch.where(dropped, 0.0, x * (1 / 0.75)))
    y.sum().backward()
    assert torch.equal(x.grad, torch.where(dropped, 0.0, torch.full_like(x, 1 / 0.75)))
    assert module(x.bfloat16()).dtype is torch.bfloat16
    assert module.eval()(x) is x
    assert dropout(p=0.0)(x) is x
    assert not dropout(p=1.0)(x).any()
    assert not dropout(p=1 - 1e-10)(x).any()  # a threshold that no int32 holds
    assert "p=0.25" in repr(module)


def test_a_layer_called_around_the_models_forward_is_refused():
    """Its count would stand still, and every step would drop the same elements."""
    module, x = dropout(), torch.ones(2, 3, 4)
    module.count.running = False
    with pytest.raises(RuntimeError, match="call the parallelized model"):
        module(x)
    with torch.no_grad():  # nothing is trained: generate on a model that was left in training mode
        assert module(x).shape == x.shape


def test_evaluation_does_not_count():
    count = ForwardCount()
    count.advance(True)
    count.advance(False)
    count.advance(True)
    assert (count.done, count.current) == (2, 2)


# Statistics. Every test is run on nn.Dropout too: a bound that it does not keep would say nothing.
SHAPE = (4, 64, 96)
DRAWS = 200


def our_masks(p, draws=DRAWS, shape=SHAPE, **key):
    return torch.stack([mask(shape, p=p, count=count, **key) for count in range(1, draws + 1)]).float()


def torch_masks(p, draws=DRAWS, shape=SHAPE, seed=0):
    torch.manual_seed(seed)
    return (nn.functional.dropout(torch.ones(draws, *shape), p) == 0).float()


SOURCES = {"ours": our_masks, "torch": torch_masks}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("p", [0.05, 0.1, 0.3, 0.5])
def test_drop_rates(source, p):
    """Of the whole, of each tensor, and of each row, token and feature: mean p, spread that of independent draws."""
    drawn = SOURCES[source](p)
    spread = math.sqrt(p * (1 - p))
    assert abs(drawn.mean() - p) < 5 * spread / math.sqrt(drawn.numel())
    for dims in [(1, 2, 3), (2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2), (3,), (2,), (0,)]:
        each = drawn.mean(dims)
        count = drawn.numel() / each.numel()
        z = (each - p) * math.sqrt(count) / spread
        assert z.abs().max() < 7, dims
        assert abs(z.var().item() - 1) < 5 * math.sqrt((2 + 1 / count / spread**2) / each.numel()), dims


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("p", [0.1, 0.3])
def test_no_correlation_between_neighbours(source, p):
    """Of tokens, features, rows and counts, near and far; and of the corners of a rectangle, which a product of a
    token's and a feature's number would give away.
    """
    centred = (SOURCES[source](p) - p) / math.sqrt(p * (1 - p))
    bound = 5 / math.sqrt(centred.numel() / 2)
    for dim in range(4):
        size = centred.shape[dim]
        for step in (1, 2, 3, size // 2):
            a, b = centred.narrow(dim, 0, size - step), centred.narrow(dim, step, size - step)
            assert abs((a * b).mean()) < bound, (dim, step)
    for step in (1, 2, 7):
        left, right = centred[..., :-step], centred[..., step:]
        corners = left[:, :, :-step] * right[:, :, :-step] * left[:, :, step:] * right[:, :, step:]
        assert abs(corners.mean()) < 5 * centred.abs().pow(2).mean() ** 2 / math.sqrt(corners.numel() / 4), step


@pytest.mark.parametrize("p", [0.1, 0.3])
def test_no_correlation_between_modules_seeds_and_counts(p):
    names = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(4) for part in "qkv"]
    drawn = [our_masks(p, draws=20, name=name) for name in names]
    drawn += [our_masks(p, draws=20, name=names[0], seed=seed) for seed in range(1, 6)]
    # the same rows on a rank further on must be other rows, and other features
    drawn += [our_masks(p, draws=20, name=names[0], dp=1), our_masks(p, draws=20, name=names[0], offset=SHAPE[2])]
    flat = torch.stack(drawn).flatten(1)
    flat = (flat - p) / math.sqrt(p * (1 - p))
    correlation = (flat @ flat.t()) / flat.shape[1]
    off = correlation - torch.diag(correlation.diag())
    assert off.abs().max() < 5.5 / math.sqrt(flat.shape[1])
    swapped = flat[0].view(20, *SHAPE)[:, :, : SHAPE[1]].transpose(2, 3)[:, :, :64, :64]
    assert abs((swapped * flat[0].view(20, *SHAPE)[:, :, :64, :64]).mean() - 1 / 64) < 5 / math.sqrt(
        swapped.numel() / 2
    )


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_a_mask_has_no_structure_of_low_rank(source, p):
    """The largest singular value of a centred mask is that of independent draws: structure would stand out."""
    tokens, features = 1500, 600
    for drawn in SOURCES[source](p, draws=2, shape=(1, tokens, features)):
        centred = (drawn[0] - p) / math.sqrt(p * (1 - p))
        largest = torch.linalg.matrix_norm(centred, 2).item()
        assert largest == pytest.approx(math.sqrt(tokens) + math.sqrt(features), rel=0.03)


def layer_gradients(ours, draws, p):
    """Gradients of A and B of one PEFT layer over many draws of its dropout."""
    torch.manual_seed(0)
    layer = get_peft_model(nn.Sequential(nn.Linear(12, 10)), LoraConfig(r=3, target_modules=["0"], lora_dropout=p))
    layer = layer.base_model.model[0].double()
    nn.init.normal_(layer.lora_B["default"].weight)
    x, weight = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 5, 10, dtype=torch.float64)
    count = ForwardCount(running=True)
    if ours:
        layer.lora_dropout["default"] = TopologyInvariantDropout(p, "0", 0, count, 0)
    layer.train()
    found = {"A": [], "B": []}
    for _ in range(draws):
        count.advance(True)
        layer.zero_grad()
        (layer(x) * weight).sum().backward()
        found["A"].append(layer.lora_A["default"].weight.grad.clone())
        found["B"].append(layer.lora_B["default"].weight.grad.clone())
    layer.eval()
    layer.zero_grad()
    (layer(x) * weight).sum().backward()
    a, b = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
    scale, odds = layer.scaling["default"], p / (1 - p)
    means = {"A": layer.lora_A["default"].weight.grad, "B": layer.lora_B["default"].weight.grad}
    # each is a sum over elements of x of (kept / (1 - p)) times a constant
    back = torch.einsum("nto,or->ntr", weight, b)
    one = torch.einsum("nto,nti,ri->ntior", weight, x, a)
    variances = {
        "A": odds * scale**2 * torch.einsum("ntr,nti->ri", back**2, x**2),
        "B": odds * scale**2 * one.square().sum((0, 1, 2)),
    }
    return {name: torch.stack(values) for name, values in found.items()}, means, variances


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("p", [0.1, 0.3])
def test_gradients_have_pefts_mean_and_variance(ours, p):
    """The mean is the gradient without dropout, and the variance that of independent draws, element by element."""
    draws = 1500
    found, means, variances = layer_gradients(ours, draws, p)
    for name, values in found.items():
        z = (values.mean(0) - means[name]) / (variances[name] / draws).sqrt()
        assert z.abs().max() < 4.5, name
        assert 0.25 < z.square().mean() < 3, name  # elements of one gradient share their draws
        ratio = values.var(0) / variances[name]
        assert (ratio - 1).abs().max() < 0.3, name
        assert abs(ratio.mean() - 1) < 0.05, name
