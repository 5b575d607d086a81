"""What may not be done to a model once it is sharded, and what to do instead: one error for each, on every rank.

Torch's own errors for these ("cannot pickle 'ProcessGroup'", "got mixed torch.Tensor and DTensor") name neither the
model nor a way out; and some of it would go on in silence, with tensors of the wrong rank's size.
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

from lora_parallel.gather import local, reshard
from lora_parallel.peft_hooks import refuse_adapters
from lora_parallel.selection import selection_of

__all__ = ["explained", "seal"]


def seal(model: nn.Module, ranks: int) -> None:
    """Refuse what a sharded model cannot do: adapters of PEFT's that come later, tensors in full in `load_state_dict`,
    deep copies of its modules. An error about a weight that its forward reads by hand gets a remedy.

    Args:
        model: What `parallelize` has sharded.
        ranks: Of its mesh. One rank's parameters are plain tensors, which may be copied and loaded.
    """
    refuse_adapters(model)
    if ranks == 1:
        return
    for module in model.modules():
        module.register_load_state_dict_pre_hook(partial(_check_load, model))
        module.__dict__["__deepcopy__"] = _refuse_copy  # copy.deepcopy looks there first; FSDP2's is of the class
    model.register_forward_hook(_explain_passing, always_call=True)


def _refuse_copy(*_: Any) -> NoReturn:
    raise TypeError(
        "a module of a sharded model cannot be copied by copy.deepcopy: this rank holds parts of it, and what "
        "communicates with the others. Copy it before parallelize (before the trainer or Accelerator shards it), and "
        "parallelize the copy too; or save_adapter, or export_merged, and load that elsewhere. A reference model needs "
        "no copy: it is this one with its adapters off (model.disable_adapter())."
    )


_LOADING = (
    "Load an adapter with load_adapter(model, folder), a checkpoint with load_checkpoint(model, optimizer, folder), "
    "and other weights before parallelize."
)


def _check_load(
    model: nn.Module, module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Look at all that is below `module`, before any of it is copied."""
    if module is model or not prefix:
        reshard(model)  # after a forward the gathered weights stand there, which the next one makes anew
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
            if selection_of(module.get_submodule(holder), key) is not None and not _same(given, parameter):
                raise ValueError(
                    f"load_state_dict: {prefix}{name} is stored with other rows on each rank than a shard has (several "
                    f"matrices in one, or fewer heads than ranks): values from elsewhere would be of other rows. "
                    f"{_LOADING}"
                )
            continue
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"load_state_dict: {prefix}{name} is a plain tensor of shape {tuple(given.shape)}, and the model is "
                f"sharded: this rank holds {tuple(parameter.to_local().shape)} of {tuple(parameter.shape)}. {_LOADING}"
            )
        if given.shape != parameter.shape:
            raise ValueError(
                f"load_state_dict: {prefix}{name} has shape {tuple(given.shape)}, and what this rank holds of it, in a "
                f"model that is sharded, {tuple(parameter.shape)}. {_LOADING}"
            )


def _same(given: DTensor, parameter: Tensor) -> bool:
    """Whether these are the values that are there: a state dict of this model's, which may be loaded back."""
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
"""By what torch's error says."""


def _explain_passing(model: nn.Module, args: Any, output: Any) -> None:
    """A hook that is called while an error passes can add to it, and do no more."""
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError):
        _explain(error)


@contextmanager
def explained() -> Iterator[None]:
    """Within, errors of torch about tensors of a sharded model get a remedy."""
    try:
        yield
    except RuntimeError as error:
        _explain(error)
        raise


def _explain(error: RuntimeError) -> None:
    """As `add_note`, which Python 3.10 does not have."""
    text = str(error.args[0]) if error.args else ""
    for said, remedy in _REMEDIES.items():
        if said in text and remedy not in text:
            error.args = (f"{text}\n{remedy}", *error.args[1:])
