"""Make `save_pretrained`, called in the user's own code, work on a sharded model.

The methods of PEFT and transformers need full tensors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial, wraps
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lora_parallel.adapters.adapter_folder import gather_adapter
from lora_parallel.adapters.inspection import adapted_model, check_finite, loose_parameters, peft_configs
from lora_parallel.distributed.dtensors import gather_on_rank_zero, reshard
from lora_parallel.distributed.meetings import alone, collective_call
from lora_parallel.distributed.rank_checks import agreed, gather_objects, is_rank_zero
from lora_parallel.export.export_merged import write_merged
from lora_parallel.layers.layer_parameters import innermost
from lora_parallel.layers.linear_classes import QuantisedLayer
from lora_parallel.layers.styles import partition_of
from lora_parallel.state import Setup, mesh_of
from lora_parallel.storage import Scratch, local_path

_log = logging.getLogger(__name__)

TRAINED = "trained_parameters.safetensors"
"""File of what trains and belongs to no adapter."""

_SUPPORTED = frozenset(
    {"is_main_process", "selected_adapters", "save_embedding_layers", "max_shard_size", "state_dict", "save_function"}
)


_ROOT = "_lora_parallel_root"  # attribute that holds the parallelized model, of it and of the base in a `PeftModel`


class TrainedState(dict[str, Tensor]):
    """Hold what trains, in full, for a trainer's `_save`; `save_pretrained` gathers by itself what it writes of it."""


def allow_save_pretrained(setup: Setup) -> None:
    """Make `save_pretrained` of a parallelized model, and of the base in a `PeftModel`, work on a sharded model.

    If the model has adapters, PEFT's and transformers' methods write their folders, as `save_adapter` does; if it has
    none, they write the model, as `export_merged` does, into a folder that may hold other files. A method of another
    class runs on rank 0, as it would in one process.
    """
    model = setup.model
    _replace_methods()
    for holder in {model, adapted_model(model) or model, innermost(model)}:
        holder.__dict__[_ROOT] = model
        own = getattr(holder, "save_pretrained", None)
        if own and getattr(own, "__func__", own) not in (PreTrainedModel.save_pretrained, PeftModel.save_pretrained):
            holder.__dict__["save_pretrained"] = partial(_save_by_class, model, own)


@cache  # on the classes: a method of a subclass calls its class's, and not one that is an attribute of the model
def _replace_methods() -> None:
    for kind in (PreTrainedModel, PeftModel):
        kind.save_pretrained = _for_sharded(kind.save_pretrained)  # type: ignore[method-assign]


def _save_by_class(model: nn.Module, own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Call a class's own `save_pretrained` on rank 0, or with a `state_dict` on the calling process alone."""
    if alone.get() or kwargs.get("state_dict") is not None:
        own(*args, **kwargs)
        return
    with collective_call("save_pretrained"):
        save_on_rank_zero(model, partial(own, *args, **kwargs))


def _for_sharded(own: Callable[..., None]) -> Callable[..., None]:
    """Return PEFT's or transformers' `save_pretrained` for models that may be sharded.

    It writes the adapters' folders in PEFT's format, or a model without adapters. It is collective: call it on every
    rank. If a `state_dict` is given, whose tensors were gathered already, the method `own` is called instead, on the
    calling process alone. `is_main_process` and `save_function` are ignored: rank 0 writes, with the engine's own
    functions.
    """
    names = list(signature(own).parameters)[1:]

    @wraps(own)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        state = {**dict(zip(names, args, strict=False)), **kwargs}.get("state_dict")
        if (model := vars(self).get(_ROOT)) is None or not isinstance(state, TrainedState | None):
            own(self, *args, **kwargs)
            return
        name = next(name for name, module in model.named_modules() if module is self)
        kwargs = {key: value for key, value in kwargs.items() if key not in ("state_dict", "save_function")}
        on_every_rank(_save_pretrained, model, name, save_pretrained, *args, **kwargs)

    return save_pretrained


def _save_pretrained(model: nn.Module, name: str, own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    names = list(signature(own).parameters)[1:]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    with collective_call("save_pretrained"):
        configs = peft_configs(model)
        with agreed() as alike:
            signature(own).bind(model, *args, **kwargs)
            directory = arguments.pop(names[0])
            methods = (PreTrainedModel.save_pretrained, PeftModel.save_pretrained)
            parameters = [each for method in methods for each in signature(method).parameters.values()]
            defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
            changed = {
                key: value for key, value in arguments.items() if key not in _SUPPORTED and value != defaults.get(key)
            }
            if changed:
                texts = ", ".join(f"{key}={value!r}" for key, value in changed.items())
                raise TypeError(f"save_pretrained of a sharded model does not support {texts}.")
            arguments = {**defaults, **arguments}
            chosen = list(configs) if arguments["selected_adapters"] is None else list(arguments["selected_adapters"])
            alike["selected_adapters"] = chosen
            unknown = [name for name in chosen if name not in configs]
            if unknown:
                raise ValueError(f"no adapter {unknown[0]!r} in the model; it has: {', '.join(configs) or 'none'}.")
        settings = arguments["save_embedding_layers"], arguments["max_shard_size"]
        write_pretrained(model, directory, chosen, *settings, inside=name)


def save_on_rank_zero(model: nn.Module, save: Callable[[], object]) -> None:
    """Call `save` on rank 0; the other ranks follow its collective calls of the parallelized `model`. Collective.

    It may call `save_pretrained`, the model's forward, and `state_dict` of each module, which returns full tensors.
    """
    with agreed():
        if is_rank_zero():
            with _sent_to_others(model):
                save()
            return
        while message := gather_objects(b"")[0]:  # a pickle that rank 0 has made now, and that was in no file
            device = mesh_of(model).device_type  # type: ignore[union-attr]
            function, args, kwargs = torch.load(BytesIO(message), map_location=device, weights_only=False)
            with suppress(Exception):  # rank 0 has it too, and `save` may catch it
                function(model, *args, **kwargs)


@contextmanager
def _sent_to_others(model: nn.Module) -> Iterator[None]:
    """Send the forwards and state dicts that rank 0 asks for to the other ranks, and at the end that no more come."""

    def send_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        on_every_rank(_follow, model, model.training, torch.is_grad_enabled(), *args, **kwargs)

    def send_state_dict(name: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return on_every_rank(_full_state_dict, model, name, *args, **kwargs) if alone.get() else own(*args, **kwargs)

    with ExitStack() as stack:
        stack.callback(gather_objects, b"")
        stack.callback(alone.reset, alone.set(True))
        stack.callback(model.register_forward_pre_hook(send_forward, with_kwargs=True, prepend=True).remove)
        for name, module in model.named_modules():
            stack.callback(module.__dict__.pop, "state_dict")
            module.__dict__["state_dict"] = partial(send_state_dict, name, module.state_dict)
        yield


def on_every_rank(function: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Make a collective call; in `save_on_rank_zero` send it to the other ranks, which make it too."""
    if not alone.get():
        return function(model, *args, **kwargs)
    message = BytesIO()
    torch.save((function, args, kwargs), message)
    gather_objects(message.getvalue())
    alone.set(False)
    try:
        return function(model, *args, **kwargs)
    finally:
        alone.set(True)


def _follow(model: nn.Module, training: bool, grad: bool, *args: Any, **kwargs: Any) -> None:
    """Run the forward that rank 0 is about to run."""
    if not is_rank_zero():
        with torch.set_grad_enabled(grad):
            model.train(training)(*args, **kwargs)


@torch.inference_mode(False)  # a DTensor cannot be detached in inference mode
def _full_state_dict(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the state dict of the module `name`, with full tensors on rank 0. Collective."""
    reshard(model)
    module = model.get_submodule(name)
    state = type(module).state_dict(module, *args, **kwargs)
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    what = f"the state dict of {name or 'the model'} ({sum(each.nbytes for each in tensors.values()) / 1e9:.2g} GB)"
    with agreed():
        for path, inner in module.named_modules():
            if isinstance(inner, QuantisedLayer) or any(partition_of(inner, key) for key in inner._parameters):
                raise ValueError(
                    f"{what} cannot be gathered: each rank stores its rows of {path} in its own order or form. Use the "
                    "state_dict that a trainer's _save is given, which is what trains, or export_merged for the model."
                )
    if is_rank_zero():
        _log.warning("%s is gathered on rank 0, because a save calls state_dict().", what)
    state.update(gather_on_rank_zero(tensors))
    return state


def write_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    adapters: Iterable[str] | None = None,
    save_embedding_layers: Literal["auto"] | bool = "auto",
    max_shard_size: int | str = "50GB",
    inside: str = "",
) -> None:
    """Write a parallelized model's adapters, or a model without adapters, as `save_pretrained` does. Collective.

    Parameters that train and belong to no adapter, such as a head beside a `PeftModel`, are written into a file beside
    the adapters, `trained_parameters.safetensors`, by their names in the model. Nothing is written unless all adapters
    can be.

    Args:
        model: The model that `parallelize` returned.
        directory: The folder to write, as in PEFT and transformers.
        adapters: The names of the adapters to write; None: all.
        save_embedding_layers: As in PEFT.
        max_shard_size: As in transformers; it applies to a model without adapters.
        inside: The name of a module: parameters that belong to no adapter are written if they are inside of it.

    Raises:
        OSError: The folder cannot be written.
        ValueError: Values are not finite. Both are raised on every rank.
    """
    names = list(peft_configs(model)) if adapters is None else list(adapters)
    reshard(model)
    loose = {name: p for name, p in loose_parameters(model).items() if name.startswith(inside and f"{inside}.")}
    with agreed() as alike:
        folder = local_path(directory)
        alike.update(directory=str(folder), save_embedding_layers=save_embedding_layers)
        check_finite(loose)
    if not names:
        write_merged(model, directory, max_shard_size, beside_others=True)
        return
    with torch.inference_mode(False):  # a DTensor cannot be detached in inference mode
        gathered = [gather_adapter(model, name, save_embedding_layers) for name in names]
        beside = gather_on_rank_zero(loose)
    with agreed():
        if is_rank_zero():
            for adapter in gathered:
                adapter.write(folder)
            _write_beside(folder / TRAINED, beside)


def _write_beside(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write what trains and belongs to no adapter; if there is nothing, remove the file of an earlier save."""
    if not tensors:
        file.unlink(missing_ok=True)
        return
    scratch = Scratch(file)
    scratch.make()
    try:
        save_file(tensors, scratch.path / file.name, metadata={"format": "pt"})
        scratch.place_file(file.name)
    finally:
        scratch.discard()
    _log.warning(
        "%d parameters train and belong to no adapter (first: %s): PEFT's files do not hold them, %s does.",
        len(tensors),
        next(iter(tensors)),
        file,
    )
