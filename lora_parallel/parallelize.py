"""Run the steps that turn a model into a sharded one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from peft import LoraConfig
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lora_parallel.adapters.base_fingerprint import base_fingerprints
from lora_parallel.adapters.injection import LateAdapter, adapt_dropout, check_adapters, has_adapters, inject_adapter
from lora_parallel.adapters.peft_private import keep_factored, refuse_unload
from lora_parallel.config import ParallelConfig
from lora_parallel.cp.attention import CPContext
from lora_parallel.cp.regions import run_on_token_chunks
from lora_parallel.distributed.dtensors import guard_dtensor_operators
from lora_parallel.distributed.gradients import PartialGradients, clip_over_stages, refuse_early_hooks
from lora_parallel.distributed.meetings import collective_call
from lora_parallel.distributed.mesh import (
    axis_rank,
    axis_size,
    dp_rank,
    mesh_sizes,
    possible_axes,
    share_random_state,
    stage_mesh,
)
from lora_parallel.distributed.rank_checks import agreed
from lora_parallel.distributed.token_chunks import TokenChunks
from lora_parallel.distributed.torch_private import has_compiled_call
from lora_parallel.export.save_pretrained import allow_save_pretrained
from lora_parallel.fsdp.unit_order import install_order_check
from lora_parallel.fsdp.wrapping import (
    check_scalars,
    device_at_rest,
    fsdp_blocks,
    gather_for_calls,
    leave_inference_mode,
    move_to_device,
    shard_for_dp,
    wants_fsdp,
)
from lora_parallel.layers.layer_parameters import clean_names, innermost, shared_parameters
from lora_parallel.lazy.materialize import read_weights
from lora_parallel.lazy.tracking import check_checkpoints, check_fresh, has_deferred, settle, without_values
from lora_parallel.loading.meta_init import adopt_rank_zero, check_same_files, tensors_of
from lora_parallel.loading.quantisers import check_loaded
from lora_parallel.optimizers import let_optimizers_step
from lora_parallel.planning.plan import Plan, check_globs, resolve_plan
from lora_parallel.pp.links import Links
from lora_parallel.pp.loss import OwnLoss
from lora_parallel.pp.pipeline import Pipeline, refuse_outputs
from lora_parallel.pp.schedules import check_held, check_microbatches, split_stages
from lora_parallel.pp.stage_model import Bounds, StageContext, StageLayers, StageModel, check_trained
from lora_parallel.quantised.conversion import bare_states, check_quantised, hold_as_bytes
from lora_parallel.runtime.compiled_blocks import compile_blocks, leave_eager, refuse_whole_compile
from lora_parallel.runtime.description import end_if_checked, is_checked, log_description
from lora_parallel.runtime.guards import check_once_it_trains, verify
from lora_parallel.runtime.optimizer_params import refuse_joined_steps, refuse_stale_steps
from lora_parallel.runtime.refusals import allow_generate, refuse_generate, seal
from lora_parallel.runtime.step_hooks import StepHooks
from lora_parallel.sizes import AXES, mesh_axes
from lora_parallel.state import ForwardCount, ParallelState, state_of
from lora_parallel.tp.apply_style import apply_style
from lora_parallel.tp.context import Tokens, TPContext
from lora_parallel.tp.loss_parallel import head_of, keep_logits_sliced
from lora_parallel.tp.sequence import Entry, run_on_chunks
from lora_parallel.tracing.inputs import viewed_with
from lora_parallel.tracing.prove_stages import StageTrace
from lora_parallel.tracing.prove_token_chunks import find_places


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
        TypeError, ValueError: An argument is wrong; raised on every rank, before the model is changed.
        OSError, ValueError: The model's checkpoint is incomplete, damaged or belongs to another model.
        RuntimeError: A guard found the result wrong (see `lora_parallel.runtime.guards`).
        SetUpIsPossible: `accelerate-lora check` runs the script; no weights were read.
    """
    materialize = materialize and not is_checked()
    with agreed(_SAME_CONFIG) as alike:
        alike.update(_comparable(config))
        _check_arrival(model, mesh, config)
        if mesh.size() > 1 or wants_fsdp(mesh, config):
            refuse_early_hooks(model)
            guard_dtensor_operators()
        lack = check_adapters(model, config, lora_config, trains)
        globs = None if isinstance(config.tp_plan, str) else config.tp_plan
        if globs is not None:
            check_globs(model, globs)
        blocks = fsdp_blocks(model, config)
        deferred = has_deferred(model)
        check_checkpoints(model, materialize)
        check_loaded(model)
        check_quantised(model)
        if config.loss_parallel:
            head_of(model)
    before = {name: ref(parameter) for name, parameter in model.named_parameters()}  # weak: the full copies are to go
    late: LateAdapter | None = None
    tp = mesh["tp"].size()
    with agreed():
        if lora_config is not None and deferred:
            late = LateAdapter(model, lora_config, autocast_adapter_dtype)
        elif lora_config is not None:
            inject_adapter(model, lora_config, config.seed, autocast_adapter_dtype)
        check_quantised(model)
        has_tenants = not config.require_adapters and not has_adapters(model) and config.pp == 1
        bare = _bare_copy(model) if has_tenants else None
        hold_as_bytes(model)
        check_fresh(model)
        if wants_fsdp(mesh, config):
            check_scalars(model)
        keep_factored(model)
        plan = resolve_plan(model, globs, tp, config.sequence_parallel) if tp > 1 else Plan({})
        cp, pp = axis_size(mesh, "cp"), axis_size(mesh, "pp")
        places = find_places(model, clean_names(model), cp, tp, config.cp_method) if cp > 1 else None
        stage_layers, bounds = _find_stages(model, config) if pp > 1 else (None, [])
    adopt_rank_zero(tensors_of(model), mesh)
    check_same_files(model, mesh)
    settle(model)
    entries: list[Entry] = []
    stages: StageModel | None = None
    if stage_layers is not None:
        own_loss = OwnLoss(model)
        stage = axis_rank(mesh, "pp")
        of_stage = StageContext(entries)
        stages = StageModel(model, stage_layers, bounds, pp, stage, of_stage, config.param_dtype, mesh.device_type)
        del stage_layers
        plan = plan.within(model)
        places = places.within(model) if places is not None else None
        there = set(model.modules())
        blocks = [block for block in blocks if block in there]
    ties = list(shared_parameters(model).values())
    for parameter in model.parameters():
        if not parameter.numel():  # nothing of it trains, and FSDP2 reduces no gradient without elements
            parameter.requires_grad_(False)
        if not parameter.is_contiguous():  # some of PEFT's are views; FSDP2 takes none
            parameter.data = parameter.data.contiguous()
    share_random_state(mesh)

    count = ForwardCount()
    adapt_dropout(model, config.seed, count, dp_rank(mesh))
    gradients = PartialGradients(mesh.get_group("tp") if tp > 1 else None, mesh.device_type)
    context, partials = _shard_for_tp(model, plan, mesh, gradients, count) if tp > 1 else (None, [])
    chunk = None
    if places is not None:
        chunks = TokenChunks(cp, axis_rank(mesh, "cp"), mesh.get_group("cp"), config.cp_method == "all_gather")
        chunk = CPContext(chunks, Tokens(count), config.cp_method)
    if config.compile_arguments is not None:
        compile_blocks(model, blocks, mesh.device_type, context, chunk, config.compile_arguments)
    if context is not None:
        for sequence in plan.sequences:
            entries += run_on_chunks(sequence, context.chunks, context.tokens, count)
    if config.loss_parallel and (stages is None or stages.is_last):
        keep_logits_sliced(head_of(model))
    if places is not None and chunk is not None:
        entries.insert(0, run_on_token_chunks(model, places, chunk, count))
    if config.activation_checkpointing:
        _checkpoint_activations(model, blocks)
    order = None
    if wants_fsdp(mesh, config):
        tied = shard_for_dp(model, blocks, mesh, config)
        if config.compile_arguments is not None:
            leave_eager(blocks, tied)
        order = install_order_check(model, stage_mesh(mesh))
        gather_for_calls(model, tied)
    with agreed():
        if late is not None:
            late.draw(model, config.seed, device_at_rest(mesh, config))
        if materialize:
            read_weights(model, device_at_rest(mesh, config))
    if materialize:
        move_to_device(model, mesh, config)  # what was in memory already
    if stages is None:
        allow_generate(model, innermost(model), mesh)
    else:
        refuse_generate(model, innermost(model))
    allow_save_pretrained(model)
    # As sharded by now; those of adapters that are not active too.
    gradients.manage(dict.fromkeys(p for owner, key in partials if (p := owner._parameters[key]) is not None))

    fresh = ("default",) if lora_config is not None and lora_config.init_lora_weights in (True, "gaussian") else ()
    styles = {name: style.name for name, style in plan.styles.values()}
    state = ParallelState(mesh, config, styles, gradients, count, fresh, materialize, bare)
    checks = [each.check for each in plan.first_batch_checks]
    hooks = StepHooks(model, mesh, count, gradients, context, order, checks, state.recover, stages is not None)
    leave_inference_mode(model)
    if stages is not None:
        state.stage = stages.tensors
        clip_over_stages(model, mesh["pp"])
        refuse_joined_steps(model)
        links = Links(mesh, config.timeout_seconds, has_ring=len(stages.stages) > 1)
        state.pipeline = Pipeline(
            model, innermost(model), stages, mesh, config, gradients, count, links, own_loss, hooks, order
        )
    verify(model, state, ties, trains)
    if not trains:
        check_once_it_trains(model, state, lack)
    state.trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
    if materialize:
        state.fingerprints = base_fingerprints(model, mesh, stage=state.stage)
    refuse_stale_steps(before, model)
    let_optimizers_step()
    state.attach(model)
    seal(model, mesh.size())
    if mesh.size() > 1:
        refuse_whole_compile(model)
    end_if_checked(model)
    log_description(model)
    return model


def _find_stages(model: nn.Module, config: ParallelConfig) -> tuple[StageLayers, Bounds]:
    """Return the layers of the model's pipeline stages, and the blocks of each, proven by running the model.

    Raises:
        ValueError: The model cannot be divided into stages, or not into these.
    """
    inner = innermost(model)
    refuse_outputs(inner, {})
    check_held(config.pp, config.pp_schedule, has_adapters(model))
    names = clean_names(model)
    trace = StageTrace(model, names, config.pp)
    check_microbatches(config.pp, config.pp_stages_per_rank, config.pp_microbatches)
    stages = config.pp * config.pp_stages_per_rank
    bounds = split_stages(trace.layers, names, stages, config.pp_split, getattr(inner, "config", None))
    trace.prove(bounds)
    check_trained(model, trace.layers, bounds, config.pp)
    return trace.layers, bounds


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


def _shard_for_tp(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, gradients: PartialGradients, count: ForwardCount
) -> tuple[TPContext, list[tuple[nn.Module, str]]]:
    """Apply each layer's style; return the layers' context, and the parameters whose gradients are partial over tp."""
    context = TPContext(mesh, gradients, model, count)
    partials: list[tuple[nn.Module, str]] = []
    for module, (name, style) in plan.styles.items():
        partials += apply_style(
            name, module, style, context, plan.partitions.get(module), plan.cuts.get(module), plan.sharings.get(module)
        )
    context.forget_originals()
    refuse_unload(model)
    for module, values in plan.attributes.items():
        for key, value in values.items():
            setattr(module, key, viewed_with(getattr(module, key), value))
    return context, partials


def _checkpoint_activations(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Enable activation checkpointing inside of each block's forward.

    In this way no wrapper's prefix gets into parameter names.
    """
    bare: Any = innermost(model)
    if hasattr(bare, "gradient_checkpointing_enable"):
        bare.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for block in blocks:
        block.forward = partial(_checkpointed, block, block.forward)


def _checkpointed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _bare_copy(model: nn.Module) -> nn.Module | Exception:
    """Return a copy of a base model without values, or the error that copying raised.

    Adapters of tenants are made on the copy later. The error is not raised here, because tenants may never be added.
    """
    try:
        return without_values(model, bare_states(model))
    except Exception as error:  # whatever a module makes of being copied
        return error
