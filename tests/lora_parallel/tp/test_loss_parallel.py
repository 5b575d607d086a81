"""Logits in slices: every operation has the result that it has on all logits, and the usual ones gather nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForSequenceClassification
from transformers.trainer_pt_utils import LabelSmoother

from lora_parallel import parallelize
from lora_parallel.distributed import collectives
from lora_parallel.tp import loss_parallel
from lora_parallel.tp.loss_parallel import SlicedTensor
from tests.cases import cases
from tests.logs import listening
from tests.oracle import Case, full, on_mesh, ranks_of, reference, relative_error, sharded, trained
from tests.oracle.workers import Failure, attempt

CHUNK = loss_parallel.CHUNK_ELEMENTS
ROWS, TOKENS, VOCABULARY = 2, 6, 7
LABELS = torch.arange(ROWS * TOKENS) % VOCABULARY
MASK = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 3 > 0
SCALES = torch.arange(1.0, VOCABULARY + 1, dtype=torch.float64)


class Head(nn.Module):
    """A language model that is a head and nothing else."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.head = nn.Linear(4, VOCABULARY, bias=bias, dtype=torch.float64)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def _fill(x: Tensor) -> Tensor:
    x[:, :, torch.tensor([1, 5])] = -3.0
    return x


def _fill_slice(x: Tensor) -> Tensor:
    x[:, :2] = 0.5
    return x * 1.0


def _fill_view(x: Tensor) -> Tensor:
    view = x.view(-1, VOCABULARY)
    other = x[:, 1:]
    view[:, 1] = 0.0
    return torch.cat([x, other], 1)


def _lose_after_fill(x: Tensor) -> Tensor:
    view = x.view(-1, VOCABULARY)
    view[:, 1] = 0.0
    return F.cross_entropy(view, LABELS)


def _fill_under_view(x: Tensor) -> Tensor:
    view, product, copied = x.view(-1, VOCABULARY), x * 2, x.clone()
    x[:, 1] = 0.0
    return torch.stack([view.view(x.shape), product, copied])


def _fill_copy(x: Tensor) -> Tensor:
    copied = x[:, :-1].clone()
    copied += 1
    return torch.cat([x, copied], 1)


def _grow(x: Tensor) -> Tensor:
    x *= 2
    return x.view(-1, VOCABULARY) * 1


def _under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _losses(x.to(torch.bfloat16))


class _Squares(torch.autograd.Function):
    """As a kernel that gets the logits and their gradient as tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def _losses(x: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(x.view(-1, VOCABULARY), LABELS, ignore_index=3, **settings)


# What a model or a trainer does between head and loss. None of these gathers.
SLICED = {
    "a product": lambda x: x * 2.5,
    "a product from the left": lambda x: 3 * x,
    "a quotient": lambda x: x / 30,
    "a soft cap": lambda x: torch.tanh(x / 3) * 3,
    "a sum": lambda x: x + 1 - x / 2,
    "a product with a tensor": lambda x: x * SCALES,
    "a bias": lambda x: x + SCALES[None],
    "a number as a tensor": lambda x: x / torch.tensor(2.0),
    "a factor of each token": lambda x: x * torch.arange(1.0, 7.0)[:, None],
    "of itself": lambda x: x * x.detach(),
    "of the first token": lambda x: x - x[0, :1, None],
    "float": lambda x: x.float() * 2,
    "to a dtype": lambda x: x.to(torch.float32),
    "to no other dtype": lambda x: x.double().to(torch.float64),
    "narrowed": lambda x: x.to(torch.bfloat16).float(),
    "view": lambda x: x.view(-1, VOCABULARY),
    "reshape": lambda x: x.reshape(3, -1, x.size(-1)),
    "flatten": lambda x: x.flatten(0, 1),
    "contiguous": lambda x: x.contiguous() * 2,
    "all but the last token": lambda x: x[..., :-1, :].contiguous(),
    "from the second token": lambda x: x[:, 1:],
    "a row": lambda x: x[0],
    "a dim more": lambda x: x[:, None],
    "chosen tokens": lambda x: x[MASK],
    "a token": lambda x: x[:, -1],
    "some tokens": lambda x: x[:, 1:5:2].contiguous().view(-1, VOCABULARY),
    "no dim less": lambda x: x[:1].squeeze(0),
    "rows by number": lambda x: x[torch.tensor([1, 0, 1])],
    "mean": _losses,
    "a loss of one's own": lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1), LABELS[2:]),
    "a loss, reshaped": lambda x: F.cross_entropy(x[..., 1:, :].reshape(-1, VOCABULARY), LABELS[2:]),
    "sum of float32": lambda x: _losses(x.float(), reduction="sum"),
    "under autocast": _under_autocast,
    "each token": lambda x: _losses(x, reduction="none"),
    "nn.CrossEntropyLoss": lambda x: nn.CrossEntropyLoss(ignore_index=3)(x.view(-1, VOCABULARY), LABELS),
    "all ignored": lambda x: F.cross_entropy(x.view(-1, VOCABULARY), LABELS * 0 - 100, reduction="sum"),
    "one token": lambda x: F.cross_entropy(x[0, :1], LABELS[:1]),
    "no token": lambda x: F.cross_entropy(x[0, :0], LABELS[:0], reduction="sum"),
}
# All else is computed from gathered logits.
GATHERED = {
    "log_softmax": lambda x: x.log_softmax(-1),
    "argmax": lambda x: x.argmax(-1),
    "some of the vocabulary": lambda x: x[..., :5],
    "one of the vocabulary": lambda x: x[:, :, 2],
    "a dim at the end": lambda x: x[..., None],
    "elements": lambda x: x[MASK[..., None].expand(-1, -1, VOCABULARY)],
    "flattened": lambda x: x.view(-1),
    "seen as integers": lambda x: x.detach().view(torch.int64),
    "transposed": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS.view(ROWS, TOKENS)),
    "weights": lambda x: _losses(x, weight=SCALES),
    "label_smoothing": lambda x: _losses(x, label_smoothing=0.1),
    "probabilities": lambda x: F.cross_entropy(x.view(-1, VOCABULARY), torch.full((12, VOCABULARY), 1 / 7).double()),
    "changed in place": _fill,
    "a slice changed in place": _fill_slice,
    "a view changed in place": _fill_view,
    "the loss of a view changed in place": _lose_after_fill,
    "changed in place under a view": _fill_under_view,
    "a copy changed in place": _fill_copy,
    "multiplied in place": _grow,
    "a function with a backward of its own": lambda x: _Squares.apply(x),
    "by numpy": lambda x: torch.from_numpy(x.detach().cpu().numpy().copy()),
    "a list": lambda x: torch.tensor(x.detach().tolist()),
    "a copy": lambda x: copy.deepcopy(x.detach()),
    "LabelSmoother": lambda x: LabelSmoother()({"logits": x}, LABELS.view(ROWS, TOKENS), shift_labels=True),
    "read before the loss": lambda x: _losses(x) * x.amax(),
}


def compute(model: nn.Module, operation: Any) -> tuple[Tensor, list[Tensor]]:
    """The result of an operation on a model's logits, in full, and the gradients that it gives."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, TOKENS, 4, generator=generator, dtype=torch.float64).requires_grad_()
    result = operation(model(x))
    if not result.requires_grad:
        return result, []
    numbers = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype)
    (result * numbers).sum().backward()
    grads = [tensor.grad for tensor in (x, *model.parameters())]
    model.zero_grad()
    whole = result.gathered("test") if isinstance(result, SlicedTensor) else result
    return whole.detach(), [full(grad) for grad in grads]


def head_on_ranks() -> nn.Module:
    mesh, config = on_mesh("1x2", loss_parallel=True, require_adapters=False, tp_plan={"head": "colwise_gather_output"})
    return parallelize(Head().train(), mesh, config)


@contextmanager
def gathers_in(calls: list[str]) -> Iterator[None]:
    """Note what each gather over tp is of. `Traffic` does not see those inside of an operator of a tensor subclass."""
    own = collectives.stacked_over

    def noted(tensor: Tensor, group: dist.ProcessGroup, what: str, where: str) -> Tensor:
        calls.append(what)
        return own(tensor, group, what, where)

    with patch.object(collectives, "stacked_over", noted), patch.object(loss_parallel, "stacked_over", noted):
        yield


def operations() -> dict[str, Any]:
    """What each operation gives on a rank, and how many all-gathers it takes."""
    model = head_on_ranks()
    found: dict[str, Any] = {}
    for name, operation in {**SLICED, **GATHERED}.items():
        calls: list[str] = []

        def counted(x: Tensor, operation: Any = operation, calls: list[str] = calls) -> Any:
            assert type(x) is SlicedTensor
            assert tuple(x.shape) == (ROWS, TOKENS, VOCABULARY)
            with gathers_in(calls):
                return operation(x)

        found[name] = attempt(compute, model, counted), calls
    return found


def test_every_operation_has_the_result_of_all_logits(pool):
    model = Head()
    answers = pool.run(2, operations)
    for name, operation in {**SLICED, **GATHERED}.items():
        want, want_grads = compute(model, operation)
        for found in answers:
            got, calls = found[name]
            assert not isinstance(got, Failure), f"{name}:\n{got.trace}"
            result, grads = got
            assert result.dtype is want.dtype, name
            tolerance = 1e-6 if want.dtype is torch.float32 else 1e-14
            torch.testing.assert_close(result, want, rtol=tolerance, atol=tolerance, msg=name)
            assert len(grads) == len(want_grads), name
            for mine, theirs in zip(grads, want_grads, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=name)
            if name in GATHERED:
                assert "output slices" in calls, name
            else:
                is_loss = result.shape[-1:] != (VOCABULARY,)
                assert calls == ["sums of exponentials and logits of labels"] * is_loss, name


def a_classifier() -> dict[str, Any]:
    mesh, config = on_mesh("1x2", loss_parallel=True)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    classes = LlamaForSequenceClassification(LlamaConfig(**sizes, vocab_size=8, pad_token_id=0))
    classes = get_peft_model(classes, LoraConfig(target_modules=["q_proj"]))
    return {
        "no head": attempt(parallelize, classes, mesh, config),
        "parameters": sum(isinstance(p, DTensor) for p in classes.parameters()),
    }


def test_a_model_without_a_head_is_refused(fake_pool):
    for found in fake_pool.run(2, a_classifier):
        assert found["no head"].kind == "ValueError"
        assert "LlamaForSequenceClassification names no language-model head" in found["no head"].message
        assert found["parameters"] == 0


def read_alone() -> Failure | None:
    logits = head_on_ranks()(torch.randn(ROWS, TOKENS, 4, dtype=torch.float64))
    return attempt(logits.argmax, -1) if dist.get_rank() == 0 else None


def test_logits_that_one_rank_reads_alone_are_an_error_that_names_them(impatient_pool):
    answer = impatient_pool.try_run(2, read_alone)[0]
    assert "'output slices of head' over tp" in answer.message


def gathers(training: bool, grad: bool) -> tuple[type, list[str]]:
    """The type of a model's output, and what is told of it when it is read twice."""
    model = head_on_ranks().train(training)
    with listening("lora_parallel") as told:
        with torch.set_grad_enabled(grad):
            logits = model(torch.randn(ROWS, TOKENS, 4, dtype=torch.float64))
        _ = logits.argmax(-1), logits.amax()
    return type(logits), told


def test_logits_are_sliced_in_training_only_and_a_gather_is_told_once(pool):
    for training, grad in ((True, False), (False, True), (False, False)):
        for kind, told in pool.run(2, gathers, training, grad):
            assert (kind, told) == (Tensor, [])
    (kind, told), (other, silence) = pool.run(2, gathers, True, True)
    assert (kind, other, silence) == (SlicedTensor, SlicedTensor, [])
    (message,) = told
    assert "argmax" in message
    assert "reads the logits of head" in message


# ---------------------------------------------------------------------- transformers' loss

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "num_items_in_batch": {"num_items_in_batch": torch.tensor(17)},
    "as an int": {"num_items_in_batch": 17},
    "ignored": {"ignored": slice(0, 7)},
    "all ignored": {"ignored": slice(None), "num_items_in_batch": 3},
    "shifted": {"shift_labels": True},
    "ignore_index": {"ignore_index": 5},
}


def steps(model: nn.Module) -> dict[str, Any]:
    """Loss and gradients of transformers' own loss for each call, accumulated over two batches."""
    found = {}
    for name, settings in CALLS.items():
        settings = dict(settings)
        model.zero_grad()
        losses = []
        for seed in (0, 1):
            ids = torch.randint(0, 131, (4, 12), generator=torch.Generator().manual_seed(seed))
            labels = ids.clone()
            labels[:, settings.pop("ignored", slice(0, 0))] = -100
            if settings.get("shift_labels") is not None:
                settings["shift_labels"] = ids.roll(-1, 1)
            loss = model(input_ids=ids, labels=labels, **settings).loss
            loss.backward()
            losses.append(loss.item())
        found[name] = losses, {key: full(p.grad) for key, p in trained(model).items()}
    return found


FLOAT32 = Case(dtype=torch.float32, lora={"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]})


def on_ranks(mesh_text: str) -> dict[str, Any]:
    mesh, config = on_mesh(mesh_text, loss_parallel=True)
    return steps(parallelize(FLOAT32.model(), mesh, config))


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["1x1", "1x4"]))
def test_arguments_of_the_loss_hold(pool, mesh):
    want = steps(FLOAT32.model())
    for found in pool.run(ranks_of(mesh), on_ranks, mesh):
        for name, (losses, gradients) in want.items():
            assert found[name][0] == pytest.approx(losses, rel=1e-6, nan_ok=True), name
            assert relative_error(found[name][1], gradients) <= 1e-5, name


# ---------------------------------------------------------------------- training

KINDS = {
    "embeddings and head": Case(dtype=torch.float32, steps=2, clip=0.5, accumulate=2, lora=FLOAT32.lora),
    "tied": Case(dtype=torch.float32, steps=2, lora=FLOAT32.lora, sizes={"tie_word_embeddings": True}),
    "whole model": Case(dtype=torch.float32, steps=2, adapters=False),
}


def run_kinds(mesh: str, kinds: list[str]) -> dict[str, Any]:
    """In chunks of a few tokens."""
    loss_parallel.CHUNK_ELEMENTS = 500
    try:
        return {
            kind: attempt(sharded, KINDS[kind], mesh, loss_parallel=True, require_adapters=KINDS[kind].adapters)
            for kind in kinds
        }
    finally:
        loss_parallel.CHUNK_ELEMENTS = CHUNK


EVERY = list(KINDS)


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    cases(("1x2", EVERY), ("2x2", EVERY[:1]), matrix=[(mesh, EVERY) for mesh in ("1x1", "2x1", "2x2", "1x4")]),
)
def test_training_equals_one_process(pool, mesh, kinds):
    for found in pool.run(ranks_of(mesh), run_kinds, mesh, kinds):
        for kind, run in found.items():
            assert not isinstance(run, Failure), f"{kind}:\n{run.trace}"
            want = reference(KINDS[kind])
            assert relative_error(run.gradients, want.gradients) <= 1e-5, kind
            assert relative_error(run.adapters, want.adapters) <= 1e-3, kind
            assert run.losses == pytest.approx(want.losses, rel=1e-5), kind
