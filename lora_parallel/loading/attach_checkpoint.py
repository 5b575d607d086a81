"""Name the checkpoint that fills a model which `from_pretrained` did not build."""

from __future__ import annotations

import os

from torch import Tensor, nn
from transformers import PreTrainedModel

from lora_parallel.lazy.files import open_checkpoint
from lora_parallel.lazy.graph import Leaf
from lora_parallel.lazy.lazy_tensor import LazyTensor
from lora_parallel.lazy.tracking import Checkpoint, check_fit, remember
from lora_parallel.loading.transformers_private import claim

__all__ = ["attach_checkpoint"]


def attach_checkpoint(model: nn.Module, path: str | os.PathLike[str], allow_pickle: bool = False) -> nn.Module:
    """Name the checkpoint that fills a model which `from_pretrained` did not build; `parallelize` reads the checkpoint.

    Call it before PEFT wraps the model. Parameters and buffers that the checkpoint holds go to meta; all others stay as
    they are.

    Args:
        model: Any `nn.Module`, on meta or not. Names in the checkpoint are those of its `state_dict()`; a transformers
            model's may be any that `from_pretrained` understands.
        path: A safetensors file; a directory with one, or with several and an index; a torch DCP directory; or, if
            `allow_pickle`, a state dict that `torch.save` wrote.
        allow_pickle: Read a pickle, with weights_only=True.

    Returns:
        `model` itself.

    Raises:
        Nothing itself: `parallelize` raises the error, on every rank, if the checkpoint cannot be read or does not fit.
    """
    checkpoint = Checkpoint(str(path))
    try:
        found = open_checkpoint(path, allow_pickle)
        _claim(model, found, str(path))
    except (OSError, ValueError) as error:
        checkpoint.problem = error
    remember(model, checkpoint)
    return model


def _claim(model: nn.Module, found: dict[str, Leaf], path: str) -> None:
    """Replace the parameters and buffers of `model` by the lazy tensors that are for them."""
    if isinstance(model, PreTrainedModel):
        claim(model, found, path)
        return
    wanted = model.state_dict(keep_vars=True)
    sources = {id(tensor): name for name, tensor in wanted.items() if name in found}
    missing = [name for name, tensor in wanted.items() if id(tensor) not in sources]  # a tie needs one name
    unclaimed = [name for name in found if name not in wanted]
    if missing or unclaimed:
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: it does not hold {len(missing)} of its parameters and "
            f"buffers (first: {missing[:2]}), and nothing claims {len(unclaimed)} of its tensors (first: "
            f"{unclaimed[:2]}). Names must be those of model.state_dict(), before PEFT wraps the model."
        )
    for name, tensor in wanted.items():
        if name in found:
            check_fit(name, tensor, found[name])
    placed: dict[int, Tensor] = {}
    for name, tensor in wanted.items():
        if id(tensor) not in placed:
            stored: Tensor = LazyTensor(found[sources[id(tensor)]]).to(tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                stored = nn.Parameter(stored, requires_grad=tensor.requires_grad)
            placed[id(tensor)] = stored
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        container = module._parameters if key in module._parameters else module._buffers
        container[key] = placed[id(tensor)]  # type: ignore[assignment]
