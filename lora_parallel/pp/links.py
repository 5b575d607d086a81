"""Send hidden states and their gradients between neighbouring pipeline ranks.

Each rank sends hidden states to the next rank, and gradients to the one before. If ranks have several stages, the last
rank also sends hidden states to the first, and gets gradients from it. Each of these four has a process group of its
own, in which messages go one way only: so their order cannot make two ranks wait for each other, on any backend.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from threading import Event, Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from lora_parallel.distributed.rank_checks import gather_objects
from lora_parallel.distributed.torch_private import default_store, is_simulated, one_gloo_thread

PATIENCE = 1.0  # Seconds of waiting after which a rank checks if another rank of its pipeline has failed
_FAILED = "failed"

_made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # Number of the links made so far, by default process group


class StageFailedError(RuntimeError):
    """Report that another rank of the pipeline failed while this one waited for it."""


@dataclass
class _Groups:
    """Hold process groups over pp ranks, beside that of the mesh, which a failure leaves as it is."""

    # The groups of messages between neighbours: of hidden states or gradients, and of the last rank and the first.
    links: dict[tuple[bool, bool], Any] = field(default_factory=dict)
    outputs: Any = None
    # The error after which messages may be lost, so that no forward is possible any more; None if there is none.
    failure: str | None = None


# Process groups by default process group, mesh and kind: models share them, as each costs threads and connections.
_groups: WeakKeyDictionary[Any, dict[Any, _Groups]] = WeakKeyDictionary()


def _groups_of(mesh: DeviceMesh, timeout_seconds: int, has_ring: bool) -> _Groups:
    """Return the process groups of a mesh, of an earlier model if none has failed. Collective over all ranks."""
    pipelines = mesh.mesh.flatten(1).T.tolist()
    known, key = _groups.setdefault(dist.group.WORLD, {}), (str(pipelines), timeout_seconds, has_ring)
    earlier = known.get(key)
    usable = earlier is not None and earlier.failure is None
    if all(gather_objects(usable)):
        assert earlier is not None
        return earlier
    known[key] = groups = _Groups()
    gloo = mesh.device_type == "cpu" and "cpu:gloo" in dist.get_backend_config()
    backend = "gloo" if gloo else None  # as that of the mesh's own groups
    timeout = timedelta(seconds=timeout_seconds)
    with one_gloo_thread():
        for kind in product((True, False), (False, True) if has_ring else (False,)):
            groups.links[kind], _ = dist.new_subgroups_by_enumeration(pipelines, timeout, backend)
        groups.outputs, _ = dist.new_subgroups_by_enumeration(pipelines, timeout, backend)
    return groups


class Links:
    """Hold the process groups between this pipeline rank and its neighbours. Making it is collective over all ranks."""

    def __init__(self, mesh: DeviceMesh, timeout_seconds: int, has_ring: bool) -> None:
        # `has_ring`: the last rank sends hidden states to the first.
        self.ranks = dist.get_process_group_ranks(mesh.get_group("pp"))
        self._device = mesh.device_type
        self._index = self.ranks.index(dist.get_rank())
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._awaited: dict[bool, deque[tuple[dist.Work | None, Tensor]]] = {True: deque(), False: deque()}
        self._dtypes: dict[str, torch.dtype] = {}
        self._groups = _Groups()
        self._timeout = timeout_seconds
        self._store: Any = None
        if is_simulated():
            return
        number = _made[dist.group.WORLD] = _made.get(dist.group.WORLD, 0) + 1  # the same on all ranks
        self._groups = _groups_of(mesh, timeout_seconds, has_ring)
        self._store = dist.PrefixStore(f"lora_parallel/pipeline {number} of {self.ranks[0]}", default_store())

    @property
    def failure(self) -> str | None:
        """Return what has failed before, in a forward of this model or of another one on the same mesh."""
        return self._groups.failure

    def _peer(self, step: int, is_hidden: bool) -> tuple[int, Any]:
        """Return the rank `step` places further, and the process group of messages between it and this one."""
        other = (self._index + step) % len(self.ranks)
        is_ring = abs(other - self._index) != 1 or (step > 0) != (other > self._index)
        return self.ranks[other], self._groups.links[is_hidden, is_ring]

    def send(self, tensor: Tensor, is_hidden: bool, key: str) -> None:
        """Send hidden states to the next rank, or their gradient to the one before, without waiting."""
        if is_hidden and self._dtypes.get(f"sent {key}") is not tensor.dtype:
            self._announce_dtype(tensor.dtype, key)
        peer, group = self._peer(1 if is_hidden else -1, is_hidden)
        data = tensor.detach().contiguous()
        self._sent.append((dist.isend(data, peer, group=group), data))

    def _announce_dtype(self, dtype: torch.dtype, key: str) -> None:
        if f"sent {key}" in self._dtypes:
            raise RuntimeError(
                f"the hidden states between pipeline stages are {dtype} and were {self._dtypes[f'sent {key}']} in an "
                "earlier micro-batch: let the blocks return one dtype."
            )
        self._dtypes[f"sent {key}"] = dtype
        self._store.set(f"dtype {key} {self._index}", str(dtype).removeprefix("torch."))

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of the hidden states that this rank is sent. It waits until the first are sent."""
        if key not in self._dtypes:
            name = f"dtype {key} {(self._index - 1) % len(self.ranks)}"
            start = time.monotonic()
            while not self._store.check([name]):
                self._check()
                if time.monotonic() - start > self._timeout:
                    raise TimeoutError(f"rank {dist.get_rank()} waited for the pipeline stage before its own in vain.")
                time.sleep(0.002)
            self._dtypes[key] = getattr(torch, self._store.get(name).decode())
        return self._dtypes[key]

    def await_next(self, like: Tensor, is_hidden: bool) -> None:
        """Begin to receive the next hidden states, or the next gradient, in a new tensor like `like`."""
        peer, group = self._peer(-1 if is_hidden else 1, is_hidden)
        data = torch.empty_like(like, memory_format=torch.contiguous_format)
        self._awaited[is_hidden].append((dist.irecv(data, peer, group=group), data))

    def receive(self, is_hidden: bool) -> Tensor:
        """Return the first tensor of those that were awaited and not returned yet."""
        work, data = self._awaited[is_hidden].popleft()
        self.wait(work)
        return data

    def finish(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self._sent:
            self.wait(work)
        self._sent.clear()

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Give all ranks of the pipeline the tensor of the last one, in place."""
        self.wait(dist.broadcast(tensor, self.ranks[-1], group=self._groups.outputs, async_op=True))
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Take the largest of each element over the ranks of the pipeline, in place."""
        self.wait(dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._groups.outputs, async_op=True))

    def broadcast_object(self, value: Any) -> Any:
        """Return the object of the last rank, which is pickled."""
        values = [value]
        dist.broadcast_object_list(values, self.ranks[-1], group=self._groups.outputs)
        return values[0]

    def wait(self, work: Any) -> None:
        """Wait for a message of the pipeline. On an accelerator its stream waits, and this process goes on."""
        if self._device != "cpu":
            work.wait()
            return
        # Gloo closes its connections if a wait for a message times out, so this one is waited for in a thread.
        done, errors = Event(), list[BaseException]()

        def wait() -> None:
            try:
                work.wait()
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        Thread(target=wait, daemon=True).start()
        while not done.wait(PATIENCE):
            self._check()
        if errors:
            self._check()
            raise RuntimeError(
                f"rank {dist.get_rank()}: a message between the pipeline ranks {self.ranks} failed. A rank has ended, "
                f"or ran a different program. Cause: {errors[0]}"
            ) from errors[0]

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of the pipeline that this one has failed, and refuse further forwards."""
        self._groups.failure = f"{type(error).__name__}: {error}"
        if isinstance(error, StageFailedError) or self._store is None:
            return
        self._store.compare_set(_FAILED, "", f"rank {dist.get_rank()} failed: {self.failure}")

    def _check(self) -> None:
        try:
            failed = self._store.check([_FAILED])
            text = self._store.get(_FAILED).decode() if failed else ""
        except dist.DistError as error:
            raise RuntimeError(
                f"rank {dist.get_rank()} waited for the pipeline ranks {self.ranks}, and the process that keeps the "
                f"store of the process group (rank 0, or the launcher) has ended. Cause: {error}"
            ) from error
        if failed and not text.startswith(f"rank {dist.get_rank()} "):
            raise StageFailedError(f"this rank waited for other pipeline stages, of which {text}")
