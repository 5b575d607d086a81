"""Record what transformers' quantisers would do to weights that are still on disk, to do it slice by slice later.

All private API of these quantisers is in this file; `tests/lora_parallel/quantised/test_loading.py` tests it. There is
no public way to quantise a checkpoint by slices (https://github.com/huggingface/transformers/issues/39404).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, revert_weight_conversion
from transformers.modeling_utils import LoadStateDictConfig

from lora_parallel.lazy.lazy_tensor import LazyTensor
from lora_parallel.lazy.tracking import keep_settings
from lora_parallel.quantised.conversion import own_modules
from lora_parallel.quantised.packed_weight import Packed
from lora_parallel.replaced import replaced

_KNOWN = ("bitsandbytes", "torchao")


def check_method(name: str, method: str) -> None:
    """Raise ValueError if the quantiser's weights cannot be cut into rows."""
    if not method.startswith(_KNOWN):
        raise ValueError(
            f"{name} is quantised by {method}, whose weights cannot be sharded. "
            "What can: linear layers of bitsandbytes (4-bit, int8) and of torchao (int8, float8, intx weight-only)."
        )


def lazily(load_config: LoadStateDictConfig) -> LoadStateDictConfig:
    """Return `load_config` with a quantiser that records what the given one would do to lazy tensors."""
    quantiser = load_config.hf_quantizer
    if quantiser is None:
        return load_config
    check_method(str(load_config.pretrained_model_name_or_path), _method(quantiser))
    mapping = []
    for converter in load_config.weight_mapping or []:
        if _of_quantiser(converter):
            converter = copy.copy(converter)
            converter.operations = [_Deserialise(quantiser)]
        mapping.append(converter)
    return replace(load_config, hf_quantizer=cast(Any, _Quantiser(quantiser)), weight_mapping=mapping)


def _method(quantiser: Any) -> str:
    method = quantiser.quantization_config.quant_method
    return str(getattr(method, "value", method))


class _Quantiser:
    """Stand in for a quantiser of transformers: same attributes, but quantisation is recorded and not done."""

    def __init__(self, quantiser: Any) -> None:
        self._original = quantiser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantise(self._original)


class _Recording(ConversionOps):
    def __init__(self, quantiser: Any) -> None:
        self.hf_quantizer = quantiser


class _Quantise(_Recording):
    """Record the quantisation of a dense weight."""

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str = "", **_: Any
    ) -> dict[str, Tensor]:
        tensors = {name: _only(value) for name, value in input_dict.items()}
        if _method(self.hf_quantizer) == "torchao":
            (tensor,) = tensors.values()
            return {full_layer_name: _torchao(self.hf_quantizer, model, full_layer_name, tensor)}
        return {name: _bitsandbytes(model, name, tensor) for name, tensor in tensors.items()}


class _Deserialise(_Recording):
    """Record the loading of a weight that was quantised before it was saved."""

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str = "", **_: Any
    ) -> dict[str, Tensor]:
        import bitsandbytes

        from lora_parallel.quantised import bnb

        tensors = {name: _only(value) for name, value in input_dict.items()}
        layer = model.get_submodule(full_layer_name.rpartition(".")[0])
        if _method(self.hf_quantizer) == "torchao":
            return {full_layer_name: _saved_torchao(self.hf_quantizer, model, full_layer_name, tensors)}
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            return {"weight": _packed(bnb.stored_4bit(layer, tensors), layer.weight)}
        if isinstance(layer, bitsandbytes.nn.Linear8bitLt):
            return {"weight": _packed(bnb.stored_8bit(layer, tensors), layer.weight)}
        return tensors


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _packed(node: Packed, meta: Tensor | None = None) -> Tensor:
    """Return a parameter for the quantised weight `node`, with the settings that a quantiser has set on `meta`."""
    parameter = nn.Parameter(LazyTensor(node), requires_grad=False)
    keep_settings(meta, parameter)
    return parameter


def _bitsandbytes(model: Any, name: str, value: LazyTensor) -> Tensor:
    import bitsandbytes
    from transformers.pytorch_utils import Conv1D

    from lora_parallel.quantised import bnb

    layer = model.get_submodule(name.rpartition(".")[0])
    if issubclass(layer.source_cls, Conv1D):
        value = value.T  # type: ignore[assignment]
    _check_shape(value, layer)
    make = bnb.dense_4bit if isinstance(layer, bitsandbytes.nn.Linear4bit) else bnb.dense_8bit
    return _packed(make(layer, value.node), layer.weight)


def _check_shape(value: Tensor, layer: Any) -> None:
    if tuple(value.shape) != (layer.out_features, layer.in_features) or not value.is_floating_point():
        raise ValueError(
            f"the files hold a weight of shape {tuple(value.shape)} and dtype {value.dtype}, and the layer to quantise "
            f"has {(layer.out_features, layer.in_features)}: the config is not the checkpoint's"
        )


def _torchao(quantiser: Any, model: Any, name: str, value: LazyTensor) -> Tensor:
    layer = model.get_submodule(name.rpartition(".")[0])
    quantise = _config_of(quantiser, model, name, value)
    if quantise is None:
        return value
    if type(layer) is not nn.Linear or not name.endswith(".weight"):
        raise ValueError(
            f"torchao would quantise it, a part of a {type(layer).__name__}: linear layers only can be sharded"
        )
    from lora_parallel.quantised import ao

    _check_shape(value, layer)
    return _packed(ao.dense_ao(value.node, quantise))


def _config_of(quantiser: Any, model: Any, name: str, value: Any) -> Callable[[nn.Linear], None] | None:
    """Return what quantises a linear layer as transformers would the layer of `name`; None if it leaves that alone."""
    from torchao.quantization import quantize_  # type: ignore[import-untyped]
    from transformers.integrations.torchao import TorchAoQuantize

    calls: list[Any] = []

    class Noting(TorchAoQuantize):
        def _quantize(self, module: Any, config: Any, *args: Any, **more: Any) -> None:
            calls.append((config, args, more))

    layer = model.get_submodule(name.rpartition(".")[0])
    before = layer._parameters["weight"]
    Noting(quantiser).convert({name: value}, model=model, full_layer_name=name, missing_keys=set())
    layer._parameters["weight"] = before
    if not calls:
        return None
    config, args, more = calls[0]
    return lambda linear: quantize_(linear, config, *args, **more)


def _saved_torchao(quantiser: Any, model: Any, name: str, tensors: Mapping[str, LazyTensor]) -> Tensor:
    from torchao.prototype.safetensors.safetensors_support import (  # type: ignore[import-untyped]
        unflatten_tensor_state_dict,
    )

    from lora_parallel.quantised import ao

    owner = name.rpartition(".")[0]
    layer = model.get_submodule(owner)
    if type(layer) is not nn.Linear or not name.endswith(".weight"):
        raise ValueError(f"torchao has quantised a part of a {type(layer).__name__}: linear layers only can be sharded")
    shapes = {f"{owner}.{key}": torch.empty(x.shape, dtype=x.dtype, device="meta") for key, x in tensors.items()}
    weight = unflatten_tensor_state_dict(shapes, quantiser.metadata)[0].get(name)
    if weight is None:
        raise ValueError(
            f"the files hold {', '.join(tensors)}, and their metadata do not say of what: the checkpoint is incomplete"
        )
    quantise = _config_of(quantiser, model, name, LazyTensor(next(iter(tensors.values())).node))
    if quantise is None or not quantiser.param_needs_quantization(model, name):
        raise ValueError(_left("it", "it quantised"))
    inner = {key.removeprefix("_weight_"): tensor for key, tensor in tensors.items()}
    return _packed(ao.stored_ao(layer, inner, weight, quantise))


def check_complete(model: Any, quantiser: Any, missing: Iterable[str], path: str) -> None:
    """Refuse a weight that the config calls quantised and that was loaded dense, or not at all."""
    dense = {
        name: f"in {tensor.dtype}"
        for name, tensor in model.named_parameters()
        if isinstance(tensor, LazyTensor) and not isinstance(tensor.node, Packed)
    }
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, how in {**dict.fromkeys(sorted(missing), "not at all"), **dense}.items():
        if not quantiser.param_needs_quantization(model, name):
            continue
        if _method(quantiser) == "torchao":
            # torchao leaves tied weights as they are, and those that its config maps to None.
            if name in tied or _config_of(quantiser, model, name, model.get_parameter(name)) is None:
                continue
        elif name in tied:
            raise ValueError(
                f"{path}: {name} is tied to {tied[name]}, which is not quantised: name it in llm_int8_skip_modules."
            )
        raise ValueError(f"{path}: {_disagree(name, quantiser, how)}")


def check_marks(model: PreTrainedModel, quantiser: Any, keys: Iterable[str], path: str) -> None:
    """Refuse files in which a layer is quantised that the model's config leaves as it is."""
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."
    for key in keys:
        mark = next((mark for mark in _MARKS if key.endswith(mark)), None)
        name = "" if mark is None else key.removesuffix(mark)
        name = next((n for n in (name, name.removeprefix(prefix), f"{prefix}{name}") if n in modules), "")
        if type(modules[name]) is nn.Linear and not quantiser.param_needs_quantization(model, f"{name}.weight"):
            raise ValueError(f"{path}: {_left(name, f'{key}, of a quantised layer')}")


def _left(name: str, what: str) -> str:
    return (
        f"config.json leaves {name} as it is, and the files hold {what}: the config is not the checkpoint's. Give the "
        "checkpoint the config.json that it was saved with."
    )


def _disagree(name: str, quantiser: Any, how: str) -> str:
    return (
        f"config.json says that {name} is quantised by {_method(quantiser)}, and the files hold it {how}: the config "
        "is not the checkpoint's. For a dense checkpoint, take quantization_config out of config.json and pass it to "
        "from_pretrained; name a layer that is to stay as it is in llm_int8_skip_modules or modules_to_not_convert."
    )


def check_loaded(model: nn.Module) -> None:
    """Check that models in memory are quantised as their configs and files say; transformers does not check it."""
    adapters = {inner for layer in model.modules() if isinstance(layer, LoraLayer) for inner in own_modules(layer)}
    parts: set[nn.Module] = set()
    for base in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        if base in parts:
            continue
        parts.update(base.modules())
        linear = {n: m for n, m in base.named_modules() if isinstance(m, nn.Linear) and m not in adapters}
        _check_as_configured(base, linear)


def _check_as_configured(model: PreTrainedModel, quantised: Mapping[str, nn.Module]) -> None:
    """Check one model; `quantised` maps names to the layers that may be quantised."""
    quantiser = getattr(model, "hf_quantizer", None)
    if quantiser is None:
        _check_files(model)
        return
    if _method(quantiser) == "torchao":
        from torchao.utils import TorchAOBaseTensor  # type: ignore[import-untyped]

        from lora_parallel.quantised import ao

        plain: Any = _Plain(model)
        embedding = model.get_input_embeddings()
        for name_with_peft, layer in quantised.items():
            name, weight = f"{name_with_peft.replace('.base_layer', '')}.weight", cast(Any, layer.weight)
            if type(layer) is not nn.Linear or weight.is_meta or weight is embedding.weight:
                continue
            if not quantiser.param_needs_quantization(plain, name):
                if isinstance(weight, TorchAOBaseTensor):
                    raise ValueError(_left(name, f"it quantised ({type(weight).__name__})"))
                continue
            quantise = _config_of(quantiser, plain, name, weight)
            if quantise is not None and (said := ao.disagrees(weight, quantise)):
                raise ValueError(_disagree(name, quantiser, said))
        return
    for name, layer in quantised.items():
        kind = getattr(layer.weight, "quant_type", None)
        said = getattr(quantiser.quantization_config, "bnb_4bit_quant_type", kind)
        if kind is not None and kind != said:
            raise ValueError(_disagree(f"{name}.weight", quantiser, f"as {kind}, not {said}"))


def reverted(model: PreTrainedModel, merged: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return dense tensors in the names and shapes of the model's checkpoints, without quantisers' conversions."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        return revert_weight_conversion(model, merged)
    others = [conversion for conversion in conversions if not _of_quantiser(conversion)] or None
    with replaced(model, {"_weight_conversions": others}):
        return revert_weight_conversion(model, merged)


def _of_quantiser(converter: Any) -> bool:
    return isinstance(converter, WeightConverter) and any(hasattr(op, "hf_quantizer") for op in converter.operations)


class _Plain:
    """Show a model with adapters as transformers built it: `get_submodule` returns base layers, not PEFT's layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_submodule(self, name: str) -> nn.Module:
        module = self._model.get_submodule(name)
        return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


_MARKS = (".weight.absmax", ".SCB", "._weight_qdata")  # Endings of the names of tensors that quantisers save


def _check_files(model: PreTrainedModel) -> None:
    """Refuse a model without a quantiser that was loaded from the files of a quantised checkpoint."""
    # transformers would cast its integers to the model's dtype, or draw weights at random.
    folder = Path(str(getattr(model.config, "_name_or_path", "")))
    config = folder / "config.json"
    if not config.is_file() or "quantization_config" in json.loads(config.read_text()):
        return
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            marked = next((key for key in opened.keys() if key.endswith(_MARKS)), None)  # noqa: SIM118
        if marked is not None:
            raise ValueError(
                f"{file} holds {marked}, of a quantised checkpoint, and its config.json says nothing of that: the "
                "weights in memory are not the model's. Give the checkpoint its own config.json."
            )
