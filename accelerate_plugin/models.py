"""Shard the models that an Accelerator is given, and the reference models of TRL's trainers.

A trainer with a reference model of its own wraps it by `trl.models.utils.prepare_fsdp`, which calls `fully_shard` by
itself: it knows no tensor parallelism, and its names of the mesh's axes are Accelerate's. Each module of TRL has
imported that function by name, so it is replaced in the modules of the trainer's classes, as the trainer is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from accelerate_plugin.arguments import adopt_output_dir
from accelerate_plugin.parallelism import LoRAParallelism, parallelism_of
from lora_parallel import parallelize
from lora_parallel.integration import (
    HeldByName,
    agreed,
    check_alike,
    check_not_stale,
    check_optimized,
    describe_optimizer,
    description_to_print,
    has_adapters,
    parallelized,
    unwrap_compiled,
)


def prepare_models(
    accelerator: Accelerator,
    models: list[nn.Module],
    optimizers: list[AcceleratedOptimizer],
    evaluation_mode: bool = False,
) -> None:
    """Shard the models that are not sharded yet, and give the optimizers their sharded parameters. Collective.

    Args:
        accelerator: An Accelerator that trains with `lora_parallel`; it keeps the models.
        models: The models to prepare, sharded or not.
        optimizers: The optimizers to prepare, as Accelerate has wrapped them.
        evaluation_mode: Accept models without adapters, and add none.

    Raises:
        RuntimeError: The base of a model would train, where adapters are required.
        ValueError: A model that an optimizer trains has no adapters, where they are required; an optimizer has stepped
            already, holds parameters that are in none of the models, or holds those that a model had before it was
            sharded; or the optimizers differ between ranks.
    """
    parallelism = parallelism_of(accelerator)
    assert parallelism is not None
    new = nn.ModuleList(model for model in dict.fromkeys(models) if not parallelized(model))
    sharded = {p for model in (*accelerator._models, *models) if parallelized(model) for p in model.parameters()}
    fresh = [innermost(each) for each in optimizers]
    with agreed():
        if len(new):
            remedy = (
                "prepare the model before the optimizer steps, or make the optimizer from the prepared model's "
                "parameters."
            )
            held = [HeldByName(each, new, sharded, remedy) for each in fresh]
        else:
            check_not_stale(
                fresh, sharded, "Prepare both at once: model, optimizer = accelerator.prepare(model, optimizer)."
            )
            held = []
    injected = False
    for model in new:
        injected |= _shard(model, parallelism, evaluation_mode, bool(optimizers))
    with agreed():
        for each in held:
            if injected:
                each.restore_adapted(new)
            else:
                each.restore(new)
    check_alike(optimizers=[describe_optimizer(each, nn.ModuleList(models)) for each in fresh])
    check_optimized([*accelerator._models, *models], fresh)
    accelerator._models.extend(model for model in models if model not in accelerator._models)


def uncompiled(model: nn.Module, parallelism: LoRAParallelism) -> nn.Module:
    """Return a model without `torch.compile` around it: its blocks are compiled, as they are sharded."""
    model, arguments = unwrap_compiled(model)
    if arguments is not None and parallelism.config.compile_arguments is None:
        parallelism.config = replace(parallelism.config, compile=arguments)
    return model


def _shard(model: nn.Module, parallelism: LoRAParallelism, evaluation_mode: bool, trains: bool) -> bool:
    """Shard a model, and inject the adapter of the plugin's `lora_config` if it has no adapter and is not frozen.

    A model without adapters counts as frozen (a teacher or a reference, for instance) if none of its parameters trains,
    or if it is prepared for evaluation. It then gets no adapter and needs none, and none of its parameters trains. A
    model without an optimizer (`trains` is False) needs adapters once it trains.

    Returns:
        True if an adapter was injected.
    """
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
        parallelism.mesh,
        config if not frozen else replace(config, require_adapters=False),
        lora_config=lora_config,
        autocast_adapter_dtype=plugin.autocast_adapter_dtype,
        trains=trains,
    )
    if (said := description_to_print(model)) is not None:
        print(said, file=sys.stderr, flush=True)
    return lora_config is not None


def _leave_out_fused_loss(model: nn.Module) -> None:
    """Make TRL's forwards with a fused LM head return no loss, which its trainers do not read.

    They compute their losses from values of tokens. A loss of one micro-batch has no rows, and cannot be joined with
    those of the others.
    """
    for each in model.modules():
        forward = each.__dict__.get("forward")
        if isinstance(each, PreTrainedModel) and forward is not None:
            each.forward = _without_fused_loss(forward)


def _without_fused_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def instead(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if not kwargs.get("fused_lm_head"):
            return output
        return type(output)(**{name: value for name, value in output.items() if name != "loss"})

    return instead


def innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer that is inside any number of Accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


_HOME, _NAME = "trl.models.utils", "prepare_fsdp"


def create_accelerator(original: Callable[..., Any], self: Any) -> None:
    """Make the Accelerator of a Trainer, which then prepares the reference model too, if TRL's trainer has one.

    All processes then have the same `output_dir`. Collective.
    """
    original(self)
    if parallelism_of(self.accelerator) is None:
        return
    adopt_output_dir(self.args)
    for kind in type(self).__mro__:
        module = sys.modules[kind.__module__]
        own = vars(module).get(_NAME)
        if callable(own) and own.__module__ == _HOME and not hasattr(own, "__wrapped__"):
            setattr(module, _NAME, _by_accelerator(own))


def _by_accelerator(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def prepare_fsdp(model: nn.Module, accelerator: Any) -> Any:
        if parallelism_of(accelerator) is None:
            return own(model, accelerator)
        return accelerator.prepare_model(model, evaluation_mode=True).eval()

    return prepare_fsdp
