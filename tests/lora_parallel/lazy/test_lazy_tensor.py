"""Tensors on disk against the same operations on tensors in memory: every region bitwise, and no byte too many."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import pytest
import torch
from torch import nn
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, SplitModulelist, Transpose

from lora_parallel.lazy import lazy_tensor
from lora_parallel.lazy.graph import Leaf, leaves, read, whole
from lora_parallel.lazy.lazy_tensor import Computed, LazyTensor


class Memory:
    """A source in memory that notes what is asked of it."""

    def __init__(self, *tensors):
        self.tensors = dict(enumerate(tensors))
        self.asked = []

    @contextmanager
    def open(self) -> Iterator:
        def reader(key, region):
            self.asked.append((key, region))
            return self.tensors[key][region].clone()

        yield reader

    def stored(self):
        return [LazyTensor(Leaf(self, key, tuple(t.shape), t.dtype)) for key, t in self.tensors.items()]


def values(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + prod(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 50).to(dtype)


def regions_of(shape, count=6, seed=0):
    """The whole, some inner rectangles, and one with nothing in it for each dim."""
    draw = random.Random(seed)
    yield whole(shape)
    for _ in range(count):
        ends = [sorted((draw.randint(0, size), draw.randint(0, size))) for size in shape]
        yield tuple(slice(low, high) for low, high in ends)
    for dim, size in enumerate(shape):
        yield tuple(slice(size, size) if at == dim else slice(0, full) for at, full in enumerate(shape))


def check(lazy, eager, pure=True):
    """Every region of `lazy` is that of `eager`; `pure`: made of as many elements of the files as it has."""
    assert type(lazy) is LazyTensor
    assert lazy.shape == eager.shape
    assert lazy.dtype == eager.dtype
    for region in regions_of(tuple(eager.shape)):
        want = eager[region]
        got = read(lazy.node, region)
        assert type(got) is torch.Tensor
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert torch.equal(got, want)
        pieces = list(lazy.node.pieces(region))
        assert all(prod(part.stop - part.start for part in piece.region) for piece in pieces)
        if not want.numel():
            assert pieces == []
        elif pure:
            asked = sum(prod(part.stop - part.start for part in piece.region) for piece in pieces)
            assert asked == want.numel()
            assert not any(isinstance(piece.leaf, Computed) for piece in pieces)


SINGLE = {
    "split": lambda x: x.split(2)[1],
    "split, the rest": lambda x: x.split(2, dim=1)[-1],
    "split with sizes": lambda x: x.split([1, 3, 1], dim=1)[1],
    "split with a size of nothing": lambda x: x.split([0, 5], dim=1)[0],
    "chunk": lambda x: x.chunk(3, dim=-1)[2],
    "chunk of one": lambda x: x.chunk(1, dim=0)[0],
    "more chunks than rows": lambda x: x.chunk(7, dim=2)[2],
    "unbind": lambda x: x.unbind(1)[3],
    "iterate": lambda x: list(x)[2],
    "permute": lambda x: x.permute(2, 0, 1),
    "permute back": lambda x: x.permute(2, 0, 1).permute(1, 2, 0),
    "permute, negative": lambda x: x.permute(-1, 1, 0),
    "transpose": lambda x: x.transpose(0, -1),
    "mT": lambda x: x.mT,
    "t": lambda x: x[0].t(),
    "t of a vector": lambda x: x[0, 0].t(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze last": lambda x: x.unsqueeze(-1),
    "select": lambda x: x.select(1, 2),
    "select, negative": lambda x: x.select(-1, -1),
    "index": lambda x: x[:, 1],
    "to a scalar": lambda x: x[2, 1, 0],
    "None": lambda x: x[None, 1:, ..., None],
    "squeeze": lambda x: x[:1].squeeze(0),
    "squeeze of no one": lambda x: x.squeeze(0),
    "squeeze of all": lambda x: x[:1, None].squeeze(),
    "slice": lambda x: x[1:4],
    "slice, negative": lambda x: x[..., -2:],
    "slice beyond": lambda x: x[3:100],
    "slice of nothing": lambda x: x[3:1],
    "narrow": lambda x: x.narrow(1, 1, 3),
    "cast down": lambda x: x.to(torch.bfloat16),
    "cast up": lambda x: x.double(),
    "cast to integers": lambda x: x.to(torch.int8),
    "cast and back": lambda x: x.half().float(),
    "cast to what it is": lambda x: x.to(x.dtype),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "view": lambda x: x.view(4, 5, 3),
    "reshape": lambda x: x.transpose(0, 1).reshape(5, 4, 3),
    "cat with itself": lambda x: torch.cat([x, x], dim=-1),
    "stack with itself": lambda x: torch.stack([x, x, x], dim=-1),
    "swap halves": lambda x: torch.cat(x.split(2)[::-1]),
    "transposed halves": lambda x: torch.cat([half.mT for half in x.chunk(2)], dim=1),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_rearrangement_reads_the_regions_of_the_real_one(name):
    x = values(4, 5, 3)
    (lazy,) = Memory(x).stored()
    check(SINGLE[name](lazy), SINGLE[name](x))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_several_tensors_are_put_together(dim):
    same = [values(3, 4, seed=seed) for seed in range(3)]
    lazy = Memory(*same).stored()
    check(torch.cat(lazy, dim=dim), torch.cat(same, dim=dim))
    check(torch.stack(lazy, dim=dim), torch.stack(same, dim=dim))
    uneven = [values(*(size if at == dim % 2 else 4 for at in range(2))) for size in (2, 0, 5, 1)]
    check(torch.cat(Memory(*uneven).stored(), dim=dim), torch.cat(uneven, dim=dim))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool])
def test_a_dtype_is_kept(dtype):
    x, y = values(3, 4, dtype=dtype), values(2, 4, dtype=dtype)
    lazy = Memory(x, y).stored()
    check(torch.cat(lazy).t()[1:], torch.cat([x, y]).t()[1:])


def test_a_scalar():
    x = torch.tensor(3.5)
    (lazy,) = Memory(x).stored()
    check(lazy, x)
    check(lazy.to(torch.bfloat16)[None], x.to(torch.bfloat16)[None])
    check(torch.stack([lazy, lazy]), torch.stack([x, x]))


def test_shapes_with_no_elements():
    x = values(0, 4)
    (lazy,) = Memory(x).stored()
    check(lazy.t(), x.t())
    check(torch.cat([lazy, lazy], dim=1), torch.cat([x, x], dim=1))
    check(lazy.split(2)[0], x.split(2)[0])
    check(lazy.chunk(2)[-1], x.chunk(2)[-1])
    assert lazy.unbind() == ()


def one_step(draw, tensors, eager):
    """The same random rearrangement of both."""
    at = draw.randrange(len(eager))
    x, y = tensors[at], eager[at]
    dim = draw.randrange(y.dim()) if y.dim() else 0
    size = y.shape[dim] if y.dim() else 0
    kinds = ["unsqueeze", "cast", "clone", "stack"]
    if y.dim():
        kinds += ["slice", "permute", "cat", "transpose", "contiguous"]
        kinds += ["split", "chunk", "select", "squeeze"] if size else []
    kind = draw.choice(kinds)
    low = draw.randint(0, size)
    high, place = draw.randint(low, size), draw.randint(0, y.dim())
    index, parts = draw.randrange(max(size, 1)), draw.randint(1, max(size, 1))
    order = draw.sample(range(y.dim()), y.dim())
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float64])
    operation = {
        "unsqueeze": lambda t: t.unsqueeze(place),
        "cast": lambda t: t.to(dtype),
        "clone": lambda t: t.clone(),
        "stack": lambda t: torch.stack([t, t], dim=place),
        "slice": lambda t: t.narrow(dim, low, high - low),
        "permute": lambda t: t.permute(order),
        "transpose": lambda t: t.transpose(dim, 0),
        "contiguous": lambda t: t.contiguous(),
        "cat": lambda t: torch.cat([t.narrow(dim, low, size - low), t.narrow(dim, 0, low)], dim=dim),
        "split": lambda t: t.split(parts, dim=dim)[0],
        "chunk": lambda t: t.chunk(parts, dim=dim)[-1],
        "select": lambda t: t.select(dim, index),
        "squeeze": lambda t: t.squeeze(dim),
    }[kind]
    return operation(x), operation(y)


@pytest.mark.parametrize("seed", range(60))
def test_random_compositions(seed):
    draw = random.Random(seed)
    eager = [values(*(draw.randint(1, 5) for _ in range(draw.randint(1, 4))), seed=seed)]
    tensors = Memory(*eager).stored()
    for _ in range(8):
        x, y = one_step(draw, tensors, eager)
        tensors.append(x)
        eager.append(y)
    check(tensors[-1], eager[-1])
    alike = [at for at, y in enumerate(eager) if y.shape == eager[-1].shape and y.dtype == eager[-1].dtype]
    lazy = torch.stack([tensors[at] for at in alike], dim=-1)
    check(lazy, torch.stack([eager[at] for at in alike], dim=-1))


COMPUTING = {
    "+ 1": lambda x: x + 1,
    "matmul": lambda x: x @ x.mT,
    "view to another shape": lambda x: x.view(2, 10, 3),
    "reshape": lambda x: x.transpose(0, 1).reshape(20, 3),
    "flatten": lambda x: x.flatten(),
    "every second": lambda x: x[::2],
    "expand": lambda x: x[:1].expand(3, 5, 3),
    "index by a list": lambda x: x[[2, 0]],
    "cat of two dtypes": lambda x: torch.cat([x, x.double()]),
    "cat with one in memory": lambda x: torch.cat([x, torch.ones(1, 5, 3)]),
    "several results": lambda x: x.topk(2, dim=0)[0],
    "the other of several results": lambda x: x.sort(dim=1)[1],
    "of a rearranged one": lambda x: (x.transpose(0, 1)[1:] * 2).sum(0),
    "rearranged afterwards": lambda x: torch.cat([(x * 3).mT, x.mT], dim=1)[:, 2:],
    "half the dims at once": lambda x: x.view(4, 5, 3, 1).squeeze(),
    "rope": lambda x: x[:, :4].reshape(4, 2, 2, 3).transpose(1, 2).reshape(4, 4, 3).contiguous(),
}


@pytest.mark.parametrize("name", COMPUTING)
def test_what_computes_is_right_too(name):
    x = values(4, 5, 3)
    memory = Memory(x)
    lazy = COMPUTING[name](memory.stored()[0])
    assert memory.asked == []
    pieces = list(lazy.node.pieces(whole(tuple(lazy.shape))))
    assert any(isinstance(piece.leaf, Computed) for piece in pieces)
    check(lazy, COMPUTING[name](x), pure=False)
    assert {leaf.key for leaf in leaves(lazy.node)} == {0}


def test_a_rearrangement_reads_only_where_it_has_to():
    """Rows of a fused tensor: none of the parts that hold other rows."""
    tensors = [values(4, 6, seed=seed) for seed in range(3)]
    memory = Memory(*tensors)
    fused = torch.cat(memory.stored()).to(torch.bfloat16)
    read(fused.node, (slice(5, 9), slice(2, 3)))
    columns = slice(2, 3)
    assert memory.asked == [(1, (slice(1, 4), columns)), (2, (slice(0, 1), columns))]


def test_nothing_is_read_by_operations():
    memory = Memory(values(4, 5, 3))
    (lazy,) = memory.stored()
    for operation in (*SINGLE.values(), *COMPUTING.values()):
        operation(lazy)
    repr(lazy)
    assert memory.asked == []


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 100])
@pytest.mark.parametrize("shape", [(7, 5), (6,), (), (0, 4), (4, 0)])
def test_equal(monkeypatch, shape, rows_at_a_time):
    monkeypatch.setattr(lazy_tensor, "_EQUAL_BYTES", rows_at_a_time * 4 * prod(shape[1:]))
    x = values(*shape)
    same, other = x.clone(), x.clone()
    if x.numel():
        other.view(-1)[-1] += 1
    first, second, third = Memory(x, same, other).stored()
    assert torch.equal(first, first)
    assert torch.equal(first, second)
    assert torch.equal(first, third) is (x.numel() == 0)
    assert not torch.equal(first, first.unsqueeze(0))


def test_equal_reads_no_further_than_the_first_difference(monkeypatch):
    monkeypatch.setattr(lazy_tensor, "_EQUAL_BYTES", 1)
    memory = Memory(torch.zeros(50, 2), torch.ones(50, 2))
    assert not torch.equal(*memory.stored())
    assert len(memory.asked) == 2


def test_equal_with_a_tensor_in_memory_is_refused():
    x = values(2, 2)
    (lazy,) = Memory(x).stored()
    with pytest.raises(TypeError, match="compared with another one on disk"):
        torch.equal(lazy, x)


def test_a_copy_is_itself():
    (lazy,) = Memory(values(2, 3)).stored()
    assert copy.deepcopy(lazy) is lazy
    assert copy.deepcopy({"a": [lazy]})["a"][0] is lazy


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_of_one_stays_one(requires_grad):
    x = values(2, 3)
    (lazy,) = Memory(x).stored()
    parameter = nn.Parameter(lazy, requires_grad=requires_grad)
    assert isinstance(parameter, LazyTensor)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad is requires_grad
    module = nn.Module()
    module.weight = parameter
    assert list(module.parameters()) == [parameter]
    check(module.weight.node and LazyTensor(parameter.node), x)
    check(parameter.detach()[1:], x[1:])


BAD = {
    "split sizes that leave rows over": lambda x: x.split([2, 1], dim=0),
    "split sizes beyond the end": lambda x: x.split([2, 7], dim=0),
    "cat of shapes that do not fit": lambda x: torch.cat([x, x[:, 1:]]),
    "cat of dims that do not fit": lambda x: torch.cat([x, x[0]]),
    "stack of shapes that do not fit": lambda x: torch.stack([x, x[1:]]),
    "transpose of a dim it has not": lambda x: x.transpose(0, 2),
    "permute with a dim twice": lambda x: x.permute(0, 0),
    "permute with a dim too few": lambda x: x.permute(0),
    "cat along a dim it has not": lambda x: torch.cat([x, x], dim=2),
    "unsqueeze at a dim it has not": lambda x: x.unsqueeze(4),
    "select of a row it has not": lambda x: x.select(0, 4),
    "narrow beyond the end": lambda x: x.narrow(0, 2, 5),
    "view of another size": lambda x: x.view(3, 3),
}


@pytest.mark.parametrize("name", BAD)
def test_what_torch_refuses_is_refused(name):
    """Of a config that is not the checkpoint's, transformers' conversions ask for such; none may pass in silence."""
    x = values(4, 5)
    (lazy,) = Memory(x).stored()
    with pytest.raises((RuntimeError, IndexError)):
        BAD[name](x)
    with pytest.raises((RuntimeError, IndexError)):
        BAD[name](lazy)


@pytest.mark.parametrize("name", ["zero_", "mul_(2)", "copy_", "setitem", "init"])
def test_writing_into_one_is_no_silent_nothing(name):
    (lazy,) = Memory(torch.ones(2, 3)).stored()
    write = {
        "zero_": lambda: lazy.zero_(),
        "mul_(2)": lambda: lazy.mul_(2),
        "copy_": lambda: lazy.copy_(torch.zeros(2, 3)),
        "setitem": lambda: lazy.__setitem__(0, 0.0),
        "init": lambda: nn.init.zeros_(lazy),
    }[name]
    with pytest.raises((TypeError, RuntimeError)):
        write()


def test_a_result_that_no_file_holds_can_be_filled():
    """As models with weight norm do with `module.weight` when loaded: in vain, but random numbers are drawn."""
    direction, length = values(2, 3), values(2, 1)
    memory = Memory(direction, length)
    lazy = torch._weight_norm(*memory.stored(), 0)
    check(lazy, torch._weight_norm(direction, length, 0), pure=False)
    memory.asked.clear()
    torch.manual_seed(3)
    nn.init.normal_(lazy)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    want = nn.init.normal_(torch.empty(2, 3))
    assert torch.equal(after, torch.get_rng_state())
    assert torch.equal(read(lazy.node), want)
    assert not memory.asked


def test_a_part_of_a_result_cannot_be_filled():
    """In memory that would reach what it is a part of."""
    part = Memory(values(4, 3)).stored()[0].unfold(0, 2, 2)
    with pytest.raises(TypeError, match="cannot be written"):
        part.zero_()


# ---------------------------------------------------------------------- transformers' own operations, unmodified


def both_ways(operation, inputs, targets, **extra):
    """An operation's results for tensors on disk and in memory."""
    flat = [tensor for group in inputs.values() for tensor in (group if isinstance(group, list) else [group])]
    lazy = iter(Memory(*flat).stored())
    on_disk = {
        name: [next(lazy) for _ in group] if isinstance(group, list) else next(lazy) for name, group in inputs.items()
    }
    found = operation.convert(on_disk, source_patterns=list(inputs), target_patterns=targets, **extra)
    want = operation.convert(
        {name: list(group) if isinstance(group, list) else group for name, group in inputs.items()},
        source_patterns=list(inputs),
        target_patterns=targets,
        **extra,
    )
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        check(found[name], tensor)
    return found


def test_merge_modulelist_runs_on_them():
    experts = {"experts.*.w1": [values(3, 4, seed=seed) for seed in range(5)]}
    both_ways(MergeModulelist(dim=0), experts, ["experts.w1"])


def test_merge_then_concatenate_runs_on_them():
    """As for the experts of Mixtral: the rows of one expert ask for nothing of another."""
    gate, up = ([values(3, 4, seed=seed) for seed in seeds] for seeds in (range(5), range(5, 10)))
    memory = Memory(*gate, *up)
    lazy = memory.stored()
    sources = {"experts.*.w1": lazy[:5], "experts.*.w3": lazy[5:]}
    names = list(sources)
    merged = MergeModulelist(dim=0).convert(dict(sources), names, ["experts.gate_up_proj"])
    fused = Concatenate(dim=1).convert(merged, names, ["experts.gate_up_proj"])["experts.gate_up_proj"]
    check(fused, torch.cat([torch.stack(gate), torch.stack(up)], dim=1))
    memory.asked.clear()
    read(fused.node, (slice(3, 4), slice(0, 6), slice(0, 4)))
    assert {key for key, _ in memory.asked} == {3, 8}


def test_concatenate_runs_on_them():
    parts = {"q": values(4, 3), "k": [values(2, 3)], "v": values(2, 3, seed=1)}
    both_ways(Concatenate(dim=0), parts, ["qkv"])


@pytest.mark.parametrize("dim", [0, 1])
def test_chunk_runs_on_them(dim):
    both_ways(Chunk(dim=dim), {"qkv": [values(6, 9)]}, ["q", "k", "v"])


def test_split_modulelist_runs_on_them():
    both_ways(SplitModulelist(dim=0), {"experts.w1": values(3, 2, 4)}, ["experts.*.w1"])


def test_transpose_runs_on_them():
    both_ways(Transpose(0, 1), {"w": [values(3, 4)]}, ["w"])
