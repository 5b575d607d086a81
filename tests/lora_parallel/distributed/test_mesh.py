"""The mesh: three axes, tp innermost, sizes that multiply to the world size."""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from lora_parallel import ParallelConfig, build_mesh
from lora_parallel.distributed.mesh import (
    axis_rank,
    communicators,
    dp_mesh,
    dp_rank,
    dp_size,
    mesh_sizes,
    same_batch_mesh,
)
from lora_parallel.distributed.torch_private import fake_process_group
from lora_parallel.sizes import AXES, mesh_axes
from tests.oracle import mesh_of
from tests.oracle.workers import Failure, attempt


def test_auto_takes_what_the_others_leave():
    def sizes(world: int, **config: int) -> tuple[int, ...]:
        found = mesh_sizes(ParallelConfig(**config), world)
        assert tuple(found) == AXES
        return tuple(found.values())

    assert sizes(6) == (1, 1, 6, 1, 1)
    assert sizes(12, tp=2, dp_replicate=3) == (1, 3, 2, 1, 2)
    assert sizes(8, tp=2, dp_shard=2, dp_replicate=2) == (1, 2, 2, 1, 2)
    assert sizes(8, tp=2, cp=2) == (1, 1, 2, 2, 2)
    assert sizes(8, tp=2, pp=2) == (2, 1, 2, 1, 2)
    assert mesh_axes(mesh_sizes(ParallelConfig(cp=2), 2)) == {"dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 1}
    assert "pp" not in mesh_axes(mesh_sizes(ParallelConfig(), 2))
    assert "cp" not in mesh_axes(mesh_sizes(ParallelConfig(), 2))


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ({}, 0),
        ({"dp_shard": 4}, 1),
        ({"dp_shard": 2, "tp": 2}, 3),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 4),
        ({"dp_shard": 2, "cp": 2, "tp": 2}, 6),
        ({"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2}, 8),
    ],
)
def test_communicators_are_the_groups_that_a_rank_is_in(sizes, count):
    config = ParallelConfig(**sizes)
    with fake_process_group(prod(sizes.values()), 0):
        build_mesh(config, "cpu")
        groups = {group for group in _world.pg_names if isinstance(group, dist.ProcessGroup)}
        assert sum(group.size() > 1 for group in groups) == count
    assert communicators(mesh_sizes(config, prod(sizes.values()))) == count


@pytest.mark.parametrize(
    ("sizes", "world", "parts"),
    [
        ({"tp": 3}, 4, ["tp=3", "does not divide", "4", "multiple of 3"]),
        ({"tp": 2, "dp_replicate": 2}, 6, ["tp=2", "dp_replicate=2", "= 4", "6"]),
        ({"tp": 2, "dp_shard": 2}, 8, ["dp_shard=2", "tp=2", "= 4", "8", "start 4 processes"]),
        ({"dp_shard": 4}, 2, ["dp_shard=4", "= 4", "world size is 2"]),
    ],
)
def test_a_product_that_is_not_the_world_size_is_refused(sizes, world, parts):
    with pytest.raises(ValueError, match="world size") as caught:
        mesh_sizes(ParallelConfig(**sizes), world)
    for part in parts:
        assert part in str(caught.value)


def refused_then_built():
    wrong = attempt(build_mesh, ParallelConfig(tp=3), "cpu")
    return wrong, dist.get_world_size(build_mesh(ParallelConfig(tp=2), "cpu").get_group("tp"))


def test_a_wrong_product_is_one_error_on_every_rank(pool):
    for wrong, tp in pool.run(4, refused_then_built):
        assert isinstance(wrong, Failure)
        assert wrong.kind == "ValueError"
        assert "tp=3" in wrong.message
        assert tp == 2  # and no rank is out of step


def layout(mesh_text):
    mesh = mesh_of(mesh_text)
    part = dp_mesh(mesh)
    return {
        "names": mesh.mesh_dim_names,
        "ranks": mesh.mesh.tolist(),
        "coordinate": tuple(axis_rank(mesh, axis) for axis in AXES),
        "same batch": dist.get_process_group_ranks(same_batch_mesh(mesh).get_group()),
        "dp": (dp_rank(mesh), dp_size(mesh)),
        "fsdp axes": part.mesh_dim_names,
    }


def test_tp_is_innermost_and_dp_rank_counts_replicas_and_shards(pool):
    for rank, found in enumerate(pool.run(8, layout, "2x2x2")):
        assert found["names"] == ("dp_replicate", "dp_shard", "tp")
        assert found["ranks"] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        assert found["coordinate"] == (0, rank // 4, rank // 2 % 2, 0, rank % 2)
        assert found["dp"] == (rank // 2, 4)
        assert found["fsdp axes"] == ("dp_replicate", "dp_shard")


def test_cp_is_between_dp_and_tp_and_fsdp_shards_over_both(pool):
    for rank, found in enumerate(pool.run(8, layout, "2x1x2cp2")):
        assert found["names"] == ("dp_replicate", "dp_shard", "cp", "tp")
        assert found["coordinate"] == (0, rank // 4, 0, rank // 2 % 2, rank % 2)
        assert found["dp"] == (rank // 4, 2)
        assert found["fsdp axes"] == ("dp_replicate", "dp_shard_cp")
        assert found["same batch"] == list(range(rank // 4 * 4, rank // 4 * 4 + 4))


def test_pp_is_outermost_and_dp_ranks_are_those_of_a_stage(pool):
    for rank, found in enumerate(pool.run(8, layout, "2x2pp2")):
        assert found["names"] == ("pp", "dp_replicate", "dp_shard", "tp")
        assert found["coordinate"] == (rank // 4, 0, rank // 2 % 2, 0, rank % 2)
        assert found["dp"] == (rank // 2 % 2, 2)


def test_a_replicate_axis_of_one_stays_out_of_fsdp(pool):
    """It would cost an all-reduce for each unit."""
    for rank, found in enumerate(pool.run(4, layout, "2x2")):
        assert found["names"] == ("dp_replicate", "dp_shard", "tp")
        assert found["fsdp axes"] == ("dp_shard",)
        assert found["dp"] == (rank // 2, 2)


def timeouts(seconds):
    mesh = build_mesh(ParallelConfig(tp=2, timeout_seconds=seconds), "cpu")
    device = next(iter(mesh.get_group("tp")._device_types))
    return [mesh.get_group(axis)._get_backend(device).options._timeout.total_seconds() for axis in mesh.mesh_dim_names]


def test_every_axis_has_the_timeout(pool):
    for found in pool.run(2, timeouts, 77):
        assert found == [77, 77, 77]


def own_groups():
    group = dist.new_group()
    mesh = build_mesh(ParallelConfig(dp_shard=2), "cpu")
    groups = [mesh.get_group(axis) for axis in mesh.mesh_dim_names]
    threads = [each._get_backend(torch.device("cpu")).options._threads for each in groups]
    return threads, dist.group.WORLD in groups, group._get_backend(torch.device("cpu")).options._threads


def test_every_axis_has_a_group_of_its_own_with_one_thread(pool):
    """Also the axis of all ranks, for which `init_device_mesh` takes the default group by itself."""
    assert pool.run(2, own_groups) == [([1, 1, 1], False, 2)] * 2
