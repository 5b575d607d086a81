"""Inject adapters that have the same values on any mesh: in full shape, from the seed, before anything is sharded."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, PeftType, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import MultiheadAttention
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.distributed.tensor import DTensor

from lora_parallel.adapters.dropout import TopologyInvariantDropout
from lora_parallel.adapters.inspection import adapter_parameters, check_unmerged, peft_configs
from lora_parallel.adapters.peft_private import check_base, from_base, observe_layers, tied_targets
from lora_parallel.config import ParallelConfig
from lora_parallel.distributed.dtensors import local
from lora_parallel.distributed.mesh import dp_rank, share_random_state
from lora_parallel.distributed.torch_private import local_region
from lora_parallel.layers.layer_parameters import clean_names
from lora_parallel.layers.linear_classes import is_linear
from lora_parallel.lazy.materialize import allocate_adapters
from lora_parallel.lazy.tracking import has_deferred
from lora_parallel.state import ForwardCount, Setup

_REMEDY = (
    "Pass lora_config=peft.LoraConfig(...), or wrap the model with peft.get_peft_model first, or set "
    "require_adapters=False to train without adapters."
)

_WORKS = (
    "What works: LoRA, DoRA and rsLoRA on linear layers, Conv1D and embeddings, lora_bias, modules_to_save, "
    "trainable_token_indices, bias='all' and 'lora_only'; other layers of LoRA's (convolutions, variants), computed in "
    "full on every tp rank."
)

_FROM_DATA = {
    "eva": "peft.initialize_lora_eva_weights(model, dataloader)",
    "corda": "peft.tuners.lora.corda.preprocess_corda before peft.get_peft_model",
    "lora_ga": "peft.tuners.lora.loraga.preprocess_loraga before peft.get_peft_model",
    "loftq": "peft.get_peft_model with its quantiser, on the full-precision weights",
}
"""Initialisations that take more than the base weights and the seed, and the call by which PEFT gets what they take."""


def has_adapters(model: nn.Module) -> bool:
    """Return True if the model has PEFT layers."""
    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def check_adapters(
    model: nn.Module, config: ParallelConfig, lora_config: LoraConfig | None, trains: bool = True
) -> ValueError | None:
    """Refuse adapters that cannot be trained here, and a lack of them; return the latter error if nothing `trains`."""
    if lora_config is not None and getattr(lora_config, "peft_type", None) != PeftType.LORA:
        raise TypeError(
            f"lora_config is a {type(lora_config).__name__}: only LoRA is supported; give a peft.LoraConfig. {_WORKS}"
        )
    if lora_config is not None and (remedy := _FROM_DATA.get(str(lora_config.init_lora_weights))) is not None:
        raise ValueError(
            f"lora_config has init_lora_weights={lora_config.init_lora_weights!r}, which takes more than the base "
            f"weights: make and initialise the PeftModel first ({remedy}), and give that to parallelize."
        )
    _check_layers(model)
    if trains:
        check_unmerged(model)
    present = has_adapters(model)
    if len(peft_models := _outer_peft_models(model)) > 1:
        raise ValueError(
            f"{type(model).__name__} holds {len(peft_models)} models of PEFT ({', '.join(peft_models)}), and an "
            "adapter folder is of one: adapt one model that holds both, or shard each by itself."
        )
    if lora_config is not None and not present:
        _check_targets(model, lora_config)
    for name, peft_config in peft_configs(model).items():
        if peft_config.peft_type != PeftType.LORA:
            kind = getattr(peft_config.peft_type, "value", peft_config.peft_type)
            raise ValueError(f"adapter {name!r} has PEFT type {kind}: only LORA is supported. {_WORKS}")
    for module in model.modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(module, (LoraLayer, TrainableTokensLayer)):
            raise ValueError(
                f"the model has adapter layers of type {type(module).__module__}.{type(module).__name__}: only LoRA's "
                f"are supported. {_WORKS}"
            )
    if present and lora_config is not None:
        raise ValueError("lora_config is given, but the model already has PEFT layers: drop one of the two.")
    if has_deferred(model):
        for peft_config in [*peft_configs(model).values(), *([lora_config] if lora_config is not None else [])]:
            check_base(peft_config, model)
    if present or lora_config is not None or not config.require_adapters:
        return None
    lack = ValueError(f"the model ({type(model).__name__}) has no PEFT layers and no lora_config is given. {_REMEDY}")
    if trains:
        raise lack
    return lack


def _outer_peft_models(model: nn.Module) -> list[str]:
    """Return the names of the PeftModels in a module that are in no other one."""
    names = {
        name: f"{name}." if name else "" for name, module in model.named_modules() if isinstance(module, PeftModel)
    }
    return [n for n in names if not any(n.startswith(prefix) for other, prefix in names.items() if other != n)]


def _check_layers(model: nn.Module) -> None:
    """Raise a ValueError for adapters that PEFT keeps in memory of base weights or other adapters, or in a copy."""
    for name, module in model.named_modules():
        if isinstance(module, MultiheadAttention):
            raise ValueError(
                f"{name} adapts nn.MultiheadAttention, which PEFT merges into the base weights in each forward: not "
                f"supported on a mesh. Leave it out of target_modules. {_WORKS}"
            )
        inside = module.named_modules() if isinstance(module, ModulesToSaveWrapper) else ()
        for inner, child in inside:
            if isinstance(child, ModulesToSaveWrapper) and child is not module:
                raise ValueError(
                    f"modules_to_save matches {name} and {inner.rpartition('.')[2]} in it: PEFT makes copies inside of "
                    "a copy, and nothing calls some of them. PEFT compares the ends of names: 'word_embeddings' ends "
                    "in 'embeddings'. Write more of the name (bert.embeddings), or leave the inner one out."
                )
    for name, peft_config in peft_configs(model).items():
        if tied := tied_targets(peft_config):
            raise ValueError(
                f"adapter {name!r} has ensure_weight_tying=True, with which PEFT trains the LoRA of tied weights "
                f"({', '.join(sorted(tied))}) in the memory of the embedding's LoRA, as parameters of their own. On a "
                "mesh that memory is not shared, and they would train apart. Use ensure_weight_tying=False, or "
                "modules_to_save or trainable_token_indices for the embedding, which stay tied."
            )


def _check_targets(model: nn.Module, config: LoraConfig) -> None:
    """Raise a ValueError for target modules that the model lacks: PEFT ignores them if another target matches."""
    names = [name for name, _ in model.named_modules()]
    targets = config.target_modules
    lacking: list[str] = []
    if isinstance(targets, str):
        if targets != "all-linear" and not any(re.fullmatch(targets, name) for name in names):
            lacking = [targets]
    elif targets is not None:
        lacking = sorted(target for target in targets if not any(f".{n}".endswith(f".{target}") for n in names))
    if lacking:
        last = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if is_linear(module)})
        raise ValueError(
            f"lora_config targets {', '.join(map(repr, lacking))}, which no module of {type(model).__name__} is called"
            f"{'' if isinstance(targets, str) else ' or ends with'}: correct target_modules, or leave that out. The "
            f"linear layers of the model are {', '.join(last) or 'none'}."
        )


def inject_adapter(model: nn.Module, lora_config: LoraConfig, seed: int, autocast_adapter_dtype: bool = True) -> None:
    """Inject the adapter "default" into `model`, in place, before it is sharded.

    Its values and dtypes are those of `torch.manual_seed(seed)` followed by `peft.get_peft_model(model, lora_config)`
    in one process. torch's random state afterwards is as before.
    """
    with _seeded(seed):
        # PEFT adapts `model` in place. The wrapper around it that PEFT returns is not needed.
        get_peft_model(model, lora_config, autocast_adapter_dtype=autocast_adapter_dtype)
    _check_layers(model)


class LateAdapter:
    """Inject an adapter's shapes before a model on meta is sharded, and draw its values after that.

    So no rank ever holds more than one layer's adapter in full. The values are those of `inject_adapter`: PEFT draws
    them in a copy of the model that stays on meta.
    """

    def __init__(self, model: nn.Module, lora_config: LoraConfig, autocast_adapter_dtype: bool) -> None:
        self._twin = copy.deepcopy(model)
        self._config = lora_config
        self._layers: list[nn.Module] = []
        with _seeded(0), observe_layers(self._layers.append):  # observed layers end on meta; these values are lost
            get_peft_model(model, lora_config, autocast_adapter_dtype=autocast_adapter_dtype)
        _check_layers(model)

    def draw(self, model: nn.Module, seed: int, device: str) -> None:
        """Draw the adapter's values layer by layer, and put this rank's part of them into the model. Call it once."""
        there = set(model.modules())
        for layer in self._layers:
            if layer in there:
                allocate_adapters(layer, device)
        remaining = iter(self._layers)

        def keep(drawn: nn.Module) -> None:
            layer = next(remaining)
            if layer not in there:
                return
            for name, values in drawn.named_parameters():
                if not values.is_meta:
                    mine = layer.get_parameter(name).detach()
                    region = local_region(mine) if isinstance(mine, DTensor) else ...
                    with torch.no_grad():
                        local(mine).copy_(values[region])

        draw_adapter(self._twin, self._config, seed, keep)
        del self._twin


def draw_adapter(
    twin: nn.Module, config: LoraConfig, seed: int, observer: Callable[[Any], None], name: str = "default"
) -> nn.Module:
    """Let PEFT adapt a model on meta; give `observer` each layer while its adapter is whole and on the CPU."""
    with _seeded(seed), observe_layers(observer):
        return get_peft_model(twin, copy.deepcopy(config), adapter_name=name)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Start torch's random state from `seed` within the context, and restore the former state afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def adapt_dropout(model: nn.Module, seed: int, count: ForwardCount, dp_rank: int) -> None:
    """Replace the dropout of every LoRA layer by one whose mask does not depend on the mesh."""
    for module, name in clean_names(model).items():
        if not isinstance(module, LoraLayer):
            continue
        for adapter, dropout in list(module.lora_dropout.items()):
            if type(dropout) is nn.Dropout and dropout.p > 0:
                key = name if adapter == "default" else f"{name}:{adapter}"
                invariant = TopologyInvariantDropout(dropout.p, key, seed, count, dp_rank)
                module.lora_dropout[adapter] = invariant.train(dropout.training)


def add_adapter(setup: Setup) -> None:
    """Inject `lora_config`, if it is given: with its values, or on meta without them, to be drawn in shards later."""
    # Values that are computed from base weights need these as PEFT knows them, before they are sharded.
    if setup.lora_config is not None and has_deferred(setup.model) and from_base(setup.lora_config) is None:
        setup.late = LateAdapter(setup.model, setup.lora_config, setup.autocast_adapter_dtype)
    elif setup.lora_config is not None:
        inject_adapter(setup.model, setup.lora_config, setup.config.seed, setup.autocast_adapter_dtype)
    setup.adapters = frozenset(adapter_parameters(setup.model))


def share_random_numbers(setup: Setup) -> None:
    """Let the ranks of a batch draw the same numbers outside of adapters, and drop in these what one process would."""
    share_random_state(setup.mesh)
    adapt_dropout(setup.model, setup.config.seed, setup.count, dp_rank(setup.mesh))
