"""Mistakes made on purpose: a guard fires, or the comparison with one process shows it."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from lora_parallel import parallelize
from lora_parallel.distributed.gradients import Gradients
from lora_parallel.layers.layer_parameters import clean_names
from lora_parallel.layers.styles import STYLES, RowPartition
from lora_parallel.planning import plan
from lora_parallel.runtime import step
from lora_parallel.tp import context
from lora_parallel.tracing.layer_groups import verify_ranks
from lora_parallel.tracing.prove_feature_slices import find_structure
from tests.oracle import Case, causal_lm, on_mesh, reference, relative_error, sharded
from tests.oracle.workers import Failure, attempt

PHI3 = {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
SMALL = {"num_hidden_layers": 1}
CASES = {
    "plain": Case(steps=1, sizes=SMALL),
    "fused": Case(family="phi3", steps=1, lora=PHI3, sizes=SMALL),
    "norms": Case(family="qwen3", steps=1, lora={"modules_to_save": ["q_norm"]}, sizes=SMALL),
    "tied": Case(steps=1, adapters=False, sizes={**SMALL, "tie_word_embeddings": True}),
}
want = cache(lambda name: reference(CASES[name]).gradients)


def chunked(partition: RowPartition) -> RowPartition:
    """The same number of rows on each rank, chunk after chunk."""
    tp = len(partition.ranks)
    return RowPartition.of(
        [list(range(rank * partition.width, (rank + 1) * partition.width)) for rank in range(tp)], partition.size
    )


def cut_fused_layers_in_chunks(patch: pytest.MonkeyPatch) -> None:
    own = plan.find_structure

    def find(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        for layer_group in found.layer_groups:
            layer_group.producers = {name: chunked(partition) for name, partition in layer_group.producers.items()}
        return found

    patch.setattr(plan, "find_structure", find)


def skip_a_reduction(patch: pytest.MonkeyPatch) -> None:
    own = step.PartialSums
    patch.setattr(step, "PartialSums", lambda gradients, partial, *args: own(gradients, partial[1:], *args))


def take_a_partial_gradient_for_whole(patch: pytest.MonkeyPatch) -> None:
    own = Gradients.leaf
    patch.setattr(Gradients, "leaf", lambda self, parameter, is_partial: own(self, parameter, False))
    by_name = "replicated_with_grad_allreduce"
    patch.setitem(STYLES, by_name, replace(STYLES[by_name], partial_roles=frozenset()))


def forget_the_input_reduction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(context, "copy_to_tp", lambda x, group, where: x)


def cut_a_tie(patch: pytest.MonkeyPatch) -> None:
    own = sys.modules["lora_parallel.tp.apply_style"].apply_style

    def apply(name: str, module: nn.Module, *args: Any) -> Any:
        result = own(name, module, *args)
        if name == "lm_head":
            module.weight = nn.Parameter(module.weight.detach().clone())
        return result

    patch.setattr(sys.modules["lora_parallel.tp.apply_style"], "apply_style", apply)


MISTAKES = {
    "fused layers in chunks": ("fused", cut_fused_layers_in_chunks),
    "one reduction skipped": ("plain", skip_a_reduction),
    "a partial gradient taken for whole": ("norms", take_a_partial_gradient_for_whole),
    "the input gradient not summed": ("plain", forget_the_input_reduction),
    "a tie cut": ("tied", cut_a_tie),
}


def make(mistake: str | None, case: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if mistake is not None:
            MISTAKES[mistake][1](patch)
        config = {"require_adapters": False} if case == "tied" else {}
        return [attempt(sharded, CASES[case], "1x2", **config)]


@pytest.mark.parametrize("case", CASES)
def test_without_a_mistake_the_comparison_holds(pool, case):
    for (run,) in pool.run(2, make, None, case):
        assert relative_error(run.gradients, want(case)) <= 1e-12


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_or_a_guard_shows_a_mistake(pool, mistake):
    case = MISTAKES[mistake][0]
    for (run,) in pool.run(2, make, mistake, case):
        if isinstance(run, Failure):
            assert mistake == "a tie cut", run.trace
            assert "lm_head.weight were one tied weight, and are not after sharding" in run.message
        else:
            assert mistake != "a tie cut"
            assert relative_error(run.gradients, want(case)) > 1e-3


class Fused(nn.Module):
    """Gate and up in one layer. Takes what nobody can guess."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(6, 16), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(torch.tanh(gate) * up) * scale


PLANS = {
    "in chunks": {"both": "colwise", "down": "rowwise"},
    "swapped": {"both": "rowwise", "down": "colwise"},
    "as it is": {"both": "packed_colwise", "down": "rowwise"},
    "gathered": {"both": "colwise_gather_output", "down": "rowwise_split_input"},
}


def try_plans():
    found = {}
    for name, globs in PLANS.items():
        mesh, config = on_mesh("1x2", tp_plan=globs, require_adapters=False)
        torch.manual_seed(0)
        alone = Fused().double()
        torch.manual_seed(0)
        model = parallelize(Fused().double(), mesh, config)
        x, scale = torch.randn(4, 3, 6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
        found[name] = attempt(model, x, scale=scale), alone(x, scale=scale).detach()
        if not isinstance(found[name][0], Failure):
            found[name] = found[name][0].detach(), found[name][1]
    return found


def test_a_plan_that_could_not_be_tried_before_is_tried_on_the_first_batch(pool):
    for found in pool.run(2, try_plans):
        for name in ("in chunks", "swapped"):
            error = found[name][0]
            assert isinstance(error, Failure)
            assert "which is not what the model computes on the first batch" in error.message
        for name in ("as it is", "gathered"):
            assert torch.allclose(*found[name], rtol=1e-12)


@pytest.mark.parametrize("layer", ["qkv_proj", "gate_up_proj"])
def test_the_proof_fails_for_a_fused_layer_in_chunks(layer):
    """Shapes alone would not: a chunk has as many rows."""
    model = causal_lm("phi3")
    found = find_structure(model, clean_names(model), 2)
    layer_group = next(
        layer_group for layer_group in found.layer_groups if any(name.endswith(layer) for name in layer_group.producers)
    )
    twins = {real: twin for twin, real in ((t, r) for r, t in found.tracer.twin_of.items())}
    layer_group.attributes = {twins[module]: values for module, values in layer_group.attributes.items()}
    assert verify_ranks(found.tracer, [layer_group], 2, range(2)) is None
    layer_group.producers = {name: chunked(partition) for name, partition in layer_group.producers.items()}
    problem = verify_ranks(found.tracer, [layer_group], 2, range(2))
    assert problem is not None
    assert "is not fed what it should be" in problem


def test_the_proof_fails_with_the_whole_models_head_count():
    model = causal_lm("phi3")
    found = find_structure(model, clean_names(model), 2)
    layer_group = next(layer_group for layer_group in found.layer_groups if layer_group.attributes)
    layer_group.attributes = {}
    assert verify_ranks(found.tracer, [layer_group], 2, range(2)) is not None
    assert torch.is_grad_enabled()
