"""Use PEFT's private API, all in one place: for a base on meta, for DoRA that is cut or compiled, for LoRA of experts.

PEFT moves an adapter to its base layer's device as soon as it has drawn the adapter's values. If the base is on meta,
with its weights still on disk, that would lose the values. So there the adapter stays on the CPU, where it was drawn;
it gets the base's dtype, as always. Nothing changes for a base that `meta_init` did not put on meta.
`tests/lora_parallel/adapters/test_peft_private.py` tests that the private API still does what this file relies on.

PEFT has no option for this (https://github.com/huggingface/peft/issues/2834 is about the same lines):
low_cpu_mem_usage=True leaves adapters on meta, uninitialised.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from peft import LoraConfig
from peft.tuners.lora import LoraModel
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import hotswap, load_peft_weights
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import get_pattern_key as get_pattern_key
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers,
    convert_peft_config_for_transformers,
)
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import PeftAdapterMixin

from lora_parallel.adapters.base_dependent import in_memory, initialise_from
from lora_parallel.adapters.low_rank_weight import Factors, LowRankWeight
from lora_parallel.distributed.dtensors import class_of
from lora_parallel.lazy.tracking import DEFER, accept_memory, is_deferred, is_readable
from lora_parallel.replaced import replaced_entries

_observers: list[Callable[[nn.Module], None]] = []
_suspensions: list[Callable[[], AbstractContextManager[Any]]] = []
_sharded: WeakSet[nn.Module] = WeakSet()


def _patch(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a method or function of PEFT's by the decorated one, which gets PEFT's own as its first argument."""
    original = getattr(owner, name)

    def replace(function: Callable[..., Any]) -> None:
        @wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, method)

    return replace


@cache  # PEFT's classes are patched for the rest of the process: PEFT may wrap a model at any time after it was built
def adapters_off_meta() -> None:
    """Patch PEFT so that it keeps an adapter off meta if `meta_init` put the adapter's base on meta."""

    @_patch(BaseTunerLayer, "_move_adapter_to_device_of_base_layer")
    def move(original: Any, self: Any, adapter_name: str, device: torch.device | None = None) -> None:
        stay = device is None and _waits(self.get_base_layer())
        original(self, adapter_name, torch.device("cpu") if stay else device)

    @_patch(ParamWrapper, "_move_adapter_to_device_of_base_layer")
    def move_parameter(original: Any, self: Any, adapter_name: str, device: torch.device | None = None) -> None:
        if not _waits(self.get_base_layer()):
            original(self, adapter_name, device)
            return
        stand_in = torch.empty(0, dtype=self.get_param().dtype)
        with replaced_entries([(self.__dict__, "get_param", lambda: stand_in)]):  # PEFT uses only its device and dtype
            original(self, adapter_name, device)

    @_patch(LoraModel, "_replace_module")
    def replace(original: Any, self: Any, parent: nn.Module, name: str, new_module: nn.Module, child: Any) -> None:
        base = child.get_base_layer() if isinstance(child, BaseTunerLayer) else child
        if _observers:
            _observers[-1](new_module)
            for key in getattr(new_module, "adapter_layer_names", ()):  # a base on disk says that it is on the CPU
                getattr(new_module, key).to("meta")
        elif _waits(base):
            setattr(parent, name, new_module)
            return
        original(self, parent, name, new_module, child)

    @_patch(PeftAdapterMixin, "load_adapter")
    def load(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_whole(self)
        if not _waits(self):
            return original(self, *args, **kwargs)
        self.hf_device_map = {"": "cpu"}  # the device for tensors that it reads; without a map, the base's device
        try:
            with _suspended():
                result = original(self, *args, **kwargs)
            accept_memory(self)  # such as a trained head that was in the folder
            return result
        finally:
            del self.hf_device_map

    @_patch(PeftAdapterMixin, "add_adapter")
    def add(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        _check_whole(self)
        original(self, *args, **kwargs)

    @_patch(BaseTuner, "inject_adapter")
    def inject(original: Any, self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            _check_whole(model)
        except ValueError:
            if not any(isinstance(module, LoraLayer) and adapter_name in module.r for module in model.modules()):
                self.peft_config.pop(adapter_name, None)  # add_weighted_adapter has put it there
            raise
        if _waits(model) and isinstance(self.peft_config[adapter_name], LoraConfig):
            check_base(self.peft_config[adapter_name], model)
        with _suspended():
            return original(self, model, adapter_name, *args, **kwargs)

    for name in ("pissa_init", "olora_init"):

        @_patch(LoraLayer, name)
        def initialise(original: Any, self: Any, adapter_name: str, *args: Any) -> None:
            initialise_from(self, adapter_name, lambda: original(self, adapter_name, *args))

    @_patch(DoraLinearLayer, "update_layer")
    def take_norms(original: Any, self: Any, *, base_layer: nn.Module, **kwargs: Any) -> None:
        with in_memory(base_layer):
            original(self, base_layer=base_layer, **kwargs)

    # All functions of `hotswap` call one of these, by its name in the module, before they change anything.
    for name in ("hotswap_adapter_from_state_dict", "_convert_scalings_to_tensor"):

        @_patch(hotswap, name)
        def swap(original: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if dist.is_initialized() and dist.get_world_size() > 1 and any(m in _sharded for m in model.modules()):
                raise ValueError(
                    f"hotswap_adapter would write full tensors into a {type(model).__name__} that is sharded: fill its "
                    "adapter with lora_parallel.load_adapter(model, folder), on every rank; adapters of other sizes "
                    "are tenants: TenantPool(model).add(...)."
                )
            return original(model, *args, **kwargs)

    @_patch(BaseTuner, "_cast_adapter_dtype")
    def cast(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with _suspended():
            return original(self, *args, **kwargs)


# Initialisations that draw from the random state alone; PiSSA, OLoRA, LoftQ and others decompose the base weight.
DRAWN = (True, False, "gaussian", "orthogonal")


def from_base(config: Any) -> str | None:
    """Return the setting by which an adapter's values are computed from whole base weights, as text, or None."""
    if config.init_lora_weights not in DRAWN:
        return f"init_lora_weights={config.init_lora_weights!r}"
    wants = {field: getattr(config, field, None) for field in ("use_dora", "kasa_config")}  # KaSA came with PEFT 0.21
    return next((f"{field}={value!r}" for field, value in wants.items() if value), None)


def tied_targets(config: Any) -> set[str]:
    """Return the layers whose LoRA PEFT puts into the memory of the embedding's, which no field of a config says."""
    return getattr(config, "target_modules_to_tie", None) or set()


def check_base(config: Any, model: nn.Module) -> None:
    """Refuse an adapter that is computed from base weights on meta, if these cannot be read, or not by themselves."""
    wants, init = from_base(config), str(config.init_lora_weights).lower()
    known = config.init_lora_weights in DRAWN or init == "olora" or init.startswith("pissa")
    known = known and not getattr(config, "kasa_config", None)  # its new weight is not the old one less the product
    alone = known and not any(getattr(module, "is_quantized", False) for module in model.modules())
    if wants is None and config.trainable_token_indices is not None:
        wants, alone = f"trainable_token_indices={config.trainable_token_indices!r}", True
    if wants is None or (alone and all(map(is_readable, model.parameters()))):
        return
    raise ValueError(
        f"LoraConfig({wants}) computes the adapter from the base weights, and the model is on meta: its weights are "
        f"still on disk{'' if alone else ', and are not read a layer at a time for this'}. Load it outside of "
        f"meta_init; where a launcher or a strategy has put it on meta, set the environment variable {DEFER}=0, which "
        "loads models into the memory of every rank."
    )


def _waits(base: nn.Module) -> bool:
    return bool(_observers) or any(is_deferred(parameter) for parameter in base.parameters())


def _suspended() -> AbstractContextManager[Any]:
    """Return the context that `suspend_during_injection` asks for, if any."""
    return _suspensions[-1]() if _suspensions else nullcontext()


@contextmanager
def _listed(callbacks: list[Any], callback: Any) -> Iterator[None]:
    adapters_off_meta()
    callbacks.append(callback)
    try:
        yield
    finally:
        callbacks.pop()


def observe_layers(observer: Callable[[nn.Module], None]) -> AbstractContextManager[None]:
    """Call `observer` with each LoRA layer that PEFT puts in place, while its adapter's values are still in memory."""
    return _listed(_observers, observer)


def suspend_during_injection(context: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """Open `context()`, within the context of this function, whenever PEFT builds, casts or loads an adapter."""
    return _listed(_suspensions, context)


def sum_weight_norm(dora: Any, total: Callable[[Tensor], Tensor]) -> None:
    """Make a DoRA layer that has only some columns of its weight take the norms of all columns.

    `total` sums this rank's sums of squares [out] over all ranks. PEFT treats the norm as a constant, without gradient.
    """
    original = dora.get_weight_norm

    @torch.no_grad()
    def get_weight_norm(weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        norm = original(weight.to(wide), lora_weight.to(wide), scaling, adapter_name=adapter_name)
        return total(norm.square()).sqrt().to(weight.dtype)

    dora.get_weight_norm = get_weight_norm


@cache
def trace_dora() -> None:
    """Let `torch.compile` trace DoRA on weights that are not quantised, in this process."""
    # PEFT asks for the module in which the weight's class is defined, which torch.compile cannot trace.

    @torch.compiler.substitute_in_graph(dequantize_module_weight)
    def weight_of(module: torch.nn.Module) -> Any:
        weight: Any = getattr(module, "weight", None)
        plain = type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()
        return weight if plain else outside_of_graphs(module)

    @torch.compiler.disable
    def outside_of_graphs(module: torch.nn.Module) -> Any:
        return dequantize_module_weight(module)


def keep_factored(model: nn.Module) -> None:
    """Make adapters of parameters (experts, routers) compute with their factors, without adding them to the weight."""
    # PEFT adds their product in every forward (https://github.com/huggingface/peft/issues/3080 is about that layer).
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
    weight = getattr(owner, key)
    factored = LowRankWeight(weight, [_factors(layer, adapter, weight) for adapter in adapters])
    with replaced_entries([(owner.__dict__, key, factored)]):
        yield


def _factors(layer: Any, adapter: str, weight: Tensor) -> Factors:
    """Return an adapter's factors in the layout of `weight`: a stack [experts, ., .], or 2-D [out, in] (a router's)."""
    # PEFT stores lora_A [experts * r, in] and lora_B [out, r * experts].
    A, B = layer.lora_A[adapter].weight.to(weight.dtype), layer.lora_B[adapter].weight.to(weight.dtype)
    if weight.dim() == 2:
        return Factors(B, A, layer.scaling[adapter])
    experts = weight.shape[0]
    A = A.reshape(experts, -1, A.shape[-1])
    B = B.reshape(B.shape[0], -1, experts).permute(2, 0, 1)
    factors = Factors(B, A, layer.scaling[adapter])
    return factors if layer._did_swap_in_out_features else factors.transposed


def converted_config(read: dict[str, Any], own: Any, model: Any) -> dict[str, Any]:
    """Return the fields of a config that was read, as PEFT changes them when it puts the adapter into `model`.

    Experts that were layers in a former release of transformers become parameters, of which a fused one has a larger r.
    """
    config = copy.copy(own)
    config.__dict__ = dict(read)
    convert_peft_config_for_transformers(config, model, None)
    return vars(config)


def converted_adapter(folder: Path, base: nn.Module, config: Any, adapter_name: str) -> dict[str, Tensor]:
    """Read the tensors of an adapter, converted by PEFT to the layers that the model has in this transformers release.

    A former release named layers otherwise, or had a layer for each expert.
    """
    renamed = getattr(base, "_checkpoint_conversion_mapping", {})
    tensors = load_peft_weights(str(folder), device="cpu", key_mapping=renamed)
    if not isinstance(base, PreTrainedModel):
        return tensors
    # PEFT looks at the classes of all modules. Those of a sharded model are FSDP2's, and a stage lacks modules.
    with torch.device("meta"):
        unsharded = class_of(base)(copy.deepcopy(base.config))
    return convert_peft_adapter_state_dict_for_transformers(unsharded, config, tensors, adapter_name)


def activate(layer: Any, adapters: list[str]) -> None:
    """Set the active adapters of a PEFT layer, without any other effect."""
    # PEFT's `set_adapter` goes over the parameters of all adapters of the layer and freezes those of the others: a
    # tenth of a second for 560 layers with eight adapters each.
    layer._active_adapter = adapters


def refuse_adapters(model: nn.Module) -> None:
    """Make every function of PEFT and transformers that adds an adapter refuse a sharded model."""
    # PEFT would give the adapter the sizes of a whole layer, or of this rank's part of one, and its gradients would not
    # be reduced.
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
    """Make PEFT's `merge_and_unload` and `unload` raise an error: they would leave layers without a TP forward."""

    def unload(*_: Any, **__: Any) -> None:
        raise ValueError(
            "adapters cannot be taken off under tensor parallelism: write the merged model with export_merged, or "
            "merge in place with merge_adapter."
        )

    for module in model.modules():
        if isinstance(module, BaseTuner):
            module.merge_and_unload = module.unload = unload  # type: ignore[method-assign,assignment]


def refuse_merge(layer: Any, what: str, where: str = "under tensor parallelism") -> None:
    """Make `merge_adapter` and similar calls raise for a PEFT layer: they would compute with its tensors as stored."""

    def merge(*_: Any, **__: Any) -> None:
        raise ValueError(
            f"{what} cannot be merged {where}: save the adapter (save_adapter) and merge it in one "
            "process with PEFT's merge_and_unload."
        )

    layer.merge = merge
