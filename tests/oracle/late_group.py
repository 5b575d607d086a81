"""A process group whose results come late, as NCCL's on a CUDA stream do: `register`, then backend "late".

gloo's results are there as soon as its thread is done, so a wait that the engine leaves out often changes nothing. Here
every such error shows:

- Each group has one queue, a thread in which its operations run one after the other, `DELAY` seconds late.
- Outputs are poisoned when an operation is issued (NaN, or an absurd integer), and have their values only after
  `wait()` of the work of that very operation.
- An input that shares memory with an output is copied when the operation is issued. Any other input is read when the
  operation runs, so that it must stay as it is until then.
- A send is done when the peer has received.
- What NCCL refuses is an error: a dtype, a reduction, a tensor that is not contiguous. So is an operation that is not
  written down here.

gloo moves the data. `run_backward_in_thread` adds what autograd does on a GPU.

Tensors may be on a GPU, which several ranks may share, as NCCL's may not ("cuda:late"). They are read in a stream of
the queue's own, after what the stream of the caller has computed by then, and brought to gloo and back.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

MODES = ("lazy", "eager", "blocking")
"""Ways in which NCCL may be set up:

- lazy: each pair of ranks has a queue of its own for messages, and the first message of a pair blocks the host until
  the peer has begun one too, as that is when NCCL makes a communicator for the pair.
- eager: messages queue with the other operations of the group (`init_process_group(device_id=...)`).
- blocking: as lazy, and the host waits in each collective until it has run (CUDA_LAUNCH_BLOCKING=1). Outputs still need
  their `wait()`.
"""

DELAY = 0.002  # seconds

_DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
}
_REDUCTIONS = {getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")}
_DATA, _RECEIPT = 0, 1  # tags of gloo's messages

Tensors = list[Tensor]
Run = Callable[[Tensors, Tensors], Iterable[dist.Work]]
"""Function that begins gloo's operations one by one, given tensors for the values of the outputs, and the inputs."""


class LateWork(dist.Work):
    """Stand for an operation in a queue, and give each output its value in `wait()`."""

    def __init__(self, name: str, future: Future[None], values: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._name, self._future, self._values = name, future, values

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            self._future.result(timeout.total_seconds() or None)
        except Exception as error:
            raise RuntimeError(f"late: {self._name} failed, or has not run within {timeout}: {error!r}") from error
        values, self._values = self._values, []  # a second wait must not undo what was written since
        for output, value in values:
            with _writing_to([output]):
                output.copy_(value)
            if value.is_cuda:  # it may be freed, and its memory used again, before the copy has run
                value.record_stream(torch.cuda.current_stream())
        return True

    def is_completed(self) -> bool:
        return self._future.done()


class LateGroup(dist.ProcessGroup):
    """Run collectives and messages over gloo, late (see the top of this file).

    The methods have the names that torch calls: its Python functions use the names of 2.13 or those of 2.11 and 2.12,
    its functional collectives those that end in `_coalesced`.
    """

    def __init__(self, mode: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._mode, self._store = mode, store
        self._queues: defaultdict[tuple[int, ...], ThreadPoolExecutor] = defaultdict(lambda: ThreadPoolExecutor(1))
        # The class that torch makes gloo groups of, which `one_gloo_thread` replaces.
        self._gloo: Any = distributed_c10d.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)

    def _issue(
        self,
        name: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        run: Run,
        reduction: Any = None,
        poisoned: Sequence[Tensor] | None = None,
        pair: tuple[int, ...] = (),
    ) -> LateWork:
        """Queue an operation that reads `inputs` and writes `outputs`.

        Args:
            name: The name of the operation, for errors.
            outputs: Tensors that get their values in `wait()`. `run` is given copies, with what they held before, as an
                operation in place needs it.
            inputs: Tensors that are not outputs as well.
            run: Function that computes the values.
            reduction: Operator of the reduction, if it is one.
            poisoned: The outputs or parts of outputs that have no value until `wait()`; None for all.
            pair: The two ranks in whose queue the operation runs; empty for the group's queue.
        """
        # Torch asks a tensor of another class for its values before a backend of its own has it, as it does not here.
        inputs = [tensor if type(tensor) in (Tensor, nn.Parameter) else tensor.clone() for tensor in inputs]
        for tensor in (*outputs, *inputs):
            kind = f"late: {name} of a tensor {list(tensor.shape)} of {tensor.dtype}"
            if tensor.dtype not in _DTYPES:
                raise TypeError(f"{kind}: NCCL has no such dtype.")
            if not tensor.is_contiguous():
                raise ValueError(f"{kind} with strides {tensor.stride()}: NCCL takes contiguous tensors only.")
            if reduction is not None and reduction not in _REDUCTIONS:
                raise ValueError(f"{kind} by {reduction}: NCCL has no such reduction.")
        sources = [tensor.data.clone() if _overlaps(tensor, outputs) else tensor.data for tensor in inputs]
        values = [tensor.data.clone() for tensor in outputs]
        with _writing_to(outputs):
            for tensor in outputs if poisoned is None else poisoned:
                _poison(tensor.data)
        issued = _present((*outputs, *inputs))
        future = self._queues[pair].submit(_run_late, run, values, sources, issued)
        if self._mode == "blocking" and not pair:
            future.exception()  # returns when it has run
        return LateWork(name, future, [(tensor.data, value) for tensor, value in zip(outputs, values, strict=True)])

    def allreduce(self, tensors: Tensors, opts: Any) -> LateWork:
        op = opts.reduceOp.op
        return self._issue("all_reduce", tensors, (), lambda values, _: [self._gloo.allreduce(values, opts)], op)

    def barrier(self, opts: Any) -> LateWork:
        return self.allreduce([torch.zeros(1)], dist.AllreduceOptions())

    def broadcast(self, tensors: Tensors, opts: Any) -> LateWork:
        poisoned = () if opts.rootRank == self.rank() else tensors
        return self._issue(
            "broadcast", tensors, (), lambda values, _: [self._gloo.broadcast(values, opts)], None, poisoned
        )

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> LateWork:
        return self._issue(
            "all_gather", *outputs, inputs, lambda values, sources: [self._gloo.allgather([values], sources)]
        )

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> LateWork:
        lists = outputs or [[]]  # only the root has a list
        return self._issue(
            "gather",
            *lists,
            inputs,
            lambda values, sources: [self._gloo.gather([values] * len(outputs), sources, opts)],
        )

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> LateWork:
        lists = inputs or [[]]  # only the root has a list
        return self._issue(
            "scatter",
            outputs,
            *lists,
            lambda values, sources: [self._gloo.scatter(values, [sources] * len(inputs), opts)],
        )

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> LateWork:
        poisoned = [
            part
            for output, input in zip(outputs, inputs, strict=True)
            for rank, part in enumerate(output.data.flatten().chunk(self.size()))
            if rank != self.rank() or not _overlaps(input, [output])  # in place, this rank's part is there already
        ]
        run = partial(map, self._gloo._allgather_base)
        return self._issue("all_gather_single", outputs, inputs, run, poisoned=poisoned)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> LateWork:
        run = partial(map, partial(self._gloo._reduce_scatter_base, opts=opts))
        return self._issue("reduce_scatter_single", outputs, inputs, run, opts.reduceOp.op)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> LateWork:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> LateWork:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def all_to_all_single(self, output: Tensor, input: Tensor, received: Any, sent: Any, opts: Any) -> LateWork:
        run = partial(map, partial(self._gloo.alltoall_base, output_split_sizes=received, input_split_sizes=sent))
        return self._issue("all_to_all_single", [output], [input], run)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def send(self, tensors: Tensors, peer: int, tag: int) -> LateWork:
        def run(_: Tensors, sources: Tensors) -> Iterator[dist.Work]:
            yield self._gloo.send(sources, peer, _DATA)
            yield self._gloo.recv([torch.empty(1)], peer, _RECEIPT)

        return self._issue("send", (), tensors, run, pair=self._pair(peer))

    def recv(self, tensors: Tensors, peer: int, tag: int) -> LateWork:
        def run(values: Tensors, _: Tensors) -> Iterator[dist.Work]:
            yield self._gloo.recv(values, peer, _DATA)
            yield self._gloo.send([torch.empty(1)], peer, _RECEIPT)

        return self._issue("recv", tensors, (), run, pair=self._pair(peer))

    def _pair(self, peer: int) -> tuple[int, ...]:
        """Return the queue of messages with a peer. If it is a new one, wait until the peer wants it too."""
        if self._mode == "eager":
            return ()
        pair = (min(self.rank(), peer), max(self.rank(), peer))
        if pair not in self._queues:
            self._store.set(f"late: first message of rank {self.rank()} with {peer}", "")
            self._store.wait([f"late: first message of rank {peer} with {self.rank()}"], self._gloo.options._timeout)
        return pair

    # What torch asks any group for, and a group of no registered backend does not know.

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:
        return self._group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]  # where objects are sent from

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo  # its timeout can be set

    def set_timeout(self, timeout: timedelta) -> None:  # which torch calls from 2.14 on
        self._gloo._set_default_timeout(timeout)


def _run_late(run: Run, values: Tensors, sources: Tensors, issued: torch.cuda.Event | None) -> None:
    time.sleep(DELAY)
    if issued is None:
        with _writing_to(values):
            for work in run(values, sources):
                work.wait()
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_event(issued)
        results = [value.cpu() for value in values]
        for work in run(results, [source.cpu() for source in sources]):
            work.wait()
        for value, result in zip(values, results, strict=True):
            value.copy_(result)
        torch.cuda.current_stream().synchronize()


def _present(tensors: Sequence[Tensor]) -> torch.cuda.Event | None:
    """Return an event after which the tensors hold what the caller's stream has computed; None for those on a CPU."""
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _overlaps(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Return True if `tensor` shares its storage with one of the others."""
    return tensor.untyped_storage().data_ptr() in {other.untyped_storage().data_ptr() for other in others}


def _writing_to(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Let torch write to tensors that were made in inference mode, which it refuses elsewhere; NCCL does not ask."""
    return torch.inference_mode() if any(tensor.is_inference() for tensor in tensors) else nullcontext()


def _poison(tensor: Tensor) -> None:
    """Overwrite a tensor with a value that nothing computes with unnoticed."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


def register(mode: str) -> None:
    """Make the backend "late" known to torch in this process, in one of `MODES`."""
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}: it is one of {MODES}.")
    dist.Backend.register_backend("late", partial(LateGroup, mode), devices=["cpu", "cuda"])


def run_backward_in_thread() -> None:
    """Run each backward pass of this process in one other thread, as autograd does for CUDA tensors.

    A backward pass within another one stays in that thread, as there. For tensors on the CPU autograd has
    no such option: `torch.autograd._engine_run_backward`, which is replaced here, is private. If a new version of torch
    calls another function, backward runs in the caller's thread as ever: look in which it runs.
    """
    engine, thread = torch.autograd._engine_run_backward, ThreadPoolExecutor(1, "backward")

    def run(*args: Any, **kwargs: Any) -> Any:
        within = torch._C._current_graph_task_id() != -1  # of a backward pass, in which another one may be run
        return engine(*args, **kwargs) if within else thread.submit(engine, *args, **kwargs).result()

    torch.autograd._engine_run_backward = run  # type: ignore[assignment]


def prepare(mode: str) -> None:
    """Make this process a rank whose results come late, in one of `MODES`: what a `WorkerPool` calls first."""
    register(mode)
    run_backward_in_thread()
