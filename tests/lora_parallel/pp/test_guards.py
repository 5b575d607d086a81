"""What would be wrong without an error in pipeline stages, done on purpose: each is an error, or right."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lora_parallel import parallelize
from lora_parallel.distributed.mesh import dp_rank
from lora_parallel.layers.layer_parameters import clean_names
from lora_parallel.pp.links import Links
from lora_parallel.pp.loss import LossCalls, LossFactors
from lora_parallel.pp.microbatches import Joined, Microbatches
from lora_parallel.pp.stage_model import OtherStageLayer, OutputShape, StageContext
from lora_parallel.tracing.prove_stages import StageTrace
from tests.cases import cases
from tests.lora_parallel.cp.runs import ids, language
from tests.lora_parallel.pp import models
from tests.lora_parallel.pp.models import Own, adapted
from tests.lora_parallel.pp.runs import GPIPE, PP, Run, actions, most_alive
from tests.oracle import full, on_mesh, over_stages, relative_error, trained
from tests.oracle.workers import Failure, attempt

TWO = {"pp_microbatches": 2}


def model_on(mesh: str, run: Run | None = None, **config: Any) -> Any:
    device_mesh, settings = on_mesh(mesh, **{**PP, **config})
    return parallelize((run or Run()).model(), device_mesh, settings)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.grad) for name, p in trained(model).items() if p.grad is not None}


# ---------------------------------------------------------------------- factors of the loss

WEIGHTS = (0.25, 1.75)


SHORT = Run(settings={"num_hidden_layers": 2})


def weighed(config: dict[str, Any], checked: bool) -> Any:
    """Each data-parallel rank weighs the loss of its rows by a weight of its own."""
    model = model_on("2x1pp2", SHORT, **config)
    mesh, _ = on_mesh("2x1pp2", **config)
    place = dp_rank(mesh)
    batch = {name: tensor.chunk(2)[place] for name, tensor in language().items()}

    def step() -> dict[str, Tensor]:
        (model(**batch).loss * WEIGHTS[place]).backward()
        return over_stages(gradients(model), "2x1pp2")

    with patch.object(LossFactors, "check", LossFactors.check if checked else lambda self, factor: None):
        return attempt(step)


def weighed_each_way() -> list[Any]:
    return [weighed({**GPIPE, **TWO}, True), weighed(TWO, True), weighed(TWO, False)]


def test_weights_of_data_parallel_ranks_are_refused_or_right(pool):
    one, batch = SHORT.model(), language()
    sum(
        (one(**{name: each.chunk(2)[place] for name, each in batch.items()}).loss * WEIGHTS[place] / 2)
        for place in range(2)
    ).backward()
    want = gradients(one)
    for right, refused, unchecked in pool.run(4, weighed_each_way):
        assert relative_error(right, want) < 1e-6
        assert isinstance(refused, Failure)
        assert "the gradient of the loss is" in refused.message
        assert 'pp_schedule="gpipe"' in refused.message
        assert relative_error(unchecked, want) > 1e-2  # without the guard it would be wrong, without an error


def left_out(mesh: str, who: str) -> Any:
    """One rank leaves a backward out, and goes on."""
    model = model_on(mesh, **TWO)
    device_mesh, _ = on_mesh(mesh, **TWO)
    leaves = (dp_rank(device_mesh) if who == "dp" else device_mesh.get_local_rank("pp")) == 1
    batch = {name: tensor.chunk(2)[dp_rank(device_mesh)] for name, tensor in language().items()}
    model(**batch).loss.backward()

    def steps() -> None:
        for leave in (leaves, False):
            loss = model(**batch).loss
            if not leave:
                loss.backward()

    start = time.monotonic()
    return attempt(steps), time.monotonic() - start


@pytest.mark.parametrize(("mesh", "ranks", "who"), cases(("1x1pp2", 2, "pp"), matrix=[("2x1pp2", 4, "dp")]))
def test_a_backward_that_one_rank_leaves_out_is_an_error_of_all(impatient_pool, mesh, ranks, who):
    for answer in impatient_pool.try_run(ranks, left_out, mesh, who):
        assert not isinstance(answer, Failure), answer
        failure, seconds = answer
        assert isinstance(failure, Failure)
        assert seconds < 40, failure


def other_factors() -> Any:
    model = model_on("1x1pp2")
    return attempt(lambda: (model(**language()).loss * (1 + dist.get_rank())).backward())


def test_another_factor_on_another_stage_is_refused(pool):
    for failure in pool.try_run(2, other_factors):
        assert "the gradient of the loss is" in failure.message


# ---------------------------------------------------------------------- parameters and their gradients


def begins_to_train(model: Any) -> None:
    next(p for name, p in model.named_parameters() if "q_proj.base_layer" in name).requires_grad_()


def hooked(model: Any) -> None:
    next(iter(trained(model).values())).register_hook(lambda grad: grad * 2)


CHANGES = {
    "a parameter that begins to train": (begins_to_train, "was frozen when the model was parallelized"),
    "register_hook": (hooked, "a pipeline runs the backwards of micro-batches by itself"),
}


def changed(names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        model = model_on("1x1pp2")
        if dist.get_rank() == 0:
            CHANGES[name][0](model)
        start = time.monotonic()
        found[name] = attempt(lambda model=model: model(**language())), time.monotonic() - start
    return found


def test_parameters_that_change_after_parallelize_are_refused_on_all_stages(pool):
    answers = pool.run(2, changed, list(CHANGES))
    for found in answers:
        for name, (_, text) in CHANGES.items():
            failure, seconds = found[name]
            assert isinstance(failure, Failure)
            assert text in failure.message
            assert seconds < 20


def asked_for() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for schedule in (PP, GPIPE):
        model = model_on("1x1pp2", **schedule)
        inputs, kind = list(trained(model).values()), schedule.get("pp_schedule", "1f1b")
        loss = model(**language()).loss
        found[f"{kind} backward"] = attempt(lambda loss=loss, inputs=inputs: loss.backward(inputs=inputs))
        found[f"{kind} grad"] = attempt(lambda loss=loss, inputs=inputs: torch.autograd.grad(loss, inputs))
    return found


def test_gradients_of_given_parameters_are_refused(pool):
    for found in pool.run(2, asked_for):
        for failure in found.values():
            assert "a pipeline runs the backwards of micro-batches by itself" in failure.message


def with_lbfgs() -> Any:
    model = model_on("1x1pp2")
    optimizer = torch.optim.LBFGS(list(trained(model).values()))
    return attempt(lambda: optimizer.step(lambda: model(**language()).loss))


def test_lbfgs_is_refused(pool):
    for failure in pool.try_run(2, with_lbfgs):
        assert "LBFGS computes one step from all parameters together" in failure.message


# ---------------------------------------------------------------------- arguments


def by_position(model: Any) -> dict[str, Any]:
    batch = language()
    model(batch["input_ids"], None, None, batch["labels"]).loss.backward()
    return gradients(model)


def as_tuples(model: Any) -> list[Any]:
    with torch.no_grad():
        return [each for each in model(**language(), return_dict=False) if isinstance(each, Tensor)]


def ignoring_seven(model: Any) -> Tensor:
    """Three rows, which four micro-batches fill up."""
    batch = ids()[:3]
    with torch.no_grad():
        return model(input_ids=batch, labels=batch, ignore_index=7).loss


def arguments() -> dict[str, Any]:
    model, found = model_on("1x1pp2"), {}
    with actions() as begun:
        found["by position"] = over_stages(by_position(model), "1x1pp2"), begun
    found["tuple"] = [each + 0 for each in as_tuples(model)]
    found["ignored"] = ignoring_seven(model)
    batch = language()
    found["adapter names"] = attempt(lambda: model(**batch, adapter_names=["default"] * 4))
    found["no rows"] = attempt(lambda: model(**{name: each[:0] for name, each in batch.items()}))
    found["recomputed"] = attempt(
        lambda: checkpoint(
            lambda ids: model(input_ids=ids).logits.square().mean(), batch["input_ids"], use_reentrant=False
        ).backward()
    )
    model = model_on("1x1pp2")
    with torch.set_grad_enabled(dist.get_rank() == 0):
        found["mode"] = attempt(lambda: model(**batch))
    model = model_on("1x1pp2")
    model(**batch)
    found["number"] = attempt(lambda: model(**batch, num_items_in_batch=50 + dist.get_rank()))
    return found


def test_arguments(pool):
    one = Run().model()
    want = by_position(one)
    for found in pool.run(2, arguments):
        got, begun = found["by position"]
        assert relative_error(got, want) < 1e-12
        assert most_alive(begun) < 4  # 1f1b: the labels were seen
        for mine, theirs in zip(found["tuple"], as_tuples(one), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["ignored"], ignoring_seven(one), rtol=2e-6, atol=0)
        assert found["adapter names"].message.startswith("adapter_names: PEFT chooses")
        assert "a batch has 0 rows" in found["no rows"].message
        assert "checkpoint its blocks" in found["recomputed"].message
        assert "were fed different batches" in found["mode"].message
        assert "were fed different batches" in found["number"].message


def test_arguments_of_a_micro_batch():
    """Rows are cut, of multimodal positions in the second dim; the last row pads them, whose labels are ignored."""
    tokens, positions, items = torch.arange(10).view(5, 2), torch.arange(30).view(3, 5, 2), torch.arange(5)
    labels = {"labels": tokens, "shift_labels": tokens}
    batch = Microbatches((tokens,), {**labels, "position_ids": positions, "num_items_in_batch": items}, 2, pads=True)
    args, kwargs = batch.part(1)
    assert torch.equal(args[0], tokens[[3, 4, 4]])
    assert torch.equal(kwargs["position_ids"], positions[:, [3, 4, 4]])
    assert kwargs["num_items_in_batch"] is items
    for name in labels:
        assert kwargs[name].tolist() == [*tokens[3:].tolist(), [-100, -100]], name


ROWS = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([{"hidden": ROWS}, {"logits": ROWS}], "something else for one micro-batch than for another"),
        ([(ROWS, ROWS), (ROWS,)], "something else for one micro-batch than for another"),
        ([(ROWS, 1), (ROWS, 2)], "returns a int, which cannot be given to all pipeline stages"),
        ([(ROWS, 1), (ROWS, True)], "returns a int, which cannot be given to all pipeline stages"),
        ([(ROWS, frozenset())] * 2, "returns a frozenset, which cannot be given to all pipeline stages"),
    ],
)
def test_outputs_of_micro_batches_that_cannot_be_joined_are_refused(outputs, reason):
    with pytest.raises(ValueError, match=reason):
        Joined.of(outputs, [], None, Microbatches((torch.ones(4, 3),), {}, 2, pads=False))


def test_hidden_states_of_one_dtype_and_then_another_are_refused():
    links: Any = object.__new__(Links)
    links._dtypes, links._store, links._index = {}, MagicMock(), 0
    links._announce_dtype(torch.float32, "training")
    with pytest.raises(RuntimeError, match=r"are torch\.bfloat16 and were torch\.float32 in an earlier micro-batch"):
        links._announce_dtype(torch.bfloat16, "training")


def test_random_states_are_restored_as_a_stage_ends():
    """The first block's entries cut the tokens, and draw numbers of this rank until its last block has left them."""
    left: list[str] = []
    entries = [MagicMock(leave=lambda device, name=name: left.append(name)) for name in ("cp", "tp")]
    context = StageContext(entries)
    context.begin((0, 1), None)
    context.end(torch.ones(1))
    assert left == ["tp", "cp"]


def called_twice(model: Any) -> None:
    with LossCalls(model, {}, MagicMock()).during():
        for _ in range(2):
            model._loss_function(torch.ones(3))


def test_a_loss_function_that_is_called_twice_is_refused():
    model: Any = nn.Module()
    model.loss_function = torch.sum
    with pytest.raises(ValueError, match="called its loss_function 2 times: call it without labels"):
        called_twice(model)


def questions() -> dict[str, Tensor]:
    return {"input_ids": ids(), "start_positions": torch.arange(4), "end_positions": torch.arange(4) + 2}


def to_float32() -> Any:
    model = model_on("1x1pp2").to(torch.float32)
    model(**language()).loss.backward()
    return over_stages(gradients(model), "1x1pp2")


def test_a_model_is_cast(pool):
    one = Run().model().to(torch.float32)
    one(**language()).loss.backward()
    want = gradients(one)
    for found in pool.run(2, to_float32):
        assert all(each.dtype is torch.float32 for each in found.values())
        assert relative_error(found, want) < 1e-5


QUESTIONS = Run(
    kind="LlamaForQuestionAnswering",
    batch=questions,
    loss=lambda model, batch: model(**batch).loss,
    lora={"task_type": "QUESTION_ANS"},
    tolerance=1e-6,
)


def answered() -> Any:
    return QUESTIONS.on("1x1pp2")


def test_a_loss_of_positions(pool):
    loss, want = QUESTIONS.step(QUESTIONS.model())
    for mine, found in pool.run(2, answered):
        assert abs(mine - loss) < 2e-6 * loss
        assert relative_error(found, want) < QUESTIONS.tolerance


# ---------------------------------------------------------------------- what stages are proven on


class WithSideOutputInTraining(Own):
    """In training mode the embedding goes to every block."""

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embed(ids)
        for block in self.blocks:
            x = block(x, first) if self.training else block(x)
        return self.head(self.norm(x))


class WithSideOutputOfTwoRows(Own):
    """The embedding goes to every block if there are several rows."""

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embed(ids)
        for block in self.blocks:
            x = block(x, first) if len(ids) > 1 else block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("kind", [WithSideOutputInTraining, WithSideOutputOfTwoRows])
def test_stages_are_proven_in_training_too(kind):
    model = adapted(kind)
    with pytest.raises(ValueError, match="is not fed the same by a stage"):
        StageTrace(model, clean_names(model), 2).prove([(0, 2), (2, 4)])
    own = adapted(models.Own)
    StageTrace(own, clean_names(own), 2).prove([(0, 2), (2, 4)])


def test_an_attribute_of_a_layer_of_another_stage_is_deleted():
    """Delete an attribute, as Trainer does at the end of training with neftune_noise_alpha."""
    embedding = nn.Embedding(3, 4)
    embedding.neftune_noise_alpha = 5.0
    instead = OtherStageLayer("embed_tokens", embedding, MagicMock(), OutputShape(4, looks_up=True), torch.float32)
    assert instead.neftune_noise_alpha == 5.0
    del instead.neftune_noise_alpha
    instead.own = 1
    del instead.own
    for name in ("neftune_noise_alpha", "own"):
        with pytest.raises(AttributeError):
            delattr(instead, name)
