"""How the experts of a mixture are shared by tp ranks, found by trying.

A module of experts holds stacks [experts, ., .]: projections up and one down. Either each rank computes slices of all
experts (up cut by output features, down by input features), or some experts as a whole. Both ways each rank's output is
a partial sum. How a stack is laid out (transposed, gate and up packed or interleaved, biases) is for its class to know;
so the module's own forward is tried on the parts that each rank would have, which must add up to what it gives whole.
The weights of the trial are products of thin random factors: it costs a few tokens, whatever the size of the experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lora_parallel.collectives import chunk_bounds
from lora_parallel.factored import FactoredWeight, Factors
from lora_parallel.nests import tensors_in
from lora_parallel.selection import Selection
from lora_parallel.wording import brief

__all__ = ["Sharing", "adapter_cuts", "holds_experts", "share_experts"]

_TRIALS = 128
_RANK = 4
_TOLERANCE = 1e-4
"""Of float32; a mistake is of the order of 1."""


@dataclass(frozen=True)
class Sharing:
    """What each rank has of a module of experts."""

    by: str
    """"features": slices of all experts; "experts": all of some."""

    cuts: dict[str, tuple[int, Selection]]
    """Of each parameter that is cut, the dim and each rank's part of it."""

    addends: frozenset[str] = frozenset()
    """Parameters that are added to the output, of which there is one: on the first rank."""

    attributes: dict[str, Any] = field(default_factory=dict)
    """What the module says of its own sizes, on a rank."""

    elsewhere: int = 0
    """By experts: the index that stands for an expert of another rank, with a weight of 0. One past the last, as in
    transformers' expert parallelism, or any, for a forward that knows of none."""

    def routed(self, values: Any, rank: int) -> Any:
        """What a rank is to feed to its share of the module, of what feeds the whole.

        Raises:
            ValueError: There is no index of experts in it.
        """
        if self.by == "features":
            return values
        _, chosen = next(iter(self.cuts.values()))
        start, stop = chosen.ranks[rank][0]
        index = next((x for x in tensors_in(values) if not x.is_floating_point() and x.dtype != torch.bool), None)
        if index is None:
            raise ValueError("no argument of the experts is an index of experts")
        others = (index < start) | (index >= stop)

        def mine(x: Tensor) -> Tensor:
            if x is index:
                return (x - start).masked_fill(others, self.elsewhere)
            return x.masked_fill(others, 0) if x.is_floating_point() and x.shape == others.shape else x

        return tree_map_only(Tensor, mine, values)


def holds_experts(module: nn.Module) -> bool:
    """Whether it holds stacks of expert weights."""
    return len(_stacks(module)) > 1


def _stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """The 3-D parameters, [experts, ., .]."""
    found = {key: p for key, p in module._parameters.items() if p is not None and p.dim() == 3 and p.shape[0] > 1}
    return found if len({p.shape[0] for p in found.values()}) == 1 else {}


def share_experts(module: nn.Module, fed: tuple[tuple[Any, ...], dict[str, Any]], tp: int, by: str) -> Sharing | str:
    """How `module` (in memory of any kind; not changed) can be shared, or why it cannot.

    Args:
        module: It holds experts.
        fed: Positional and keyword arguments that it takes.
        tp: Size of the tp axis.
        by: As in `Sharing`.
    """
    stacks = _stacks(module)
    experts = next(iter(stacks.values())).shape[0]
    if by == "experts":
        if experts % tp:
            return f"it has {experts} experts, no multiple of tp={tp}"
        candidates = _by_experts(module, experts, tp)
    else:
        hidden = next((x.shape[-1] for x in tensors_in(fed) if x.is_floating_point()), 0)
        candidates = _by_features(module, stacks, hidden, tp)
    problem = None
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        torch.manual_seed(0)
        fed = _example(fed, experts)
        values = {key: _random(p) for key, p in module._parameters.items() if p is not None}
        try:
            whole = _run(module, values, {}, fed)
        except Exception as error:
            return f"its forward cannot be tried ({brief(error)})"
        for sharing in islice(candidates, _TRIALS):
            found = _problem(module, sharing, values, fed, whole, tp)
            if found is None:
                return sharing
            problem = problem or found
    if problem is None:
        shapes = ", ".join(f"{key} {tuple(p.shape)}" for key, p in stacks.items())
        problem = (
            f"none of its stacks ({shapes}) is fed a number of features that the others compute and tp={tp} divides"
        )
    return problem


def _by_experts(module: nn.Module, experts: int, tp: int) -> Iterator[Sharing]:
    chosen = Selection.of([range(*chunk_bounds(experts, tp, rank)) for rank in range(tp)], experts)
    cuts = {key: (0, chosen) for key, p in module._parameters.items() if p is not None and p.shape[:1] == (experts,)}
    counts = {
        key: experts // tp for key, value in vars(module).items() if "expert" in key and _is_count(value, experts)
    }
    if hasattr(module, "_is_expert_parallel"):
        yield Sharing("experts", cuts, attributes={**counts, "_is_expert_parallel": True}, elsewhere=experts // tp)
    yield Sharing("experts", cuts, attributes=counts)


def _is_count(value: Any, count: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == count


def _by_features(module: nn.Module, stacks: Mapping[str, nn.Parameter], hidden: int, tp: int) -> Iterator[Sharing]:
    """What may be right, the likeliest first."""
    for down, at in product([*stacks][::-1], (2, 1)):
        width = stacks[down].shape[at]
        if stacks[down].shape[3 - at] != hidden or width % tp:
            continue
        choices: dict[str, list[tuple[int, Selection] | str | None]] = {}
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if key == down:
                choices[key] = [(at, _chunks(width, tp))]
            elif key in stacks:
                choices[key] = [
                    (dim, chosen)
                    for dim in (1, 2)
                    if parameter.shape[3 - dim] == hidden
                    for chosen in _halves(parameter.shape[dim], width, tp)
                ]
            elif parameter.dim() == 2 and parameter.shape[0] == stacks[down].shape[0]:
                choices[key] = [(1, chosen) for chosen in _halves(parameter.shape[1], width, tp)]
                choices[key] += ["addend"] if parameter.shape[1] == hidden else []
            else:
                choices[key] = [None]
        sizes = {key: width // tp for key, value in vars(module).items() if _is_count(value, width)}
        sizes |= {key: 2 * width // tp for key, value in vars(module).items() if _is_count(value, 2 * width)}
        for each in product(*choices.values()):
            chosen_of = dict(zip(choices, each, strict=True))
            cuts = {key: cut for key, cut in chosen_of.items() if isinstance(cut, tuple)}
            addends = frozenset(key for key, cut in chosen_of.items() if cut == "addend")
            yield Sharing("features", cuts, addends)
            if sizes:
                yield Sharing("features", cuts, addends, sizes)


def _chunks(size: int, tp: int) -> Selection:
    return Selection.of([range(*chunk_bounds(size, tp, rank)) for rank in range(tp)], size)


def _halves(size: int, width: int, tp: int) -> list[Selection]:
    """The features that belong to chunks of `width`: the same ones, or those of two matrices, packed or interleaved."""
    if size == width:
        return [_chunks(width, tp)]
    return [Selection.packed([width, width], tp), _chunks(size, tp)] if size == 2 * width else []


def adapter_cuts(wrapper: Any, adapter: str, sharing: Sharing) -> dict[str, tuple[int, Selection]]:
    """How "lora_A" [experts * r, in] and "lora_B" [out, r * experts] of PEFT's `ParamWrapper` go with its parameter."""
    dim, chosen = sharing.cuts[wrapper.parameter_name]
    A, B = wrapper.lora_A[adapter].weight.shape, wrapper.lora_B[adapter].weight.shape
    if dim:
        feeds = A[1] == chosen.size and dim == (2 if wrapper._did_swap_in_out_features else 1)
        return {"lora_A": (1, chosen)} if feeds else {"lora_B": (0, chosen)}
    experts, r = chosen.size, A[0] // chosen.size
    mine = [chosen.rows(rank) for rank in range(len(chosen.ranks))]
    of_A = [(each[:, None] * r + torch.arange(r)).flatten().tolist() for each in mine]
    of_B = [(torch.arange(r)[:, None] * experts + each).flatten().tolist() for each in mine]
    return {"lora_A": (0, Selection.of(of_A, A[0])), "lora_B": (1, Selection.of(of_B, B[1]))}


# ---------------------------------------------------------------------- trial


def _example(fed: Any, experts: int) -> Any:
    """Random numbers in place of what the module was fed: a router without its weights may choose the same experts for
    all tokens, or give no numbers at all.
    """
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
    return FactoredWeight(None, [Factors(left, right, 1.0)])


def _problem(
    module: nn.Module, sharing: Sharing, values: Mapping[str, Any], fed: Any, whole: Tensor, tp: int
) -> str | None:
    total = torch.zeros_like(whole)
    for rank in range(tp):
        mine = dict(values)
        for key, (dim, chosen) in sharing.cuts.items():
            mine[key] = values[key].index_select(dim, chosen.rows(rank))
        for key in sharing.addends:
            mine[key] = values[key] * (rank == 0)
        try:
            part = _run(module, mine, sharing.attributes, sharing.routed(fed, rank))
        except Exception as error:  # whatever a forward raises on sizes that do not fit
            return f"its forward fails on a rank's share ({brief(error)})"
        if part.shape != whole.shape:
            return "its forward, on a rank's share, gives another shape"
        total += part
    right = (total - whole).abs().max() <= _TOLERANCE * whole.abs().max()
    return None if right else "what its forward gives on the shares of all ranks does not add up to the whole"


def _run(module: nn.Module, values: Mapping[str, Any], attributes: Mapping[str, Any], fed: Any) -> Tensor:
    """The output of the module's own forward with other parameters and attributes, which stand before its own."""
    changed = {**values, **attributes}
    before = {key: module.__dict__[key] for key in changed if key in module.__dict__}
    try:
        module.__dict__.update(changed)
        args, kwargs = tree_map_only(Tensor, torch.clone, fed)
        output = module(*args, **kwargs)
    finally:
        for key in changed:
            del module.__dict__[key]
        module.__dict__.update(before)
    if not isinstance(output, Tensor):
        raise TypeError(f"it gives a {type(output).__name__}")
    return output.detach().clone()
