"""PEFT's private API, in one place: layers on a base that is on meta, DoRA on columns of a weight, LoRA of experts.

PEFT moves an adapter to its base layer's device as soon as it has drawn it. With a base that waits on meta for its
weights that would lose the values, so there an adapter stays where it was drawn; in the base's dtype, as always.
Nothing changes for a base that is not ours. `tests/lora_parallel/test_peft_hooks.py` holds what is used to its meaning.

PEFT has no option for it (https://github.com/huggingface/peft/issues/2834 is about the same lines):
low_cpu_mem_usage=True leaves adapters on meta, uninitialised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn
from transformers.integrations import PeftAdapterMixin

from lora_parallel.deferred import accept_memory, is_deferred
from lora_parallel.factored import FactoredWeight, Factors

__all__ = [
    "DRAWN",
    "activate",
    "adapters_off_meta",
    "check_needs_no_base",
    "keep_factored",
    "observe_layers",
    "refuse_adapters",
    "refuse_merge",
    "refuse_unload",
    "sum_weight_norm",
    "suspend_during_injection",
]

_observers: list[Callable[[nn.Module], None]] = []
_suspensions: list[Callable[[], AbstractContextManager[Any]]] = []
_sharded: WeakSet[nn.Module] = WeakSet()
_installed = False


def adapters_off_meta() -> None:
    """Let adapters stay off meta where their base is a deferred one. Done once; for good, as PEFT may wrap a model at
    any time after it was built.
    """
    global _installed
    if _installed:
        return
    _installed = True
    own_move = BaseTunerLayer._move_adapter_to_device_of_base_layer
    own_move_parameter = ParamWrapper._move_adapter_to_device_of_base_layer
    own_replace = LoraModel._replace_module
    own_inject = BaseTuner.inject_adapter
    own_cast = BaseTuner._cast_adapter_dtype
    own_load = PeftAdapterMixin.load_adapter
    own_add = PeftAdapterMixin.add_adapter

    @wraps(own_move)
    def move(self: Any, adapter_name: str, device: torch.device | None = None) -> None:
        stay = device is None and _waits(self.get_base_layer())
        own_move(self, adapter_name, torch.device("cpu") if stay else device)

    @wraps(own_move_parameter)
    def move_parameter(self: Any, adapter_name: str, device: torch.device | None = None) -> None:
        if not _waits(self.get_base_layer()):
            own_move_parameter(self, adapter_name, device)
            return
        stand_in = torch.empty(0, dtype=self.get_param().dtype)
        self.__dict__["get_param"] = lambda: stand_in  # it asks nothing of it but device and dtype
        try:
            own_move_parameter(self, adapter_name, device)
        finally:
            del self.__dict__["get_param"]

    @wraps(own_replace)
    def replace(self: Any, parent: nn.Module, child_name: str, new_module: nn.Module, child: Any) -> None:
        base = child.get_base_layer() if isinstance(child, BaseTunerLayer) else child
        if _observers:
            _observers[-1](new_module)
        elif _waits(base):
            setattr(parent, child_name, new_module)
            return
        own_replace(self, parent, child_name, new_module, child)

    @wraps(own_load)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_whole(self)
        if not _waits(self):
            return own_load(self, *args, **kwargs)
        self.hf_device_map = {"": "cpu"}  # where it puts what it reads; without one, where the base is
        try:
            with _all(_suspensions):
                result = own_load(self, *args, **kwargs)
            accept_memory(self)  # a trained head in the folder
            return result
        finally:
            del self.hf_device_map

    @wraps(own_add)
    def add(self: Any, *args: Any, **kwargs: Any) -> None:
        _check_whole(self)
        own_add(self, *args, **kwargs)

    @wraps(own_inject)
    def inject(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            _check_whole(model)
        except ValueError:
            if not any(isinstance(each, LoraLayer) and adapter_name in each.r for each in model.modules()):
                self.peft_config.pop(adapter_name, None)  # add_weighted_adapter has put it there
            raise
        if _waits(model) and isinstance(self.peft_config[adapter_name], LoraConfig):
            check_needs_no_base(self.peft_config[adapter_name])
        with _all(_suspensions):
            return own_inject(self, model, adapter_name, *args, **kwargs)

    @wraps(own_cast)
    def cast(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _all(_suspensions):
            return own_cast(self, *args, **kwargs)

    BaseTunerLayer._move_adapter_to_device_of_base_layer = move  # type: ignore[method-assign]
    ParamWrapper._move_adapter_to_device_of_base_layer = move_parameter  # type: ignore[method-assign]
    LoraModel._replace_module = replace  # type: ignore[method-assign]
    BaseTuner.inject_adapter = inject  # type: ignore[method-assign]
    BaseTuner._cast_adapter_dtype = cast  # type: ignore[method-assign]
    PeftAdapterMixin.load_adapter = load  # type: ignore[method-assign]
    PeftAdapterMixin.add_adapter = add  # type: ignore[method-assign]


# Initialisations that draw from the random state alone; PiSSA, OLoRA, LoftQ and others decompose the base weight.
DRAWN = (True, False, "gaussian", "orthogonal")


def check_needs_no_base(config: Any) -> None:
    """Check that an adapter can be made before its base is read.

    Raises:
        ValueError: It is computed from the base weights.
    """
    wants = None
    if config.init_lora_weights not in DRAWN:
        wants = f"init_lora_weights={config.init_lora_weights!r}"
    elif config.use_dora:
        wants = "use_dora=True"
    elif config.trainable_token_indices is not None:
        wants = f"trainable_token_indices={config.trainable_token_indices!r}"
    if wants is not None:
        raise ValueError(
            f"LoraConfig({wants}) computes the adapter from the base weights, and the model is on meta: its weights "
            "are still on disk. Load it outside of meta_init."
        )


def _waits(base: nn.Module) -> bool:
    return bool(_observers) or any(is_deferred(parameter) for parameter in base.parameters())


@contextmanager
def _all(contexts: list[Callable[[], AbstractContextManager[Any]]]) -> Iterator[None]:
    if not contexts:
        yield
        return
    with contexts[-1]():
        yield


@contextmanager
def observe_layers(observer: Callable[[nn.Module], None]) -> Iterator[None]:
    """Within, call `observer` with each LoRA layer as PEFT puts it in place, its adapter drawn and still in memory."""
    adapters_off_meta()
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()


@contextmanager
def suspend_during_injection(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Within, PEFT builds its layers inside `context()`."""
    adapters_off_meta()
    _suspensions.append(context)
    try:
        yield
    finally:
        _suspensions.pop()


def sum_weight_norm(dora: Any, total: Callable[[Tensor], Tensor]) -> None:
    """Let a DoRA layer that is shown some columns of its weight take the norm of all of them.

    Args:
        dora: PEFT's `DoraLinearLayer`. It treats the norm as a constant: no gradient.
        total: From this rank's sums of squares [out] to those of all ranks.
    """
    own = dora.get_weight_norm

    @torch.no_grad()
    def get_weight_norm(weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        norm = own(weight.to(wide), lora_weight.to(wide), scaling, adapter_name=adapter_name)
        return total(norm.square()).sqrt().to(weight.dtype)

    dora.get_weight_norm = get_weight_norm


def keep_factored(model: nn.Module) -> None:
    """Let adapters of parameters (experts, routers) be computed with by their factors, which PEFT multiplies and adds
    to the weight in every forward (https://github.com/huggingface/peft/issues/3080 is about that layer on shards).
    """
    for module in model.modules():
        if isinstance(module, ParamWrapper) and module.get_param().dtype in _COMPUTED_WITH:
            module._activate_lora = MethodType(_activate_factored, module)  # type: ignore[method-assign]


_COMPUTED_WITH = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def _activate_factored(layer: Any, active_adapters: list[str]) -> Iterator[None]:
    adapters = [adapter for adapter in active_adapters if adapter in layer.lora_A]
    if not adapters:
        yield
        return
    owner, key = layer.get_base_layer(), layer.parameter_name
    shadowed, weight = owner.__dict__.get(key), getattr(owner, key)
    owner.__dict__[key] = FactoredWeight(weight, [_factors(layer, adapter, weight) for adapter in adapters])
    try:
        yield
    finally:
        del owner.__dict__[key]
        if shadowed is not None:
            owner.__dict__[key] = shadowed


def _factors(layer: Any, adapter: str, weight: Tensor) -> Factors:
    """PEFT's layout: lora_A [experts * r, in], lora_B [out, r * experts]. Of as many experts as `weight` has, or of a
    weight [out, in] (a router's).
    """
    A, B = layer.lora_A[adapter].weight.to(weight.dtype), layer.lora_B[adapter].weight.to(weight.dtype)
    if weight.dim() == 2:
        return Factors(B, A, layer.scaling[adapter])
    experts = weight.shape[0]
    A = A.reshape(experts, -1, A.shape[-1])
    B = B.reshape(B.shape[0], -1, experts).permute(2, 0, 1)
    factors = Factors(B, A, layer.scaling[adapter])
    return factors if layer._did_swap_in_out_features else factors.transposed


def activate(layer: Any, adapters: list[str]) -> None:
    """Have a layer say that these adapters are active. `set_adapter` would go over the parameters of all that it has,
    and freeze the others: a tenth of a second where 560 layers have eight each.
    """
    layer._active_adapter = adapters


def refuse_adapters(model: nn.Module) -> None:
    """Let PEFT and transformers refuse adapters for a sharded model, by whichever of their ways they come: PEFT would
    make them of the sizes of a whole layer, or of this rank's part of one, and no gradient of theirs would be reduced.
    """
    adapters_off_meta()
    _sharded.update(model.modules())


def _check_whole(model: nn.Module) -> None:
    if any(module in _sharded for module in model.modules()):
        raise ValueError(
            f"adapters cannot be added to a {type(model).__name__} that is sharded (add_adapter, add_weighted_adapter, "
            "load_adapter under a new name, get_peft_model): add them before parallelize; a weighted one in one "
            "process, from saved adapters. Adapters that come and go are tenants: TenantPool(model).add(...)."
        )


def refuse_unload(model: nn.Module) -> None:
    """Let PEFT's `merge_and_unload` and `unload` fail: a bare layer has no tensor parallel forward."""

    def unload(*_: Any, **__: Any) -> None:
        raise ValueError(
            "adapters cannot be taken off under tensor parallelism: write the merged model with export_merged, or "
            "merge in place with merge_adapter."
        )

    for module in model.modules():
        if isinstance(module, BaseTuner):
            module.merge_and_unload = module.unload = unload  # type: ignore[method-assign,assignment]


def refuse_merge(layer: Any, what: str, where: str = "under tensor parallelism") -> None:
    """Let `merge_adapter` and its kin fail on a PEFT layer: they would compute with its tensors as they are stored."""

    def merge(*_: Any, **__: Any) -> None:
        raise ValueError(
            f"{what} cannot be merged {where}: save the adapter (save_adapter) and merge it in one "
            "process with PEFT's merge_and_unload."
        )

    layer.merge = merge
