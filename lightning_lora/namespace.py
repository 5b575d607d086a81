"""What the strategy needs of Lightning, from either of its namespaces.

`lightning` and `pytorch_lightning` are copies of one code base whose classes do not know each other. Names that are
private there stand here and nowhere else; `tests/lightning_lora/test_namespace.py` holds each to its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

__all__ = ["Namespace", "namespace"]


@dataclass(frozen=True)
class Namespace:
    """One of Lightning's namespaces."""

    Precision: Any
    HalfPrecision: Any
    MixedPrecision: Any
    DoublePrecision: Any
    SubprocessScriptLauncher: Any
    TorchCheckpointIO: Any
    LightningOptimizer: Any
    fitting: Any
    """`TrainerFn.FITTING`."""
    interrupted: Any
    """`TrainerStatus.INTERRUPTED`."""
    rank_zero_only: tuple[Any, ...]
    init_dist_connection: Any
    default_backend: Any
    reset_seed: Any
    optimizers_to_device: Any
    worker_init_function: Any


def namespace(pytorch: str, fabric: str) -> Namespace:
    """The namespace of these two packages, for example "lightning.pytorch" and "lightning.fabric"."""
    plugins = import_module(f"{pytorch}.plugins.precision")
    states = import_module(f"{pytorch}.trainer.states")
    distributed = import_module(f"{fabric}.utilities.distributed")
    seed = import_module(f"{fabric}.utilities.seed")
    return Namespace(
        Precision=plugins.Precision,
        HalfPrecision=plugins.HalfPrecision,
        MixedPrecision=plugins.MixedPrecision,
        DoublePrecision=plugins.DoublePrecision,
        SubprocessScriptLauncher=import_module(
            f"{pytorch}.strategies.launchers.subprocess_script"
        )._SubprocessScriptLauncher,
        TorchCheckpointIO=import_module(f"{fabric}.plugins.io.torch_io").TorchCheckpointIO,
        LightningOptimizer=import_module(f"{pytorch}.core.optimizer").LightningOptimizer,
        fitting=states.TrainerFn.FITTING,
        interrupted=states.TrainerStatus.INTERRUPTED,
        rank_zero_only=(
            import_module(f"{pytorch}.utilities.rank_zero").rank_zero_only,
            import_module(f"{fabric}.utilities.rank_zero").rank_zero_only,
        ),
        init_dist_connection=distributed._init_dist_connection,
        default_backend=distributed._get_default_process_group_backend_for_device,
        reset_seed=seed.reset_seed,
        optimizers_to_device=import_module(f"{fabric}.utilities.optimizer")._optimizers_to_device,
        worker_init_function=seed.pl_worker_init_function,
    )
