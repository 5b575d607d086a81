"""The collectives of tensor parallel compute: what they compute, how many there are, what a lost peer looks like."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model

from lora_parallel import ParallelConfig, build_mesh, no_sync, parallelize
from lora_parallel.distributed.collectives import chunk_bounds, copy_to_tp, gather_last_dim, split_last_dim, sum_over_tp
from lora_parallel.distributed.torch_private import set_timeout
from tests.lora_parallel.traffic import Traffic
from tests.oracle import SIZES, causal_lm, fill_adapters, lora_config, mesh_of, on_mesh, ranks_of
from tests.oracle.workers import Failure, attempt


@pytest.mark.parametrize("size", [0, 1, 3, 5, 7, 8, 131])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_chunk_bounds_cut_as_torch_chunk(size, parts):
    bounds = [chunk_bounds(size, parts, index) for index in range(parts)]
    pieces = torch.arange(size).chunk(parts)
    assert [list(range(*bound)) for bound in bounds if bound[0] < bound[1]] == [p.tolist() for p in pieces if len(p)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size


WIDTH = 7  # four ranks have 2, 2, 2 and 1 of it


def functions():
    """Each function's output and input gradient; the input and the output's gradient hold the rank's number + 1."""
    group = mesh_of("1x4").get_group("tp")
    rank = dist.get_rank(group)
    start, end = chunk_bounds(WIDTH, 4, rank)
    weight = torch.arange(1.0, WIDTH + 1)

    def run(function, x, grad, *args):
        x = x.clone().requires_grad_()
        y = function(x, *args, group, "here")
        y.backward(grad)
        return y.detach(), x.grad

    mine = torch.full((2, WIDTH), rank + 1.0)
    return {
        "copy": run(copy_to_tp, mine, mine),
        "sum": run(sum_over_tp, mine, mine),
        "gather": run(gather_last_dim, mine[:, start:end], weight.expand(2, -1), WIDTH),
        "split": run(split_last_dim, weight.expand(2, -1), mine[:, start:end]),
    }


def test_forward_and_backward_of_each(pool):
    together = torch.tensor([1.0, 1, 2, 2, 3, 3, 4]).expand(2, -1)
    weight = torch.arange(1.0, WIDTH + 1).expand(2, -1)
    for rank, found in enumerate(pool.run(4, functions)):
        start, end = chunk_bounds(WIDTH, 4, rank)
        mine, ten = torch.full((2, WIDTH), rank + 1.0), torch.full((2, WIDTH), 10.0)
        want = {
            "copy": (mine, ten),
            "sum": (ten, mine),
            "gather": (together, weight[:, start:end]),
            "split": (weight[:, start:end], together),
        }
        for name, (y, grad) in want.items():
            assert torch.equal(found[name][0], y), name
            assert torch.equal(found[name][1], grad), name


def twice():
    group = mesh_of("1x2").get_group("tp")
    found = {}
    for function, args in ((copy_to_tp, ()), (sum_over_tp, ()), (gather_last_dim, (2 * WIDTH,)), (split_last_dim, ())):
        x = torch.ones(2, WIDTH, requires_grad=True)
        (first,) = torch.autograd.grad(function(x, *args, group, "here").square().sum(), x, create_graph=True)
        found[function.__name__] = attempt(first.sum().backward)
    return [found]


def test_gradients_of_gradients_are_refused(pool):
    """They would lack what other ranks have of them."""
    for (found,) in pool.run(2, twice):
        for failure in found.values():
            assert "differentiate twice" in failure.message


def step_traffic(mesh_text, layers, lora, embedded):
    """(kind, ranks) of every collective of one forward and one backward, the second step's; and of a no_sync one."""
    mesh, config = on_mesh(mesh_text, require_adapters=lora)
    model = causal_lm(num_hidden_layers=layers)
    if lora:
        model = get_peft_model(model, lora_config())
        fill_adapters(model)
    else:
        model.requires_grad_(False)
    model = parallelize(model.train(), mesh, config)
    ids = torch.arange(12).view(1, 12)
    inputs = {"input_ids": ids}
    if embedded:
        embeds = torch.randn(
            1, 12, SIZES["hidden_size"], dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        inputs = {"inputs_embeds": embeds.requires_grad_()}
    loss = model(**inputs, labels=ids).loss  # the first batch is compared between tp peers
    if loss.requires_grad:
        loss.backward()
    with Traffic() as forward:
        loss = model(**inputs, labels=ids).loss
    with Traffic() as backward:
        if loss.requires_grad:
            loss.backward()
    with Traffic() as accumulated, no_sync(model):
        loss = model(**inputs, labels=ids).loss
        if loss.requires_grad:
            loss.backward()
    groups = {
        axis: tuple(dist.get_process_group_ranks(mesh.get_group(axis))) for axis in ("dp_replicate", "dp_shard", "tp")
    }
    return groups, forward.calls, backward.calls, accumulated.calls


def by_kind(calls, groups):
    """{(kind, axis): count}; an axis of one rank counts under its ranks."""
    axes = {ranks: axis for axis, ranks in groups.items() if len(ranks) > 1}
    counted: dict[tuple, int] = {}
    for kind, ranks in calls:
        key = (kind, axes.get(ranks, ranks))
        counted[key] = counted.get(key, 0) + 1
    return counted


def traffic_of(mesh_text, cases):
    return [step_traffic(mesh_text, *case) for case in cases]


def test_lora_adds_no_activation_collective(pool):
    """Two all-reduces a decoder layer forward and two backward, with LoRA on all seven layers and without; and one a
    forward, of two numbers, that compares its inputs between tp peers.
    """
    cases = [(layers, lora, True) for lora in (True, False) for layers in (2, 4)]
    for answers in pool.run(2, traffic_of, "1x2", cases):
        counts = {case[:2]: (by_kind(f, g), by_kind(b, g)) for case, (g, f, b, _) in zip(cases, answers, strict=True)}
        reduce, gather = ("all_reduce", "tp"), ("all_gather", "tp")
        for layers in (2, 4):
            # the head: its slices are gathered, its input gradient is reduced; no embedding runs
            assert counts[layers, False] == ({reduce: 2 * layers + 1, gather: 1}, {reduce: 2 * layers + 1})
            # and with adapters one message more, for all their partial gradients
            assert counts[layers, True] == ({reduce: 2 * layers + 1, gather: 1}, {reduce: 2 * layers + 2})
        for (layers, _, _), (groups, _, _, accumulated) in zip(cases, answers, strict=True):
            # while accumulating, adapters or not: no message for gradients
            assert by_kind(accumulated, groups) == {reduce: 4 * layers + 2, gather: 1}


def test_the_embedding_costs_one_all_reduce(pool):
    """With frozen embeddings nothing flows to layer 0's input, so its q, k and v reduce nothing but their adapters."""
    for ids, embeds in pool.run(2, traffic_of, "1x2", [(2, True, False), (2, True, True)]):
        forward = [by_kind(calls[1], calls[0])["all_reduce", "tp"] for calls in (ids, embeds)]
        assert forward[0] - forward[1] == 1


@pytest.mark.parametrize("mesh", ["2x2", "4x1", "2x2x1"])
def test_adapter_gradients_cost_one_message_a_unit_and_axis(pool, mesh):
    """Units: three decoder layers and the root, of which the root holds no adapter."""
    layers = 3
    for (answer,) in pool.run(ranks_of(mesh), traffic_of, mesh, [(layers, True, False)]):
        groups, forward, backward, accumulated = answer
        sizes = {axis: len(ranks) for axis, ranks in groups.items()}
        tp = sizes["tp"] > 1
        want_forward = {("all_gather", "dp_shard"): layers + 1}
        want_backward = {("all_gather", "dp_shard"): layers, ("reduce_scatter", "dp_shard"): layers}
        # and over each of the two axes which parameters were used
        want_backward["all_reduce", "dp_shard"] = 1
        if sizes["dp_replicate"] > 1:
            want_backward["all_reduce", "dp_replicate"] = layers + 1
        if tp:
            want_forward |= {("all_reduce", "tp"): 2 * layers + 1 + 1, ("all_gather", "tp"): 1}
            want_backward["all_reduce", "tp"] = 2 * layers - 1 + 1 + 1  # layer 0's input, the head, the adapters
        assert by_kind(forward, groups) == want_forward
        assert by_kind(backward, groups) == want_backward
        # accumulating: what activations need, and no gradient
        kept = {key: n for key, n in want_backward.items() if key[0] == "all_gather"}
        if tp:
            kept["all_reduce", "tp"] = 2 * layers
        both = {key: want_forward.get(key, 0) + kept.get(key, 0) for key in want_forward | kept}
        assert by_kind(accumulated, groups) == both


def a_peer_that_does_not_come():
    """Rank 1 stops after its forward; rank 0 goes on with a backward."""
    config = ParallelConfig(tp=2)
    mesh = build_mesh(config, "cpu")
    model = get_peft_model(causal_lm(), lora_config())
    model = parallelize(model, mesh, config)
    ids = torch.arange(12).view(1, 12)
    loss = model(input_ids=ids, labels=ids).loss
    if dist.get_rank() == 0:
        set_timeout(mesh.get_group("tp"), 2)  # not before: the ranks may be far apart until here
        loss.backward()


def another_program():
    """In each tp group one rank waits for the other: rank 0 with a sum, rank 2 with slices."""
    config = ParallelConfig(tp=2, timeout_seconds=2)
    mesh = build_mesh(config, "cpu")
    x = torch.ones(2, 4, requires_grad=True)
    if dist.get_rank() == 0:
        sum_over_tp(x, mesh.get_group("tp"), "layers.0.mlp.down_proj")
    elif dist.get_rank() == 2:
        gather_last_dim(x, 8, mesh.get_group("tp"), "lm_head")
    return "done"


def test_a_lost_peer_is_an_error_that_names_the_collective(pool):
    first, second = pool.try_run(2, a_peer_that_does_not_come)
    assert second is None
    assert isinstance(first, Failure)
    assert first.kind == "RuntimeError"
    assert "rank 0: the collective 'input gradient of lm_head' over tp (ranks [0, 1]) failed" in first.message
    assert "Cause: " in first.message


def test_ranks_each_name_the_collective_they_are_in(pool):
    first, *others, last = pool.try_run(4, another_program)
    assert others[0] == last == "done"
    for rank, answer, named in (
        (0, first, "output of layers.0.mlp.down_proj"),
        (2, others[1], "output slices of lm_head"),
    ):
        assert isinstance(answer, Failure)
        peers = [rank, rank + 1]
        assert f"rank {rank}: the collective '{named}' over tp (ranks {peers}) failed" in answer.message
