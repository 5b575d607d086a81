"""What a checkpoint is of: models, and the optimizers of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lora_parallel.adapters import adapter_parameters
from lora_parallel.gather import persistent_buffers
from lora_parallel.state import ParallelState, parallelized, state_of

__all__ = ["TrainState"]

_EXTRA_STATE = "_extra_state"
"""How torch ends the name of what `get_extra_state` returns."""


@dataclass(frozen=True)
class TrainState:
    """Parallelized models and their optimizers, by name."""

    module: nn.Module
    """A parallelized model, or what holds several; parameters are stored by their names in it."""

    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    """By the names to store them under."""

    @property
    def models(self) -> dict[str, nn.Module]:
        """The parallelized models by their names in `module`."""
        return parallelized(self.module)

    @property
    def states(self) -> dict[str, ParallelState]:
        """What `parallelize` left on each model."""
        found = {name: state_of(model) for name, model in self.models.items()}
        return {name: state for name, state in found.items() if state is not None}

    @property
    def parallel(self) -> ParallelState:
        """The first model's; the mesh is the same for all."""
        return next(iter(self.states.values()))

    def parameter_names(self) -> dict[nn.Parameter, str]:
        """The name of each parameter in `module`."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that a state dict has (running statistics, counters), by name. They are whole on every rank."""
        return persistent_buffers(self.module)

    def other_state(self) -> dict[str, Any]:
        """What else a state dict has (`get_extra_state`, persistent states of metrics), by name; this rank's."""
        # nn.Module's own: one that a module overrides may take other arguments, or leave out and rename.
        everything = nn.Module.state_dict(self.module, keep_vars=True)
        named = {**dict(self.module.named_parameters(remove_duplicate=False)), **self.buffers()}
        known = {id(tensor) for tensor in named.values()}
        return {name: value for name, value in everything.items() if name not in named and id(value) not in known}

    def load_other_state(self, values: Mapping[str, Any]) -> None:
        """Give it back to the modules that it is from."""
        device = self.parallel.mesh.device_type
        # Modules place their extra state themselves.
        placed = {
            name: value if name.endswith(_EXTRA_STATE) else tree_map_only(Tensor, lambda each: each.to(device), value)
            for name, value in values.items()
        }
        nn.Module.load_state_dict(self.module, placed, strict=False)

    def loose_parameters(self) -> dict[str, nn.Parameter]:
        """What trains, or did when it was parallelized and was frozen since, and belongs to no adapter, by name."""
        held = {parameter for model in self.models.values() for parameter in adapter_parameters(model).values()}
        trained = {
            parameter
            for model_name, model in self.models.items()
            for name, parameter in model.named_parameters()
            if name in self.states[model_name].trained
        }
        return {
            name: p for name, p in self.module.named_parameters() if (p.requires_grad or p in trained) and p not in held
        }
