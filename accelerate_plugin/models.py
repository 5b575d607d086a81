"""Shard the models that an Accelerator is given, and give its optimizers their sharded parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import PreTrainedModel

from accelerate_plugin.parallelism import LoRAParallelism, Original, standing_in
from lora_parallel import parallelize
from lora_parallel.integration import (
    HeldByName,
    agreed,
    check_not_stale,
    check_optimized,
    describe_optimizer,
    description_to_print,
    has_adapters,
    is_checked,
    parallelized,
    replaced,
    unwrap_compiled,
)


def prepare_models(
    accelerator: Accelerator,
    models: list[nn.Module],
    optimizers: list[AcceleratedOptimizer],
    evaluation_mode: bool = False,
) -> None:
    """Shard the models that are not sharded yet, and give the optimizers their sharded parameters. Collective."""
    parallelism = accelerator.state.parallelism_config
    new = nn.ModuleList(model for model in dict.fromkeys(models) if not parallelized(model))
    sharded = {p for model in (*accelerator._models, *models) if parallelized(model) for p in model.parameters()}
    bare = [innermost(optimizer) for optimizer in optimizers]
    with agreed():
        if not any(map(has_adapters, (*accelerator._models, *models))):
            for each in bare:
                held = (parameter for group in each.param_groups for parameter in group["params"])
                check_trains(f"the optimizer ({type(each).__name__})", held)
        remedy = (
            "prepare the model before the optimizer steps, or make the optimizer from the prepared model's parameters."
        )
        by_name = [HeldByName(optimizer, new, sharded, remedy) for optimizer in bare] if len(new) else []
        if not len(new):
            check_not_stale(
                bare, sharded, "Prepare both at once: model, optimizer = accelerator.prepare(model, optimizer)."
            )
    injected = [_shard(model, parallelism, evaluation_mode, bool(optimizers)) for model in new]
    with agreed() as alike:
        for optimizer in by_name:
            optimizer.restore_adapted(new) if any(injected) else optimizer.restore(new)
        alike["optimizers"] = [describe_optimizer(optimizer, nn.ModuleList(models)) for optimizer in bare]
    check_optimized([*accelerator._models, *models], bare)
    accelerator._models.extend(model for model in models if model not in accelerator._models)


def check_trains(holder: str, parameters: Iterable[Tensor]) -> None:
    """Raise a ValueError if no parameter of `holder`, a model or an optimizer, requires a gradient."""
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            f"no parameter of {holder} trains, as after merge_and_unload() or unload(): train the model with its "
            "adapters."
        )


@contextmanager
def refusing_wrappers() -> Iterator[None]:
    """Refuse, within the context, a model with adapters that is wrapped in DDP or FSDP1: it would not be sharded."""
    with ExitStack() as stack:
        for kind in (DistributedDataParallel, FullyShardedDataParallel):
            stack.enter_context(replaced(kind, {"__init__": standing_in(kind.__init__, _refuse_wrapper)}))
        yield


def _refuse_wrapper(original: Original, self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    if has_adapters(module) or is_checked():  # `check` has no other ranks, and both send weights here
        raise ValueError(
            f"the script wraps a model in {type(self).__name__}, and no model was sharded: the mesh is not used. "
            'Lightning does that without Trainer(strategy="lora_fsdp2_tp") or a LoRAParallelStrategy; in a loop of '
            "your own, give the bare model to accelerator.prepare, or to parallelize."
        )
    original(self, module, *args, **kwargs)


def uncompiled(model: nn.Module, parallelism: LoRAParallelism) -> nn.Module:
    """Return a model without `torch.compile` around it: its blocks are compiled, as they are sharded."""
    model, arguments = unwrap_compiled(model)
    if arguments is not None and parallelism.config.compile_arguments is None:
        parallelism.config = replace(parallelism.config, compile=arguments)
    return model


def _shard(model: nn.Module, parallelism: LoRAParallelism, evaluation_mode: bool, trains: bool) -> bool:
    """Shard a model, and return True if it got the adapter of the plugin's `lora_config`."""
    # A model without adapters is frozen (a teacher, perhaps) if none of its parameters trains, or if it is prepared for
    # evaluation: it gets no adapter and needs none. One without an optimizer needs adapters only once it trains.
    plugin, config = parallelism.plugin, parallelism.config
    bare = not has_adapters(model)
    frozen = bare and (evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()))
    if frozen:
        model.requires_grad_(False)
    lora_config = plugin.lora_config if bare and not frozen else None
    if parallelism.pp_size > 1:
        _leave_out_fused_loss(model)
    parallelize(
        model,
        parallelism.device_mesh,
        config if not frozen else replace(config, require_adapters=False),
        lora_config=lora_config,
        autocast_adapter_dtype=plugin.autocast_adapter_dtype,
        trains=trains,
    )
    if (said := description_to_print(model)) is not None:
        print(said, file=sys.stderr, flush=True)
    return lora_config is not None


def _leave_out_fused_loss(model: nn.Module) -> None:
    """Make TRL's forwards with a fused LM head return no loss, which its trainers do not read."""
    # They compute their losses from values of tokens. A loss of one micro-batch has no rows to be joined by.
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and "forward" in module.__dict__:
            module.forward = standing_in(module.forward, _without_fused_loss)


def _without_fused_loss(original: Original, *args: Any, **kwargs: Any) -> Any:
    output = original(*args, **kwargs)
    if kwargs.get("fused_lm_head"):
        return type(output)(**{name: value for name, value in output.items() if name != "loss"})
    return output


def innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer that is inside any number of Accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
