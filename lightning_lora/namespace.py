"""Collect the names of Lightning that the strategies need, from either of its namespaces, and wrap its functions.

`lightning` and `pytorch_lightning` (with `lightning_fabric`) are copies of one code base, with separate classes.
Private names of Lightning are looked up here; `tests/lightning_lora/test_namespace.py` checks that each does what is
assumed here. Four other files use private names: `loading`, `trainer_strategy`, `callbacks` and `data`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

from torch import nn

# What both strategies need. {owner} has the precision plugins and the launcher: the package of Trainer or of Fabric.
_SHARED = {
    "Precision": "{owner}.plugins.precision:Precision",
    "HalfPrecision": "{owner}.plugins.precision:HalfPrecision",
    "MixedPrecision": "{owner}.plugins.precision:MixedPrecision",
    "DoublePrecision": "{owner}.plugins.precision:DoublePrecision",
    "SubprocessScriptLauncher": "{owner}.strategies.launchers.subprocess_script:_SubprocessScriptLauncher",
    "rank_zero_info": "{owner}.utilities.rank_zero:rank_zero_info",
    "init_dist_connection": "{fabric}.utilities.distributed:_init_dist_connection",
    "default_backend": "{fabric}.utilities.distributed:_get_default_process_group_backend_for_device",
    "reset_seed": "{fabric}.utilities.seed:reset_seed",
    "worker_init_function": "{fabric}.utilities.seed:pl_worker_init_function",
    "update_properties": "{fabric}.utilities.device_dtype_mixin:_update_properties",
}
_TRAINER = {
    "TorchCheckpointIO": "{fabric}.plugins.io.torch_io:TorchCheckpointIO",
    "LightningOptimizer": "{owner}.core.optimizer:LightningOptimizer",
    "fitting": "{owner}.trainer.states:TrainerFn.FITTING",
    "interrupted": "{owner}.trainer.states:TrainerStatus.INTERRUPTED",
    "Callback": "{owner}.callbacks:Callback",
    "OnExceptionCheckpoint": "{owner}.callbacks:OnExceptionCheckpoint",
    "DummyLogger": "{owner}.loggers.logger:DummyLogger",
    "SLURMEnvironment": "{fabric}.plugins.environments:SLURMEnvironment",
    "optimizers_to_device": "{fabric}.utilities.optimizer:_optimizers_to_device",
}


def installed_trainers() -> list[str]:
    """Return the packages that have a Trainer, of those that are installed."""
    return [name for name in ("lightning.pytorch", "pytorch_lightning") if find_spec(name.split(".")[0]) is not None]


def fabric_namespace(fabric: str) -> SimpleNamespace:
    """Return the names in a Fabric package: "lightning.fabric" or "lightning_fabric"."""
    return _namespace(_SHARED, fabric, fabric)


def trainer_namespace(pytorch: str, fabric: str) -> SimpleNamespace:
    """Return the names in a Trainer package and its Fabric package, such as "lightning.pytorch", "lightning.fabric"."""
    return _namespace(_SHARED | _TRAINER, pytorch, fabric)


def _namespace(paths: dict[str, str], owner: str, fabric: str) -> SimpleNamespace:
    """Return an object with the Lightning objects at these paths as attributes."""
    return SimpleNamespace(
        **{name: resolve_name(path.format(owner=owner, fabric=fabric)) for name, path in paths.items()},
        rank_zero_only=tuple(
            resolve_name(f"{package}.utilities.rank_zero:rank_zero_only") for package in dict.fromkeys((owner, fabric))
        ),
    )


def wrap(module: Any, name: str, instead: Callable[..., Any]) -> None:
    """Replace a function of a module, once, by `instead`, which gets that function before its arguments."""
    original = getattr(module, name)

    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return instead(original, *args, **kwargs)

    if not hasattr(original, "calls_instead"):  # `wraps` of others copies the attribute
        wrapper.calls_instead = instead  # type: ignore[attr-defined]
        setattr(module, name, wrapper)


def is_lightning_module(module: nn.Module) -> bool:
    """Return True if `module` is a LightningModule, by Fabric's own test: its step methods are called, no forward."""
    return hasattr(module, "_fabric")
