"""Register the strategies by name with the installed Lightning namespaces.

The namespaces are disjoint: each accepts only strategies that derive from its own classes. Beside its names the class
for Trainer is registered under its class paths: LightningCLI hands a class path that comes without arguments to Trainer
as a name.
"""

from __future__ import annotations

import importlib.util
from typing import Any

NAMES = {"lora_fsdp2": 1, "lora_fsdp2_tp": 2, **{f"lora_fsdp2_tp{size}": size for size in range(1, 17)}}
"""tensor_parallel_size of each registered name. Lightning looks names up in lower case, so they must be lower-case."""


def register_strategies() -> None:
    """Register all names of `NAMES` and the class paths; names that are registered already are replaced."""
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry
    from lightning_utilities.core import rank_zero

    from lightning_lora import strategy

    # Registry, class, and what may stand before the class's name in a LightningCLI file; Fabric has no such files.
    registries: list[tuple[Any, Any, list[str]]] = [
        (StrategyRegistry, strategy.LoRAParallelStrategy, ["", "lightning_lora.", "lightning_lora.strategy."]),
        (STRATEGY_REGISTRY, strategy.FabricLoRAParallelStrategy, []),
    ]
    if importlib.util.find_spec("pytorch_lightning") is not None:
        log = rank_zero.log  # both namespaces share this variable, and each sets it to its own logger on import
        from lightning_fabric.strategies import STRATEGY_REGISTRY as LEGACY_FABRIC_REGISTRY
        from pytorch_lightning.strategies import StrategyRegistry as LegacyRegistry

        from lightning_lora import legacy

        rank_zero.log = log
        registries += [
            (LegacyRegistry, legacy.LoRAParallelStrategy, ["", "lightning_lora.legacy."]),
            (LEGACY_FABRIC_REGISTRY, legacy.FabricLoRAParallelStrategy, []),
        ]
    for registry, kind, prefixes in registries:
        for name, size in {**NAMES, **{f"{prefix}{kind.__name__}".lower(): 1 for prefix in prefixes}}.items():
            registry.register(
                name,
                kind,
                description=f"LoRA under FSDP2 x tensor parallelism of size {size}",
                override=True,
                tensor_parallel_size=size,
            )
