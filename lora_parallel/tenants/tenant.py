"""Hold the data of one tenant of a pool, and check what a pool is asked to train."""

from __future__ import annotations

import inspect
import re
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import index
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lora_parallel.adapters.injection import has_adapters
from lora_parallel.adapters.peft_private import DRAWN
from lora_parallel.distributed.dtensors import local
from lora_parallel.distributed.gradients import clip_grad_norm_, refuse_clipping_if
from lora_parallel.layers.layer_parameters import clean_names
from lora_parallel.optimizers import StepsOn, steps_on
from lora_parallel.state import ParallelState, state_of
from lora_parallel.tenants.layer import TenantLayer, adapted_layers
from lora_parallel.tenants.routing import Factor


def _check_made(made: Any, parameters: Sequence[nn.Parameter]) -> None:
    if not isinstance(made, Optimizer):
        raise ValueError(f"optimizer(...) gave a {type(made).__name__}: let it return a torch.optim.Optimizer.")
    stepped = {parameter for group in made.param_groups for parameter in group["params"]}
    if not stepped or not stepped <= set(parameters):
        raise ValueError(
            f"optimizer(...) gave a {type(made).__name__} of other parameters than it was given: let it make a new one "
            "of these, or of some of them, each time that it is called (with a budget that is twice)."
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer(...) gave a {type(made).__name__}, whose step computes the loss anew: a pool's step does not. "
            "Give one that steps with the gradients."
        )


def settings_of(optimizer: Optimizer) -> str:
    """Describe the class and the plain settings of an optimizer as text, which must be the same on every rank."""
    plain = (bool, int, float, str, Tensor, type(None))
    groups = [
        {key: value for key, value in group.items() if all(isinstance(leaf, plain) for leaf in tree_leaves(value))}
        for group in [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    ]
    return f"{type(optimizer).__name__}({groups})"


Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]  # makes an optimizer of parameters


@dataclass(frozen=True)
class MemoryNeeds:
    """Hold the most bytes that a tenant takes at one time on this rank."""

    total: int
    state: int  # bytes of `total` that the state of the tenant's optimizer takes


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of bytes that an optimizer's state takes on this rank."""
    return sum(local(leaf).nbytes for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor))


def memory_needs(factors: Sequence[Factor], optimizer: Optimizers) -> MemoryNeeds:
    """Compute the most bytes that a tenant takes at one time on this rank."""
    # Counted are its parameters; the state of their optimizer, by one step on parameters without values; gradients that
    # have been summed over ranks, and those of a later backward; and the values that a step gathers of a sharded one.
    bare = [nn.Parameter(torch.empty_like(local(factor.parameter), device="meta")) for factor in factors]
    try:
        tried = optimizer(bare)
        for parameter in bare:
            parameter.grad = torch.empty_like(parameter)
        tried.step()
        state = state_bytes(tried)
    except Exception as error:  # an optimizer may raise anything on tensors without values
        raise ValueError(
            f"the optimizer cannot be tried on parameters without values ({type(error).__name__}: {error}), so that "
            "nobody knows what it takes: leave the pool's budget out."
        ) from error
    shards = sum(parameter.nbytes for parameter in bare)
    whole = sum(prod(factor.shape) * factor.parameter.dtype.itemsize for factor in factors)
    gathered = whole if any(factor.cut is not None for factor in factors) else 0
    return MemoryNeeds(state + 2 * shards + whole + gathered, state)


def check_fits(name: str, needs: MemoryNeeds, others: Sequence[MemoryNeeds | None], budget: int) -> None:
    """Raise ValueError if a new tenant does not fit into the budget beside the other tenants."""
    left = budget - sum(other.total for other in others if other is not None)
    if needs.total > left:
        raise ValueError(
            f"the tenant {name!r} takes up to {needs.total:,} bytes on a rank (adapter, gradients, optimizer "
            f"state), and {max(left, 0):,} of the budget of {budget:,} are left: remove a "
            "tenant, lower r, share adapters out with shard=True, or raise the budget."
        )


@dataclass(eq=False)
class Tenant:
    """Hold one tenant of a pool: its adapter's layers, its optimizer, and the gradients that wait for its step."""

    name: str
    config: LoraConfig
    seed: int  # of the tenant's dropout
    steps: int = 0
    needs: MemoryNeeds | None = None  # memory that the tenant takes of the pool's budget; None if there is none
    layers: list[TenantLayer] = field(default_factory=list)
    optimizer: Optimizer = field(init=False)
    # gradient of each factor that has been summed over all ranks since the last step
    finished: list[Tensor | None] = field(default_factory=list)
    forwards: int = 0  # training forwards that the tenant has taken part in; its dropout depends on it

    _steps_now: bool = False

    def set_optimizer(self, made: Any) -> None:
        """Step `made`, the optimizer of the parameters, by `step` alone; refuse steps and clipping by anybody else."""
        _check_made(made, self.parameters)
        self.optimizer, self.finished = made, [None] * len(self.parameters)
        this = weakref.ref(self)  # no reference cycle: removal frees at once

        def check_driven(*_: Any) -> None:
            if (tenant := this()) is not None and not tenant._steps_now:
                raise RuntimeError(
                    f"the optimizer of the tenant {tenant.name!r} was told to step, but gradients are in the pool: "
                    f"call pool.step({tenant.name!r})."
                )

        def not_clipped() -> str | None:
            if (tenant := this()) is None or tenant._steps_now or not tenant.waits():
                return None
            return f"gradients of {tenant.name!r} wait in the pool: clip with pool.step({tenant.name!r}, max_norm=...)."

        made.register_step_pre_hook(check_driven)
        for parameter in self.parameters:
            refuse_clipping_if(parameter, not_clipped)

    @property
    def has_sums(self) -> bool:
        """Return True if gradients that have been summed over ranks wait for the tenant's step."""
        return any(gradient is not None for gradient in self.finished)

    @property
    def has_unsummed(self) -> bool:
        """Return True if a gradient has not been summed over ranks."""
        return any(factor.has_gradient for factor in self.factors)

    def waits(self) -> bool:
        """Return True if gradients wait for the tenant's step, whether or not they have been summed over ranks."""
        return self.has_sums or self.has_unsummed

    @property
    def factors(self) -> list[Factor]:
        """Return the factors of the adapter: `lora_A` and `lora_B` of each layer, in the order of the layers."""
        return [factor for layer in self.layers for factor in layer.factors[self.name]]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the adapter, in the order of the factors."""
        return [factor.parameter for factor in self.factors]

    def memory(self) -> dict[str, int]:
        """Count the bytes that this rank holds of the tenant: adapter, gathered copies, gradients, optimizer state."""
        waiting = [gradient for factor in self.factors for gradient in (factor.parameter.grad, factor.waiting)]
        return {
            "adapter": sum(local(parameter).nbytes for parameter in self.parameters),
            "gathered": sum(whole.nbytes for factor in self.factors for whole in factor.gathered),
            "gradients": sum(local(grad).nbytes for grad in (*self.finished, *waiting) if grad is not None),
            "optimizer": state_bytes(self.optimizer),
        }

    def check_between_steps(self, what: str) -> None:
        """Raise ValueError if a gradient of the tenant waits for a step, since the call `what` would lose it."""
        if self.waits():
            raise ValueError(
                f"{what}: gradients of {self.name!r} wait for a step and would be lost: call step or zero_grad."
            )

    def add_sums(self, sums: Sequence[Tensor | None]) -> None:
        """Add gradients that have been summed over all ranks, one for each factor, to those that wait for a step."""
        self.finished = [
            before if new is None else new if before is None else before + new
            for before, new in zip(self.finished, sums, strict=True)
        ]

    def drop_gradients(self) -> None:
        """Let go of all gradients, summed or not."""
        self.finished = [None] * len(self.finished)
        for factor in self.factors:
            factor.drop_gradients()

    def record(self) -> dict[str, int]:
        """Return the counters that a saved tenant goes on with."""
        return {"steps": self.steps, "forwards": self.forwards, "seed": self.seed}

    def resume(self, record: Mapping[str, int]) -> None:
        """Go on with the counters of a saved tenant, without gradients."""
        self.steps, self.forwards = record.get("steps", 0), record.get("forwards", 0)
        self.seed = record.get("seed", self.seed)
        for layer in self.layers:
            layer.reseed(self.name, self.seed)
        self.drop_gradients()

    @property
    def gathers(self) -> bool:
        """Return True if a step gathers parameters, so that all ranks step at the same time."""
        sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters)
        return sharded and steps_on(self.optimizer) is StepsOn.FULL

    def step(self, max_norm: float | None) -> Tensor | None:
        """Step with the summed gradients, if there are any, clipped to `max_norm`; return the norm before clipping."""
        self._steps_now = True
        try:
            for parameter, gradient in zip(self.parameters, self.finished, strict=True):
                # Clipping changes a copy, so that a failed step can be tried again.
                parameter.grad = gradient if gradient is None or max_norm is None else gradient.clone()
            norm = None if max_norm is None else clip_grad_norm_(self.parameters, max_norm)
            if self.has_sums:
                self.optimizer.step()
        finally:
            self._steps_now = False
            for parameter in self.parameters:
                parameter.grad = None
        self.steps += self.has_sums
        return norm


def describe_config(config: Any) -> str:
    """Describe a config by its values that are not the defaults, as text that is the same in every process."""
    if not isinstance(config, LoraConfig):
        return repr(config)
    # The order of a set differs between processes.
    ordered = {key: sorted(value) if isinstance(value, set) else value for key, value in _said(config).items()}
    return f"LoraConfig({', '.join(f'{key}={value!r}' for key, value in sorted(ordered.items()))})"


def check_name(name: Any, base: nn.Module) -> None:
    """Raise ValueError if PEFT cannot use a tenant's name for its modules and in the names of parameters."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name, re.ASCII):
        raise ValueError(f"a tenant's name is {name!r}: give letters, digits, underscores and hyphens.")
    inside = {part for parameter, _ in base.named_parameters() for part in parameter.split(".")}
    if name in inside or name.startswith("lora_") or hasattr(nn.ModuleDict(), name):
        raise ValueError(f"a tenant's name is {name!r}, which is a name inside of the model too: give another.")


# fields of a LoraConfig that tenants support; a config that sets any other field is refused
_TAKEN = {
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    *("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    "inference_mode",
}

_FILLED_IN = {"target_parameters", "modules_to_save"}  # PEFT fills them with an empty value for some models

_LINEAR = "tenants are plain LoRA on linear layers: name those in target_modules."


def check_lora_config(config: Any) -> None:
    """Raise ValueError if a config asks for more than plain LoRA, or for initial values from base weights."""
    if not isinstance(config, LoraConfig):
        raise ValueError(f"config is a {type(config).__name__}: give a peft.LoraConfig.")
    for key, asked in _said(config).items():
        if key not in _TAKEN and (asked or key not in _FILLED_IN):
            raise ValueError(f"LoraConfig({key}={asked!r}): {_LINEAR}")
    if config.init_lora_weights not in DRAWN:
        raise ValueError(
            f"LoraConfig(init_lora_weights={config.init_lora_weights!r}) is computed from the base weights, which are "
            "sharded: load a saved adapter instead."
        )


def _said(config: LoraConfig) -> dict[str, Any]:
    """Return the fields of a config whose values are not the defaults."""
    usual = LoraConfig().to_dict()
    return {key: value for key, value in config.to_dict().items() if value != usual.get(key)}


def check_dtype(dtype: Any) -> None:
    """Raise ValueError if an adapter cannot be stored in a dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(f"dtype={dtype!r}: give a floating-point torch.dtype of 16 bits or more, or None for PEFT's.")


def seed_of(init_seed: Any) -> int:
    """Return a seed as a Python int; raise ValueError if `torch.manual_seed` does not take it."""
    whole = hasattr(init_seed, "__index__") and not isinstance(init_seed, (bool, torch.Tensor))
    if not whole or not -(2**63) <= index(init_seed) < 2**64:  # what torch.manual_seed takes
        raise ValueError(f"init_seed={init_seed!r}: give a whole number of 64 bits.")
    return index(init_seed)


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the batch norm layers of a model by name: in training they mix the rows of a batch."""
    return {where: layer for layer, where in clean_names(model).items() if isinstance(layer, _BatchNorm)}


def check_rows_apart(layers: Mapping[str, nn.Module]) -> None:
    """Raise ValueError if one of these batch norm layers is in training, where it mixes the rows of a batch."""
    for where, layer in layers.items():
        if layer.training:
            raise ValueError(
                f"{where} is a {type(layer).__name__} in training: it mixes the rows of all tenants, and its "
                "statistics are the base's. Put it in evaluation (model.train() undoes that)."
            )


def check_layers(adapted: Any, name: str, config: LoraConfig) -> None:
    """Raise ValueError unless the adapter is on linear layers only, and on each that the config targets."""
    layers = adapted_layers(adapted)
    targets = config.target_modules if isinstance(config.target_modules, (list, set, tuple)) else ()
    if lacking := [t for t in targets if not any(f".{where}".endswith(f".{t}") for where in layers)]:
        raise ValueError(
            f"LoraConfig(target_modules=...): the base lacks {sorted(lacking)}, or the config excludes them: the "
            f"adapter would be on {sorted({where.rpartition('.')[2] for where in layers})} alone. Correct them, or "
            "leave them out."
        )
    check_lora_config(adapted.peft_config[name])  # PEFT fills in what it knows of the model
    places = Counter(child for parent in adapted.modules() for child in parent._modules.values() if child is not None)
    for where, layer in layers.items():
        plain = name in layer.lora_A and isinstance(layer.lora_A[name], nn.Linear)
        if isinstance(layer, ParamWrapper) or not plain:
            kind = type(layer.get_base_layer()).__name__
            raise ValueError(f"the adapter {name!r} would be on {where}, which is a {kind}: {_LINEAR}")
        if places[layer.get_base_layer()] > 1:  # PEFT adapts the layer under one of its names only
            raise ValueError(
                f"the adapter {name!r} would be on {where}, which the model has under another name too: leave it out "
                "of target_modules."
            )


def check_base(model: nn.Module) -> tuple[ParallelState, nn.Module]:
    """Return a model's state and its copy without values; raise ValueError if it cannot be the base of a pool."""
    state = state_of(model)
    if state is None:
        raise ValueError(f"this {type(model).__name__} was not parallelized; pass what parallelize returned.")
    if state.stage is not None:
        raise ValueError("a TenantPool needs the whole base on each rank of a mesh without a pp axis: use pp=1.")
    if state.bare is None:
        raise ValueError(
            "the model has adapters of its own, or was told to need some: parallelize the bare base with "
            "ParallelConfig(require_adapters=False)."
        )
    if state.pool is not None or has_adapters(model):
        raise ValueError("the model has a TenantPool, or adapters of its own, already: a base has one pool.")
    if isinstance(state.bare, Exception):
        raise ValueError(
            f"the base cannot be copied ({type(state.bare).__name__}: {state.bare}), and adapters are drawn on a "
            "copy without values: let its modules be copied by copy.deepcopy."
        )
    if state.config.sequence_parallel:
        raise ValueError("tenants need all tokens of a sample on one rank: leave sequence_parallel=False.")
    if state.config.cp > 1:
        raise ValueError(f"tenants need all tokens of a sample on one rank: leave cp=1 (it is cp={state.config.cp}).")
    return state, state.bare


def check_samples(names: Sequence[str], lengths: Sequence[int] | None) -> list[int] | None:
    """Check the arguments of `TenantPool.route`; return the lengths as Python ints, or None."""
    if isinstance(names, str) or not len(names):
        raise ValueError(f"route({names!r}) names no samples: give a list with the tenant of each row.")
    if lengths is None:
        return None
    try:
        counted = [index(length) for length in lengths]
    except TypeError:
        counted = [-1]
    if any(length < 0 for length in counted):
        raise ValueError(f"route has the lengths {list(lengths)}: give the tokens of each sample, whole numbers.")
    if len(counted) != len(names):
        raise ValueError(f"route names {len(names)} samples, and gives {len(counted)} lengths: one for each.")
    return counted
