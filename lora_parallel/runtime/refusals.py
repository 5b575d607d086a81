"""Refuse what a sharded model does not support, and make `model.generate` work on it.

Torch's own errors for these operations ("cannot pickle 'ProcessGroup'", "got mixed torch.Tensor and DTensor") name
neither the model nor a way out. Some of the operations would even go on without an error, with tensors of another
rank's size, or with parameters that nothing shards or reduces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any, NoReturn

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from lora_parallel.adapters.peft_private import refuse_adapters, refuse_merge
from lora_parallel.distributed.dtensors import local, reshard
from lora_parallel.distributed.meetings import collective_call
from lora_parallel.distributed.mesh import dp_size, share_random_state
from lora_parallel.distributed.torch_private import gathered_parameters
from lora_parallel.layers.layer_parameters import innermost
from lora_parallel.layers.styles import partition_of
from lora_parallel.runtime.compiled_blocks import refuse_whole_compile
from lora_parallel.state import Setup


def seal(model: nn.Module, ranks: int) -> None:
    """Make a sharded model refuse what it does not support; on one rank its plain tensors may be copied and loaded.

    These are adapters that PEFT adds later, full tensors in `load_state_dict`, embeddings of another size, copies and
    pickles. Torch's error about a weight that the model's forward reads by hand gets a remedy.
    """
    refuse_adapters(model)
    if ranks == 1:
        return
    for module in model.modules():
        module.register_load_state_dict_pre_hook(partial(_check_load, model))
        # On the instance: copy.deepcopy finds it before FSDP2's, which is on the class.
        module.__dict__["__deepcopy__"] = partial(_refuse, TypeError, _COPY)
        module.__dict__["__reduce_ex__"] = partial(_refuse, TypeError, _PICKLE)
        if hasattr(module, "resize_token_embeddings"):
            module.__dict__["resize_token_embeddings"] = partial(_refuse, ValueError, _RESIZE)


def _refuse(kind: type[Exception], message: str, *_: Any, **__: Any) -> NoReturn:
    raise kind(message)


_COPY = (
    "a module of a sharded model cannot be copied by copy.deepcopy: this rank holds parts of it, and what communicates "
    "with the others. Copy it before parallelize (before the trainer or Accelerator shards it), and parallelize the "
    "copy too; or save_adapter, or export_merged, and load that elsewhere. A reference model needs no copy: it is this "
    "one with its adapters off (model.disable_adapter())."
)
_PICKLE = (
    "a module of a sharded model cannot be pickled, by torch.save(model) for example: this rank holds parts of it, and "
    "what communicates with the others. save_adapter writes the adapter, save_checkpoint what a run goes on with, "
    "export_merged the whole model. All ranks must call them."
)
_RESIZE = (
    "resize_token_embeddings was called on a sharded model, whose ranks hold parts of the embeddings: resize them "
    "before parallelize (before the trainer or Accelerator shards the model)."
)
_GENERATE = (
    "generate does not work under pipeline parallelism (pp > 1), where each rank has some of the blocks: save the "
    "adapter and generate on a mesh without pp, or with vLLM; or leave it out (predict_with_generate=False)."
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
        loaded = state.get(f"{prefix}{name}")
        if not isinstance(loaded, Tensor) or parameter.is_meta:
            continue
        if metadata.get("assign_to_params_buffers"):
            raise ValueError(
                f"load_state_dict(assign=True) would put another tensor in place of {prefix}{name}, and the optimizer "
                f"and what shards the model would go on with the old one: leave assign out. {_LOADING}"
            )
        if isinstance(loaded, DTensor):
            holder, _dot, key = name.rpartition(".")
            if partition_of(module.get_submodule(holder), key) is not None and not _same(loaded, parameter):
                raise ValueError(
                    f"load_state_dict: {prefix}{name} is stored with other rows on each rank than a shard has (several "
                    f"matrices in one, or fewer heads than ranks): values from elsewhere would be of other rows. "
                    f"{_LOADING}"
                )
            continue
        if isinstance(parameter, DTensor):
            part, whole = tuple(parameter.to_local().shape), tuple(parameter.shape)
            shard = f"this rank holds {part} of {whole}"
            if part == whole:
                shard = "it is the mesh's, with all values on each"
            raise ValueError(
                f"load_state_dict: {prefix}{name} is a plain tensor of shape {tuple(loaded.shape)}, and the model is "
                f"sharded: {shard}. {_LOADING}"
            )
        if loaded.shape != parameter.shape:
            raise ValueError(
                f"load_state_dict: {prefix}{name} has shape {tuple(loaded.shape)}, and what this rank holds of it, in "
                f"a model that is sharded, {tuple(parameter.shape)}. {_LOADING}"
            )


def _same(loaded: DTensor, parameter: Tensor) -> bool:
    """Return True if `loaded` equals `parameter`, as a state dict of the model itself, which may be loaded back."""
    return loaded.shape == parameter.shape and torch.equal(local(loaded.detach()), local(parameter.detach()))


# remedy for each error of torch, by a part of the error's message
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


def explain_passing() -> None:
    """Add the remedy to the error that a forward raises, which is all that a forward hook can do about an error."""
    if isinstance(error := sys.exc_info()[1], RuntimeError):
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
    """Append the remedy to the message of `error`; Python 3.10 has no `add_note`."""
    text = str(error.args[0]) if error.args else ""
    for said, remedy in _REMEDIES.items():
        if said in text and remedy not in text:
            error.args = (f"{text}\n{remedy}", *error.args[1:])


def allow_generate(model: nn.Module, base: nn.Module, mesh: DeviceMesh) -> None:
    """Make `generate` of a sharded model (and of `base`, inside of a `PeftModel`) gather the root unit's weights.

    Data-parallel ranks finish their texts at different steps, and a rank that stopped would leave the others waiting
    for its weights. With more than one such rank `synced_gpus=True` is the default, which keeps all ranks running to
    the last step. The ranks of one batch draw the same tokens: they begin with the random state of the first of them.
    """
    if not isinstance(model, FSDPModule) and mesh.size() == 1:
        return
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")  # does nothing if FSDP2 does not shard the model
    for holder in {model, base}:
        if hasattr(holder, "generate"):
            _complete(holder, model, mesh)


def refuse_generate(model: nn.Module, base: nn.Module) -> None:
    """Make `generate` an error with the remedy, for a model of which each rank has a pipeline stage."""
    for holder in {model, base}:
        if hasattr(holder, "generate"):
            holder.__dict__["generate"] = partial(_refuse, ValueError, _GENERATE)


def _complete(holder: Any, root: nn.Module, mesh: DeviceMesh) -> None:
    bare_generate: Any = holder.generate
    replicated = mesh["dp_replicate"].size() > 1

    def generate(*args: Any, **kwargs: Any) -> Any:
        if dp_size(mesh) > 1:
            kwargs.setdefault("synced_gpus", True)
        try:
            if replicated and not kwargs["synced_gpus"]:  # a replica needs no weights of other replicas
                share_random_state(mesh)
                return bare_generate(*args, **kwargs)
            with collective_call("generate"):
                share_random_state(mesh)
                return bare_generate(*args, **kwargs)
        finally:
            reshard(root)  # as after any forward that no backward follows

    holder.__dict__["generate"] = generate


class Substitutes:
    """Find substitutes: tensors in the place of a model's parameter that are not what FSDP2 gathers of the parameter.

    FSDP2 would compute with the parameters instead, or take the substitutes for its own shards. A tensor parallel layer
    would take a full tensor for its slice, and would never finish the gradient of a replicated tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self._parameters = [
            (module._parameters, key, parameter, f"{name}.{key}" if name else key)
            for name, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and sharded
        ]
        # The same in columns, which `begin_forward` compares without a line of Python for each parameter.
        self._columns: list[list[Any]] = [[row[at] for row in self._parameters] for at in range(3)]
        modules = list(model.modules()) if sharded else []
        self._modules = set(modules)
        # what each module holds, and what it held
        self._now = [module._modules for module in modules], [module._parameters for module in modules]
        self._children, self._counts = [dict(children) for children in self._now[0]], list(map(len, self._now[1]))

    def begin_forward(self, model: nn.Module, *call: Any) -> None:
        """Raise RuntimeError, as a forward begins, if a parameter has a substitute, or a new one trains."""
        if self._now[0] != self._children or list(map(len, self._now[1])) != self._counts:
            self._refuse_new(model)
        holders, keys, parameters = self._columns
        if all(map(is_, map(dict.get, holders, keys), parameters)):
            return
        odd = [(now.get(key), name) for now, key, parameter, name in self._parameters if now.get(key) is not parameter]
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        gathered = {id(parameter) for unit in units for parameter in gathered_parameters(unit)}
        for substitute, name in odd:
            if substitute is not None and id(substitute) not in gathered:
                raise RuntimeError(
                    f"another tensor is in the place of {name} than parallelize left there (torch.func.functional_call "
                    "does so, load_state_dict(assign=True) and assignments): each rank would compute with what it "
                    "takes for its shard. Change the parameter in place, or load_adapter; for several adapters on one "
                    "base, TenantPool."
                )

    def _refuse_new(self, model: nn.Module) -> None:
        """Check that modules which have come since do not train. Adapters that a TenantPool adds are the pool's."""
        known = {id(parameters): {*parameters} for parameters, *_ in self._parameters}
        layers = (layer for layer in model.modules() if isinstance(layer, BaseTunerLayer))
        of_pool = {inner for layer in layers if layer.get_base_layer() in self._modules for inner in layer.modules()}
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                before = known.get(id(module._parameters), ())
                if parameter is not None and parameter.requires_grad and key not in before and module not in of_pool:
                    raise RuntimeError(
                        f"{f'{name}.{key}' if name else key} trains, and was put into the model after parallelize: its "
                        "gradient would not be reduced, so that ranks part. Put the layer in place (a new head, a "
                        "resized embedding) before the model is sharded."
                    )


class FrozenParameters:
    """Refuse forwards in which a parameter trains that was frozen when the model was sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._is_unit = isinstance(model, FSDPModule)

    def begin_forward(self, *call: Any) -> None:
        if torch.is_grad_enabled() and self._is_unit:
            self.begin_schedule()

    def begin_schedule(self) -> None:
        """Raise RuntimeError if a frozen parameter has been set to train."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was frozen when the model was parallelized and is not any more: FSDP2 or the pipeline "
                    "would compute no gradient for it. Set requires_grad, and activate adapters (set_adapter), before "
                    "parallelize."
                )


def guard_calls(setup: Setup) -> None:
    """Make `generate` work on a sharded model, and an error of what does not."""
    model, mesh = setup.model, setup.mesh
    if setup.stages is None:
        allow_generate(model, innermost(model), mesh)
    else:
        refuse_generate(model, innermost(model))
    if not setup.config.shard_base and isinstance(model, FSDPModule):
        for name, layer in model.named_modules():
            if isinstance(layer, BaseTunerLayer):
                refuse_merge(layer, name, "with shard_base=False")
    seal(model, mesh.size())
    if mesh.size() > 1:
        model.__dict__["compile"] = refuse_whole_compile
