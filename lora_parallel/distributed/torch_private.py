"""Wrap the private API of torch.distributed, autograd and FSDP2, in one place.

`torch.utils._pytree` and the helpers of `__torch_function__` in `torch._C` are used where they are needed instead. Each
function says why it uses the private API, and which public API is missing.
`tests/lora_parallel/distributed/test_torch_private.py` tests that each private API still means the same, so that an
upgrade that changes one fails there and not in a training run.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from packaging.version import Version
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from lora_parallel.replaced import replaced


def in_backward() -> bool:
    """Return True inside a backward pass of the calling thread, as FSDP2 asks; a module called then is recomputed."""
    # torch has no public function for this (pytorch/pytorch#107247 asks for one).
    return backward_pass() != -1


def backward_pass() -> int:
    """Return the unique number of the backward pass that the calling thread is inside of; -1 outside of any."""
    return torch._C._current_graph_task_id()


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` once, when the backward pass in progress has accumulated every gradient."""
    # DDP and FSDP2 use the same queue. Callbacks run in the order in which they were queued: see `queue_fsdp_end`.
    Variable._execution_engine.queue_callback(callback)


def post_accumulate_hooks(parameter: Tensor) -> dict[int, Callable[[Tensor], None]]:
    """Return the hooks that `register_post_accumulate_grad_hook` has registered on `parameter`, by number."""
    # The dict is torch's own, or a new empty one. FSDP2 reads the same attribute; there is no public way to list them.
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def without_compile(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that `torch.compile(module)` has wrapped, or None if `module` is no such wrapper."""
    # torch documents neither the wrapper's class nor the way back; Lightning and Accelerate use both as well.
    return module._orig_mod if isinstance(module, torch._dynamo.OptimizedModule) else None


def has_hooks(module: torch.nn.Module) -> bool:
    """Return True if a call of a module runs hooks of its own; torch has no public way to ask."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def has_global_hooks() -> bool:
    """Return True if calls of all modules run hooks; torch has no public way to ask."""
    return torch.nn.modules.module._has_any_global_hook()


def in_function_transform() -> bool:
    """Return True inside of `torch.func.grad`, `vmap` and their like; torch has no public way to ask."""
    return torch._C._are_functorch_transforms_active()


def is_view(tensor: Tensor) -> bool:
    """Return True if autograd takes a tensor for a view of another one; torch has no public way to ask."""
    return tensor._is_view()


def unsafe_view(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `tensor` in another shape, as no view; nothing may use `tensor` itself after that."""
    # Autograd lets nobody change a view in place that an autograd function has returned.
    return torch.ops.aten._unsafe_view(tensor, shape)


def has_compiled_call(module: torch.nn.Module) -> bool:
    """Return True if `module.compile()` was called; torch has no public way to ask."""
    return getattr(module, "_compiled_call_impl", None) is not None


def drop_compiled_call(module: torch.nn.Module) -> None:
    """Undo `module.compile()`; torch has no public way back."""
    module._compiled_call_impl = None


def gradient_hooks(parameter: Tensor) -> int:
    """Return the number of hooks that `register_hook` has registered on `parameter`; torch has no public way to ask."""
    return len(getattr(parameter, "_backward_hooks", None) or ())


def on_gradients_of(asked: Callable[[Sequence[Any], bool], Sequence[Any]]) -> None:
    """Let `asked` see and replace the tensors whose gradients a backward pass in this process is asked for.

    `asked` is given the tensors (or `GradientEdge`s), and True if their gradients are to be accumulated in `.grad`.
    Both `loss.backward(inputs=...)` and `torch.autograd.grad(...)`, also if imported by name, call the function that is
    replaced here. autograd has no public hook that runs before a backward pass and knows what it was asked for.
    """
    run_backward = getattr(torch.autograd, "_engine_run_backward", None)
    if run_backward is None:
        return

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 3 and args[3]:  # the inputs whose gradients are asked for
            inputs = tuple(asked(args[3], kwargs.get("accumulate_grad", False)))
            args = (*args[:3], inputs, *args[4:])
        return run_backward(outputs, *args, **kwargs)

    torch.autograd._engine_run_backward = run  # type: ignore[assignment]


def compute_for_dtensors(operator: Any, function: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> bool:
    """Make `function(operator, args, kwargs)` compute an operator for DTensors; return False if torch has no table."""
    # The table is that of operators that follow no sharding rule. `register_sharding`, which is public, can only choose
    # placements of inputs, and has no effect on an operator that has been used before.
    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if handlers is None:
        return False
    handlers[operator] = function
    return True


def local_tensor(tensor: Any) -> Tensor:
    """Return the local tensor of a DTensor: the same object each time, which tells if it was replaced."""
    # `to_local()` gives it under `no_grad` only, and entering that takes longer than all the rest.
    return tensor._local_tensor


def placed_as(tensor: DTensor) -> Callable[[Tensor], DTensor]:
    """Return a function that makes a DTensor like `tensor` (mesh, placements, shape, strides) of a local tensor."""
    # As FSDP2 does it, but for `DTensor.__init__`, which does nothing and takes twice as long as all the rest; the
    # public `DTensor.from_local` is an operation of autograd, and takes fifteen times as long.
    spec = tensor._spec
    return lambda local: DTensor.__new__(DTensor, local, spec, requires_grad=False)


def local_region(tensor: DTensor) -> tuple[slice, ...]:
    """Return the region of the full tensor that this rank's shard of `tensor` holds, one slice a dim."""
    # torch's checkpoint planner uses the same function; the public ones do not know `_StridedShard`.
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if 0 in shape:
        return tuple(slice(0, n) for n in tensor.to_local().shape)
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def strided_shard(dim: int, cuts: int) -> Placement:
    """Return the placement over dp, as FSDP2 chooses it, of a tensor that `cuts` tp ranks split along the same dim."""
    return _StridedShard(dim, split_factor=cuts)


def is_rectangle(tensor: DTensor) -> bool:
    """Return True if this rank's shard is one rectangle of the full tensor, as torch's checkpoints assume."""
    # FSDP2's placement is `_StridedShard` where tensor parallelism shards the same dim. Its split factor is the number
    # of parts into which the following mesh axes split the dim, unless a packed weight (several matrices) is split.
    sizes = tensor.device_mesh.shape
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            following = zip(sizes[axis + 1 :], tensor.placements[axis + 1 :], strict=True)
            cuts = prod(size for size, other in following if isinstance(other, Shard) and other.dim == placement.dim)
            if placement.split_factor != cuts:
                return False
    return True


# torch 2.13 renames both functions.
all_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# A graph of torch.compile can hold functional collectives only, which have no public name. Outside of graphs the public
# collectives do the same in an eighth of the host's time (130 us of an all-reduce of a few floats, and 16).


def all_gather_stacked(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return every rank's `tensor`, stacked to [ranks, ...]."""
    if torch.compiler.is_compiling():
        gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor  # renamed by torch 2.13
        return funcol.wait_tensor(gather(tensor.unsqueeze(0), 0, group))
    stacked = tensor.new_empty(group.size(), *tensor.shape)
    all_gather_into(stacked.flatten(0, 1) if tensor.dim() else stacked, tensor, group=group)
    return stacked


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `tensor` over the ranks of `group`, as a new tensor."""
    if torch.compiler.is_compiling():
        summed = funcol.wait_tensor(funcol.all_reduce(tensor, "sum", group))
        # A copy, which inductor leaves out: torch 2.11 keeps what it has waited for, and an autograd function that
        # returned it would get a gradient of zeros, where the backend of torch.compile does not differentiate
        # ("eager"). No view: models add to it in place (Falcon), which autograd refuses for the view of a function.
        return summed.clone()
    summed = tensor.clone()
    dist.all_reduce(summed, group=group)
    return summed


def reduce_scatter_sum(stacked: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part [...] of the sum of `stacked` [ranks, ...] over the ranks of `group`."""
    if torch.compiler.is_compiling():
        scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor  # renamed as well
        return funcol.wait_tensor(scatter(stacked.flatten(0, 1), "sum", 0, group)).view(stacked.shape[1:])
    summed = stacked.new_empty(stacked.shape[1:])
    reduce_scatter_into(summed, stacked.flatten(0, 1), group=group)
    return summed


def all_to_all(stacked: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part i of `stacked` [ranks, ...] to rank i, and return what came from each."""
    if torch.compiler.is_compiling():
        return funcol.wait_tensor(funcol.all_to_all_single(stacked, None, None, group))
    received = torch.empty_like(stacked)
    dist.all_to_all_single(received, stacked, group=group)
    return received


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the timeout of an existing process group: `init_device_mesh` makes its groups with torch's default."""
    if not is_simulated():  # a group that sends nothing has no timeout
        # torch 2.14 has a public function, and warns at the private one.
        set_on = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_on(timedelta(seconds=seconds), group)


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...], name: str, backend: str | None) -> None:
    """Give `mesh` one more axis `name`, made of several others, as torchtitan does; there is no public way."""
    mesh[axes]._flatten(name, backend)


def sub_mesh(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Return the part of `mesh` that has these axes, among which there may be one that `flatten_axes` made."""
    with warnings.catch_warnings():
        # torch 2.13 warns that the caller is to keep it some day; but nothing else gives HSDP its two axes.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh[axes if len(axes) > 1 else axes[0]]


def default_store() -> Any:
    """Return the store that the default process group was made with; torch has no public way to read it."""
    return dist.distributed_c10d._get_default_store()


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups that this rank is in; torch has no public list of them."""
    return list(dist.distributed_c10d._world.pg_map)


def file_of(result: WriteResult) -> str:
    """Return the file of a torch checkpoint that a piece of a tensor was written to; the type has no public name."""
    return result.storage_data.relative_path


def storageless(
    kind: type[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | None = None,
    strides: Sequence[int] | None = None,
) -> Any:
    """Make a tensor of the subclass `kind` that has a shape, a dtype, a device and strides, but no memory."""
    # Every subclass with `__torch_dispatch__` is made like this (DTensor, for one); there is no public constructor.
    return Tensor._make_wrapper_subclass(
        kind, tuple(shape), strides=strides, dtype=dtype, device=device or torch.device("cpu")
    )


# Functions that read a tensor's memory without an operation, which a tensor without memory must handle.
MEMORY_READERS = {
    Tensor.numpy,
    Tensor.tolist,
    Tensor.__array__,
    Tensor.__deepcopy__,
    Tensor.__reduce_ex__,
    Tensor.data_ptr,
    Tensor.untyped_storage,
}

# `__torch_function__` of a subclass that handles operations in `__torch_dispatch__` alone, as torch documents it
no_torch_function: Any = torch._C._disabled_torch_function_impl


@contextmanager
def fake_process_group(world_size: int, rank: int) -> Iterator[None]:
    """Make this process one of `world_size` ranks, whose collectives send nothing and return at once.

    Torch has the backend "fake" for its own tests, and no public one.

    Raises:
        RuntimeError: This process has a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("this process has a process group already, and a simulated rank needs one of its own.")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        if dist.is_initialized():  # code inside may have ended it, as a script does at its end
            dist.destroy_process_group()


def is_simulated() -> bool:
    """Return True within `fake_process_group`: collectives send nothing, and parameters need no values."""
    return dist.is_initialized() and dist.get_backend() == "fake"


@contextmanager
def one_gloo_thread() -> Iterator[None]:
    """Give each gloo group that is made within the context one worker thread: two can corrupt the heap."""
    # They write a long name of the collective that has finished into one string (docs/upstream/gloo_threads.md).
    # torch ignores the options that it is given for gloo, so the class is replaced.
    if not dist.is_gloo_available():
        yield
        return
    c10d: Any = dist.distributed_c10d
    gloo: Any = c10d.ProcessGroupGloo

    class OneThread(gloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **later: Any) -> None:
            usual = gloo(dist.HashStore(), 0, 1, timeout).options  # for its devices, which the environment selects
            options = gloo._Options()
            options._threads, options._timeout, options._devices = 1, timeout, usual._devices
            for name, value in later.items():  # enable_reconfigure, from torch 2.14 on
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    with replaced(c10d, {"ProcessGroupGloo": OneThread}):
        yield


@contextmanager
def not_profiled() -> Iterator[None]:
    """Hide the operations of the calling thread from torch's profilers within the context. It does not nest."""
    # A collective on gloo that a profiler has seen begin, and that ends when the profiler has stopped, writes into
    # memory that the profiler has freed (docs/upstream/gloo_profiler.md).
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


_NOTHING = torch.empty(0)
# A reference in C++ for as long as the process lives. While there is none, the thread of gloo that lets go of its own
# needs the GIL for that: it drops the Python object's.
_VIEW = _NOTHING.view(0)


def finish_groups() -> None:
    """End process groups at exit, unless an error has ended the process: gloo's threads let go of all tensors first."""
    # A thread of gloo that frees a tensor while Python ends aborts the process (docs/upstream/gloo_exit.md). An all-
    # reduce of no elements waits for no peer, but comes after messages whose peers an error may keep away.
    if getattr(sys, "last_value", None) is not None or not dist.is_initialized():
        return
    until = time.monotonic() + 5
    for group in process_groups():
        if "cpu:gloo" in dist.get_backend_config(group):
            work = dist.all_reduce(_NOTHING, group=group, async_op=True)
            with suppress(RuntimeError):  # a timeout
                work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
    if any("nccl" in dist.get_backend_config(group) for group in process_groups()):
        dist.destroy_process_group()  # which NCCL wants, and a process group of gloo alone does without


def group_of_collective(args: Sequence[Any]) -> dist.ProcessGroup | None:
    """Return the process group in the arguments of an operator of c10d, or None if there is none."""
    # Functional collectives are given its name, the others the group in a script object.
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in arg._type().name():  # type: ignore[attr-defined]
            return dist.ProcessGroup.unbox(arg)
    name = next((arg for arg in reversed(args) if isinstance(arg, str)), None)
    return group_named(name) if name else None


def group_named(name: str) -> dist.ProcessGroup | None:
    """Return the process group of this name, or None if this process has none; torch's public API takes no names."""
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (LookupError, RuntimeError, ValueError):
        return None


def _groups_of(unit: FSDPModule) -> list[Any]:
    """Return the groups in which FSDP2 holds the parameters of `unit`; before torch 2.13 there is at most one."""
    state: Any = unit._get_fsdp_state()
    if (groups := getattr(state, "_fsdp_param_groups", None)) is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def units_of(model: torch.nn.Module) -> list[list[FSDPModule]]:
    """List the FSDP units in `model`, each as its modules: those given to `fully_shard` together share a state."""
    units: dict[Any, list[FSDPModule]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            units.setdefault(module._get_fsdp_state(), []).append(module)
    return list(units.values())


def gathered_parameters(unit: FSDPModule) -> list[Tensor]:
    """Return the parameters that FSDP2 gathers from the shards of `unit`, also while they are not in place."""
    states = (state for group in _groups_of(unit) for state in group.fsdp_params)
    return [gathered for state in states if (gathered := getattr(state, "_unsharded_param", None)) is not None]


def is_being_gathered(unit: FSDPModule) -> bool:
    """Return True if FSDP2 has begun to gather the parameters of `unit`, and nothing has waited for them yet."""
    return any(group._all_gather_result is not None for group in _groups_of(unit))


def reduces_gradients(unit: FSDPModule) -> bool:
    """Return True if FSDP2 finishes the gradients of `unit` in a backward pass; there is no public way to ask."""
    return all(group.reduce_grads and group.all_reduce_grads for group in _groups_of(unit))


def drop_gathered_gradients(unit: FSDPModule) -> None:
    """Drop the gradients that passes without a reduction left; `reset_iter_state` only documents that it does."""
    for group in _groups_of(unit):
        for state in group.fsdp_params:
            state.unsharded_accumulated_grad = None
            if hasattr(state, "_unsharded_param"):
                state._unsharded_param.grad = None


def queue_fsdp_end(model: torch.nn.Module, after_failure: bool = False) -> None:
    """Queue FSDP2's own end of the backward pass in progress, if it is not: what is queued later runs behind it."""
    # FSDP2 queues it when a gradient reaches an output that FSDP2 has found, which may be later, or never.
    state: Any = model._get_fsdp_state()  # type: ignore[operator]
    if after_failure:  # the pass that failed has queued it, and it was not run
        state._state_ctx.post_backward_final_callback_queued = False
    state._register_root_post_backward_final_callback()


def check_fsdp_end(model: torch.nn.Module) -> None:
    """Raise RuntimeError if FSDP2 has not ended the backward pass: it may still hold gradients, not reduced over dp."""
    state: Any = model._get_fsdp_state()  # type: ignore[operator]
    if state._state_ctx.post_backward_final_callback_queued:
        raise RuntimeError(
            "FSDP2 has not ended this backward pass, and sums over ranks would miss gradients that it has not reduced "
            f"yet: torch {torch.__version__} queues its end otherwise than lora_parallel expects. Use a torch that "
            "lora_parallel has been tested with, and report this."
        )


def gather_for_backward(unit: torch.nn.Module, tensor: Tensor) -> None:
    """Let FSDP2 gather the parameters of `unit` once a gradient reaches `tensor`, as it does for outputs that it finds.

    It finds those in tuples, lists, dicts and (from torch 2.13 on) dataclasses.
    """
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    if not any(getattr(hook, "__self__", None) is state for hook in (tensor._backward_hooks or {}).values()):
        tensor.register_hook(state._pre_backward)


def forward_by_method(model: torch.nn.Module, name: str) -> None:
    """Let FSDP2 gather the root unit's weights around a method of `model`, and not around its `forward` any more."""
    register_fsdp_forward_method(model, name)
    # There is no public way to remove the hooks on `forward`, which must not run around one that calls the method.
    state: Any = model._get_fsdp_state()  # type: ignore[operator]
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def make_root(model: torch.nn.Module) -> None:
    """Let FSDP2 find all units in `model` and take it for the root, not the unit that is called first. Collective."""
    root: Any = model
    root.__dict__["_nothing"] = lambda: None
    register_fsdp_forward_method(root, "_nothing")
    root._nothing()
    del root.__dict__["_nothing"]
    root.reshard()


@contextmanager
def last_backward(model: torch.nn.Module, is_last: bool, keeps_gathered: bool) -> Iterator[None]:
    """Tell FSDP2 if other backward passes of forwards that have run already follow those within the context."""
    # If others follow, the root unit's weights stay gathered for them, and with `keeps_gathered` those of all units.
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_is_last_backward(is_last)
    model.set_reshard_after_backward(is_last, recurse=keeps_gathered)
    try:
        yield
    finally:
        model.set_is_last_backward(True)
        model.set_reshard_after_backward(True)


def parameters_on_meta() -> AbstractContextManager[None]:
    """Within the context, let FSDP2 run with parameters on meta, which it refuses: a simulated rank has no values."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return replaced(FSDPParamGroup, {"_validate_no_meta_params": lambda group: None})


def _shard_integer_parameters() -> None:
    """Let FSDP2 of torch 2.11 shard integer weights as 2.12 does: frozen from the start, and in their own dtype."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    nn, init_dtypes = torch.nn, _fsdp_param.FSDPParam.init_dtype_attrs

    def parameter(data: Tensor, requires_grad: bool = True) -> torch.nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    def init_dtype_attrs(self: Any, policy: Any) -> None:
        init_dtypes(self, policy)
        if not self.orig_dtype.is_floating_point:
            self.param_dtype = None

    _fsdp_param.nn = SimpleNamespace(**{**vars(nn), "Parameter": parameter})  # type: ignore[assignment]
    _fsdp_param.FSDPParam.init_dtype_attrs = init_dtype_attrs  # type: ignore[method-assign, assignment]


if Version(torch.__version__).release < (2, 12):
    _shard_integer_parameters()
