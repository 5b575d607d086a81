"""Wrap a model in FSDP2: a unit per block, one per set of tied layers in different blocks, and one for the rest.

FSDP2 gathers a unit's weights when the unit itself is called. The root unit holds the modules that are in no block:
embeddings, the last norm, the head. Code for soft prompts or images calls the embedding before the model. Calls of
`model.forward(...)`, of the base model inside of a `PeftModel` or of the trunk alone bypass the root unit altogether. A
layer that tensor parallelism splits would then compute with a shard of its shard, without an error. The hooks of this
file gather the weights for such a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from lora_parallel.config import ParallelConfig
from lora_parallel.distributed.dtensors import local, tensors_in
from lora_parallel.distributed.mesh import dp_mesh, shard_size, stage_mesh
from lora_parallel.distributed.torch_private import (
    drop_gathered_gradients,
    in_backward,
    is_being_gathered,
    make_root,
)
from lora_parallel.fsdp.unit_order import install_order_check
from lora_parallel.layers.layer_parameters import innermost, lora_layers, shared_parameters
from lora_parallel.state import Setup


def is_at_rest(tensor: Tensor) -> bool:
    """Return True if `tensor` is a parameter that FSDP2 holds as shards over dp, which no layer can compute with."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.mesh_dim_names != ("tp",)


def gather_for_calls(model: nn.Module, tied: Sequence[nn.Module], blocks: Collection[nn.Module]) -> None:
    """Gather the root unit's weights around calls of a module in it by itself; refuse such calls of `tied` layers.

    Of `blocks` that are no units, and of LoRA layers, calls of the whole are what can be gathered for.
    """
    root = _Root(model)
    names = {module: name for name, module in model.named_modules()}
    for layer in tied:  # FSDP2 gathers and shards the weights of such a unit for one forward of all its layers
        layer.register_forward_pre_hook(partial(root.refuse, names[layer]), prepend=True)
    for name, module in below(model, blocks):
        if module in tied:
            continue
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(root.begin, prepend=True)
        elif (first := _first_at_rest(module)) is not None:
            call = _Call(root, name, *first)
            module.register_forward_pre_hook(call.before, with_kwargs=True, prepend=True)
            module.register_forward_hook(call.after, always_call=True)


def below(module: nn.Module, blocks: Collection[nn.Module] = (), prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules below `module` down to FSDP units and `blocks`, whose submodules are left out."""
    for key, child in module.named_children():
        yield f"{prefix}{key}", child
        if not isinstance(child, FSDPModule) and child not in blocks:
            yield from below(child, blocks, f"{prefix}{key}.")


def _first_at_rest(module: nn.Module) -> tuple[nn.Module, str] | None:
    """Return the module and key of a parameter that a call of `module` needs gathered, or None if there is none."""
    # A module with FSDP units inside calls its submodules in turn, and these have hooks of their own. The parameter is
    # given by its key, because gathering puts another tensor in its place.
    whole = not any(isinstance(inner, FSDPModule) for inner in module.modules())
    parameters = ((m, key, p) for m in (module.modules() if whole else [module]) for key, p in m._parameters.items())
    return next(((m, key) for m, key, p in parameters if p is not None and is_at_rest(p)), None)


class Units:
    """Shard weights again that a forward has left gathered, and let FSDP2 go on after a step that failed."""

    def __init__(self, model: nn.Module, prefetches: bool) -> None:
        self._model: Any = model
        self._prefetches = prefetches
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def begin_forward(self, *call: Any) -> None:
        """Shard all weights: what is gathered may be older than the last step of the optimizer."""
        for unit in self._units:
            if self._prefetches and is_being_gathered(unit):  # ahead of a block that has not run since
                unit.unshard()
            unit.reshard()

    def end_forward(self) -> None:
        """Shard all weights after a forward that no backward follows: `parameters()` must give the sharded ones."""
        if not torch.is_grad_enabled():
            self.begin_forward()

    def recover(self) -> None:
        """Reset FSDP2's state, and drop the gradients that the failed step has left there."""
        if not isinstance(self._model, FSDPModule):
            return
        if not hasattr(self._model, "reset_iter_state"):
            raise RuntimeError(
                f"the last step failed, and FSDP2 of torch {torch.__version__} cannot go on after that: restart "
                "from a checkpoint, or use torch 2.13, which can."
            )
        self._model.reset_iter_state()
        for unit in self._units:
            drop_gathered_gradients(unit)


def leave_inference_mode(model: nn.Module) -> None:
    """Run a model and its FSDP units under `no_grad` where they are called in inference mode."""
    # FSDP2's buffers of a first forward could never be trained with otherwise. Only `Step` has hooks around these.
    for module in dict.fromkeys([model, *(unit for unit in model.modules() if isinstance(unit, FSDPModule))]):
        left = ExitStack()
        module.register_forward_pre_hook(partial(_leave, left), prepend=True)
        module.register_forward_hook(partial(_return, left), always_call=True)


def _leave(left: ExitStack, *_: Any) -> None:
    if torch.is_inference_mode_enabled():
        left.enter_context(torch.inference_mode(False))
        left.enter_context(torch.no_grad())


def _return(left: ExitStack, *_: Any) -> None:
    left.close()


class _Root:
    """Gather and shard the root unit's weights outside of its forward."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self._begun = self._runs = False
        model.register_forward_pre_hook(self._begins, prepend=True)
        model.register_forward_hook(self._ends, always_call=True)

    def _begins(self, *_: Any) -> None:
        self._begun = self._runs = True

    def _ends(self, *_: Any) -> None:
        self._runs = False

    def refuse(self, name: str, *_: Any) -> None:
        """Raise an error if the tied layer `name` is called outside of the model's forward and of a backward pass."""
        if not self._runs and not in_backward():
            raise RuntimeError(
                f"{name} was called outside of the model's forward, and shares a weight with a layer of another block, "
                "so that FSDP2 runs both or none: call the model that was parallelized, not a part of it."
            )

    def begin(self, *_: Any) -> None:
        """Make FSDP2 take the model for the root unit, if the model has not been called yet. Collective."""
        if not self._begun:
            self._begun = True
            make_root(self.model)

    @torch.inference_mode(False)
    def unshard(self) -> None:
        self.begin()
        self.model.unshard()


class _Call:
    """Gather the root unit's weights for calls of one of its modules by itself."""

    def __init__(self, root: _Root, name: str, holder: nn.Module, key: str) -> None:
        self._root, self._name, self._holder, self._key = root, name, holder, key
        self._gathered = False

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_at_rest(self._holder._parameters[self._key]):  # type: ignore[arg-type]
            return
        needed = [*module.parameters(), *tensors_in([args, kwargs])]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in needed):
            raise RuntimeError(
                f"{self._name} was called by itself in training, while FSDP2 holds its weights in shards, and its "
                "backward would want them: call the model that was parallelized, not model.forward, the model inside "
                "of it (get_base_model()) or a part of that; outside of training call it under torch.no_grad()."
            )
        self._root.unshard()
        self._gathered = True

    def after(self, *_: Any) -> None:
        if self._gathered:
            self._gathered = False
            self._root.model.reshard()


def wants_fsdp(mesh: DeviceMesh, config: ParallelConfig) -> bool:
    """Return True if FSDP2 has work: parameters to shard, replicate over dp or offload, or a dtype to compute in."""
    return dp_mesh(mesh).size() > 1 or config.param_dtype is not None or config.cpu_offload


def device_at_rest(mesh: DeviceMesh, config: ParallelConfig) -> str:
    """Return the type of device that holds the parameters of FSDP2's units between two uses."""
    return "cpu" if config.cpu_offload else mesh.device_type


def move_to_device(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Move to the mesh's device what is not there yet, except what FSDP2 holds in the CPU's memory."""
    if not config.cpu_offload:
        model.to(mesh.device_type)  # FSDP2 takes note of the new parameters
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_at_rest(tensor):
            tensor.data = tensor.data.to(mesh.device_type)


def check_scalars(model: nn.Module) -> None:
    """Raise ValueError if a parameter without dims (a scalar) trains, which FSDP2 cannot shard."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0 and parameter.requires_grad:
            raise ValueError(
                f"{name} is a scalar that trains, which FSDP2 cannot shard: freeze it (requires_grad_(False)), or give "
                "it the shape (1,)."
            )


def check_dtypes(model: nn.Module) -> None:
    """Raise ValueError if a layer that tp may cut trains in two dtypes: it needs all of its weights at once."""
    # FSDP2 reduces one dtype in a unit, so that the parts of the layer would be units that are gathered in turn.
    for name, layer in model.named_modules():
        dtypes = {parameter.dtype for parameter in layer.parameters() if parameter.requires_grad}
        if isinstance(layer, BaseTunerLayer) and len(dtypes) > 1:
            found = " and ".join(sorted(map(str, dtypes)))
            raise ValueError(
                f"{name} trains in {found}, which FSDP2 and tp cannot do together: PEFT has adapters in float32 beside "
                "the biases of a base in bfloat16. Load the base in float32, or make the adapters with "
                "get_peft_model(..., autocast_adapter_dtype=False), or leave the biases frozen (bias='none')."
            )


def check_whole_base(setup: Setup) -> None:
    """Raise ValueError if `shard_base=False` leaves a weight in another dtype than the one to compute in."""
    config = setup.config
    if config.shard_base or config.param_dtype is None:
        return
    for name, parameter in _base_parameters(setup).items():
        if parameter.is_floating_point() and parameter.dtype != config.param_dtype:
            raise ValueError(
                f"shard_base=False: {name} is {parameter.dtype}, and the dtype to compute in is {config.param_dtype}, "
                "to which FSDP2 casts only what it shards. Load the model in that dtype "
                f"(from_pretrained(..., dtype={config.param_dtype})), or leave shard_base=True."
            )


def _base_parameters(setup: Setup) -> dict[str, nn.Parameter]:
    """Map names to the parameters that `shard_base=False` leaves whole: those that cannot train."""
    return {
        name: parameter
        for name, parameter in setup.model.named_parameters()
        if name not in setup.adapters and (setup.config.require_adapters or not parameter.requires_grad)
    }


def make_units(setup: Setup) -> list[nn.Module]:
    """Make each block an FSDP unit, and the rest another one; return the layers tied to layers of other blocks.

    Layers that train in another dtype than most are units of their own. Without `config.shard_base` one unit holds what
    trains beside them, and the base is in none.

    At dp_shard 2 and tp 2, with 64 features and r 8, a rank then has of

    | tensor | placement over (dp_shard, tp) | gathered | at rest |
    |---|---|---|---|
    | a colwise weight [64, 64] | (_StridedShard(0), Shard(0)) | [32, 64] | [16, 64] |
    | its lora_A [8, 64] | (Shard(0), Replicate) | [8, 64] | [4, 64] |
    | its lora_B [64, 8] | (_StridedShard(0), Shard(0)) | [32, 8] | [16, 8] |
    | a rowwise weight [64, 64] | (Shard(0), Shard(1)) | [64, 32] | [32, 32] |
    | its lora_A [8, 64] | (Shard(0), Shard(1)) | [8, 32] | [4, 32] |
    | its lora_B [64, 8] | (Shard(0), Replicate) | [64, 8] | [32, 8] |
    """
    model, blocks, mesh, config = setup.model, setup.blocks, setup.mesh, setup.config
    # One policy holds for a whole unit. Memory is pinned for copies that overlap with an accelerator's compute.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if config.cpu_offload else OffloadPolicy()
    sharding: dict[str, Any] = {
        "mesh": dp_mesh(mesh),
        "mp_policy": MixedPrecisionPolicy(param_dtype=config.param_dtype, reduce_dtype=_reduce_dtype(model, config)),
        "offload_policy": offload,
        "shard_placement_fn": partial(_shard_placement, shard_size(mesh)),
        # FSDP2 cannot shard a scalar. A frozen one (a temperature) stays whole on every rank.
        "ignored_params": {p for p in model.parameters() if p.dim() == 0 and not p.requires_grad},
    }
    if not config.shard_base:
        base = {*_base_parameters(setup).values()}
        sharding["ignored_params"] |= base
        blocks = []
    units = [*blocks, *_of_other_dtypes(model)]
    tied = _tied_across(model, units)
    for layers in tied:
        fully_shard(layers, reshard_after_forward=False, **sharding)  # in use from the first of the layers to the last
    inside = [layer for layers in tied for layer in layers]
    for unit in reversed(units):
        if unit not in inside:
            fully_shard(unit, reshard_after_forward=config.reshard_after_forward, **sharding)
    # The root's weights (embedding, head) are needed again as backward starts: they stay gathered until its end.
    fully_shard(model, reshard_after_forward=False, **sharding)
    _prefetch(blocks, config.prefetch_blocks)
    return inside


def _of_other_dtypes(model: nn.Module) -> list[nn.Module]:
    """Return the layers that train in another dtype than most that trains: FSDP2 reduces one in a unit."""
    # Such as a saved head or norm in bfloat16 beside adapters in float32.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes = Counter[torch.dtype]()
    for parameter in trained:
        sizes[parameter.dtype] += parameter.numel()
    most = max(sizes, key=sizes.__getitem__, default=None)
    others = {parameter for parameter in trained if parameter.dtype != most}
    return [m for m in model.modules() if any(p in others for p in m._parameters.values() if p is not None)]


def _prefetch(blocks: Sequence[nn.Module], count: int) -> None:
    """Let each block that is a unit gather the weights of the next ones in forward, and of those before in backward."""
    units: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for index, unit in enumerate(units if count else ()):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + count])
        unit.set_modules_to_backward_prefetch(units[max(0, index - count) : index][::-1])


def _tied_across(model: nn.Module, blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Return the sets of layers that share a weight and lie in different units; each becomes a unit of its own."""
    # FSDP2 replaces the parameters of each unit by shards of its own, so that two units could not share a weight.
    unit_of: dict[nn.Module, object] = {module: block for block in blocks for module in block.modules()}
    adapted = (layer for layer in model.modules() if isinstance(layer, BaseTunerLayer))
    layer_of = {inner: layer for layer in adapted for inner in layer.modules()}
    groups: list[list[nn.Module]] = []
    ties = [[layer_of.get(holder, holder) for holder, _ in places] for places in shared_parameters(model).values()]
    while apart := next((tie for tie in ties if len({id(unit_of.get(layer)) for layer in tie}) > 1), None):
        joined = [group for group in groups if any(unit_of.get(layer) is group for layer in apart)]
        groups = [group for group in groups if group not in joined]
        layers = dict.fromkeys(layer for part in (*joined, apart) for layer in part)
        inner = {module for layer in layers for module in layer.modules() if module is not layer}
        groups.append([layer for layer in layers if layer not in inner])
        unit_of.update({module: groups[-1] for layer in layers for module in layer.modules()})
    return groups


def _reduce_dtype(model: nn.Module, config: ParallelConfig) -> torch.dtype | None:
    """Return `config.reduce_dtype`, or None if gradients are at least as wide already."""
    wide = config.reduce_dtype
    computed = config.param_dtype or next((p.dtype for p in model.parameters() if p.requires_grad), None)
    if wide is None or computed is None or torch.finfo(computed).bits >= torch.finfo(wide).bits:
        return None
    return wide


def _shard_placement(dp_shard: int, parameter: nn.Parameter) -> Shard | None:
    """Return the placement over the first dim that `dp_shard` divides; None stands for dim 0, FSDP2's default."""
    # Sharding dim 0 of `lora_A` [r, in] with r < dp_shard would leave ranks empty. FSDP2 shards dims other than 0 only
    # evenly; one that tp has split is split again.
    part = local(parameter)
    if isinstance(parameter, DTensor):
        split = {placement.dim for placement in parameter.placements if isinstance(placement, Shard)}
        if any(parameter.shape[dim] % parameter.device_mesh.size() for dim in split):
            return None  # tp ranks hold slices of different sizes, and must all choose the same dim
    if part.numel() == 0:
        return None
    dim = next((dim for dim, size in enumerate(part.shape) if size % dp_shard == 0), 0)
    return Shard(dim) if dim > 0 else None


def fsdp_blocks(model: nn.Module, config: ParallelConfig) -> list[nn.Module]:
    """Return the modules that become one FSDP unit each: outermost instances of the block classes."""
    if config.block_classes == "auto":
        wanted = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    else:
        wanted = set(config.block_classes)
        present = {type(module).__name__ for module in model.modules()}
        if wanted - present:
            raise ValueError(
                f"block_classes: {', '.join(sorted(wanted - present))} is no class of a module in the model; it has "
                f"{', '.join(sorted(present))}."
            )
    blocks: list[nn.Module] = []
    inside = {model}
    for module in model.modules():
        if type(module).__name__ in wanted and module not in inside:
            blocks.append(module)
            inside.update(module.modules())
    recomputes = config.activation_checkpointing and not hasattr(innermost(model), "gradient_checkpointing_enable")
    compiles = config.compile_arguments is not None
    for option, needs_blocks in (("activation_checkpointing=True", recomputes), ("compile=True", compiles)):
        if needs_blocks and not blocks:
            raise ValueError(f"{option}, but the model has no blocks: name their classes in block_classes=[...].")
    return blocks


def fit_parameters(setup: Setup) -> None:
    """Make parameters such as FSDP2 takes, and note the ties that sharding must keep."""
    setup.ties = list(shared_parameters(setup.model).values())
    for parameter in setup.model.parameters():
        if not parameter.numel():  # nothing of it trains, and FSDP2 reduces no gradient without elements
            parameter.requires_grad_(False)
        if not parameter.is_contiguous():  # some of PEFT's are views; FSDP2 takes none
            parameter.data = parameter.data.contiguous()


def shard_over_dp(setup: Setup) -> None:
    """Apply FSDP2, if it has work, with the guards that it needs."""
    if wants_fsdp(setup.mesh, setup.config):
        setup.tied_across = make_units(setup)
        setup.order = install_order_check(setup.model, stage_mesh(setup.mesh), setup.gradients)
        gather_for_calls(setup.model, setup.tied_across, {*setup.blocks, *lora_layers(setup.model)})
