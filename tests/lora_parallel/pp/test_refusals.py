"""What pipeline stages refuse, on every rank; and ranks that fail, end or are fed something else."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lora_parallel import ParallelConfig, TenantPool, parallelize, save_adapter
from lora_parallel.pp.pipeline import Pipeline, ScheduleRun
from lora_parallel.pp.schedules import balanced_bounds
from lora_parallel.state import state_of
from tests.lora_parallel.cp.runs import ids, language
from tests.lora_parallel.pp import models
from tests.lora_parallel.pp.models import Own, adapted
from tests.lora_parallel.pp.runs import PP, Run
from tests.oracle import SEVEN, full, on_mesh, relative_error, trained
from tests.oracle.rows import rows
from tests.oracle.workers import Death, Failure, attempt


def llama(**settings: Any) -> nn.Module:
    return Run(settings=settings).model()


def frozen_ends() -> nn.Module:
    return Run(lora={"layers_to_transform": [0, 1]}).model()


def without_adapters() -> nn.Module:
    return Run().model().unload().requires_grad_(True)  # type: ignore[operator]


def frozen() -> nn.Module:
    return without_adapters().requires_grad_(False)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "more stages than blocks": (partial(llama, num_hidden_layers=1), {}, "the model has 1 blocks .* 2 stages"),
    "blocks that are none": (llama, {"pp_split": ["model.norm"]}, "'model.norm' is no block"),
    "blocks twice": (
        llama,
        {"pp_schedule": "interleaved", "pp_stages_per_rank": 2, "pp_split": ["model.layers.2"] * 3},
        "in the model's order",
    ),
    "rounds": (
        llama,
        {"pp_schedule": "interleaved", "pp_stages_per_rank": 2, "pp_microbatches": 5},
        "do not divide pp_microbatches=5",
    ),
    "a trained tie": (
        lambda: Run(
            settings={"tie_word_embeddings": True},
            lora={"target_modules": SEVEN, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        ).model(),
        {},
        "one weight that trains|trains, and it would be on the pipeline ranks",
    ),
    "an encoder and a decoder": (lambda: rows()["bart"].build(), {}, "an encoder and a decoder"),
    "relative embeddings": (lambda: rows()["deberta-v2"].build(), {}, "the weight of .*rel_embeddings is used without"),
    "hidden states": (partial(llama, output_hidden_states=True), {}, "output_hidden_states=True: under pp"),
    "no adapters": (without_adapters, {"require_adapters": False}, "pp=2 without adapters"),
    "a frozen model": (frozen, {"require_adapters": False}, r"of this LlamaForCausalLM trains.*teacher.*GKD.*use pp=1"),
    "adapters in some blocks": (frozen_ends, {}, r"nothing trains on the pipeline ranks \[1\]"),
    "a side output": (partial(adapted, models.WithSideOutput), {}, "is not fed the same by a stage"),
    "a layer between": (partial(adapted, models.WithLayerBetween), {}, "norm is called between blocks"),
    "a block twice": (partial(adapted, models.WithOneBlockTwice), {}, "one after the other"),
    "an uncalled layer": (partial(adapted, models.WithUncalledLayer), {}, "spare was not called"),
    "a head by hand": (partial(adapted, models.WithHeadByHand), {}, "the weight of .*embed is used without"),
    "a trained norm around blocks": (
        partial(adapted, models.WithLayerBetween, modules_to_save=["norm"]),
        {},
        "norm is called between",
    ),
}


def refused(names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        build, config, _ = MODELS[name]
        model = build()
        before = dict(model.named_parameters())
        mesh, settings = on_mesh("1x1pp2", **{**PP, **config})
        answer = attempt(parallelize, model, mesh, settings)
        untouched = (
            all(before[key] is p for key, p in model.named_parameters())
            and before.keys() == dict(model.named_parameters()).keys()
        )
        found[name] = answer if isinstance(answer, Failure) else "served", untouched
    return found


def test_models_and_configs_are_refused_by_name_and_left_as_they_are(fake_pool):
    for found in fake_pool.run(2, refused, list(MODELS)):
        for name, (answer, untouched) in found.items():
            assert isinstance(answer, Failure), f"{name} was served"
            assert answer.kind == "ValueError", (name, answer.trace)
            assert re.search(MODELS[name][2], answer.message), (name, answer.message)
            assert untouched, name


@pytest.mark.parametrize(
    ("config", "kind", "text"),
    [
        ({"pp": 0}, ValueError, "pp=0: give a positive int"),
        ({"pp_microbatches": 1.5}, TypeError, "pp_microbatches=1.5"),
        ({"pp_schedule": "zero bubble"}, ValueError, 'give "1f1b", "gpipe" or "interleaved"'),
        ({"pp": 2, "pp_schedule": "interleaved"}, ValueError, "2 stages or more"),
        ({"pp": 2, "pp_stages_per_rank": 2}, ValueError, "for 1"),
        ({"pp": 2, "pp_split": ["a", "b"]}, ValueError, "all but the first"),
        ({"pp_split": "half"}, ValueError, "a list of names of blocks"),
        ({"pipeline_parallel_size": 2}, TypeError, "did you mean pp"),
    ],
)
def test_configs_are_checked(config, kind, text):
    with pytest.raises(kind, match=text):
        ParallelConfig(**config)


# ---------------------------------------------------------------------- calls


def calls() -> dict[str, Any]:
    """What a model that works refuses, and a step after all of it."""
    mesh, settings = on_mesh("1x1pp2", **PP)
    model: Any = parallelize(Run().model(), mesh, settings)
    batch = language()
    found = {
        "rows": attempt(model, **{name: each[:3] for name, each in batch.items()}),
        "hidden states": attempt(lambda: model(**batch, output_hidden_states=True)),
        "attentions": attempt(lambda: model(**batch, output_attentions=True)),
        "a cache": attempt(lambda: model(**batch, use_cache=True)),
        "inputs": attempt(lambda: model(inputs_embeds=torch.randn(4, 5, 40, dtype=torch.float64, requires_grad=True))),
        "generate": attempt(lambda: model.generate(input_ids=batch["input_ids"])),
        "generate of the base": attempt(lambda: model.get_base_model().generate(input_ids=batch["input_ids"])),
        "forward": attempt(lambda: model.forward(**batch)),
        "the inside": attempt(lambda: model.get_base_model()(**batch)),
        "tenants": attempt(lambda: TenantPool(model)),
        "saving the inside": attempt(save_adapter, model.base_model, "nowhere"),
    }
    output = model(**batch)
    both = output.loss + output.logits.square().mean()
    found["a gradient of logits"] = attempt(both.backward)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    found["twice"] = attempt(loss.backward)
    model.zero_grad()
    loss = model(input_ids=batch["input_ids"]).logits.square().mean()
    loss.backward(retain_graph=True)
    found["twice, without labels"] = attempt(loss.backward)
    return found


CALLS = {
    "rows": "a batch has 3 rows, which pp_microbatches=4 does not divide",
    "hidden states": "output_hidden_states=True: under pp",
    "attentions": "output_attentions=True: under pp",
    "a cache": "use_cache=True",
    "inputs": "an input of the model requires a gradient",
    "generate": "generate does not work under pipeline parallelism",
    "generate of the base": "generate does not work under pipeline parallelism",
    "forward": "model.forward was called by itself",
    "the inside": "is on another pipeline stage|was called",
    "tenants": "a TenantPool needs the whole base",
    "saving the inside": "is inside of a model with pipeline stages",
    "a gradient of logits": "a gradient came back through an output",
    "twice": "backward was called twice",
    "twice, without labels": "backward was called twice",
}


def test_calls_are_refused_on_every_rank(pool):
    answers = pool.run(2, calls)
    for name, text in CALLS.items():
        found = [answer[name] for answer in answers]
        assert all(isinstance(each, Failure) for each in found) or name == "the inside", (name, found)
        assert any(isinstance(each, Failure) and re.search(text, each.message) for each in found), (name, found)


def own_models() -> dict[str, Any]:
    """A model of one's own is served; one that returns something without rows is refused in its first forward."""
    found: dict[str, Any] = {}
    batch = torch.arange(32).view(4, 8) % 11
    mesh, settings = on_mesh("1x1pp2", **PP)
    model: Any = parallelize(adapted(Own), mesh, settings)
    model(batch).square().mean().backward()
    found["gradients"] = {name: full(p.grad) for name, p in trained(model).items()}
    odd: Any = parallelize(adapted(models.WithScalar), mesh, settings)
    start = time.monotonic()
    found["scalar"] = attempt(odd, batch), time.monotonic() - start
    found["after"] = attempt(odd, batch)
    return found


def test_models_of_ones_own(pool):
    model, batch = adapted(Own), torch.arange(32).view(4, 8) % 11
    model(batch).square().mean().backward()
    want = {name: p.grad for name, p in trained(model).items()}
    answers = pool.run(2, own_models)
    for found in answers:
        assert relative_error(found["gradients"], {name: want[name] for name in found["gradients"]}) < 1e-12
        failure, seconds = found["scalar"]
        assert "What has no rows cannot be joined" in failure.message
        assert seconds < 20
        assert "an earlier step of this pipeline failed" in found["after"].message


# ---------------------------------------------------------------------- ranks that fail


def other_batches() -> list[Any]:
    mesh, settings = on_mesh("1x1pp2", **PP)
    model: Any = parallelize(Run().model(), mesh, settings)
    model(**language()).loss.backward()
    found = []
    for tokens in (14, 14):
        batch = ids(seed=dist.get_rank(), tokens=tokens)
        found.append(attempt(lambda batch=batch: model(input_ids=batch, labels=batch)))
    return found


def test_stages_that_are_fed_other_batches_are_told(pool):
    for found in pool.run(2, other_batches):
        for failure in found:
            assert isinstance(failure, Failure)
            assert "are pipeline parallel peers and were fed different batches" in failure.message


def one_rank_fails(mesh_text: str, place: int, in_backward: bool) -> tuple[Any, float, Any]:
    """One rank raises in the second action of a kind."""
    mesh, settings = on_mesh(mesh_text, **PP)
    model: Any = parallelize(Run().model(), mesh, settings)
    model(**language()).loss.backward()
    kind = "_backward" if in_backward else "_forward"
    own, count = getattr(ScheduleRun, kind), [0]

    def failing(self: Any, *args: Any) -> None:
        count[0] += 1
        if dist.get_rank() == place and count[0] == 2:
            raise MemoryError("out of memory, as it were")
        own(self, *args)

    start = time.monotonic()
    with patch.object(ScheduleRun, kind, failing):
        answer = attempt(lambda: model(**language()))
    return answer, time.monotonic() - start, attempt(lambda: model(**language()))


@pytest.mark.parametrize(("place", "in_backward"), [(0, False), (1, False), (1, True)])
def test_a_rank_that_raises_in_a_schedule_is_told_on_all_ranks(pool, place, in_backward):
    answers = pool.run(2, one_rank_fails, "1x1pp2", place, in_backward)
    for rank, (failure, seconds, after) in enumerate(answers):
        assert isinstance(failure, Failure)
        assert seconds < 20
        if rank == place:
            assert failure.kind == "MemoryError"
        else:
            assert f"rank {place} failed: MemoryError: out of memory" in failure.message
        assert "an earlier step of this pipeline failed" in after.message


def one_rank_ends(place: int) -> Any:
    mesh, settings = on_mesh("1x1pp2", **PP)
    model: Any = parallelize(Run().model(), mesh, settings)
    own = Pipeline.around

    def ending(self: Any, *args: Any) -> Any:
        if dist.get_rank() == place:
            os._exit(3)
        return own(self, *args)

    start = time.monotonic()
    with patch.object(Pipeline, "around", ending):
        return attempt(lambda: model(**language())), time.monotonic() - start


@pytest.mark.parametrize("place", [1])
def test_a_rank_that_ends_in_a_schedule_is_an_error_of_the_others(pool, place):
    answers = pool.try_run(2, one_rank_ends, place)
    assert isinstance(answers[place], Death)
    failure, seconds = answers[1 - place]
    assert isinstance(failure, Failure)
    assert "message between the pipeline ranks" in failure.message or "waited" in failure.message
    assert seconds < 30


# ---------------------------------------------------------------------- mistakes made on purpose


def broken(what: str) -> dict[str, Any]:
    mesh, settings = on_mesh("1x1pp2", **PP)
    run = Run(lora={"lora_dropout": 0.3}) if what == "rows of dropout" else Run()
    model: Any = parallelize(run.model(), mesh, settings)
    own = ScheduleRun._backward
    with patch.object(ScheduleRun, "_backward", own):
        pipeline = state_of(model).pipeline
        if what == "rows of dropout":
            pipeline._count.share_of = lambda dp_rank: dp_rank  # every micro-batch drops as the first
        if what == "number of labels":
            pipeline._loss.begin = _with_own_numbers(pipeline._loss.begin)
        model(**language()).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


def _with_own_numbers(begin: Any) -> Any:
    def own(*args: Any) -> Any:
        found = begin(*args)
        found._number = None  # each micro-batch takes its own mean
        return found

    return own


def whole(dropout: float) -> dict[str, Any]:
    mesh, settings = on_mesh("1x1")
    model: Any = parallelize(Run(lora={"lora_dropout": dropout}).model(), mesh, settings)
    model(**language()).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


@pytest.mark.parametrize(("what", "dropout"), [("rows of dropout", 0.3), ("number of labels", 0.0)])
def test_mistakes_are_seen_by_the_comparison(pool, what, dropout):
    """The oracle of these tests would see it if a micro-batch were taken for the whole batch."""
    (want,) = pool.run(1, whole, dropout)
    for found in pool.run(2, broken, what):
        assert relative_error(found, {name: want[name] for name in found}) > 1e-3


# ---------------------------------------------------------------------- the split


def test_stages_are_balanced_with_embeddings_and_head_counted():
    block, ends = (10.0, 10.0), (25.0, 0.0)
    bounds = balanced_bounds([block] * 12, ends, (25.0, 25.0), 4)
    assert [last - first for first, last in bounds] == [3, 3, 3, 3] or bounds[-1][1] - bounds[-1][0] <= 3
    held = [10 * (last - first) for first, last in bounds]
    held[0] += 25
    held[-1] += 25
    assert max(held) <= 55
    assert balanced_bounds([block] * 4, (0.0, 0.0), (0.0, 0.0), 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert balanced_bounds([(1.0, 1.0)] * 3 + [(3.0, 3.0)], (0.0, 0.0), (0.0, 0.0), 2) == [(0, 3), (3, 4)]
