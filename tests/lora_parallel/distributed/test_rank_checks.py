"""What ranks agree on: errors, and whether they hold the same bytes."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lora_parallel.distributed import dtensors
from lora_parallel.distributed.dtensors import fingerprint
from lora_parallel.distributed.rank_checks import agreed, begin_gather, gather_numbers
from tests.oracle.workers import Failure, attempt


class OwnError(Exception):
    """No builtin: other ranks cannot know the class."""


KINDS = [ValueError, FileNotFoundError, KeyError, OwnError, torch.OutOfMemoryError]


def failing(kind, here):
    with agreed():
        if dist.get_rank() in here:
            raise kind("the reason")
    return "went on"


def undecoded():
    """An error that is not made from a text alone."""
    with agreed():
        if dist.get_rank() == 2:
            b"caf\xe9".decode()


def failures():
    """By kind of error: what each rank sees of a failure on rank 2, and on all of them."""
    found = [(attempt(failing, kind, (2,)), attempt(failing, kind, (0, 1, 2, 3))) for kind in KINDS]
    return found, failing(ValueError, ()), attempt(undecoded)


def test_a_failure_on_one_rank_is_raised_on_all(pool):
    for rank, (found, after, decoding) in enumerate(pool.run(4, failures)):
        assert after == "went on"
        assert decoding.kind == ("UnicodeDecodeError" if rank == 2 else "RuntimeError")
        assert decoding.message.startswith("" if rank == 2 else "on rank 2: ")
        assert "codec can't decode byte 0xe9" in decoding.message
        for kind, (one, everywhere) in zip(KINDS, found, strict=True):
            assert isinstance(one, Failure)
            assert "the reason" in one.message
            assert everywhere.kind == kind.__name__
            if rank == 2:
                assert one.kind == kind.__name__
                assert "on rank" not in one.message
            else:
                known = kind in (ValueError, FileNotFoundError, KeyError)
                assert one.kind == (kind.__name__ if known else "RuntimeError")
                assert "on rank 2: " in one.message


def unlike():
    """Return the errors where values differ, where rank 0 lacks one, and where rank 1 fails with and without it."""
    rank = dist.get_rank()

    def compare(values, fails=False):
        with agreed("Say the same.") as alike:
            alike.update(values)
            if fails and rank == 1:
                raise KeyError("the reason")
            alike["last"] = "the same"

    return (
        attempt(compare, {"folder": "a", "size": 1 if rank == 1 else 2}),
        attempt(compare, {"folder": "a"} if rank else {}),
        attempt(compare, {"size": rank}, fails=True),
        attempt(compare, {"size": 1}, fails=True),
        attempt(compare, {"folder": "a"}),
    )


def test_values_that_must_be_the_same_on_every_rank(pool):
    """Those that differ are told before the error that they may have led to."""
    for rank, (other, absent, explained, failing, same) in enumerate(pool.run(2, unlike)):
        assert other.kind == absent.kind == explained.kind == "ValueError"
        assert other.message == "size is 2 on rank 0 and 1 on rank 1: Say the same."
        assert absent.message == "folder is None on rank 0 and 'a' on rank 1: Say the same."
        assert explained.message == "size is 0 on rank 0 and 1 on rank 1: Say the same."
        assert failing.kind == "KeyError"
        assert ("on rank 1: " in failing.message) == (rank == 0)
        assert same is None


def test_without_a_process_group_errors_pass_through():
    with pytest.raises(OwnError, match="the reason"), agreed():
        raise OwnError("the reason")
    assert gather_numbers([3, 4], "a call").tolist() == [[3, 4]]


def rank_numbers():
    return gather_numbers([dist.get_rank(), 7, -(2**62)], "a call").tolist()


def test_numbers_come_in_rank_order(pool):
    for found in pool.run(4, rank_numbers):
        assert found == [[rank, 7, -(2**62)] for rank in range(4)]


def profiled_numbers():
    """Return a gather that is read after a profiler's end, and what the profiler records of it and of a barrier."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = begin_gather([dist.get_rank()], "a call")
        dist.barrier()
    return result().tolist(), [event.name for event in profiler.events() if event.name.startswith("gloo:")]


def test_no_profiler_records_a_gather_that_may_outlive_it(pool):
    """Gloo's thread would write the gather's end into freed memory: docs/upstream/gloo_profiler.md."""
    assert pool.run(2, profiled_numbers) == [([[0], [1]], ["gloo:barrier"])] * 2


def test_equal_tensors_have_equal_fingerprints():
    tensor = torch.randn(300, 77, generator=torch.Generator().manual_seed(0))
    copies = [tensor.clone(), tensor.t().contiguous().t(), torch.nn.Parameter(tensor), tensor.requires_grad_()]
    assert {fingerprint(copy) for copy in copies} == {fingerprint(tensor)}
    shifted = torch.empty(tensor.numel() + 1)[1:].view_as(tensor)  # 4 bytes off the alignment that int64 wants
    shifted.copy_(tensor)
    assert fingerprint(shifted) == fingerprint(tensor)


def test_a_changed_or_moved_element_changes_the_fingerprint():
    generator = torch.Generator().manual_seed(0)
    for count in (1, 3, 4095, 3 * 8192 + 5):  # the last: several full rows of the sum and a rest
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool):
            tensor = (torch.randn(count, generator=generator) * 3).to(dtype)
            seen = {fingerprint(tensor)}
            for place in {0, count // 2, count - 1}:
                other = tensor.clone()
                other[place] = ~other[place] if dtype is torch.bool else other[place] + 1
                seen.add(fingerprint(other))
            assert len(seen) == 1 + len({0, count // 2, count - 1}), (count, dtype)
    numbers = torch.arange(40000.0)
    swaps = [(0, 1), (0, 512), (1, 4097), (0, 4096), (0, 8192), (39998, 39999), (5, 39999)]
    seen = {fingerprint(numbers)}
    for i, j in swaps:
        other = numbers.clone()
        other[i], other[j] = numbers[j], numbers[i]
        seen.add(fingerprint(other))
    assert len(seen) == 1 + len(swaps)


def test_rows_in_another_order_change_the_fingerprint():
    """As when tensor parallel peers are fed the same rows in different orders."""
    for length in (12, 512, 4096, 8192):
        batch = torch.randint(0, 1000, (8, length), generator=torch.Generator().manual_seed(0))
        assert fingerprint(batch.flip(0)) != fingerprint(batch), length


def mixed(tensor: torch.Tensor) -> int:
    """SplitMix64's number of each word, with its place for the count of draws, in Python's integers."""
    raw = bytes(tensor.view(torch.uint8).tolist())
    total, ones = len(raw), 2**64 - 1
    for place in range(0, len(raw), 8):
        x = (int.from_bytes(raw[place : place + 8], "little") + place // 8 * 0x9E3779B97F4A7C15) & ones
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & ones
        x = (x ^ x >> 27) * 0x94D049BB133111EB & ones
        total += x ^ x >> 31
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("words", [2, 3, 2**20])
def test_a_fingerprint_mixes_each_word_with_its_place(monkeypatch, words):
    """Compare pieces of several sizes with Python's integers: no shift keeps a sign, and the rest of a piece counts."""
    monkeypatch.setattr(dtensors, "_PIECE", words)
    generator = torch.Generator().manual_seed(0)
    for count in (1, 8, 16, 17, 64, 85):
        tensor = torch.randint(0, 256, (count,), generator=generator).byte()
        assert fingerprint(tensor) == mixed(tensor), count


def test_words_in_any_other_order_change_the_fingerprint():
    """Also where sums and first moments of rows and columns are the same, as of [1, 0, 0, 1] and [0, 1, 1, 0]."""
    for words in ([1, 0, 0, 1], [0, 0, 1, 1, 2, 2], [-1, 0, 1, 2**62, -(2**63), 0]):
        orders = set(permutations(words))
        for dtype in (torch.int64, torch.float64):
            assert len({fingerprint(torch.tensor(order).to(dtype)) for order in orders}) == len(orders)
    rows = torch.randint(0, 1000, (4, 512), generator=torch.Generator().manual_seed(0))
    assert len({fingerprint(rows[list(order)]) for order in permutations(range(4))}) == 24
    square = torch.eye(4096, dtype=torch.int64)[:2, :2]
    assert fingerprint(square) != fingerprint(square.flip(0))


def test_zeros_of_other_lengths_differ():
    assert len({fingerprint(torch.zeros(n)) for n in (0, 1, 2, 4096, 8192)}) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64, torch.uint8])
def test_any_dtype_and_rank_of_tensor_has_a_fingerprint(dtype):
    assert isinstance(fingerprint(torch.ones((), dtype=dtype)), int)
    assert fingerprint(torch.ones(2, 0, dtype=dtype)) == 0
