"""An accelerator made of Python alone, on which one rank trains, and a list of the places where the host waits for it.

Tensors on the device "gpu" are torch's fake tensors: they have shapes and no values. Tensors in the CPU's memory are
real. Whatever the host reads from the device is 0 or True.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from itertools import chain
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE = "gpu"


class Wait(NamedTuple):
    """A place where the host waits for the device."""

    why: str
    module: str  # empty in a thread of autograd's that runs no function of Python
    function: str
    line: int


WAITS: list[Wait] = []


def note(why: str) -> None:
    """Note that the host waits, in the innermost function that is not of torch, Python or this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals["__name__"]
        package = module.partition(".")[0]
        if package not in sys.stdlib_module_names and package != "torch" and module != __name__:
            WAITS.append(Wait(why, module, frame.f_code.co_name, frame.f_lineno))
            return
        frame = frame.f_back
    WAITS.append(Wait(why, "", "", 0))


def _nothing(*_: Any) -> None:
    pass


class Event:
    """What torch.cuda.Event is for CUDA, and torch.cuda.Stream."""

    device = torch.device("cpu")
    record = wait = wait_event = wait_stream = _nothing

    def __init__(self, *_: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        note("synchronize")


class _Module:
    """What torch.cuda is for CUDA, as far as a step uses it."""

    Event = Stream = Event
    set_device = manual_seed_all = set_rng_state = _nothing

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = None) -> Event:
        return Event()

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    device = stream

    def synchronize(self, device: Any = None) -> None:
        note("synchronize")

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)  # which the host keeps, of CUDA's generators too

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def register() -> None:
    """Give this process the device, for ever: no other test may run in it."""
    _setup_privateuseone_for_python_backend(DEVICE, _Module())


def is_there(tensor: Tensor) -> bool:
    """Return True for a tensor on the device."""
    return tensor.device.type == DEVICE


class _Device(TorchDispatchMode):
    """Run operations on the device without values, and note those that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not {Tensor, FakeTensor, nn.Parameter}.issuperset(types):
            return NotImplemented  # of a DTensor: its operations on local parts come here, too
        name, kwargs = func._overloadpacket.__name__, kwargs or {}
        given = (each if isinstance(each, (list, tuple)) else (each,) for each in (*args, *kwargs.values()))
        inputs = [each for each in chain.from_iterable(given) if isinstance(each, Tensor)]
        if name == "is_pinned":
            return self._is_pinned(inputs[0])
        if name == "_pin_memory" or kwargs.get("pin_memory"):  # torch cannot pin memory for such a device
            pinned = inputs[0].clone() if inputs else func(*args, **{**kwargs, "pin_memory": False})
            self._pinned.append(pinned)
            return pinned
        device = torch.device(kwargs.get("device") or (inputs[0].device if inputs else "cpu"))
        if device.type != DEVICE and not any(map(is_there, inputs)):
            return func(*args, **kwargs)
        if name == "copy_":
            self._note_copy(inputs[1], inputs[0], (*args, False)[2])
            if not is_there(inputs[0]):
                return inputs[0]
        elif name == "_to_copy" and device.type != inputs[0].device.type:
            made = self._empty(inputs[0], device, kwargs.get("dtype") or inputs[0].dtype)
            self._note_copy(inputs[0], made, kwargs.get("non_blocking", False))
            return made if is_there(made) else made.zero_()
        elif name in ("_local_scalar_dense", "equal"):
            note(name)
            return name == "equal" or inputs[0].dtype == torch.bool or 0
        elif name in ("nonzero", "masked_select") or (name == "repeat_interleave" and not kwargs.get("output_size")):
            note(name)
            found = inputs[0].numel()  # as if all were True or 1
            return inputs[-1].new_zeros((found, inputs[0].dim()) if name == "nonzero" else found)
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [place for index in args[1] for place in self._places(index, name)]
            args = (args[0], indices, *args[2:])
        elif name == "barrier":
            note(name)
        with self._fake:
            return func(*args, **kwargs)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return any(each.untyped_storage()._cdata == tensor.untyped_storage()._cdata for each in self._pinned)

    def _note_copy(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        on_host = target if is_there(source) else source
        if not is_there(on_host) and not (non_blocking and self._is_pinned(on_host)):
            note(f"copy from {source.device.type} to {target.device.type}")

    def _empty(self, like: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        with self._fake if device.type == DEVICE else nullcontext():
            return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device)

    def _places(self, index: Tensor | None, name: str) -> list[Tensor | None]:
        """Return an index as torch takes it here: one of truths becomes the places of as many as there can be."""
        if index is None:
            return [None]
        if not is_there(index):
            note("index on the CPU")  # which torch copies to the device
        if index.dtype != torch.bool:
            return [index]
        note("index of truths")
        return [index] if name != "index" else [index.new_zeros(index.numel(), dtype=torch.int64)] * index.dim()


def _gather_object(everyone: list[Any], mine: Any, group: Any = None) -> None:
    note("objects")  # NCCL sends them by way of the device
    everyone[:] = [mine] * len(everyone)


def _move(model: nn.Module, *_: Any) -> None:
    """Move what is on the CPU to the device; `nn.Module.to` refuses models that hold fake tensors."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None and not is_there(tensor):
                    moved = tensor.detach().to(DEVICE)
                    held[key] = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _tensor(data: Any, *, pin_memory: bool = False, own: Any = torch.tensor, **like: Any) -> Tensor:
    made: Tensor = own(data, **like)
    return made.pin_memory() if pin_memory else made


def _broadcast_objects(*_: Any, **kwargs: Any) -> None:
    note("objects")


def _gather_numbers(numbers: list[int], what: str) -> Tensor:
    return torch.tensor([numbers] * dist.get_world_size())


@contextmanager
def rank_on_device(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process a rank of a job on the device within the context; its messages are sent from there only."""
    engine: Any = import_module("lora_parallel.parallelize")
    # Up to there the model is in the CPU's memory, as users have it. FSDP2 would move it, but not to fake tensors.
    first = engine.PASSES.index(engine.shard_over_dp)
    passes = (*engine.PASSES[:first], lambda setup: _move(setup.model), *engine.PASSES[first:])
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(f"{DEVICE}:fake", rank=rank, world_size=world_size, store=dist.HashStore())
    torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor makes no copy that a mode sees
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        for place, stand_in in {
            "torch.tensor": _tensor,
            "torch.distributed.get_backend": lambda group=None: "fake",
            "torch.distributed.all_gather_object": _gather_object,
            "torch.distributed.broadcast_object_list": _broadcast_objects,
            "lora_parallel.tenants.routing.gather_numbers": _gather_numbers,  # by way of the CPU, in a job
            "lora_parallel.pp.links.is_simulated": lambda: False,
            "lora_parallel.pp.links.Links.dtype": lambda self, key: torch.float32,  # which no other rank announces
            "lora_parallel.adapters.injection.share_random_state": _nothing,
            "lora_parallel.loading.meta_init.move_to_device": _move,
            # There are no values to compare.
            "lora_parallel.runtime.guards.unequal_replicas": lambda parameters, mesh: {},
            "lora_parallel.runtime.guards.base_fingerprints": lambda model, mesh, stage: {},
            "lora_parallel.runtime.same_batch.SameBatch._compare": lambda self, number, both: (
                int(both[0]),
                int(both[1]),
            ),
        }.items():
            stack.enter_context(mock.patch(place, stand_in))
        stack.enter_context(mock.patch.object(engine, "PASSES", passes))
        stack.enter_context(_Device())
        yield
