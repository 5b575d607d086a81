"""Find how tp ranks can share the experts of a mixture, prove it by running them, and decide for each module.

A module of experts holds stacks of weights [experts, ., .]: `gate_up_proj`, or `up_proj` with or without `gate_proj`,
and `down_proj`. The module's class declares to transformers how they are laid out. The declaration is not trusted
alone: the module's own forward is run on the parameters that each rank would have, and the outputs of all ranks must
add up to the output of the whole module. The weights of these runs are products of thin random factors, so that a run
costs a few tokens, whatever the size of the experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lora_parallel.adapters.low_rank_weight import Factors, LowRankWeight
from lora_parallel.distributed.collectives import chunk_bounds
from lora_parallel.distributed.dtensors import tensors_in
from lora_parallel.layers.layer_parameters import base_of
from lora_parallel.layers.styles import EXPERT_SPLITS, STYLES, RowPartition
from lora_parallel.planning.entries import PlanBuilder
from lora_parallel.replaced import replaced_entries
from lora_parallel.tp.experts import ExpertSharing, expert_stacks, holds_experts
from lora_parallel.tracing.inputs import brief
from lora_parallel.tracing.prove_feature_slices import Structure

_RANK = 4
# Largest relative error of a sharing that is right, in float32. A wrong sharing has an error of the order of 1.
_TOLERANCE = 1e-4


def share_experts(
    module: nn.Module, fed: tuple[tuple[Any, ...], dict[str, Any]], tp: int, by: str
) -> ExpertSharing | str:
    """Return how tp ranks can share the experts in `module`, or the reason why they cannot."""
    stacks = expert_stacks(module)
    experts = next(iter(stacks.values())).shape[0]
    if by == "experts":
        if experts % tp:
            return f"it has {experts} experts, no multiple of tp={tp}"
        candidates = _by_experts(module, experts, tp)
    else:
        candidates = _by_features(module, tp)
    problem = None
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        torch.default_generator.manual_seed(0)
        fed = _example(fed, experts)
        values = {key: _random(p) for key, p in module._parameters.items() if p is not None}
        try:
            whole = _run(module, values, {}, fed)
        except Exception as error:
            return f"its forward cannot be tried ({brief(error)})"
        for sharing in candidates:
            reason = _problem(module, sharing, values, fed, whole, tp)
            if reason is None:
                return sharing
            problem = problem or reason
    if problem is None:
        shapes = ", ".join(f"{key} {tuple(p.shape)}" for key, p in stacks.items())
        problem = (
            f"none of its stacks ({shapes}) is fed a number of features that the others compute and tp={tp} divides"
        )
    return problem


def _by_experts(module: nn.Module, experts: int, tp: int) -> Iterator[ExpertSharing]:
    chosen = RowPartition.of([range(*chunk_bounds(experts, tp, rank)) for rank in range(tp)], experts)
    cuts = {key: (0, chosen) for key, p in module._parameters.items() if p is not None and p.shape[:1] == (experts,)}
    counts = {
        key: experts // tp for key, value in vars(module).items() if "expert" in key and _is_count(value, experts)
    }
    if hasattr(module, "_is_expert_parallel"):
        yield ExpertSharing(
            "experts", cuts, attributes={**counts, "_is_expert_parallel": True}, absent_expert=experts // tp
        )
    yield ExpertSharing("experts", cuts, attributes=counts)


def _is_count(value: Any, count: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == count


def _by_features(module: nn.Module, tp: int) -> Iterator[ExpertSharing]:
    """Yield the split by features that the module's class declares, or all that an undeclared one may need."""
    # transformers' `@use_experts_implementation` notes the declaration: `is_transposed` stacks are [experts, in, out],
    # not [experts, out, in]; gate and up are `is_concatenated`, [gate; up], or interleaved.
    down = module._parameters.get("down_proj")
    if down is None or down.dim() != 3:
        return
    declared = hasattr(module, "is_transposed") and hasattr(module, "is_concatenated")
    layouts = [(module.is_transposed, module.is_concatenated)] if declared else product((False, True), (True, False))
    for is_transposed, is_concatenated in layouts:
        outputs, inputs = (2, 1) if is_transposed else (1, 2)
        width = down.shape[inputs]
        if width % tp:
            continue
        chunks = _chunks(width, tp)
        packed = RowPartition.packed([width, width], tp) if is_concatenated else _chunks(2 * width, tp)
        cuts = {"down_proj": (inputs, chunks)}
        for key, rows in (("gate_up_proj", packed), ("gate_proj", chunks), ("up_proj", chunks)):
            cuts |= {key: (outputs, rows)} if module._parameters.get(key) is not None else {}
            cuts |= {f"{key}_bias": (1, rows)} if module._parameters.get(f"{key}_bias") is not None else {}
        if any(module._parameters[key].shape[dim] != rows.size for key, (dim, rows) in cuts.items()):  # type: ignore[union-attr]
            continue
        addends = frozenset({"down_proj_bias"} & module._parameters.keys())
        sizes = {key: width // tp for key, value in vars(module).items() if _is_count(value, width)}
        for attributes in [{}, sizes] if sizes else [{}]:
            yield ExpertSharing("features", cuts, addends, attributes)


def _chunks(size: int, tp: int) -> RowPartition:
    return RowPartition.of([range(*chunk_bounds(size, tp, rank)) for rank in range(tp)], size)


# ---------------------------------------------------------------------- running the module on a rank's share


def _example(fed: Any, experts: int) -> Any:
    """Return the module's arguments with random activations, routing weights and indices of experts."""
    # A router without its weights may choose the same experts for all tokens, or give NaN.
    rows = next((len(x) for x in tensors_in(fed) if x.is_floating_point() and x.dim()), 0)

    def drawn(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return torch.randn(x.shape, dtype=x.dtype)
        ids = x.dtype != torch.bool and x.dim() == 2 and len(x) == rows and x.shape[1] <= experts
        return torch.rand(rows, experts).topk(x.shape[1]).indices.to(x.dtype) if ids else x

    return tree_map_only(Tensor, drawn, fed)


def _random(parameter: nn.Parameter) -> Any:
    if parameter.dim() != 3:
        return torch.randn(parameter.shape)
    experts, rows, columns = parameter.shape
    left, right = torch.randn(experts, rows, _RANK), torch.randn(experts, _RANK, columns) / columns**0.5
    return LowRankWeight(None, [Factors(left, right, 1.0)])


def _problem(
    module: nn.Module, sharing: ExpertSharing, values: Mapping[str, Any], fed: Any, whole: Tensor, tp: int
) -> str | None:
    total = torch.zeros_like(whole)
    for rank in range(tp):
        mine = dict(values)
        for key, (dim, chosen) in sharing.cuts.items():
            mine[key] = values[key].index_select(dim, chosen.rows(rank))
        for key in sharing.addends:
            mine[key] = values[key] * (rank == 0)
        try:
            part = _run(module, mine, sharing.attributes, sharing.local_arguments(fed, rank))
        except Exception as error:  # a forward may raise anything on sizes that do not fit
            return f"its forward fails on a rank's share ({brief(error)})"
        if part.shape != whole.shape:
            return "its forward, on a rank's share, gives another shape"
        total += part
    right = (total - whole).abs().max() <= _TOLERANCE * whole.abs().max()
    return None if right else "what its forward gives on the shares of all ranks does not add up to the whole"


def _run(module: nn.Module, values: Mapping[str, Any], attributes: Mapping[str, Any], fed: Any) -> Tensor:
    """Return the output of the module's own forward with other parameters and attributes."""
    args, kwargs = tree_map_only(Tensor, torch.clone, fed)
    with replaced_entries((module.__dict__, key, value) for key, value in {**values, **attributes}.items()):
        output = module(*args, **kwargs)
    if not isinstance(output, Tensor):
        raise TypeError(f"it gives a {type(output).__name__}")
    return output.detach().clone()


def plan_experts(builder: PlanBuilder, structures: list[Structure], sequence_parallel: bool) -> None:
    """Share experts by features if their forward is right on slices, else as whole experts; or as the user says."""
    ways = {STYLES[style]: by for style, by in EXPERT_SPLITS.items()}
    fed = {
        module: (tracer, tracer.twin_of[base])
        for tracer in (structure.tracer for structure in structures)
        for module in builder.layers
        if (base := base_of(module)) in tracer.twin_of and tracer.twin_of[base] in tracer.experts
    }
    bases = [base_of(module) for module in builder.layers]
    known: dict[object, ExpertSharing | str] = {}
    for module, plan in builder.layers.items():
        base = base_of(module)
        asked = ways.get(plan.style) if plan.asked is not None and plan.style is not None else None
        if asked is not None and plan.style is not None and not holds_experts(base):
            raise ValueError(
                f"tp_plan: {plan.asked} makes {plan.name!r} {plan.style.name}, and "
                f"{type(base).__name__} holds no stacks of experts: parameters [experts, ., .], of several."
            )
        if plan.asked is not None and asked is None:
            continue
        if plan.style in ways:
            plan.style = None
        if not holds_experts(base):
            continue
        if module not in fed and any(other in fed for other in builder.modules[plan.name]):
            continue  # of `modules_to_save`, the original, which is not computed with
        reasons = ["nothing that the model was run with reached it"] if module not in fed else []
        if bases.count(base) > 1:
            reasons = ["several layers share them"]
        if sequence_parallel:
            reasons = ["with sequence_parallel=True each rank has the tokens of its own only: set it to False"]
        for style, by in ways.items() if not reasons else ():
            if asked not in (None, by):
                continue
            tracer, twin = fed[module]
            key = type(base), by, _shapes(base), _shapes(tracer.experts[twin])
            if key not in known:
                known[key] = share_experts(twin, tracer.experts[twin], builder.tp, by)
            outcome = known[key]
            if isinstance(outcome, str):
                reasons.append(f"{style.name}: {outcome}")
                continue
            plan.style, plan.sharing = style, outcome
            builder.attributes.setdefault(base, {}).update(outcome.attributes)
            break
        if plan.sharing is not None:
            continue
        why = "; ".join(reasons)
        if asked is not None or isinstance(module, BaseTunerLayer):
            raise ValueError(
                f"tp={builder.tp}: the experts {plan.name!r} ({type(base).__name__}) cannot be shared by tp ranks: {why}. "  # noqa: E501
                'Use another tp, tp=1 (FSDP2 only), the style "replicate" for them (in full on every tp rank), or '
                "leave them out of target_parameters and of tp_plan."
            )
        if not sequence_parallel:
            plan.whole = why


def _shapes(values: Any) -> object:
    """Return the shapes of a module's parameters, or of all tensors in arguments."""
    if isinstance(values, nn.Module):
        return tuple((key, tuple(p.shape)) for key, p in values._parameters.items() if p is not None)
    return tuple(tuple(x.shape) for x in tree_leaves(values) if isinstance(x, Tensor))
