"""Collect the state that a checkpoint holds: that of models, and of the optimizers of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lora_parallel.distributed.gather import persistent_buffers
from lora_parallel.state import ParallelState, parallelized, state_of

__all__ = ["TrainState"]

_EXTRA_STATE = "_extra_state"
"""Ending of the state dict key under which torch stores what a module's `get_extra_state` returns."""


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
        found = {name: state_of(model) for name, model in self.models.items()}
        return {name: state for name, state in found.items() if state is not None}

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh of the models, which all have the same."""
        mesh = next((state.mesh for state in self.states.values()), self.mesh_without_models)
        assert mesh is not None
        return mesh

    @property
    def timeout_seconds(self) -> int:
        """Return the timeout of collectives, in seconds."""
        return max((state.config.timeout_seconds for state in self.states.values()), default=1800)

    def parameter_names(self) -> dict[nn.Parameter, str]:
        """Map each parameter to its name in `module`."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers (running statistics, counters), by name, which every rank of a stage has."""
        return persistent_buffers(self.module)

    def other_state(self) -> dict[str, Any]:
        """Return this rank's entries of the state dict that are neither parameters nor buffers, by name.

        Such entries are extra states of modules (`get_extra_state`) and persistent states of metrics.
        """
        # Calls nn.Module's method: an override may take other arguments, or leave entries out or rename them.
        everything = nn.Module.state_dict(self.module, keep_vars=True)
        named = {**dict(self.module.named_parameters(remove_duplicate=False)), **self.buffers()}
        known = {id(tensor) for tensor in named.values()}
        return {name: value for name, value in everything.items() if name not in named and id(value) not in known}

    def load_other_state(self, values: Mapping[str, Any]) -> None:
        """Load the entries that `other_state` returned into the modules that they came from."""
        device = self.mesh.device_type
        # Modules move their extra state to a device themselves.
        placed = {
            name: value if name.endswith(_EXTRA_STATE) else tree_map_only(Tensor, lambda each: each.to(device), value)
            for name, value in values.items()
        }
        nn.Module.load_state_dict(self.module, placed, strict=False)
