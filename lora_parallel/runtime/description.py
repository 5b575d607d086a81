"""Describe a parallelized model in lines of text, and end a script there for `accelerate-lora check`."""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lora_parallel.adapters.fused_lora import count_fused
from lora_parallel.adapters.inspection import peft_configs
from lora_parallel.distributed.dtensors import class_of, local
from lora_parallel.distributed.mesh import axis_rank, mesh_sizes
from lora_parallel.distributed.rank_checks import is_rank_zero
from lora_parallel.distributed.torch_private import is_simulated
from lora_parallel.layers.layer_parameters import clean_parameter_name, count_kinds, innermost
from lora_parallel.layers.styles import partition_of
from lora_parallel.replaced import replaced
from lora_parallel.sizes import mesh_text, rank_lines
from lora_parallel.state import ParallelState, state_of

log = logging.getLogger(__name__)

_DISTRIBUTIONS = ("lightning-lora", "torch", "peft", "transformers")
_KINDS = 12  # largest number of kinds of layers that are listed
_KIND = {  # of what trains in a layer, by the name of what PEFT adds to it
    "lora_A": "LoRA",
    "lora_embedding_A": "LoRA",
    "modules_to_save": "modules_to_save",
    "token_adapter.trainable_tokens_delta": "trainable_token_indices",
}
_ADAPTED = rf"(?:base_model\.model\.)?(.+)\.({'|'.join(map(re.escape, _KIND))})"
_HEADS = {"classifier", "score", "qa_outputs"}  # PEFT itself adds all of these to modules_to_save, for some tasks


def describe(model: nn.Module) -> str:
    """Describe a parallelized model as this rank holds it.

    Args:
        model: What `parallelize` returned.

    Returns:
        Lines without a line break at the end.

    Raises:
        ValueError: `model` was not parallelized.
    """
    state = state_of(model)
    if state is None:
        raise ValueError(f"this {type(model).__name__} was not parallelized: pass what parallelize returned.")
    return "\n".join(_lines(model, state))


def log_description(model: nn.Module) -> None:
    """Log the description of a model on rank 0 with level INFO, unless the rank is simulated to predict its cost."""
    if log.isEnabledFor(logging.INFO) and _is_first():
        log.info("%s", describe(model))


def description_to_print(model: nn.Module) -> str | None:
    """Return the description of a model to print on the first rank; None elsewhere, and where it has been logged."""
    return None if log.isEnabledFor(logging.INFO) or not _is_first() else describe(model)


def _is_first() -> bool:
    return not is_simulated() and is_rank_zero()


def _lines(model: nn.Module, state: ParallelState) -> Iterator[str]:
    sizes = mesh_sizes(state.config, state.mesh.size())
    yield ", ".join(f"{name} {_version(name)}" for name in _DISTRIBUTIONS)
    yield f"{class_of(innermost(model)).__name__} on {mesh_text(sizes)} ({state.mesh.device_type})"
    yield from (f"  {line}" for line in rank_lines(sizes))
    yield from _memory(model, state)
    yield from _plan(state, sizes["tp"])
    yield from _fused(model)
    yield from _adapters(model, state)
    if state.stage is not None:
        config = state.config
        yield (
            f"pipeline: {config.pp_schedule}, {config.pp * config.pp_stages_per_rank} stages, "
            f"{config.pp_microbatches} micro-batches; this rank is {axis_rank(state.mesh, 'pp')} of {config.pp} on pp"
        )


def _memory(model: nn.Module, state: ParallelState) -> Iterator[str]:
    """Yield a table of the bytes of parameters, here and in the whole model."""
    here, whole = [0.0, 0.0], [0.0, 0.0]  # of frozen parameters, and of those that train
    dtypes: tuple[set[torch.dtype], set[torch.dtype]] = (set(), set())
    for name, parameter in model.named_parameters():
        holder, _, key = name.rpartition(".")
        dtypes[parameter.requires_grad].add(parameter.dtype)
        here[parameter.requires_grad] += _bytes(local(parameter))
        size: float = _bytes(parameter)
        if (partition := partition_of(model.get_submodule(holder), key)) is not None:
            rows = partition[0]
            size *= rows.size / (rows.width * len(rows.ranks))  # tp ranks may store the same rows
        whole[parameter.requires_grad] += size
    rank = dist.get_rank() if dist.is_initialized() else 0
    title = "whole model" if state.stage is None else "its stages"
    yield f"{f'bytes of rank {rank}':<28}{'this rank':>12}{title:>14}"
    for name, trains, factor in (
        ("frozen parameters", False, 1),
        ("trained parameters", True, 1),
        ("gradients of those", True, 1),
        ("states of AdamW", True, 2),
    ):
        yield f"  {name:<26}{_text(here[trains] * factor):>12}{_text(whole[trains] * factor):>14}"
    texts = [" and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in each)) or "none" for each in dtypes]
    computes = f"; FSDP2 computes in {str(state.config.param_dtype).removeprefix('torch.')}"
    yield f"  dtype: frozen {texts[0]}, trained {texts[1]}{computes if state.config.param_dtype is not None else ''}"
    yield "  activations and logits: `accelerate-lora plan MODEL --gpus N --seq TOKENS` predicts them"


def _plan(state: ParallelState, tp: int) -> Iterator[str]:
    if tp == 1:
        return
    kinds = count_kinds(state.styles)
    width, style_width = (max((len(kind[i]) for kind in kinds), default=0) for i in (0, 1))
    yield f"tensor-parallel plan, {len(state.styles)} layers"
    for (glob, style), count in [*kinds.items()][:_KINDS]:
        yield f"  {glob:<{width}}  {style:<{style_width}}  {count}"
    if len(kinds) > _KINDS:
        yield f"  and {len(kinds) - _KINDS} kinds more, which the logger lora_parallel.planning lists with level INFO"


def _fused(model: nn.Module) -> Iterator[str]:
    """Yield how many LoRA layers are computed together with their bases, and why others are not."""
    fused, others = count_fused(model)
    if fused or others:
        reasons = ", ".join(why if len(others) == 1 else f"{count} {why}" for why, count in others.items())
        yield f"LoRA layers: fused {fused}" + (f", PEFT's forward {others.total()}: {reasons}" if others else "")


def _adapters(model: nn.Module, state: ParallelState) -> Iterator[str]:
    """Yield the layers that each adapter is on, by kind and number, and the names of its config that no layer has.

    PEFT says nothing of a name that matches no layer, if another name of the config does.
    """
    names = state.stage.names if state.stage is not None else {name for name, _ in model.named_parameters()}
    for adapter, config in peft_configs(model).items():
        pattern = re.compile(_ADAPTED + re.escape(f".{adapter}") + r"(?=\.|$)")
        matches = [match for name in sorted(names) if (match := pattern.match(name))]
        layers = {clean_parameter_name(match[1]): _KIND[match[2]] for match in matches}
        r = f" (r={config.r})" if hasattr(config, "r") else ""
        for kind in dict.fromkeys(layers.values()):
            lasts = Counter(layer.rpartition(".")[2] for layer, of in layers.items() if of == kind)
            text = ", ".join(f"{last} {count}" for last, count in lasts.items())
            yield f"adapter {adapter!r}{r}, {kind} on {lasts.total()} layer{'s' * (lasts.total() > 1)}: {text}"
        left_out = {*_HEADS, *(getattr(config, "exclude_modules", None) or ())}
        for option in ("target_modules", "modules_to_save", "rank_pattern", "alpha_pattern"):
            wanted = getattr(config, option, None) or ()
            adapted = [layer for layer, kind in layers.items() if kind == option or option != "modules_to_save"]
            for name in sorted(() if isinstance(wanted, str) else set(wanted) - left_out):
                pattern = name if option.endswith("_pattern") else re.escape(name)  # as PEFT matches them
                if not any(re.fullmatch(rf"(.*\.)?({pattern})", layer) for layer in adapted):
                    yield f"  no layer is adapted by {name!r} of {option}: if it should be, correct the name"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _text(size: float) -> str:
    unit, divisor = next((unit for unit in (("GiB", 2**30), ("MiB", 2**20)) if size >= unit[1]), ("KiB", 2**10))
    return f"{size / divisor:.2f} {unit}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a clone that is not installed
        return "(not installed)"


_checked = False


class SetUpIsPossible(SystemExit):
    """End a script whose set-up is checked; no `except Exception` of a script or a trainer stops it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(0)
        self.model = model


def end_after_set_up() -> AbstractContextManager[None]:
    """Within the context, let `parallelize` read no weights, and raise `SetUpIsPossible` in place of returning."""
    return replaced(sys.modules[__name__], {"_checked": True})


def is_checked() -> bool:
    """Return True within `end_after_set_up`: nothing is trained, so no weights are read and nothing is written."""
    return _checked


def end_if_checked(model: nn.Module) -> None:
    """Raise `SetUpIsPossible` within `end_after_set_up`; do nothing outside of it."""
    if _checked:
        raise SetUpIsPossible(model)
