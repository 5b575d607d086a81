"""Ranks with different batches run the same blocks in the same order, or every one of them raises an error."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration, M2M100Config, M2M100ForConditionalGeneration

from lora_parallel import no_sync, parallelize
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.fsdp import unit_order
from tests.cases import cases
from tests.lora_parallel.traffic import Traffic
from tests.oracle import Case, fill_adapters, full, on_mesh, ranks_of, relative_error, trained
from tests.oracle.workers import IMPATIENT, Failure, attempt

CASE = Case(steps=6, sizes={"num_hidden_layers": 6}, lora={"target_modules": ["q_proj"]})
SEQUENCE = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "vocab_size": 32}
SMALL = {**SEQUENCE, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "pad_token_id": 1}


class Steps:
    """A model on a mesh of which a test chooses the blocks that this rank runs, and what was compared meanwhile."""

    def __init__(self, mesh: str, **settings: Any) -> None:
        self.mesh, config = on_mesh(mesh, **settings)
        self.row = dp_rank(self.mesh)
        self.model = parallelize(CASE.model(), self.mesh, config)
        self.trunk = self.model.base_model.model.model
        self.blocks = list(self.trunk.layers)
        self.compared: list[str] = []

    def losses(self, step: int, blocks: list[int]) -> Any:
        """The loss, and that of the embeddings alone, with these blocks only."""
        batch = CASE.batches()[step].chunk(dp_size(self.mesh))[self.row]
        self.trunk.layers = nn.ModuleList(self.blocks[index] for index in blocks)
        try:
            return self.model(input_ids=batch, labels=batch).loss
        finally:
            self.trunk.layers = nn.ModuleList(self.blocks)

    def train(self, step: int, blocks: list[int]) -> None:
        self.losses(step, blocks).backward()

    def __enter__(self) -> Steps:
        self._own, unit_order.PATIENCE = (unit_order.meet, unit_order.PATIENCE), 0.2

        def meet(step: str, *more: Any) -> None:
            self.compared.append(step)
            self._own[0](step, *more)

        unit_order.meet = meet
        return self

    def __exit__(self, *error: object) -> None:
        unit_order.meet, unit_order.PATIENCE = self._own


ALL = [0, 1, 2, 3, 4, 5]


PARTED = {
    "others": ([0, 1, 4, 5], [0, 2, 3, 5]),
    "fewer": ([0, 1, 4, 5], [0, 1, 3, 4, 5]),
    "fewer at the end": ([0, 1, 2], [0, 1, 2, 3]),
    "fewer at the beginning": ([1, 2], [0, 1, 2]),
}


def part_at_once(mesh: str) -> dict[str, Any]:
    """By kind: what was raised in the first step, in which the two dp rows run different blocks."""
    found = {}
    for kind, (first, second) in PARTED.items():
        with Steps(mesh) as steps:
            found[kind] = attempt(steps.train, 0, second if steps.row else first)
    return found


def part_later(mesh: str, kind: str) -> None:
    """Run different blocks after two steps on the same ones."""
    with Steps(mesh) as steps:
        for step in range(2):
            steps.train(step, ALL)
        first, second = PARTED.get(kind, (ALL, ALL))
        loss = steps.losses(2, second if steps.row else first)
        if kind == "in backward" and not steps.row:
            loss = loss.detach().requires_grad_() * 1.0  # reaches no block
        loss.backward()
        steps.train(3, ALL)


def check_told(raised: Failure, units: tuple[str, ...]) -> None:
    assert raised.kind == "RuntimeError", raised
    assert "ranks make different calls: rank " in raised.message
    assert "must run the same blocks in the same order: turn LayerDrop off" in raised.message
    for unit in units:
        assert f"gather of base_model.model.model.{unit} of PeftModelForCausalLM" in raised.message


def test_replicas_that_run_different_blocks_are_told_as_they_reduce(pool):
    """They gather nothing from each other."""
    for found in pool.run(2, part_at_once, "2x1x1"):
        for kind in PARTED:
            assert found[kind].kind == "RuntimeError", (kind, found[kind])
            assert "ranks make different calls: rank " in found[kind].message
            assert "must run the same blocks in the same order: turn LayerDrop off" in found[kind].message
        assert "reduction of base_model.model.model.layers.3" in found["fewer"].message
        assert "use of the parameters of PeftModel" in found["fewer at the beginning"].message


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2", "2x2x1"]))
def test_ranks_that_run_different_blocks_are_all_told_which(pool, mesh):
    for found in pool.run(ranks_of(mesh), part_at_once, mesh):
        check_told(found["others"], ("layers.1", "layers.2"))
        check_told(found["fewer"], ("layers.4", "layers.3"))
        check_told(found["fewer at the end"], ("layers.2", "layers.3"))


@pytest.mark.parametrize(
    ("mesh", "kind", "units"),
    cases(
        ("2x1", "others", ("layers.1", "layers.2")),
        ("2x1", "in backward", ()),
        ("2x2", "fewer at the end", ("layers.2", "layers.3")),
        matrix=[
            ("2x1", "fewer", ("layers.3", "layers.4")),
            ("2x2", "others", ("layers.1", "layers.2")),
            ("2x2x1", "fewer", ("layers.3", "layers.4")),
        ],
    ),
)
def test_ranks_that_part_after_steps_alike_are_all_told(pool, mesh, kind, units):
    """One of them waits in a gather by then, which nobody joins; it finds out that another rank asks."""
    for raised in pool.try_run(ranks_of(mesh), part_later, mesh, kind):
        check_told(raised, units)


def swap_two_blocks(usual: int) -> None:
    """Run blocks of equal shapes in another order on the second dp row, and name the blocks that began to compute."""
    with Steps("2x1") as steps:
        for step in range(usual):
            steps.train(step, ALL)
        computed: list[int] = []
        for index, block in enumerate(steps.blocks):  # what is inside of a unit runs once the unit is gathered
            block.self_attn.register_forward_pre_hook(lambda *_, index=index: computed.append(index))
        try:
            steps.losses(usual, [0, 2, 1, 3, 4, 5] if steps.row else ALL)
        except RuntimeError as error:
            raise RuntimeError(f"{error} Computed: {computed}") from error


@pytest.mark.parametrize("usual", [0, 2], ids=["at once", "later"])
def test_no_rank_computes_with_the_rows_of_a_block_that_another_has_swapped(pool, usual):
    """Their gathers fit each other in size: without an error both would compute with rows of two blocks."""
    for raised in pool.try_run(2, swap_two_blocks, usual):
        check_told(raised, ("layers.1", "layers.2"))
        assert raised.message.endswith("Computed: [0]")


def leave_a_backward_out() -> None:
    """A rank that skips a batch, where what was gathered for the forward is kept for the backward."""
    with Steps("2x1", reshard_after_forward=False) as steps:
        for step in range(3):
            steps.train(step, ALL)
        loss = steps.losses(3, ALL)
        if steps.row == 0:
            loss.backward()
        steps.train(4, ALL)


def test_a_backward_that_one_rank_leaves_out_is_told(impatient_pool):
    """A wait for gloo's reduce-scatter ends with its timeout only: rank 0 asks just as rank 1 has waited as long.

    Rank 0 is told of both calls in any case; rank 1 as well, or it stopped waiting before rank 0 asked.
    """
    first, second = impatient_pool.try_run(2, leave_a_backward_out)
    forward, reduction = "forward of PeftModelForCausalLM for training", "reduction of base_model.model.model.layers"
    assert first.kind == "RuntimeError", first
    assert forward in first.message
    assert reduction in first.message
    if second.kind == "TimeoutError":
        assert f"for ranks [0] in {forward}" in second.message
        assert "Rows without an image do not run its tower" in second.message
        waited = re.search(r"rank 1 waited (\d+) s", first.message)
        assert waited is not None, first
        assert int(waited[1]) >= IMPATIENT
        return
    for raised in (first, second):
        assert raised.kind == "RuntimeError", raised
        assert f"ranks make different calls: rank 0 {reduction}" in raised.message
        assert "as many forwards and backward passes" in raised.message


def wait_for_the_dead() -> None:
    """Wait in a reduce-scatter whose peer is killed, by the order of units."""
    output, given = torch.empty(2), torch.ones(4)
    dist.reduce_scatter_tensor(output, given)  # the ranks are connected
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.reduce_scatter_tensor(output, given, async_op=True)
    unit_order.UnitOrder().wait(work, "reduction of a unit", dist.group.WORLD)


def test_a_wait_ends_when_the_peer_is_killed(pool):
    """Gloo's reduce-scatter is never complete then, but each wait for it fails at once."""
    first, second = pool.try_run(2, wait_for_the_dead)
    assert "SIGKILL" in second.message
    assert "Connection" in first.message


def models_in_turn(usual: bool) -> None:
    """Two models of one class, which the second dp row runs in the other order."""
    first, second = Steps("2x1"), Steps("2x1")
    with first:
        for steps in (first, second, first, second) if usual else ():
            steps.train(0, ALL)
        for steps in (second, first) if first.row else (first, second):
            steps.train(1, ALL)


@pytest.mark.parametrize("usual", [False, True])
def test_two_models_are_told_apart(pool, usual):
    for raised in pool.try_run(2, models_in_turn, usual):
        assert "ranks make different calls: rank 0 " in raised.message, raised
        assert ", rank 1 forward of PeftModelForCausalLM" in raised.message


SCHEDULE = [ALL, ALL, [0, 2, 4], ALL, [0, 2, 4], [1, 5]]


def same_blocks(mesh: str) -> Any:
    """Every rank on the same blocks, which are others at each step; and which steps were compared, by step."""
    counts = []
    with Steps(mesh) as steps:
        gradients = []
        for step, blocks in enumerate(SCHEDULE):
            steps.compared.clear()
            steps.train(step, blocks)
            gradients.append({name: full(p.grad) for name, p in trained(steps.model).items() if p.grad is not None})
            steps.model.zero_grad()
            counts.append(len(steps.compared))
    return gradients, counts


def test_blocks_that_every_rank_runs_are_its_own_business(pool):
    model = CASE.model()
    trunk = model.base_model.model.model
    blocks, want = list(trunk.layers), []
    for batch, chosen in zip(CASE.batches(), SCHEDULE, strict=True):
        model.zero_grad()
        trunk.layers = nn.ModuleList(blocks[index] for index in chosen)
        model(input_ids=batch, labels=batch).loss.backward()
        trunk.layers = nn.ModuleList(blocks)
        want.append({name: p.grad.clone() for name, p in trained(model).items() if p.grad is not None})
    for gradients, counts in pool.run(2, same_blocks, "2x1"):
        for got, expected in zip(gradients, want, strict=True):
            assert relative_error(got, expected) <= 1e-12
        assert counts[1] == 1  # that a forward follows the first
        assert counts[4] < counts[2]  # where the two part, not all that follows


def usual_steps(mesh: str) -> Any:
    """What is compared, and sent, in steps of any kind once each kind has been."""
    with Steps(mesh) as steps:

        def window() -> None:
            for step in range(3):
                with no_sync(steps.model):
                    steps.train(step, ALL)
            steps.train(3, ALL)

        def evaluate() -> None:
            steps.model.eval()
            with torch.no_grad():
                steps.losses(4, ALL)
                steps.losses(5, ALL)
            steps.model.train()

        found = {}
        for name, kind in {"step": lambda: steps.train(0, ALL), "window": window, "evaluation": evaluate}.items():
            for _ in range(3):
                steps.compared.clear()
                with Traffic() as traffic:
                    kind()
            found[name] = len(steps.compared), len(traffic.calls)
    return found


def test_usual_steps_are_compared_with_no_one(pool):
    """One gather a unit forward, one a block backward, one reduction a block, and one of what was used; nothing of the
    comparison.
    """
    for found in pool.run(2, usual_steps, "2x1"):
        assert found["step"] == (0, 7 + 6 + 6 + 1)
        assert found["window"] == (0, 4 * (7 + 6) + 6 + 1)
        assert found["evaluation"][0] == 0


def evaluate_alone(mesh: str) -> Any:
    with Steps(mesh) as steps:
        for step in range(3):
            if steps.row == 1 or step == 1:
                with torch.no_grad():
                    steps.losses(4, ALL)
            steps.train(step, ALL)
        return {name: full(p.grad) for name, p in trained(steps.model).items()}


def test_replicas_evaluate_what_they_like(pool):
    """Nothing is sharded between them: forwards without gradients communicate nothing, on any rank."""
    model = CASE.model()
    for batch in CASE.batches()[:3]:
        model(input_ids=batch, labels=batch).loss.backward()
    want = {name: p.grad for name, p in trained(model).items()}
    for got in pool.run(2, evaluate_alone, "2x1x1"):
        assert relative_error(got, want) <= 1e-12


def after_an_error(mesh: str) -> Any:
    with Steps(mesh) as steps:
        steps.train(0, ALL)
        steps.blocks[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        failed = attempt(steps.train, 1, ALL)
        steps.blocks[2].mlp._forward_pre_hooks.clear()
        steps.model.zero_grad()
        steps.train(2, ALL)
        return failed.kind, {name: full(p.grad) for name, p in trained(steps.model).items()}


def test_a_step_that_failed_is_followed_by_one_that_is_compared_anew(pool):
    model, batch = CASE.model(), CASE.batches()[2]
    model(input_ids=batch, labels=batch).loss.backward()
    want = {name: p.grad for name, p in trained(model).items()}
    for kind, got in pool.run(2, after_an_error, "2x1"):
        assert kind == "ZeroDivisionError"
        assert relative_error(got, want) <= 1e-12


def layer_drops(mesh: str) -> dict[str, Any]:
    found = {}
    for name, kind, settings in (
        ("M2M100", M2M100ForConditionalGeneration, M2M100Config(**SMALL)),
        ("BART", BartForConditionalGeneration, BartConfig(**SMALL)),
        ("BART, set", BartForConditionalGeneration, BartConfig(**SMALL, decoder_layerdrop=0.01)),
        ("BART, frozen encoder", BartForConditionalGeneration, BartConfig(**SMALL, encoder_layerdrop=0.5)),
    ):
        on, config = on_mesh(mesh)
        model = get_peft_model(kind(settings), LoraConfig(target_modules=["q_proj", "fc1"]))
        fill_adapters(model)
        model = parallelize(model.train(), on, config)
        ids = torch.randint(4, 32, (2, 6), generator=torch.Generator().manual_seed(0))
        model.eval()
        with torch.no_grad():
            evaluated = attempt(lambda model=model, ids=ids: model(input_ids=ids, labels=ids).loss.item())
        model.train()
        if name == "BART, frozen encoder":
            model.get_encoder().eval()  # which drops nothing
        raised = attempt(lambda model=model, ids=ids: model(input_ids=ids, labels=ids).loss.backward())
        for module in model.modules():
            if hasattr(module, "layerdrop"):
                module.layerdrop = 0.0
        found[name] = type(evaluated), raised, attempt(lambda m=model, i=ids: m(input_ids=i, labels=i).loss.backward())
    return found


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["1x2"]))
def test_layer_drop_is_refused_by_name_in_training(pool, mesh):
    for found in pool.run(2, layer_drops, mesh):
        for name, (evaluated, raised, afterwards) in found.items():
            assert evaluated is float
            assert afterwards is None, afterwards
            if mesh == "1x2" or name in ("BART", "BART, frozen encoder"):
                assert raised is None, raised
                continue
            assert raised.kind == "ValueError"
            side = "decoder" if name == "BART, set" else "encoder"
            probability = 0.01 if name == "BART, set" else 0.05
            assert f"base_model.model.model.{side}.layerdrop is {probability}: LayerDrop skips" in raised.message
