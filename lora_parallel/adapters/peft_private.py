"""Use PEFT's private API, all in one place: for a base on meta, for DoRA that is cut or compiled, for LoRA of experts.

PEFT moves an adapter to its base layer's device as soon as it has drawn the adapter's values. If the base is on meta,
with its weights still on disk, that would lose the values. So there the adapter stays on the CPU, where it was drawn;
it gets the base's dtype, as always. Nothing changes for a base that `meta_init` did not put on meta.
`tests/lora_parallel/adapters/test_peft_private.py` tests that the private API still does what this file relies on.

PEFT has no option for this (https://github.com/huggingface/peft/issues/2834 is about the same lines):
low_cpu_mem_usage=True leaves adapters on meta, uninitialised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import get_pattern_key as get_pattern_key
from torch import Tensor, nn
from transformers.integrations import PeftAdapterMixin

from lora_parallel.adapters.low_rank_weight import Factors, LowRankWeight
from lora_parallel.lazy.tracking import DEFER, accept_memory, is_deferred, is_readable

_observers: list[Callable[[nn.Module], None]] = []
_suspensions: list[Callable[[], AbstractContextManager[Any]]] = []
_sharded: WeakSet[nn.Module] = WeakSet()
_installed = False


def adapters_off_meta() -> None:
    """Patch PEFT so that it keeps an adapter off meta if `meta_init` put the adapter's base on meta.

    The first call patches PEFT's classes for the rest of the process, as PEFT may wrap a model at any time after it was
    built. Later calls do nothing.
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
        self.__dict__["get_param"] = lambda: stand_in  # PEFT uses only its device and dtype
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
        self.hf_device_map = {"": "cpu"}  # the device for tensors that it reads; without a map, the base's device
        try:
            with _all(_suspensions):
                result = own_load(self, *args, **kwargs)
            accept_memory(self)  # such as a trained head that was in the folder
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
            check_needs_no_base(self.peft_config[adapter_name], model)
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


def check_needs_no_base(config: Any, model: nn.Module) -> None:
    """Check that an adapter's values do not depend on base weights that cannot be read yet.

    Rows of an embedding that a file holds can be read; DoRA and decompositions need whole weights.

    Args:
        config: The adapter's `LoraConfig`.
        model: The model on meta.

    Raises:
        ValueError: The adapter's values are computed from the base weights.
    """
    wants = None
    if config.init_lora_weights not in DRAWN:
        wants = f"init_lora_weights={config.init_lora_weights!r}"
    elif config.use_dora:
        wants = "use_dora=True"
    elif config.trainable_token_indices is not None and not all(map(is_readable, model.parameters())):
        wants = f"trainable_token_indices={config.trainable_token_indices!r}"
    if wants is not None:
        raise ValueError(
            f"LoraConfig({wants}) computes the adapter from the base weights, and the model is on meta: its weights "
            f"are still on disk. Load it outside of meta_init; where a launcher or a strategy has put it on meta, set "
            f"the environment variable {DEFER}=0, which loads models into the memory of every rank."
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
    """Call `observer` with each LoRA layer that PEFT puts in place within the context.

    The values of the layer's adapter have been drawn by then, and are still in memory.
    """
    adapters_off_meta()
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()


@contextmanager
def suspend_during_injection(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Open `context()`, within the context of this function, whenever PEFT builds, casts or loads an adapter."""
    adapters_off_meta()
    _suspensions.append(context)
    try:
        yield
    finally:
        _suspensions.pop()


def sum_weight_norm(dora: Any, total: Callable[[Tensor], Tensor]) -> None:
    """Make a DoRA layer that has only some columns of its weight take the norms of all columns.

    Args:
        dora: PEFT's `DoraLinearLayer`. It treats the norm as a constant, without a gradient.
        total: Sums a tensor over all ranks; gets this rank's sums of squares [out].
    """
    own = dora.get_weight_norm

    @torch.no_grad()
    def get_weight_norm(weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        norm = own(weight.to(wide), lora_weight.to(wide), scaling, adapter_name=adapter_name)
        return total(norm.square()).sqrt().to(weight.dtype)

    dora.get_weight_norm = get_weight_norm


@cache
def trace_dora() -> None:
    """Let `torch.compile` trace DoRA on weights that are not quantised, in this process.

    PEFT asks for the module in which the weight's class is defined, which `torch.compile` cannot trace. A quantised
    weight still breaks the graph there.
    """

    @torch.compiler.substitute_in_graph(dequantize_module_weight)
    def weight_of(module: torch.nn.Module) -> Any:
        weight: Any = getattr(module, "weight", None)
        plain = type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()
        return weight if plain else outside_of_graphs(module)

    @torch.compiler.disable
    def outside_of_graphs(module: torch.nn.Module) -> Any:
        return dequantize_module_weight(module)


def keep_factored(model: nn.Module) -> None:
    """Make adapters of parameters (experts, routers) compute with their factors, without adding them to the weight.

    PEFT multiplies the factors and adds them to the weight in every forward
    (https://github.com/huggingface/peft/issues/3080 is about that layer on shards).

    Args:
        model: A model with PEFT layers, changed in place.
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
    owner.__dict__[key] = LowRankWeight(weight, [_factors(layer, adapter, weight) for adapter in adapters])
    try:
        yield
    finally:
        del owner.__dict__[key]
        if shadowed is not None:
            owner.__dict__[key] = shadowed


def _factors(layer: Any, adapter: str, weight: Tensor) -> Factors:
    """Return an adapter's factors in the layout of `weight`: a stack [experts, ., .], or 2-D [out, in] (a router's).

    PEFT stores lora_A [experts * r, in] and lora_B [out, r * experts].
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
    """Set the active adapters of a PEFT layer, without any other effect.

    PEFT's `set_adapter` would go over the parameters of all adapters of the layer and freeze those of the others. That
    takes a tenth of a second for 560 layers with eight adapters each.
    """
    layer._active_adapter = adapters


def refuse_adapters(model: nn.Module) -> None:
    """Make every function of PEFT and transformers that adds an adapter refuse a sharded model.

    PEFT would give the adapter the sizes of a whole layer, or of this rank's part of one, and its gradients would not
    be reduced.

    Args:
        model: A model that has been sharded.
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
    """Make PEFT's `merge_and_unload` and `unload` raise an error.

    They would leave the bare layers, which have no tensor parallel forward.

    Args:
        model: A model whose layers are tensor parallel.
    """

    def unload(*_: Any, **__: Any) -> None:
        raise ValueError(
            "adapters cannot be taken off under tensor parallelism: write the merged model with export_merged, or "
            "merge in place with merge_adapter."
        )

    for module in model.modules():
        if isinstance(module, BaseTuner):
            module.merge_and_unload = module.unload = unload  # type: ignore[method-assign,assignment]


def refuse_merge(layer: Any, what: str, where: str = "under tensor parallelism") -> None:
    """Make `merge_adapter` and similar calls raise for a PEFT layer: they would compute with its tensors as stored.

    Args:
        layer: A PEFT layer.
        what: The kind of adapter, for the error message.
        where: The circumstances in which merging fails, for the error message.
    """

    def merge(*_: Any, **__: Any) -> None:
        raise ValueError(
            f"{what} cannot be merged {where}: save the adapter (save_adapter) and merge it in one "
            "process with PEFT's merge_and_unload."
        )

    layer.merge = merge
