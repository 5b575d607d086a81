"""Refuse operations that a sharded model does not support: each raises an error on every rank, with a remedy.

Torch's own errors for these operations ("cannot pickle 'ProcessGroup'", "got mixed torch.Tensor and DTensor") name
neither the model nor a way out. Some of the operations would even go on without an error, with tensors of another
rank's size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lora_parallel.adapters.peft_private import refuse_adapters
from lora_parallel.distributed.gather import local, reshard
from lora_parallel.layers.row_partition import partition_of

__all__ = ["explained", "seal"]


def seal(model: nn.Module, ranks: int) -> None:
    """Make a sharded model refuse the operations that it does not support.

    These are adapters that PEFT adds later, full tensors in `load_state_dict`, embeddings of another size, and copies
    and pickles of the model's modules.
    Torch's error about a weight that the model's forward reads by hand gets a remedy.

    Args:
        model: The model that `parallelize` has sharded.
        ranks: The number of ranks of the model's mesh. With one rank the parameters are plain tensors, which may be
            copied and loaded.
    """
    refuse_adapters(model)
    if ranks == 1:
        return
    for module in model.modules():
        module.register_load_state_dict_pre_hook(partial(_check_load, model))
        module.__dict__["__deepcopy__"] = _refuse_copy  # copy.deepcopy finds it before FSDP2's, which is on the class
        module.__dict__["__reduce_ex__"] = _refuse_pickle
        if hasattr(module, "resize_token_embeddings"):
            module.__dict__["resize_token_embeddings"] = _refuse_resize
    model.register_forward_hook(_explain_passing, always_call=True)


def _refuse_copy(*_: Any) -> NoReturn:
    raise TypeError(
        "a module of a sharded model cannot be copied by copy.deepcopy: this rank holds parts of it, and what "
        "communicates with the others. Copy it before parallelize (before the trainer or Accelerator shards it), and "
        "parallelize the copy too; or save_adapter, or export_merged, and load that elsewhere. A reference model needs "
        "no copy: it is this one with its adapters off (model.disable_adapter())."
    )


def _refuse_pickle(*_: Any) -> NoReturn:
    raise TypeError(
        "a module of a sharded model cannot be pickled, by torch.save(model) for example: this rank holds parts of it, "
        "and what communicates with the others. save_adapter writes the adapter, save_checkpoint what a run goes on "
        "with, export_merged the whole model. All ranks must call them."
    )


def _refuse_resize(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        "resize_token_embeddings was called on a sharded model, whose ranks hold parts of the embeddings: resize them "
        "before parallelize (before the trainer or Accelerator shards the model)."
    )


_LOADING = (
    "Load an adapter with load_adapter(model, folder), a checkpoint with load_checkpoint(model, optimizer, folder), "
    "and other weights before parallelize."
)


def _check_load(
    model: nn.Module, module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Check the tensors of `state` for all parameters of `module`, before `load_state_dict` copies any of them."""
    if module is model or not prefix:
        reshard(model)  # a forward may have left gathered weights, and the next one would undo a load into these
    for name, parameter in module.named_parameters(remove_duplicate=False):
        given = state.get(f"{prefix}{name}")
        if not isinstance(given, Tensor) or parameter.is_meta:
            continue
        if metadata.get("assign_to_params_buffers"):
            raise ValueError(
                f"load_state_dict(assign=True) would put another tensor in place of {prefix}{name}, and the optimizer "
                f"and what shards the model would go on with the old one: leave assign out. {_LOADING}"
            )
        if isinstance(given, DTensor):
            holder, _dot, key = name.rpartition(".")
            if partition_of(module.get_submodule(holder), key) is not None and not _same(given, parameter):
                raise ValueError(
                    f"load_state_dict: {prefix}{name} is stored with other rows on each rank than a shard has (several "
                    f"matrices in one, or fewer heads than ranks): values from elsewhere would be of other rows. "
                    f"{_LOADING}"
                )
            continue
        if isinstance(parameter, DTensor):
            part, whole = tuple(parameter.to_local().shape), tuple(parameter.shape)
            held = (
                f"this rank holds {part} of {whole}" if part != whole else "it is the mesh's, with all values on each"
            )
            raise ValueError(
                f"load_state_dict: {prefix}{name} is a plain tensor of shape {tuple(given.shape)}, and the model is "
                f"sharded: {held}. {_LOADING}"
            )
        if given.shape != parameter.shape:
            raise ValueError(
                f"load_state_dict: {prefix}{name} has shape {tuple(given.shape)}, and what this rank holds of it, in a "
                f"model that is sharded, {tuple(parameter.shape)}. {_LOADING}"
            )


def _same(given: DTensor, parameter: Tensor) -> bool:
    """Return True if `given` equals `parameter`, as a state dict of the model itself does, which may be loaded back."""
    return given.shape == parameter.shape and torch.equal(local(given.detach()), local(parameter.detach()))


_REMEDIES = {
    "got mixed torch.Tensor and DTensor": (
        "A weight of a sharded model was read by hand, as in hidden @ layer.weight.T, and each rank holds a part: "
        "call the layer instead (layer(hidden)), in the model's forward, or take all of it by "
        "layer.weight.full_tensor(), which every rank must call."
    ),
    "but its data is not allocated yet": (
        "A parameter or gradient of a sharded model was read as if this rank had all of it, as Lightning's grad_norm "
        "does: lora_parallel.clip_grad_norm_(parameters, float('inf')) gives the norm of all ranks' gradients and "
        "changes none, tensor.full_tensor() the values. Every rank must call it."
    ),
}
"""Remedy for each error of torch, by a part of the error's message."""


def _explain_passing(model: nn.Module, args: Any, output: Any) -> None:
    """Add the remedy to the error that a forward raises, which is all that a forward hook can do about an error."""
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError):
        _explain(error)


@contextmanager
def explained() -> Iterator[None]:
    """Add a remedy to torch's errors about tensors of a sharded model, if they are raised within the context."""
    try:
        yield
    except RuntimeError as error:
        _explain(error)
        raise


def _explain(error: RuntimeError) -> None:
    """Append the remedy to the message of `error`, in the place of `add_note`, which Python 3.10 does not have."""
    text = str(error.args[0]) if error.args else ""
    for said, remedy in _REMEDIES.items():
        if said in text and remedy not in text:
            error.args = (f"{text}\n{remedy}", *error.args[1:])
