"""Cross entropy of slices: torch's own, for every dtype and however uneven the slices, in chunks and in one message."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lora_parallel.distributed.collectives import chunk_bounds
from lora_parallel.tp import loss_parallel
from lora_parallel.tp.loss_parallel import cross_entropy_of_slices
from tests.lora_parallel.traffic import Traffic
from tests.oracle import mesh_of
from tests.oracle.workers import Failure, attempt

TOKENS, VOCABULARY, IGNORED = 11, 9, -100  # four ranks have 3, 3, 3 and 0 of the vocabulary
CHUNK = loss_parallel.CHUNK_ELEMENTS
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, some of them -inf, labels, some of them ignored, and the gradient of each token's loss."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64) * 5
    logits[:4, :3] = -torch.inf  # all that one rank has of some tokens
    labels = torch.randint(3, VOCABULARY, (TOKENS,), generator=generator)
    labels[[2, 5]] = IGNORED
    grad = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    return logits.to(dtype), labels, grad


def of_this_rank(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """This rank's slice as a leaf, and the loss of each token."""
    start, end = chunk_bounds(VOCABULARY, 1 if group is None else group.size(), 0 if group is None else group.rank())
    part = logits[:, start:end].clone().requires_grad_()
    return part, cross_entropy_of_slices(part, labels, IGNORED, VOCABULARY, start, logits.dtype, group, "head")


def on_slices(dtype: torch.dtype) -> tuple[Tensor, Tensor, int, int]:
    """The losses, the gradient of all ranks' slices, and how many collectives forward and backward took."""
    group = mesh_of("1x4").get_group("tp")
    logits, labels, grad = problem(dtype)
    loss_parallel.CHUNK_ELEMENTS = 2 * 3  # two tokens at a time
    try:
        with Traffic() as forward:
            part, losses = of_this_rank(logits, labels, group)
        with Traffic() as backward:
            losses.backward(grad.to(losses.dtype))
    finally:
        loss_parallel.CHUNK_ELEMENTS = CHUNK
    parts = [None] * 4
    dist.all_gather_object(parts, part.grad, group=group)
    return losses.detach(), torch.cat(parts, dim=1), len(forward.calls), len(backward.calls)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_losses_and_gradients_are_those_of_torch(pool, dtype):
    logits, labels, grad = problem(dtype)
    logits = logits.double().requires_grad_()
    want = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    want.backward(grad)
    for losses, gradient, forward, backward in pool.run(4, on_slices, dtype):
        assert losses.dtype is torch.promote_types(dtype, torch.float32)
        assert gradient.dtype is dtype
        assert (losses - want).abs().max() <= 20 * min(TOLERANCE[dtype], 1e-6)  # the sum is never less than float32
        assert (gradient - logits.grad).abs().max() <= TOLERANCE[dtype]
        assert losses[labels == IGNORED].tolist() == [0, 0]
        assert (forward, backward) == (1, 0)


class Largest(TorchDispatchMode):
    """Note the most elements that a result in float32 has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        found = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor) and t.dtype is torch.float32]
        self.elements = max([self.elements, *found])
        return result


def test_wide_logits_exist_for_a_chunk_of_the_tokens_only(monkeypatch):
    logits, labels, _ = problem(torch.bfloat16)
    for chunk, most in ((2 * VOCABULARY, 2 * VOCABULARY), (2**24, TOKENS * VOCABULARY)):
        monkeypatch.setattr(loss_parallel, "CHUNK_ELEMENTS", chunk)
        with Largest() as largest:
            of_this_rank(logits, labels)[1].sum().backward()
        assert largest.elements == max(most, 2 * TOKENS)  # two numbers a token


def test_labels_outside_of_the_vocabulary_are_refused():
    logits, labels, _ = problem()
    for label in (VOCABULARY, -1):
        with pytest.raises(IndexError, match=f"labels of head .* outside of its vocabulary of {VOCABULARY}"):
            of_this_rank(logits, torch.where(torch.arange(TOKENS) == 3, label, labels))


def alone() -> Failure | None:
    """Rank 0 computes a loss that its peer does not."""
    group = mesh_of("1x2").get_group("tp")
    return attempt(of_this_rank, *problem()[:2], group) if dist.get_rank() == 0 else None


@pytest.mark.matrix
def test_a_rank_that_computes_the_loss_alone_says_where_it_waited(impatient_pool):
    answer = impatient_pool.try_run(2, alone)[0]
    assert isinstance(answer, Failure)
    assert "'sums of exponentials and logits of labels of head' over tp" in answer.message
