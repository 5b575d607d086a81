"""Check or replace the parameters that an optimizer holds: with those from before sharding it trains nothing."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from weakref import WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from lora_parallel.distributed.gradients import refuse_clipping_if
from lora_parallel.distributed.meetings import place_of_call
from lora_parallel.distributed.mesh import over_stages
from lora_parallel.optimizers import check_optimizers, joins_parameters, let_optimizers_step
from lora_parallel.state import Setup, mesh_of, names_elsewhere

_REPLACED, _LIVE = "_lora_parallel_replaced", "_lora_parallel_live"
_REMEDY = (
    "Make the optimizer afterwards, from the sharded model's parameters; or prepare both at once, "
    "accelerator.prepare(model, optimizer); or return it from configure_optimizers."
)


def refuse_stale_steps(before: Mapping[str, ref[nn.Parameter]], model: nn.Module) -> None:
    """Make optimizers that hold parameters which sharding has replaced (`before`, by name) raise an error when they
    step.

    Nothing else tells such an optimizer from one that works: the old parameters get no gradients, and optimizers skip
    parameters without gradients. A model may well be sharded before its optimizer is made, so that sharding itself
    cannot raise this error.
    """
    live = set(model.parameters())
    replaced = {name: p for name, former in before.items() if (p := former()) is not None and p not in live}
    if replaced:
        check_optimizers(_refuse_replaced)
    where = place_of_call()
    for name, parameter in replaced.items():
        setattr(parameter, _REPLACED, (name, where))
        refuse_clipping_if(parameter, partial(_gradient_elsewhere, ref(parameter)))
        if parameter.requires_grad:
            setattr(parameter, _LIVE, False)
            parameter.register_post_accumulate_grad_hook(_note_gradient)


def _note_gradient(parameter: nn.Parameter) -> None:
    setattr(parameter, _LIVE, True)


def _is_live(parameter: nn.Parameter) -> bool:
    """Return True if another model goes on with a replaced parameter: a gradient has come since, not from before."""
    return parameter.grad is not None and getattr(parameter, _LIVE, True)


def _gradient_elsewhere(replaced: ref[nn.Parameter]) -> str | None:
    """Return the error for clipping a replaced parameter: it has no gradient to clip, and its successor does."""
    parameter = replaced()
    if parameter is None or not parameter.requires_grad or _is_live(parameter):
        return None
    name, where = getattr(parameter, _REPLACED)
    return (
        f"{name} is the parameter as before the model was sharded (at {where}), which put a sharded one in its place: "
        "its gradient would not be clipped, and an optimizer that holds it would train nothing. Clip "
        f"model.parameters() of the sharded model. {_REMEDY}"
    )


_staged: WeakSet[nn.Module] = WeakSet()  # models of whose parameters each rank has those of its pipeline stages


def refuse_joined_steps(model: nn.Module) -> None:
    """Make an optimizer that joins parameters raise an error when it steps with some of `model`, which has stages."""
    # LBFGS takes its direction and the length of its step from inner products over all parameters.
    _staged.add(model)
    check_optimizers(_refuse_joined_step)


def _refuse_joined_step(optimizer: Optimizer) -> None:
    if not joins_parameters(optimizer):
        return
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    if any(not stepped.isdisjoint(model.parameters()) for model in _staged):
        raise RuntimeError(
            f"{type(optimizer).__name__} computes one step from all parameters together, and under pp each rank has "
            "those of its stages only: use an optimizer that works on each parameter by itself (AdamW, SGD), or pp=1."
        )


def _refuse_replaced(optimizer: Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    replaced = [p for p in parameters if _REPLACED in p.__dict__]
    # Another model that shares a weight with the sharded model goes on with the old weight, and trains it.
    stale = any(p.requires_grad and not _is_live(p) for p in replaced)
    if replaced and (stale or all(p.grad is None for p in parameters)):
        name, where = getattr(max(replaced, key=lambda parameter: parameter.requires_grad), _REPLACED)
        more = f" and {len(replaced) - 1} more" if len(replaced) > 1 else ""
        raise RuntimeError(
            f"this {type(optimizer).__name__} optimizer holds {name}{more} as before the model was sharded (at "
            f"{where}), which put sharded parameters in their place: it would train nothing. {_REMEDY}"
        )


def check_not_stale(optimizers: Iterable[Optimizer], known: Collection[nn.Parameter], remedy: str) -> None:
    """Check that optimizers hold parameters of sharded models only.

    Args:
        optimizers: The optimizers.
        known: All parameters of all sharded models.
        remedy: The end of the error: a sentence that says what to do.

    Raises:
        ValueError: An optimizer holds other parameters.
    """
    for optimizer in optimizers:
        stale = sum(parameter not in known for group in optimizer.param_groups for parameter in group["params"])
        if stale:
            raise ValueError(
                f"{type(optimizer).__name__} holds {stale} parameters that are not the sharded model's: it was made "
                f"before the model was sharded. {remedy}"
            )


def describe_optimizer(optimizer: Optimizer, module: nn.Module) -> str:
    """Return a text with an optimizer's class, settings and parameters, to be compared between ranks.

    Replicated parameters that ranks update in different ways drift apart. The text is about the parameters of all
    pipeline stages. Collective if there are several.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    mine = [[names.get(parameter, "?") for parameter in group["params"]] for group in optimizer.param_groups]
    stages = over_stages(mine, mesh_of(module))
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        members = [name for of_stage in stages for of_group in of_stage[index : index + 1] for name in of_group]
        settings = {key: value for key, value in sorted(group.items()) if key != "params"}
        groups.append(f"{len(members)} parameters ({zlib.crc32(' '.join(members).encode()):08x}) with {settings}")
    return f"{type(optimizer).__name__} of {'; '.join(groups)}"


class HeldByName:
    """Remember an optimizer's parameters by name while sharding replaces the parameters of its model.

    Args:
        optimizer: An optimizer that has not stepped. State that its class makes in the beginning is made anew.
        module: The model before it is sharded.
        sharded: Parameters of models that are sharded already, which the optimizer may hold too.
        remedy: The end of the error for an optimizer that has state: a sentence that says what to do.

    Raises:
        ValueError: The optimizer has state, or holds parameters that are neither the module's nor in `sharded`.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module, sharded: Collection[nn.Parameter], remedy: str) -> None:
        kind = type(optimizer).__name__
        self._has_state = bool(optimizer.state)  # Adagrad makes its state with the optimizer
        if optimizer.state and _has_stepped(optimizer):
            raise ValueError(
                f"{kind} has state for {len(optimizer.state)} parameters already, which would stay with the unsharded "
                f"ones: {remedy}"
            )
        names = {parameter: name for name, parameter in module.named_parameters()}
        foreign = sum(p not in names and p not in sharded for group in optimizer.param_groups for p in group["params"])
        if foreign:
            raise ValueError(
                f"{kind} holds {foreign} parameters that are not those of the {type(module).__name__} it is set up "
                "with: make it from this model's parameters, or set its other models up before. Weights that a loss "
                "holds (a guide, a head) are such parameters: freeze them, requires_grad_(False)."
            )
        self._optimizer = optimizer
        # the name of each parameter of the module, and other parameters themselves, by group
        self._entries = [[names.get(p, p) for p in group["params"]] for group in optimizer.param_groups]

    def restore(self, module: nn.Module) -> None:
        """Put the parameters that have the remembered names in `module` now in the place of the old ones.

        Those that are on other pipeline stages are left out.
        """
        parameters, elsewhere = dict(module.named_parameters(remove_duplicate=False)), names_elsewhere(module)
        for group, entries in zip(self._optimizer.param_groups, self._entries, strict=True):
            # In place: an optimizer may keep the list itself elsewhere too.
            here = [entry for entry in entries if entry not in elsewhere]
            group["params"][:] = [parameters[entry] if isinstance(entry, str) else entry for entry in here]
        self._make_state()

    def restore_adapted(self, module: nn.Module) -> None:
        """Put the trained parameters of `module` in the place of the old ones, if adapters were injected meanwhile.

        A group that held parameters of a layer gets the parameters that train in the layer now, and loses those that
        are frozen.

        Raises:
            ValueError: A parameter trains in a layer of which no group held a parameter.
        """
        layers = [
            {entry.rpartition(".")[0] for entry in entries if isinstance(entry, str)} for entries in self._entries
        ]
        new_parameters: list[list[nn.Parameter]] = [[] for _ in layers]
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            parts = name.split(".")[:-1]
            within = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
            index = next((index for layer in within for index, names in enumerate(layers) if layer in names), None)
            if index is None:
                raise ValueError(
                    f"{name}, of the injected adapter, is in a layer that {type(self._optimizer).__name__} held no "
                    "parameter of: make the optimizer from all of the model's parameters."
                )
            new_parameters[index].append(parameter)
        for group, entries, new in zip(self._optimizer.param_groups, self._entries, new_parameters, strict=True):
            group["params"][:] = [*new, *(entry for entry in entries if not isinstance(entry, str))]
        self._make_state()

    def _make_state(self) -> None:
        """Make the state of the parameters that the optimizer holds now, as its class does in the beginning."""
        if self._has_state:
            optimizer = self._optimizer
            made = type(optimizer)([dict(group) for group in optimizer.param_groups], **optimizer.defaults)
            optimizer.state.clear()
            optimizer.state.update(made.state)


def _has_stepped(optimizer: Optimizer) -> bool:
    """Return False if each state counts no steps yet."""
    counts = [states.get("step", 1) for states in optimizer.state.values()]
    return any(not (isinstance(count, Tensor) and count.is_meta) and count != 0 for count in counts)


def guard_optimizers(setup: Setup) -> None:
    """Make optimizers that would step wrongly raise an error, and let others step on shards."""
    if setup.stages is not None:
        refuse_joined_steps(setup.model)
    refuse_stale_steps(setup.before, setup.model)
    let_optimizers_step()
