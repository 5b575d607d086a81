"""Compiled blocks: one graph for all blocks of a kind, without breaks, and the training of eager blocks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lora_parallel import no_sync, parallelize
from lora_parallel.adapters.dropout import TopologyInvariantDropout
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.state import ForwardCount
from tests.cases import cases
from tests.oracle import (
    Case,
    Run,
    causal_lm,
    differing,
    full,
    on_mesh,
    parse_mesh,
    ranks_of,
    reference,
    relative_error,
    sharded,
)
from tests.oracle.rows import ENCODER, Step, _step, base_model, masked_language, one_process, rows
from tests.oracle.tenant_rows import STEPS, add, alone, batch, loss_of, pool_of, values
from tests.oracle.workers import Failure, attempt

WHOLE: dict[str, Any] = {"compile": {"backend": "aot_eager", "fullgraph": True}}
"""An error where the graph breaks. The backend differentiates and decomposes, and calls no compiler."""

LAYERS: dict[str, Any] = {"num_hidden_layers": 3}
BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}


@dataclass(frozen=True)
class Lengths(Case):
    """Batches of other lengths. Each of four tp ranks has two tokens of them at least."""

    def batches(self) -> list[Tensor]:
        lengths = (24, 12, 19, 20, 11, 14)
        return [ids.repeat(1, 2)[:, :length] for ids, length in zip(super().batches(), lengths, strict=False)]


CASES: dict[str, tuple[Case, dict[str, Any], int]] = {
    "all linear layers": (Case(steps=20, sizes=LAYERS), {}, 2),
    "two linear layers": (Case(steps=3, sizes=LAYERS, lora={"target_modules": ["q_proj", "down_proj"]}), {}, 2),
    "lengths": (Lengths(steps=6, sizes=LAYERS), {"sequence_parallel": True}, 4),
    "dropout, biases, recomputed": (
        Case(
            steps=3,
            sizes=BIASED,
            lora={"lora_dropout": 0.2, "lora_bias": True, "target_modules": ["q_proj", "down_proj"]},
        ),
        {"activation_checkpointing": True},
        1,
    ),
    "DoRA": (Case(steps=2, sizes=LAYERS, lora={"use_dora": True, "lora_dropout": 0.2}), {"sequence_parallel": True}, 2),
    "packed matrices": (
        Case("phi3", sizes=LAYERS, lora={"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
        {},
        2,
    ),
    "embedding and head, tied": (
        Case(
            sizes={**LAYERS, "tie_word_embeddings": True},
            lora={"target_modules": ["embed_tokens", "v_proj", "lm_head"]},
        ),
        {},
        1,
    ),
    "a parameter": (
        Case(sizes=LAYERS, lora={"target_modules": ["q_proj"], "target_parameters": ["mlp.down_proj.weight"]}),
        {},
        2,
    ),
    "logits in slices": (Case(sizes=LAYERS), {"loss_parallel": True}, 2),
    "all train": (Case(sizes={**LAYERS, **BIASED}, adapters=False), {"require_adapters": False}, 1),
}
"""A case, its options, and the number of graphs: one, one more for a first block whose input needs no gradient. There
are as many again where lengths vary, whether tp divides them or not.
"""


def begin_counting() -> None:
    torch.compiler.reset()
    counters.clear()


def counted() -> tuple[int, int]:
    """The numbers of graphs and of breaks since `begin_counting`."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def both_ways(mesh: str, name: str) -> tuple[Run, Run, tuple[int, int]]:
    case, config, _ = CASES[name]
    if parse_mesh(mesh)["tp"] == 1:
        config = {key: value for key, value in config.items() if key != "sequence_parallel"}
    eager = sharded(case, mesh, **config)
    begin_counting()
    return eager, sharded(case, mesh, **config, **WHOLE), counted()


KEPT = ("1x2", "two linear layers")
# What is compiled is what tp makes of a block: each case on 1x2. FSDP2 gathers outside of the graphs: on other meshes
# the cases whose gradients take other ways there.
MESHES = {
    "1x1": ["all linear layers"],
    "1x2": [name for name in CASES if name != KEPT[1]],
    "2x1": ["two linear layers", "dropout, biases, recomputed", "all train"],
    "2x2": ["all linear layers", "dropout, biases, recomputed", "embedding and head, tied", "logits in slices"],
    "1x4": ["lengths"],
    "2x1x2": ["packed matrices"],
}
OTHERS = [(mesh, name) for mesh, names in MESHES.items() for name in names]


# A test a case: several in one would compile for minutes.
@pytest.mark.parametrize(("mesh", "name"), cases(KEPT, matrix=OTHERS))
def test_compiled_blocks_train_as_eager_ones(pool, mesh, name):
    case, _, expected = CASES[name]
    for eager, compiled, (graphs, breaks) in pool.run(ranks_of(mesh), both_ways, mesh, name):
        assert (graphs, breaks) == (expected, 0)
        assert compiled.losses == pytest.approx(eager.losses, rel=1e-10)
        assert relative_error(compiled.gradients, eager.gradients) < 1e-12
        assert relative_error(compiled.adapters, eager.adapters) < 1e-8
        if name.endswith("linear layers"):  # eager training is compared with one process for the other cases elsewhere
            # transformers' models compute losses in float32, which dp ranks average.
            bound = {"rel": 1e-9} if ranks_of(mesh) == parse_mesh(mesh)["tp"] else {"abs": 1e-6}
            assert compiled.losses == pytest.approx(reference(case).losses, **bound)


def on_chunks(method: str) -> tuple[Run, Run, tuple[int, int]]:
    """Batches of three lengths on cp 2, with dropout and recomputation."""
    case = Lengths(steps=3, lora={"lora_dropout": 0.2})
    config = {"cp_method": method, "activation_checkpointing": True}
    eager = sharded(case, "1x1cp2", **config)
    begin_counting()
    return eager, sharded(case, "1x1cp2", **config, **WHOLE), counted()


@pytest.mark.matrix
@pytest.mark.parametrize("method", cases("ulysses", matrix=["all_gather"]))
def test_compiled_blocks_train_on_chunks_as_eager_ones(pool, method):
    """Graphs are of the first length, of lengths that cp divides and of others; no more however lengths vary."""
    for eager, compiled, (graphs, breaks) in pool.run(2, on_chunks, method):
        assert (graphs <= 3, breaks) == (True, 0), graphs
        assert compiled.losses == pytest.approx(eager.losses, rel=1e-10)
        assert relative_error(compiled.gradients, eager.gradients) < 1e-12
        assert relative_error(compiled.adapters, eager.adapters) < 1e-8


def beside_training(mesh_text: str) -> list[Any]:
    """What is not training, of a compiled model and of an eager one; and the model's own settings afterwards."""
    found = []
    for settings in ({}, WHOLE):
        mesh, config = on_mesh(mesh_text, require_adapters=False, **settings)
        model: Any = parallelize(causal_lm(use_cache=True), mesh, config).train()
        ids = torch.arange(10).view(2, 5)
        trained = model(input_ids=ids, labels=ids)
        trained.loss.backward()
        packed = model(input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 0, 1]] * 2))
        given = model(input_ids=ids, use_cache=True)
        model.eval()
        with torch.no_grad():
            evaluated = model(input_ids=ids)
            uncached = model(input_ids=ids, use_cache=False).logits
        told = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
        caches = [each.past_key_values is not None for each in (given, evaluated)]
        logits = {"trained": trained.logits, "packed": packed.logits, "cached": evaluated.logits, "uncached": uncached}
        assert (trained.past_key_values is None) == bool(settings)
        found.append(({name: each.detach() for name, each in logits.items()}, told, caches, model.config.use_cache))
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x1", "2x2"]))
def test_evaluation_and_generation_are_those_of_an_eager_model(pool, mesh):
    """A forward that is given a cache, or makes one, runs as it did; training makes none, unless it is asked to."""
    for (logits, told, caches, use_cache), (*compiled,) in pool.run(ranks_of(mesh), beside_training, mesh):
        assert relative_error(compiled[0], logits) < 1e-12
        assert torch.equal(compiled[1], told)
        assert compiled[2:] == [caches, use_cache] == [[True, True], True]


def tenants(mesh_text: str) -> tuple[dict[str, dict[str, Tensor]], list[int], int]:
    """Three steps of two tenants, and after each the number of graphs; then a batch of both."""
    begin_counting()
    mesh, model, pool = pool_of(mesh_text, WHOLE)
    graphs = []
    for name in ("ada", "bea"):
        add(pool, name)
    for step in range(STEPS):
        for name in ("ada", "bea"):
            ids = batch(name, step).chunk(dp_size(mesh))[dp_rank(mesh)]
            with pool.train(name):
                loss_of(model(input_ids=ids).logits, ids).backward()
            pool.step(name)
        graphs.append(counted()[0])
    found = {name: values(model, name) for name in ("ada", "bea")}
    with pool.route(["ada", "bea"]):
        model(input_ids=torch.arange(10).view(2, 5)).logits.sum().backward()
    pool.remove("ada")
    with pool.train("bea"):
        model(input_ids=torch.arange(10).view(2, 5)).logits.sum().backward()
    return found, graphs, counted()[1]


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", cases("1x1", matrix=["1x2", "2x2"]))
def test_tenants_train_in_compiled_blocks(pool, mesh):
    """One graph for each kind of adapter, and one for a first block; a batch of several tenants runs eagerly."""
    for found, graphs, breaks in pool.run(ranks_of(mesh), tenants, mesh):
        assert (graphs, breaks) == ([4, 4, 4], 0)
        for name, got in found.items():
            assert relative_error(got, alone(name)) < 1e-9, name


def compiled_row(name: str, mesh_text: str) -> tuple[Step, tuple[int, int]]:
    row = rows()[name]
    begin_counting()
    mesh, config = on_mesh(mesh_text, **row.config, compile={"backend": "aot_eager"})
    model = parallelize(row.build(), mesh, config)
    return _step(row, model, dp_rank(mesh), dp_size(mesh)), counted()


BREAKS = {"bert, classes", "modernbert", "clip text", "qwen2-moe, shared experts"}
BREAKS |= {"llava, images", "llava, images on one rank", "qwen2.5-vl, patches and their grid"}
"""Families whose own code asks for values of masks, grids or routers: the graph breaks in one process, too."""

WITHOUT_BLOCKS = {"distilbert", "electra", "deberta-v2"}
FAILS_ALONE = {"qwen3.5, gated delta net"}  # in one process, too, by AOTAutograd without inductor
COMPILED = [
    row.name
    for row in rows().values()
    if row.group in ("family", "quantised") and row.name not in WITHOUT_BLOCKS | FAILS_ALONE
]
IN_PLACE = "falcon, grouped"  # adds to the sum over tp in place


@pytest.mark.parametrize("name", cases(IN_PLACE, matrix=[name for name in COMPILED if name != IN_PLACE]))
def test_every_family_compiles(pool, name):
    for step, (graphs, breaks) in pool.run(2, compiled_row, name, "1x2"):
        assert graphs > 0
        assert (breaks > 0) == (name in BREAKS)
        assert relative_error(step.gradients, one_process(name).gradients) < max(rows()[name].tolerance, 1e-12)


def test_the_masks_of_dropout_are_the_same_in_compiled_code():
    """Its products of 32-bit numbers wrap around, in what the C++ compiler makes of them as well."""
    module = TopologyInvariantDropout(0.3, "layer", 5, ForwardCount(running=True), dp_rank=3, feature_offset=7)
    x = torch.ones(4, 33, 130)
    compiled = torch.compile(module)
    for number in (1, 2):
        module.count.current = number
        module.prepared = torch.tensor(module.keys(), dtype=torch.int32)
        want = module(x)
        assert 0.25 < (want == 0).float().mean() < 0.35
        assert torch.equal(compiled(x), want)


def test_one_that_prepares_nothing_is_noticed():
    """Keys of an earlier forward would drop where that one did."""
    module = TopologyInvariantDropout(0.3, "layer", 5, ForwardCount(running=True), dp_rank=0)
    module.prepared = torch.tensor(module.keys(1), dtype=torch.int32)
    module.count.current = 2
    stale = torch.compile(module, backend="aot_eager")(torch.ones(8, 40))
    assert differing({"x": stale}, {"x": module(torch.ones(8, 40))})


class Gated(nn.Module):
    """A block that looks at its input without gradients before it computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.gate(x).mean()
        return x + self.down(self.up(x) * gate)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Gated(), Gated()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def gated_model() -> Any:
    torch.manual_seed(4)
    targets = ["up", "gate", "down"]
    return get_peft_model(Stack().double(), LoraConfig(r=3, target_modules=targets, init_lora_weights=False)).double()


def gated_gradients(model: Any, accumulating: Any = nullcontext) -> dict[str, Tensor]:
    """Accumulate two passes: zeros are put in before the first one, of which FSDP2 reduces nothing."""
    for context in (accumulating, nullcontext):
        with context():
            model(torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 3, 8)).square().sum().backward()
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def own_backend(graph: Any, inputs: Any) -> Any:
    return graph.forward


def gated(mesh_text: str, backend: Any) -> tuple[Any, int, dict[str, Tensor]]:
    """A block fails in the forward; the next step is as if it had not."""
    plan = {"*.up": "colwise", "*.gate": "colwise_gather_output", "*.down": "rowwise"}
    compiled = {"backend": backend, "fullgraph": True}
    mesh, config = on_mesh(mesh_text, tp_plan=plan, block_classes=["Gated"], compile=compiled)
    model: Any = parallelize(gated_model(), mesh, config)
    block = model.get_base_model().blocks[1]
    wrong = attempt(block.forward, "no activations")
    shadows = [module for module in block.modules() if isinstance(module, nn.Linear) and "weight" in module.__dict__]
    return wrong, len(shadows), gated_gradients(model, partial(no_sync, model))


def test_layers_share_no_input_with_one_that_had_no_gradient(pool):
    """And a backend may be a function, which is another object on each rank; and a block that fails leaves its
    parameters in place.
    """
    want = gated_gradients(gated_model())
    for wrong, shadows, got in pool.run(2, gated, "1x2", own_backend):
        assert isinstance(wrong, Failure)
        assert shadows == 0
        assert got.keys() == want.keys()
        assert relative_error(got, want) < 1e-12


@pytest.mark.parametrize("mesh", cases("1x2", "2x1", matrix=["2x2"]))
def test_a_layer_that_is_used_without_gradients_alone_gets_none(pool, mesh):
    """A backend that differentiates has its factors among the graph's inputs, and autograd brings them nothing."""
    want = gated_gradients(gated_model())
    for _, _, got in pool.run(ranks_of(mesh), gated, mesh, "aot_eager"):
        assert got.keys() == want.keys()
        assert relative_error(got, want) < 1e-12


def tied(mesh_text: str) -> tuple[Step, tuple[int, int]]:
    mesh, config = on_mesh(mesh_text, require_adapters=False, compile={"backend": "eager"})
    model = base_model("BertForMaskedLM", ENCODER).double().train()
    begin_counting()
    model = parallelize(model, mesh, config)
    batch = {name: tensor.chunk(dp_size(mesh))[dp_rank(mesh)] for name, tensor in masked_language().items()}
    model(**batch).loss.backward()
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return Step(0.0, gradients), counted()


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2"]))
def test_blocks_that_share_a_weight_with_another_run_eagerly(pool, mesh):
    """FSDP2 gathers the weight when a layer asks for it, which is after the block has begun."""
    model = base_model("BertForMaskedLM", ENCODER).double().train()
    model(**masked_language()).loss.backward()
    want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for step, (graphs, _) in pool.run(ranks_of(mesh), tied, mesh):
        assert relative_error(step.gradients, want) < 1e-11
        assert graphs == 1  # of both layers; embeddings and head share their weight, and run eagerly


def calls_a_part(mesh_text: str) -> list[Any]:
    mesh, config = on_mesh(mesh_text, **WHOLE)
    model = parallelize(Case(lora={"lora_dropout": 0.1}).model(), mesh, config)
    return [attempt(model.get_base_model().model, torch.arange(12)[None])]


def test_dropout_of_a_forward_that_is_not_counted_is_refused(pool):
    """It would drop where the last forward did."""
    for (failure,) in pool.run(2, calls_a_part, "1x2"):
        assert isinstance(failure, Failure)
        assert "was called in training, but not by the model's own forward" in failure.message
