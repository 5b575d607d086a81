"""Collect and restore what a checkpoint holds beside adapters: states of models, of optimizers and of random numbers.

torch's `get_optimizer_state_dict` is not used: it steps an optimizer that has no state, makes state for parameters that
never got a gradient, and makes none where gradients are present.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from lora_parallel.distributed.dtensors import local, persistent_buffers, region_of
from lora_parallel.distributed.mesh import dp_rank, dp_size, over_stages, stage_mesh
from lora_parallel.optimizers import StepsOn, joins_parameters, steps_on
from lora_parallel.state import ParallelState, parallelized, state_of
from lora_parallel.storage import without_numpy

Tensors = dict[str, dict[str, Tensor]]
"""Tensors by the name of their parameter, then by the optimizer's key for them (such as "exp_avg")."""


@dataclass(frozen=True)
class OptimizerState:
    """Hold an optimizer's state without the optimizer."""

    tensors: Tensors = field(default_factory=dict)
    """State tensors that have their parameter's shape, sharded as the parameter is."""

    record: dict[str, Any] = field(default_factory=dict)
    """Everything else: the optimizer's class, its groups (parameter names, settings), values that are no shards (step
    counts), values that belong to no parameter, and the dtype of each tensor in `tensors`. It is the same on every rank
    of a pipeline stage.
    """


def optimizer_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> OptimizerState:
    """Divide an optimizer's state into shards, which share memory with it, and values that can be saved as they are."""
    tensors: Tensors = {}
    values: dict[str, dict[str, Any]] = {}
    kind = type(optimizer).__name__
    whole = steps_on(optimizer) is StepsOn.FULL
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"{kind} holds a parameter of shape {tuple(parameter.shape)} that is not the model's: make it from "
                    "the parameters of the model that parallelize returned."
                )
            name = names[parameter]
            for key, value in optimizer.state.get(parameter, {}).items():
                if type(value) in _SHARDS and value.shape == parameter.shape:
                    tensors.setdefault(name, {})[key] = value.detach()
                elif not whole and any(_is_part(leaf, parameter) for leaf in tree_leaves(value)):
                    raise ValueError(
                        f"{kind} keeps the state {key!r} of {name} in a {type(value).__name__} that is not of the "
                        f"parameter's shape {tuple(parameter.shape)}, and the parameter is sharded: it cannot be told "
                        "what of it belongs to which rank, so it cannot be saved."
                    )
                else:
                    values.setdefault(name, {})[key] = _copied(value)
    shared = {key: _copied(value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    for key, value in shared.items():
        if not whole and any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in tree_leaves(value)):
            raise ValueError(
                f"{kind} keeps a state {key!r} of no parameter that holds a tensor: it cannot be told what of it "
                "belongs to which rank, so it cannot be saved. Keep plain values there."
            )
    groups = [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            "settings": copy.deepcopy(
                {key: without_numpy(value) for key, value in group.items() if key not in ("params", "param_names")}
            ),
        }
        for group in optimizer.param_groups
    ]
    dtypes = {name: {key: value.dtype for key, value in states.items()} for name, states in tensors.items()}
    return OptimizerState(
        tensors, {"class": kind, "groups": groups, "values": values, "shared": shared, "tensors": dtypes}
    )


_SHARDS = (Tensor, nn.Parameter, DTensor)
"""Types of state tensors that can be cut anywhere; one in 8 bits, of a class of torchao, cannot."""


def _copied(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.to("cpu", copy=True) if isinstance(leaf, Tensor) else without_numpy(leaf), value)


def _is_part(value: Any, parameter: nn.Parameter) -> bool:
    if isinstance(value, DTensor):
        return True
    return isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.numel() > 1


def merged_records(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the record of an optimizer of the whole model, from the records of all pipeline stages."""
    first = records[0]
    for record in records:
        mine, theirs = ([repr(group["settings"]) for group in of_stage["groups"]] for of_stage in (first, record))
        if record["class"] != first["class"] or mine != theirs:
            raise ValueError(
                f"one pipeline stage has a {first['class']} with {len(mine)} parameter groups, another a "
                f"{record['class']} with {len(theirs)}, or with other settings in them: make the same groups on every "
                "rank; those that a stage has no parameters of are empty there."
            )
    groups = [
        {**group, "parameters": [name for record in records for name in record["groups"][index]["parameters"]]}
        for index, group in enumerate(first["groups"])
    ]
    by_name = ("values", "shared", "tensors")  # entries of a record with an entry for each parameter, or other name
    parts = {key: {name: value for record in records for name, value in record[key].items()} for key in by_name}
    return {**first, **parts, "groups": groups}


def group_names(optimizer: Optimizer, names: Mapping[nn.Parameter, str], mesh: DeviceMesh | None) -> list[set[str]]:
    """Return the names of the parameters in each group, on all pipeline stages. Collective if there are several."""
    mine = [[names.get(parameter, "?") for parameter in group["params"]] for group in optimizer.param_groups]
    stages = zip_longest(*over_stages(mine, mesh), fillvalue=())
    return [{name for names in group for name in names} for group in stages]


def check_optimizer(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    names_of_groups: Sequence[Collection[str]],
    record: Mapping[str, Any],
) -> None:
    """Check that a saved record fits an optimizer, for which `group_names` has returned `names_of_groups`."""
    kind, groups = type(optimizer).__name__, record["groups"]
    if record["class"] != kind:
        raise ValueError(f"the optimizer that was saved is a {record['class']}, the one to fill a {kind}.")
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the {kind} that was saved has {len(groups)} parameter groups, the one to fill "
            f"{len(optimizer.param_groups)}: make it with the same groups."
        )
    for index, (group_now, saved) in enumerate(zip(names_of_groups, groups, strict=True)):
        mine, theirs = set(group_now), set(saved["parameters"])
        if mine != theirs:
            raise ValueError(
                f"parameter group {index} of the {kind} has {len(mine - theirs)} parameters that the saved one lacks "
                f"(first: {sorted(mine - theirs)[:1]}) and lacks {len(theirs - mine)} of it (first: "
                f"{sorted(theirs - mine)[:1]}): make it with the same groups."
            )
    if joins_parameters(optimizer):
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            if [names[parameter] for parameter in group["params"]] != saved["parameters"]:
                raise ValueError(
                    f"the {kind} that was saved has its parameters in another order, and keeps states of all of them "
                    "together: make it with the parameters in the order of the model."
                )
    if steps_on(optimizer) is StepsOn.FULL:
        return
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        name = names[parameter]
        for key, value in record["values"].get(name, {}).items():
            if any(_is_part(leaf, parameter) for leaf in tree_leaves(value)):
                raise ValueError(
                    f"the {kind} that was saved keeps the state {key!r} of {name} in tensors that are not of the "
                    "parameter's shape: they were saved on one rank, and cannot be divided among several. Resume on "
                    "one rank, or leave the optimizer out."
                )


def restored(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    record: Mapping[str, Any],
    read: Callable[[str, str, tuple[slice, ...]], Tensor],
) -> Callable[[], None]:
    """Read a saved state for this rank's shards, on any mesh; return a function that puts it into the optimizer."""
    # `read` returns a region of a full state tensor, by its parameter's name, its key and the region.
    state: dict[Tensor, dict[str, Any]] = {}
    for group, saved in zip(optimizer.param_groups, record["groups"], strict=True):
        for parameter in group["params"]:
            name = names[parameter]
            values = {
                key: _on_device(key, value, parameter, saved["settings"])
                for key, value in record["values"].get(name, {}).items()
            }
            for key, dtype in record["tensors"].get(name, {}).items():
                values[key] = torch.empty_like(parameter.detach(), dtype=dtype)
                if local(values[key]).numel():
                    local(values[key]).copy_(read(name, key, region_of(parameter)))
            if values:
                state[parameter] = values

    def put() -> None:
        optimizer.state.clear()
        optimizer.state.update(state)
        optimizer.state.update(copy.deepcopy(record["shared"]))
        for group, saved in zip(optimizer.param_groups, record["groups"], strict=True):
            group.update(copy.deepcopy(saved["settings"]))

    return put


def restored_bytes(names: Mapping[nn.Parameter, str], record: Mapping[str, Any]) -> int:
    """Return how many bytes a saved state takes on this rank once it is restored."""
    parts = {name: local(parameter).numel() for parameter, name in names.items()}
    shards = [parts[name] * dtype.itemsize for name, of in record["tensors"].items() for dtype in of.values()]
    whole = [leaf.nbytes for leaf in tree_leaves(record["values"]) if isinstance(leaf, Tensor)]
    return sum(shards) + sum(whole)


def _on_device(key: str, value: Any, parameter: nn.Parameter, settings: Mapping[str, Any]) -> Any:
    """Copy a saved value to the device where torch's `Optimizer.load_state_dict` would put it."""
    # Step counts stay on the CPU unless the optimizer's kernels need them on the device. The saved settings decide
    # that, since the optimizer continues with them.
    on_cpu = key == "step" and not (settings.get("capturable") or settings.get("fused"))
    device = torch.device("cpu") if on_cpu else parameter.device
    return tree_map(lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else copy.deepcopy(leaf), value)


@dataclass(frozen=True)
class TrainState:
    """Hold parallelized models and their optimizers, by name."""

    module: nn.Module
    """A parallelized model, or a module that holds several; parameters are stored by their names in this module."""

    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    """Optimizers by the names that their states are stored under."""

    mesh_without_models: DeviceMesh | None = None
    """Mesh of the run, where `module` holds no model whose mesh is known."""

    @property
    def models(self) -> dict[str, nn.Module]:
        """Return the parallelized models by their names in `module`."""
        return parallelized(self.module)

    @property
    def states(self) -> dict[str, ParallelState]:
        """Return the `ParallelState` of each model, by the names of the models."""
        return {name: state for name, model in self.models.items() if (state := state_of(model)) is not None}

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh of the models, which all have the same."""
        mesh = next((state.mesh for state in self.states.values()), self.mesh_without_models)
        assert mesh is not None
        return mesh

    def parameter_names(self) -> dict[nn.Parameter, str]:
        """Map each parameter to its name in `module`."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers (running statistics, counters), by name, which every rank of a stage has."""
        return persistent_buffers(self.module)

    def other_state(self) -> dict[str, Any]:
        """Return this rank's entries of the state dict, by name, that are no parameters or buffers: extra states."""
        # Calls nn.Module's method: an override may take other arguments, or leave entries out or rename them.
        everything = nn.Module.state_dict(self.module, keep_vars=True)
        named = {**dict(self.module.named_parameters(remove_duplicate=False)), **self.buffers()}
        known = {id(tensor) for tensor in named.values()}
        return {name: value for name, value in everything.items() if name not in named and id(value) not in known}

    def load_other_state(self, values: Mapping[str, Any]) -> None:
        """Load the entries that `other_state` returned into the modules that they came from."""
        device = self.mesh.device_type
        placed = {  # a module moves its own extra state (get_extra_state) to a device itself
            name: value if name.endswith("_extra_state") else tree_map_only(Tensor, lambda x: x.to(device), value)
            for name, value in values.items()
        }
        nn.Module.load_state_dict(self.module, placed, strict=False)


def gather_random_states(mesh: DeviceMesh) -> list[dict[str, Any]]:
    """Gather random states on rank 0, one entry for each dp rank in order; others get an empty list. Collective."""
    mine = _capture(mesh.device_type)
    states: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, states if dist.get_rank() == 0 else None, dst=0)
    if dist.get_rank() != 0:
        return []
    batches = stage_mesh(mesh).mesh.reshape(dp_size(mesh), -1)  # pp peers of rank 0's stage have the same states
    return [states[ranks[0]] for ranks in batches.tolist()]


def restore_random_state(states: list[dict[str, Any]], mesh: DeviceMesh) -> None:
    """Set this process's random states to those that its data-parallel rank had when the checkpoint was written.

    A data-parallel rank that the saving mesh did not have gets a seed of its own, derived from the saved state of
    data-parallel rank 0 and its own number.
    """
    rank = dp_rank(mesh)
    if rank < len(states):
        _put(states[rank], mesh.device_type)
        return
    digest = hashlib.blake2b(states[0]["torch"].numpy().tobytes() + rank.to_bytes(4, "little"), digest_size=4)
    seed = int.from_bytes(digest.digest(), "little")
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)


def _capture(device_type: str) -> dict[str, Any]:
    """Return this process's random states as plain values and tensors, which weights_only=True reads back."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device_type != "cpu":
        state["device"] = torch.get_device_module(device_type).get_rng_state()
    kind, keys, *rest = np.random.get_state()
    return {**state, "numpy": [str(kind), [int(key) for key in keys], *rest]}


def _put(state: dict[str, Any], device_type: str) -> None:
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
    torch.set_rng_state(state["torch"])
    if device_type != "cpu" and "device" in state:
        torch.get_device_module(device_type).set_rng_state(state["device"])
    if "numpy" in state:
        np.random.set_state(tuple(state["numpy"]))
