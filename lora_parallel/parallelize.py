"""Run the passes that turn a model into a sharded one, in their order.

Each pass stands with the mechanism that it starts, and decides for itself whether it has work. The passes share a
`Setup`. `tests/mutants/order.py` exchanges those of which nobody would see that they run in another order.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from peft import LoraConfig
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lora_parallel.adapters.fused_lora import fuse_lora
from lora_parallel.adapters.injection import add_adapter, check_adapters, share_random_numbers
from lora_parallel.config import ParallelConfig
from lora_parallel.cp.regions import split_tokens_over_cp
from lora_parallel.distributed.dtensors import guard_dtensor_operators
from lora_parallel.distributed.gradients import refuse_early_hooks
from lora_parallel.distributed.meetings import collective_call
from lora_parallel.distributed.mesh import mesh_sizes, possible_axes
from lora_parallel.distributed.rank_checks import agreed
from lora_parallel.distributed.torch_private import has_compiled_call
from lora_parallel.export.save_pretrained import allow_save_pretrained
from lora_parallel.fsdp.wrapping import fit_parameters, fsdp_blocks, shard_over_dp, wants_fsdp
from lora_parallel.lazy.tracking import check_checkpoints
from lora_parallel.loading.meta_init import fill_shards, start_alike
from lora_parallel.loading.quantisers import check_loaded
from lora_parallel.planning.plan import check_globs, plan_layers, set_local_sizes
from lora_parallel.pp.pipeline import keep_own_stages, run_stages
from lora_parallel.quantised.conversion import check_quantised, hold_quantised
from lora_parallel.runtime.compiled_blocks import checkpoint_activations, compile_each_block, leave_nested_eager
from lora_parallel.runtime.description import end_if_checked, is_checked, log_description
from lora_parallel.runtime.guards import verify_result
from lora_parallel.runtime.optimizer_params import guard_optimizers
from lora_parallel.runtime.refusals import guard_calls
from lora_parallel.runtime.step import hook_step
from lora_parallel.sizes import AXES, mesh_axes
from lora_parallel.state import Setup, state_of
from lora_parallel.tp.apply_style import shard_over_tp
from lora_parallel.tp.loss_parallel import head_of, plan_logits, split_logits
from lora_parallel.tp.sequence import split_tokens_over_tp
from lora_parallel.tracing.prove_stages import find_stages
from lora_parallel.tracing.prove_token_chunks import find_places

# What is decided on the model in full shapes. If one of these fails on a rank, all ranks raise its error together.
PREPARATIONS = (
    add_adapter,
    hold_quantised,
    plan_layers,
    find_places,
    find_stages,
)

PASSES = (
    start_alike,
    keep_own_stages,
    fit_parameters,
    share_random_numbers,
    fuse_lora,
    plan_logits,
    shard_over_tp,
    set_local_sizes,
    # Each of these changes forwards, around what those before it have made of them.
    compile_each_block,
    split_tokens_over_tp,
    split_logits,
    split_tokens_over_cp,
    checkpoint_activations,
    # From here on parameters are as the optimizer sees them, and then have values.
    shard_over_dp,
    leave_nested_eager,
    fill_shards,
    # What a step, a save and a mistake of the user's do.
    allow_save_pretrained,
    hook_step,
    run_stages,
    verify_result,
    guard_optimizers,
    guard_calls,
)


@collective_call("parallelize")
def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    config: ParallelConfig,
    lora_config: LoraConfig | None = None,
    materialize: bool = True,
    autocast_adapter_dtype: bool = True,
    trains: bool = True,
) -> nn.Module:
    """Shard `model` over `mesh` in place, base layers and their adapters alike. Collective.

    Afterwards a training step is the one-process step: call the model on this data-parallel rank's share of the batch
    (tp peers on the same share), `loss.backward()`, `clip_grad_norm_`, `optimizer.step()` with an optimizer made from
    `model.parameters()` after this call. When a backward pass returns, each adapter parameter's `.grad` is the gradient
    of the mean over data-parallel ranks. Parameter names stay as they are. On a mesh of one rank parameters stay plain
    tensors.

    Args:
        model: A model whose forward is called as a whole: a transformers model, a `PeftModel`, any `nn.Module` with
            PEFT layers. The model may be in memory on every rank: then rank 0's values are used where copies differ,
            and each full tensor is freed once it is sharded. Or the model was built under `meta_init`: then each rank
            reads its shard from the checkpoint that the model remembers, and no weights are sent.
        mesh: The result of `build_mesh`.
        config: The config that `mesh` was built with.
        lora_config: The adapter to inject into a model without PEFT layers; None to inject none.
        materialize: False leaves base weights on meta, to look at `read_plan` and shapes; the adapters have values.
        autocast_adapter_dtype: As in `peft.get_peft_model`: injected adapters of a 16-bit base are float32.
        trains: False for a model that is evaluated: `config.require_adapters` is checked by its first training forward.

    Returns:
        `model` itself.

    Raises:
        TypeError, ValueError: An argument is wrong; raised on every rank, before a weight is changed.
        OSError, ValueError: The model's checkpoint is incomplete, damaged or belongs to another model.
        RuntimeError: A guard found the result wrong (see `lora_parallel.runtime.guards`).
        SetUpIsPossible: `accelerate-lora check` runs the script; no weights were read.
    """
    run_passes(
        Setup(model, mesh, config, lora_config, materialize and not is_checked(), autocast_adapter_dtype, trains)
    )
    return model


def run_passes(setup: Setup) -> None:
    """Do what `parallelize` does with its arguments. A plan or places that `setup` has already are not made anew."""
    _check_arguments(setup)
    with agreed():
        for prepare in PREPARATIONS:
            prepare(setup)
    for change in PASSES:
        change(setup)
    setup.state.attach(setup.model)
    end_if_checked(setup.model)
    log_description(setup.model)


def _check_arguments(setup: Setup) -> None:
    """Refuse what cannot be parallelized, on every rank, and note what the model is like before any change."""
    model, mesh, config = setup.model, setup.mesh, setup.config
    with agreed(_SAME_CONFIG) as alike:
        alike.update(_comparable(config))
        _check_arrival(model, mesh, config)
        if mesh.size() > 1 or wants_fsdp(mesh, config):
            refuse_early_hooks(model)
            guard_dtensor_operators()
        setup.lack = check_adapters(model, config, setup.lora_config, setup.trains)
        if not isinstance(config.tp_plan, str):
            check_globs(model, config.tp_plan)
        setup.blocks = fsdp_blocks(model, config)
        check_checkpoints(model, setup.materialize)
        check_loaded(model)
        check_quantised(model)
        if config.loss_parallel:
            head_of(model)
    setup.before = {name: ref(parameter) for name, parameter in model.named_parameters()}


def _comparable(config: ParallelConfig) -> dict[str, Any]:
    """Return {"config.<field>": value}, with names in place of functions (`torch.compile` backends)."""
    arguments = {
        name: f"{value.__module__}.{getattr(value, '__qualname__', type(value).__name__)}" if callable(value) else value
        for name, value in (config.compile_arguments or {}).items()
    }
    fields = {**vars(config), "compile": arguments or config.compile}
    return {f"config.{name}": value for name, value in fields.items()}


# With different seeds, tp peers would drop different elements of the same activation.
_SAME_CONFIG = "give every rank the same config, and the same seed too: batches are told apart by rank, not by seed."


_WRAPPER_PARTS = {
    "_checkpoint_wrapped_module": "torch's checkpoint_wrapper: use activation_checkpointing=True or the model's own "
    "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})",
    "_orig_mod": "torch.compile: give the module itself, and ParallelConfig(compile=True)",
    "_fsdp_wrapped_module": "FSDP1: pass the bare model",
}


def _check_arrival(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give an nn.Module.")
    if not isinstance(config, ParallelConfig):
        raise TypeError(f"config is a {type(config).__name__}: give a ParallelConfig.")
    names = mesh.mesh_dim_names or () if isinstance(mesh, DeviceMesh) else ()
    if names not in possible_axes():
        raise TypeError(f"mesh is {mesh!r}: give what build_mesh returns, with axes {', '.join(AXES)}.")
    asked = mesh_axes(mesh_sizes(config, mesh.size()))
    if dict(zip(names, mesh.shape, strict=True)) != asked:
        raise ValueError(
            f"the mesh has sizes {tuple(mesh.shape)} of {', '.join(names)}, the config asks for "
            f"{tuple(asked.values())} of {', '.join(asked)}: give build_mesh and parallelize the same config."
        )
    if state_of(model) is not None:
        raise ValueError(f"this {type(model).__name__} is parallelized already.")
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError("the model is wrapped in DistributedDataParallel: pass the bare model (model.module).")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "fully_shard was already applied to the model, or parallelize to it or to one that holds it: pass the bare "
            "model, once."
        )
    for name, module in model.named_modules():
        if has_compiled_call(module):
            raise ValueError(
                f"{name or type(module).__name__} was compiled by .compile(), which would trace how its weights are "
                "gathered: leave that out, and give ParallelConfig(compile=True)."
            )
    for name, parameter in model.named_parameters():
        for part, remedy in _WRAPPER_PARTS.items():
            if part in name.split("."):
                raise ValueError(f"{name} is inside a wrapper of {remedy}.")
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is a DTensor already. If the model is the inside of one that is parallelized "
                "(get_base_model()), use that one; else load it without tp_plan=, device_mesh= or DistributedConfig: "
                "from_pretrained under meta_init lets each rank read its own slices too."
            )
