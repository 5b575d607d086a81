"""What each process sees, and what it hears of the others: dataloaders, schedulers, gathered values."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, utils
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset
from transformers import trainer_pt_utils
from transformers.trainer_utils import seed_worker

from accelerate_plugin.data import prepare_sampler
from tests.accelerate_plugin.harness import launched, plugin
from tests.oracle import Case, full, ranks_of, relative_error, trained
from tests.oracle.workers import Failure, attempt

MESHES = ["1x2", "2x2", "2x1"]


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(16))


class Sized(Stream):
    def __len__(self) -> int:
        return 16


def prepared(accelerator: Accelerator) -> tuple[Any, Any]:
    model = Case().model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1.0)
    return accelerator.prepare(model, optimizer)


def everyone(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def seen(mesh: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with launched():
        accelerator = Accelerator(fsdp_plugin=plugin(mesh))
        torch.manual_seed(dist.get_rank())  # as with set_seed(device_specific=True), or none
        loader: Any = accelerator.prepare(DataLoader(Numbers(), batch_size=2, shuffle=True))
        found["shuffled"] = everyone([batch.tolist() for batch in loader])
        found["next epoch"] = everyone([batch.tolist() for batch in loader])
        found["stream"] = everyone([b.tolist() for b in accelerator.prepare(DataLoader(Stream(), batch_size=2))])
        loader = DataLoader(
            Numbers(),
            batch_size=2,
            worker_init_fn=partial(seed_worker, num_workers=1, rank=dist.get_rank()),
        )
        found["worker rank"] = everyone([accelerator.prepare(loader).worker_init_fn.keywords["rank"]])
        parts = []
        loader = accelerator.prepare(DataLoader(Numbers(), batch_size=4))
        for batch in loader:
            parts.append(accelerator.gather_for_metrics(batch))
        found["metrics"] = torch.cat(parts).tolist()
        # Another config than the Accelerator was made with; by default it dispatches the batches of such a dataset.
        config, found["stream of metrics"] = accelerator.dataloader_config, []
        for dispatch in (None, False):
            accelerator.dataloader_config = DataLoaderConfiguration(dispatch_batches=dispatch)
            loader = accelerator.prepare(DataLoader(Sized(), batch_size=3))
            parts = [accelerator.gather_for_metrics(each) for each in loader]
            found["stream of metrics"].append(torch.cat(parts).tolist())
        accelerator.dataloader_config = config
        loader = accelerator.prepare(DataLoader(Numbers(), batch_size=4))
        parts = []
        for batch in loader:
            parts.append(accelerator.gather_for_metrics([{"id": each} for each in batch.tolist()]))
        found["objects"] = [each["id"] for part in parts for each in part]
        dp_rank = accelerator.state.parallelism_config.dp_rank
        found["gathered"] = accelerator.gather(torch.tensor([dp_rank, 10 + dp_rank])).tolist()
        found["gathered by utils"] = utils.gather(torch.tensor([dp_rank, 10 + dp_rank])).tolist()
        found["objects by utils"] = utils.gather_object([dp_rank, 10 + dp_rank])
        found["indices"] = everyone(accelerator.process_index)
        found["ends"] = everyone([accelerator.is_main_process, accelerator.is_last_process])
        utils.set_seed(5, device_specific=True)
        found["draws"] = everyone(torch.rand(()).item())
        found["nothing"] = tuple(accelerator.gather(torch.empty(0, 3)).shape)
        found["scalars"] = accelerator.gather({"a": torch.tensor(float(dp_rank))})["a"].tolist()
        found["sum"] = accelerator.reduce(torch.tensor([1.0, dp_rank]), "sum").tolist()
        found["mean"] = accelerator.reduce(torch.tensor([1.0, dp_rank]), "mean").tolist()
        found["max"] = accelerator.reduce(torch.tensor([-1.0, dp_rank]), "max").tolist()
        for reduction in ("sum", "mean", "max"):
            [reduced] = utils.reduce({"a": [torch.tensor([1.0, dp_rank])]}, reduction)["a"]
            found[f"{reduction} by utils"] = reduced.tolist()
        with accelerator.split_between_processes(list(range(8))) as mine:
            found["split"] = everyone(mine)
        with accelerator.split_between_processes(torch.arange(7), apply_padding=True) as mine:
            found["padded"] = everyone(mine.tolist())
        if dist.get_rank() == dist.get_world_size() - 1:
            accelerator.set_trigger()
        found["triggered"] = [accelerator.check_trigger(), accelerator.check_trigger()]
        found["processes"] = accelerator.num_processes
        model, optimizer = prepared(accelerator)
        counted: list[int] = []
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: counted.append(step) or 1.0 / (1 + step))
        schedule = accelerator.prepare(schedule)
        tokens = torch.randint(0, 100, (4, 6), generator=torch.Generator().manual_seed(dp_rank))
        for _ in range(2):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found["scheduled"] = schedule.scheduler.last_epoch
        once: dict[str, Any] = {}
        for each in (nullcontext(), accelerator.no_sync(model)):
            with each:
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            if not once:
                once = {name: full(p.grad) for name, p in trained(model).items()}
                optimizer.zero_grad()
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        twice = {name: full(p.grad) / 2 for name, p in trained(model).items()}
        found["accumulated"] = relative_error(twice, once) < 1e-12
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_tensor_parallel_peers_act_as_one_process(pool, mesh):
    world, tp = ranks_of(mesh), 1 if mesh == "2x1" else 2
    dp = world // tp
    for found in pool.run(world, seen, mesh):
        for name in ("shuffled", "next epoch", "stream", "worker rank", "split"):
            shares = found[name][::tp]
            assert found[name] == [share for share in shares for _ in range(tp)], name
            assert all(a != b for a, b in itertools.pairwise(shares)), name
        assert found["shuffled"] != found["next epoch"]
        assert {each for share in found["shuffled"] for batch in share for each in batch} == set(range(18))
        assert sorted(each for share in found["stream"][::tp] for batch in share for each in batch) == list(range(16))
        assert found["metrics"] == found["objects"] == list(range(18))
        assert found["gathered"] == [each for rank in range(dp) for each in (rank, 10 + rank)]
        assert found["gathered by utils"] == found["objects by utils"] == found["gathered"]
        assert found["indices"] == [rank for rank in range(dp) for _ in range(tp)]
        assert found["ends"] == [[rank == 0, rank == world - 1] for rank in range(world)]
        drawn = [torch.rand((), generator=torch.Generator().manual_seed(5 + rank)).item() for rank in range(dp)]
        assert found["draws"] == [each for each in drawn for _ in range(tp)]
        assert found["stream of metrics"] == [list(range(16))] * 2
        assert found["nothing"] == (0, 3)
        assert found["scalars"] == list(range(dp))
        assert found["sum"] == [dp, sum(range(dp))]
        assert found["mean"] == [1, sum(range(dp)) / dp]
        assert found["max"] == [-1, dp - 1]
        assert found["sum by utils"] == found["sum"]
        assert found["mean by utils"] == found["mean"]
        assert found["max by utils"] == [1, dp - 1]
        assert [each for share in found["split"][::tp] for each in share] == list(range(8))
        padded = [[0, 1, 2, 3], [4, 5, 6, 6]] if dp == 2 else [list(range(7))]
        assert found["padded"] == [share for share in padded for _ in range(tp)]
        assert found["triggered"] == [True, False]
        assert found["processes"] == dp
        assert found["scheduled"] == 2 * dp
        assert found["accumulated"]


def dispatched(mesh: str) -> list[Any]:
    answers = []
    for configuration in (
        DataLoaderConfiguration(dispatch_batches=True),
        DataLoaderConfiguration(use_seedable_sampler=True),
    ):
        with launched():
            made = attempt(Accelerator, fsdp_plugin=plugin(mesh), dataloader_config=configuration)
            if not isinstance(made, Failure):
                torch.manual_seed(dist.get_rank())
                loader: Any = made.prepare(DataLoader(Numbers(), batch_size=2, shuffle=True))
                made = everyone([batch.tolist() for batch in loader])
        answers.append(made)
    with launched():
        Accelerator(fsdp_plugin=plugin(mesh))
        answers.append(attempt(by_function, DataLoader(Stream(), batch_size=2)))
    return answers


def by_function(loader: Any) -> list[list[int]]:
    """Return the batches that Accelerate's function deals by itself: it dispatches an iterable dataset by default."""
    return everyone([batch.tolist() for batch in prepare_data_loader(loader, put_on_device=True)])


def test_dispatching_one_batch_to_all_is_refused(pool):
    """Accelerate would give every process the same batch, whichever data-parallel rank it is."""
    for refused, seeded, dealt_by_function in pool.run(4, dispatched, "2x2"):
        assert refused.kind == dealt_by_function.kind == "ValueError"
        assert "dispatch_batches" in refused.message
        assert "dispatch_batches" in dealt_by_function.message
        assert seeded[0] == seeded[1] != seeded[2] == seeded[3]
    for dealt, _, dealt_by_function in pool.run(2, dispatched, "2x1"):
        assert sorted(each for share in dealt_by_function for batch in share for each in batch) == list(range(16))
        assert {each for share in dealt for batch in share for each in batch} == set(range(18))
        assert dealt[0] != dealt[1]


def test_rows_that_trainer_balances_by_length_are_those_of_the_data_parallel_rank():
    """Trainer gives its sampler the rank among all processes."""

    def balanced(rank: int) -> Any:
        return trainer_pt_utils.BatchRebalanceSampler(list(range(1, 17)), 8, dp_size=2, grad_accum=1, rank=rank)

    for dp_rank in (0, 1):
        loader = DataLoader(Numbers(), batch_sampler=balanced(5))
        prepare_sampler(loader, dp_rank, seedable=True)
        assert list(loader.batch_sampler) == list(balanced(dp_rank)) != list(balanced(1 - dp_rank))


def clipped(mesh: str) -> list[float]:
    with launched():
        accelerator = Accelerator(fsdp_plugin=plugin(mesh))
        model, _ = prepared(accelerator)
        tokens = Case().batches()[0]
        model(input_ids=tokens, labels=tokens).loss.backward()
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        worst = max(p.grad.abs().max().full_tensor().item() for p in model.parameters() if p.grad is not None)
        norms = [accelerator.clip_grad_norm_(model.parameters(), 1e-9, order).item() for order in ("inf", 2)]
        return [worst, *norms]


def test_clipping_by_value(pool):
    for worst, largest, norm in pool.run(4, clipped, "2x2"):
        assert worst == largest == 1e-3
        assert norm > 0
