"""Collect the names of Lightning that the strategies need, from either of its namespaces.

`lightning` and `pytorch_lightning` (with `lightning_fabric`) are copies of one code base, with separate classes.
Private names of Lightning are imported here; `tests/lightning_lora/test_namespace.py` checks that each does what is
assumed here. Four other files use private names: `loading`, `trainer_strategy`, `callbacks` and `data`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn


def installed_trainers() -> list[str]:
    """Return the packages that have a Trainer, of those that are installed."""
    return [name for name in ("lightning.pytorch", "pytorch_lightning") if find_spec(name.split(".")[0]) is not None]


@dataclass(frozen=True)
class Namespace:
    """Hold the names of Lightning that Trainer's and Fabric's strategies both need."""

    Precision: Any
    HalfPrecision: Any
    MixedPrecision: Any
    DoublePrecision: Any
    SubprocessScriptLauncher: Any
    rank_zero_only: tuple[Any, ...]
    rank_zero_info: Any
    init_dist_connection: Any
    default_backend: Any
    reset_seed: Any
    worker_init_function: Any
    update_properties: Any


@dataclass(frozen=True)
class TrainerNamespace(Namespace):
    """Hold the names of Lightning that Trainer's strategy needs."""

    TorchCheckpointIO: Any
    LightningOptimizer: Any
    fitting: Any
    """Member `FITTING` of `TrainerFn`."""
    interrupted: Any
    """Member `INTERRUPTED` of `TrainerStatus`."""
    optimizers_to_device: Any
    Callback: Any
    OnExceptionCheckpoint: Any
    DummyLogger: Any
    SLURMEnvironment: Any


def fabric_namespace(fabric: str) -> Namespace:
    """Return the names in a Fabric package: "lightning.fabric" or "lightning_fabric"."""
    return Namespace(**_shared(fabric, fabric))


def trainer_namespace(pytorch: str, fabric: str) -> TrainerNamespace:
    """Return the names in a Trainer package and its Fabric package, such as "lightning.pytorch", "lightning.fabric"."""
    states, callbacks = (import_module(f"{pytorch}.{name}") for name in ("trainer.states", "callbacks"))
    return TrainerNamespace(
        **_shared(pytorch, fabric),
        TorchCheckpointIO=import_module(f"{fabric}.plugins.io.torch_io").TorchCheckpointIO,
        LightningOptimizer=import_module(f"{pytorch}.core.optimizer").LightningOptimizer,
        fitting=states.TrainerFn.FITTING,
        interrupted=states.TrainerStatus.INTERRUPTED,
        Callback=callbacks.Callback,
        OnExceptionCheckpoint=callbacks.OnExceptionCheckpoint,
        DummyLogger=import_module(f"{pytorch}.loggers.logger").DummyLogger,
        SLURMEnvironment=import_module(f"{fabric}.plugins.environments").SLURMEnvironment,
        optimizers_to_device=import_module(f"{fabric}.utilities.optimizer")._optimizers_to_device,
    )


def _shared(owner: str, fabric: str) -> dict[str, Any]:
    """Return the fields of `Namespace`; `owner` has the precision plugins and the launcher of Trainer or of Fabric."""
    plugins = import_module(f"{owner}.plugins.precision")
    launcher = import_module(f"{owner}.strategies.launchers.subprocess_script")
    distributed = import_module(f"{fabric}.utilities.distributed")
    seed = import_module(f"{fabric}.utilities.seed")
    return {
        "Precision": plugins.Precision,
        "HalfPrecision": plugins.HalfPrecision,
        "MixedPrecision": plugins.MixedPrecision,
        "DoublePrecision": plugins.DoublePrecision,
        "SubprocessScriptLauncher": launcher._SubprocessScriptLauncher,
        "rank_zero_only": tuple(
            import_module(f"{package}.utilities.rank_zero").rank_zero_only for package in dict.fromkeys((owner, fabric))
        ),
        "rank_zero_info": import_module(f"{owner}.utilities.rank_zero").rank_zero_info,
        "init_dist_connection": distributed._init_dist_connection,
        "default_backend": distributed._get_default_process_group_backend_for_device,
        "reset_seed": seed.reset_seed,
        "worker_init_function": seed.pl_worker_init_function,
        "update_properties": import_module(f"{fabric}.utilities.device_dtype_mixin")._update_properties,
    }


def is_lightning_module(module: nn.Module) -> bool:
    """Return True if `module` is a LightningModule, by Fabric's own test: its step methods are called, no forward."""
    return hasattr(module, "_fabric")
