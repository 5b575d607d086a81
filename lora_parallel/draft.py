"""A plan in the making: entries of plans, what running the model shows, and what is left."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard
from torch.utils._pytree import tree_leaves

from lora_parallel.adapter_forms import cut_problem, problem_anywhere
from lora_parallel.experts import Sharing, holds_experts, share_experts
from lora_parallel.flow import Flow
from lora_parallel.layers import base_of, features_dim, is_linear, shared_parameters
from lora_parallel.names import embeddings_of, innermost
from lora_parallel.plan_checks import check_widths, cut_as, leaves_a_rank_empty
from lora_parallel.probe import probed_models
from lora_parallel.selection import Selection
from lora_parallel.sequence import Sequence, find_sequence
from lora_parallel.structure import Structure
from lora_parallel.styles import STYLES, WAYS_OF_EXPERTS, Style, fed_all, fed_tokens, giving_tokens, style_named

__all__ = ["Draft", "Entries"]

log = logging.getLogger(__name__)

Entries = list[tuple[re.Pattern[str], str]]
"""Patterns of names, and styles."""


class Draft:
    """A plan in the making.

    Args:
        model: As in `resolve_plan`.
        names: Of its layers.
        tp: Size of the tp axis.
    """

    def __init__(self, model: nn.Module, names: Mapping[nn.Module, str], tp: int) -> None:
        self.model, self.names, self.tp = model, names, tp
        self.styles: dict[nn.Module, tuple[str, Style]] = {}
        self.selections: dict[nn.Module, Selection] = {}
        self.cuts: dict[nn.Module, dict[str, tuple[int, Selection]]] = {}
        self.attributes: dict[nn.Module, dict[str, Any]] = {}
        self.sharings: dict[nn.Module, Sharing] = {}
        self.sequences: list[Sequence] = []
        self.proven: set[nn.Module] = set()
        """Layers of flows, and parameters between them: shown to be right by running the model."""

        self._by_user: dict[str, str] = {}
        """The user's entry for a name."""

        self._between: set[nn.Module] = set()
        self._active: list[Flow] = []
        self._tabled: set[nn.Module] = set()
        self._packed: set[nn.Module] = set()
        self._completed = False
        self._direct: set[str] = set()
        self._gathered: dict[str, str] = {}
        self._whole: dict[str, str] = {}
        self._modules: dict[str, list[nn.Module]] = {}
        for module, name in names.items():
            self._modules.setdefault(name, []).append(module)

    def take(self, own: Entries, table: Entries, globs: Mapping[str, str]) -> None:
        """The entries of plans. A style in a model's own plan that there is none of here is left out.

        Args:
            own: Of plans that models carry.
            table: Of `families`, which say nothing of heads and fused layers and hold as far as they are proven.
            globs: The user's.
        """
        for module, name in self.names.items():
            chosen = next((style for pattern, style in own if pattern.fullmatch(name)), None)
            if chosen is None:
                chosen = next((style for pattern, style in table if pattern.fullmatch(name)), None)
                if chosen is not None:
                    self._tabled.add(module)
            if chosen is not None and chosen in STYLES:
                self._give(module, name, STYLES[chosen])
            for glob, style in globs.items():
                if fnmatchcase(name, glob):
                    self._give(module, name, style_named(style, f"the entry {glob!r}"))
                    self._by_user[name] = f"the entry {glob!r}"

    def _give(self, module: nn.Module, name: str, style: Style) -> None:
        """Note an entry. What is packed is colwise, on rows that running the model shows, or else two matrices'."""
        packed = style is STYLES["packed_colwise"]
        self.styles[module] = name, STYLES["colwise"] if packed else style
        (self._packed.add if packed else self._packed.discard)(module)

    def check_between(self, structures: list[Structure]) -> None:
        """A partial gradient is a mistake in what does not act on slices.

        Raises:
            ValueError: The user says of something that was run that it acts on slices, and it does not.
        """
        entered = set()
        for structure in structures:
            probe = structure.probe
            entered |= {real for real, twin in probe.twin_of.items() if twin in probe.entered}
        for module, (name, style) in self.styles.items():
            partial = style is STYLES["replicated_with_grad_allreduce"] and name in self._by_user
            if partial and module in entered and self._between.isdisjoint(module.modules()):
                raise ValueError(
                    f"tp_plan: {self._by_user[name]} makes {name!r} replicated_with_grad_allreduce, which is for what "
                    "acts on the slices between a colwise and a rowwise layer, and it does not: use replicate."
                )

    def pack(self) -> None:
        """Choose the rows of packed layers that no run shows.

        Raises:
            ValueError: tp does not divide a half.
        """
        for module in self._packed - self.proven:
            if module in self.styles and is_linear(base_of(module)):
                base: Any = base_of(module)
                half, odd = divmod(base.weight.shape[features_dim(base)], 2)
                if odd or half % self.tp:
                    raise ValueError(
                        f"tp={self.tp} does not divide {self.styles[module][0]!r}: packed_colwise cuts each half of "
                        f"its {2 * half + odd} output features."
                    )
                self.selections[module] = Selection.packed([half, half], self.tp)

    @property
    def asked_for(self) -> dict[nn.Module, tuple[str, Style]]:
        """What the user says."""
        return {module: entry for module, entry in self.styles.items() if entry[0] in self._by_user}

    @property
    def between_slices(self) -> set[str]:
        """Layers that a plan says are whole and act on slices."""
        return {name for name, style in self.styles.values() if style is STYLES["replicated_with_grad_allreduce"]}

    def fit(self, structure: Structure) -> None:
        """Take over the flows that a model was shown to have, unless the user says otherwise."""
        inside_blocks = any(_in_block(name) for flow in structure.flows for name in flow.units)
        for flow in self._consistent(structure.flows):
            wanted = {name: self._flow_style(name) for name in flow.sources}
            wanted |= dict.fromkeys(flow.sinks, STYLES["rowwise"])
            modules = [module for name in wanted for module in self._modules[name]]
            if any(
                name in self._by_user and self.styles[module][1] is not style
                for name, style in wanted.items()
                for module in self._modules[name]
            ):
                reason = next(self._by_user[name] for name in wanted if name in self._by_user)
                structure.rejected.update(dict.fromkeys(wanted, f"{reason} asks for another style in the same flow"))
                self._drop_between(flow)
                continue
            problems = (cut_problem(module, style) for name, style in wanted.items() for module in self._modules[name])
            if (problem := next(filter(None, problems), None)) is not None:
                structure.rejected.update(dict.fromkeys(wanted, f"in the same flow, {problem}"))
                self._drop_between(flow)
                continue
            planned = any(module in self.styles for module in modules)
            if not planned and ((inside_blocks and not all(map(_in_block, wanted))) or self._is_head(flow.sinks)):
                continue
            self._active.append(flow)
            for name, style in wanted.items():
                for module in self._modules[name]:
                    self.styles[module] = name, style
                    self.proven.add(module)
                    selection = flow.sources.get(name)
                    if selection is not None and not selection.is_chunked:
                        self.selections[module] = selection
            for module, values in flow.attributes.items():
                self.attributes.setdefault(module, {}).update(values)
            for (module, key), cut in flow.between.items():
                self._between.add(module)
                if cut is not None:
                    self.cuts.setdefault(module, {})[key] = cut

    def _consistent(self, flows: list[Flow]) -> list[Flow]:
        """Those whose layers share weights only with layers that are cut alike."""
        tied = list(shared_parameters(self.model).values())
        layer_of = {base_of(module): module for module in self.names}
        while True:
            cut_as = {
                module: (name in flow.sinks, flow.sources.get(name))
                for flow in flows
                for name in flow.units
                for module in self._modules[name]
            }
            loose = {
                layer_of[each]
                for holders in tied
                for each in holders
                if each in layer_of and len({cut_as.get(layer_of.get(each, each)) for each in holders}) > 1
            }
            kept = [
                flow
                for flow in flows
                if not any(module in loose for name in flow.units for module in self._modules[name])
            ]
            if len(kept) == len(flows):
                return kept
            flows = kept

    def _drop_between(self, flow: Flow) -> None:
        """What a plan says acts on slices acts on whole tensors, where a flow is not cut."""
        for module, _ in flow.between:
            if module not in self._between and self.names.get(module) not in self._by_user:
                self.styles.pop(module, None)

    def _flow_style(self, name: str) -> Style:
        embeds = any(isinstance(base_of(module), nn.Embedding) for module in self._modules[name])
        return STYLES["embedding_colwise" if embeds else "colwise"]

    def _is_head(self, names: Iterable[str]) -> bool:
        heads = {base_of(module) for module in _ends(self.model, "output")}
        return any(base_of(module) in heads for name in names for module in self._modules[name])

    def check_entries(self, structures: list[Structure]) -> None:
        """Of layers that were run, those that compute slices must be in a flow.

        Raises:
            ValueError: One is not, and the user says that it computes slices.
        """
        flows = [flow for structure in structures for flow in structure.flows]
        # One that was found can be cut, whatever keeps it whole: the widths of its layers are no matter then.
        fitting = self.proven | {module for flow in flows for name in flow.units for module in self._modules[name]}
        for structure in structures:
            for name in sorted(structure.called):
                for module in self._modules[name]:
                    entry = self.styles.get(module)
                    if entry is None or module in self.proven or not entry[1].even:
                        continue
                    kind = entry[1].name
                    reason = structure.rejected.get(name, _NO_SINK)
                    if name in self._by_user:
                        check_widths(self.names, self.styles, fitting, self.tp)
                        raise ValueError(
                            f"tp_plan: {self._by_user[name]} makes {name!r} {kind}, which is not what "
                            f"{type(innermost(self.model)).__name__} computes: {reason}. A rowwise layer takes slices "
                            "that colwise layers before it compute, all of them and nothing else. "
                            '"colwise_gather_output" and "rowwise_split_input" are right for any linear layer.'
                        )
                    check_widths(self.names, self.styles, fitting, self.tp)
                    del self.styles[module]  # `complete` gives it a style that is right for any
                    if not is_linear(base_of(module)):
                        continue
                    self.styles[module] = name, STYLES["colwise_gather_output"]
                    self._gathered[name] = reason
            self._direct |= structure.used_directly
            for name in structure.used_directly:
                for module in self._modules.get(name, ()):
                    if name not in self._by_user:
                        self.styles.pop(module, None)
        for module in self._tabled - self.proven:
            if module in self.styles and self.names[module] not in self._by_user:
                del self.styles[module]
        for module in list(self.styles):
            name, style = self.styles[module]
            layer = is_linear(base_of(module)) or isinstance(base_of(module), nn.Embedding)
            if name not in self._by_user and not layer and isinstance(style.weight, Shard):
                del self.styles[module]  # experts, say: a model's own plan means something else by the style

    def share_experts(self, structures: list[Structure], sequence_parallel: bool) -> None:
        """Share the experts of mixtures: slices of all of them on each rank if that is what their forward can do, or
        else some of them; or as the user says.

        Args:
            structures: Of the models inside.
            sequence_parallel: A rank computes with its own tokens only, and needs all of the experts for them.

        Raises:
            ValueError: They cannot be shared as the user says, or have adapters and cannot be shared at all.
        """
        ways = {STYLES[style]: by for style, by in WAYS_OF_EXPERTS.items()}
        fed = {
            module: (probe, probe.twin_of[base])
            for probe in (structure.probe for structure in structures)
            for module in self.names
            if (base := base_of(module)) in probe.twin_of and probe.twin_of[base] in probe.experts
        }
        bases = [base_of(module) for module in self.names]
        known: dict[object, Sharing | str] = {}
        for module, name in self.names.items():
            base = base_of(module)
            asked = ways.get(self.styles[module][1]) if name in self._by_user else None
            if asked is not None and not holds_experts(base):
                raise ValueError(
                    f"tp_plan: {self._by_user[name]} makes {name!r} {self.styles[module][1].name}, and "
                    f"{type(base).__name__} holds no stacks of experts: parameters [experts, ., .], of several."
                )
            if name in self._by_user and asked is None:
                continue
            if self.styles.get(module, ("", None))[1] in ways:
                del self.styles[module]
            if not holds_experts(base):
                continue
            if module not in fed and any(other in fed for other in self._modules[name]):
                continue  # of `modules_to_save`, the original, which is not computed with
            reasons = ["nothing that the model was run with reached it"] if module not in fed else []
            if bases.count(base) > 1:
                reasons = ["several layers share them"]
            if sequence_parallel:
                reasons = ["with sequence_parallel=True each rank has the tokens of its own only: set it to False"]
            for style, by in ways.items() if not reasons else ():
                if asked not in (None, by):
                    continue
                probe, twin = fed[module]
                key = type(base), by, _shapes(base), _shapes(probe.experts[twin])
                if key not in known:
                    known[key] = share_experts(twin, probe.experts[twin], self.tp, by)
                found = known[key]
                if isinstance(found, str):
                    reasons.append(f"{style.name}: {found}")
                    continue
                self.styles[module] = name, style
                self.sharings[module] = found
                self.attributes.setdefault(base, {}).update(found.attributes)
                break
            if module in self.sharings:
                continue
            why = "; ".join(reasons)
            if asked is not None or isinstance(module, BaseTunerLayer):
                raise ValueError(
                    f"tp={self.tp}: the experts {name!r} ({type(base).__name__}) cannot be shared by tp ranks: {why}. "
                    'Use another tp, tp=1 (FSDP2 only), the style "replicate" for them (in full on every tp rank), or '
                    "leave them out of target_parameters and of tp_plan."
                )
            if not sequence_parallel:
                self._whole[name] = why

    def complete(self, structures: list[Structure]) -> None:
        """Give the large layers that no plan speaks of, and no flow has, the style that is right for any."""
        called = {name for structure in structures for name in structure.called}
        reasons = {name: reason for structure in structures for name, reason in structure.rejected.items()}
        for module, name in self.names.items():
            base = base_of(module)
            if module in self.styles or name in self._direct or not is_linear(base):
                continue
            adapted = isinstance(module, BaseTunerLayer)
            if _in_block(name) and (adapted or name in called):
                self.styles[module] = name, STYLES["colwise_gather_output"]
                self._gathered[name] = reasons.get(name, _NO_SINK)
        ends: dict[Literal["input", "output"], str] = {"input": "embedding_rowwise", "output": "colwise_gather_output"}
        for side, style in ends.items():
            for module in _ends(self.model, side):
                fits = isinstance(base_of(module), nn.Embedding) if side == "input" else is_linear(base_of(module))
                if (
                    fits
                    and module in self.names
                    and module not in self.styles
                    and self.names[module] not in self._direct
                ):
                    self.styles[module] = self.names[module], STYLES[style]
        self._untie()
        self._completed = True

    def keep_whole(self, structures: list[Structure]) -> None:
        """Leave whole what cannot be cut, where no user says otherwise and nothing takes slices of it."""
        reached = {name for structure in structures for name in structure.called}
        for module, name in self.names.items():
            entry = self.styles.get(module)
            if entry is None and not isinstance(module, BaseTunerLayer):
                continue
            problem = cut_problem(module, entry[1] if entry is not None else STYLES["colwise_gather_output"])
            if problem is None or name in self._by_user or problem_anywhere(module) is not None:
                continue
            if entry is None or not entry[1].even or (name in reached and module not in self.proven):
                self.styles[module] = name, STYLES["replicate"]
                self._whole[name] = problem
                self._gathered.pop(name, None)
        if self._whole:
            self._untie()
        if self._completed:
            for module, name in self.names.items():
                if isinstance(module, BaseTunerLayer):
                    self.styles.setdefault(module, (name, STYLES["replicate"]))

    def keep_small_whole(self) -> None:
        """Leave layers whole that have too few features for each tp rank to get some: they give the same, and FSDP2
        reduces no gradient without elements.
        """
        for module, (name, style) in self.styles.items():
            if not style.even and leaves_a_rank_empty(module, style, self.tp):
                self.styles[module] = name, STYLES["replicate"]
                self._gathered.pop(name, None)

    def _untie(self) -> None:
        """Leave layers whole that share a weight with something that is."""
        tied = shared_parameters(self.model).values()
        layer_of = {base_of(module): module for module in self.names}
        while True:
            apart = [
                holders
                for holders in tied
                if len({cut_as(self.styles.get(layer_of.get(each, each))) for each in holders}) > 1
            ]
            loose = [
                layer_of[each]
                for holders in apart
                for each in holders
                if each in layer_of
                and layer_of[each] in self.styles
                and self.names[layer_of[each]] not in self._by_user
                and isinstance(self.styles[layer_of[each]][1].weight, Shard)
            ]
            if not loose:
                return
            for module in dict.fromkeys(loose):
                del self.styles[module]

    def add_replicated(self) -> None:
        """Give a style to what trains outside of the plan, so that every trained tensor ends as a DTensor over tp; and
        to what acts on slices.
        """
        for module, name in self.names.items():
            if module in self._between and module not in self.proven:
                trains = any(p is not None and p.requires_grad for p in module._parameters.values())
                if trains or module in self.cuts or module in self.styles:
                    self.styles[module] = name, STYLES["replicated_with_grad_allreduce"]
                continue
            if module in self.styles:
                continue
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                raise ValueError(
                    f"tp={self.tp}: {name!r} has adapter layers ({type(module).__name__}) but no tensor parallel style. "  # noqa: E501
                    f'Add it to the plan, for example tp_plan={{"{_glob(name)}": "colwise"}} (or "replicate", computed '
                    "in full on every tp rank), or leave it out of target_modules."
                )
            if any(p is not None and p.requires_grad for p in module._parameters.values()):
                if name in self._direct:
                    raise ValueError(
                        f"tp={self.tp}: {name!r} trains, and its weight is used without calling it, where tensor "
                        "parallelism has no hold of it: freeze it, or use tp=1 (FSDP2 only)."
                    )
                self.styles[module] = name, STYLES["replicate"]

    def split_tokens(self, structures: list[Structure], problem: str) -> None:
        """Plan for sequence parallelism.

        Raises:
            ValueError: A model's blocks do not work token by token between the layers that are cut.
        """
        remedy = "Use sequence_parallel=False."
        if not structures:
            raise ValueError(
                f"sequence_parallel=True: {type(innermost(self.model)).__name__} cannot be run without its weights "
                f"({problem}), so that nothing shows where its tokens may be split. {remedy}"
            )
        for structure in structures:
            flows = [flow for flow in structure.flows if any(flow is each for each in self._active)]
            model = type(structure.probe.model).__name__
            in_flow = {name for flow in flows for name in flow.units}
            for name in sorted(structure.called - in_flow):
                for module in self._modules[name]:
                    style = self.styles[module][1] if module in self.styles and _in_block(name) else None
                    if style is not None and isinstance(style.weight, Shard):
                        raise ValueError(
                            f"sequence_parallel=True: {name!r} is {style.name}, and its output would have to be "
                            f"gathered with that of other tokens. {remedy[:-1]}, or the style replicate for it."
                        )
            try:
                sequence = find_sequence(structure, flows, self.tp)
            except ValueError as error:
                raise ValueError(
                    f"sequence_parallel=True: the tokens of {model} cannot be split: {error}. {remedy}"
                ) from error
            self.sequences.append(sequence)
            for module, name in self.names.items():
                if module not in sequence.inside and name not in in_flow:
                    continue
                style = self.styles[module][1] if module in self.styles else None
                if name in in_flow and style is not None:
                    if name in sequence.sinks:
                        style = giving_tokens(style)
                    elif style.enter == "copy":
                        style = fed_tokens(style) if name in sequence.layers else fed_all(style)
                    self.styles[module] = name, style
                elif style is not None:
                    self.styles[module] = name, STYLES["replicated_with_grad_allreduce"]

    def say(self, problem: str) -> None:
        """Tell the plan, on rank 0; louder what costs more than it might, and that a plan was not tried."""
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        model = type(innermost(self.model)).__name__
        chosen = _counted({name: self._in_words(module) for module, (name, _) in self.styles.items()})
        lines = "\n".join(f"  {glob}: {what} ({count} layers)" for (glob, what), count in chosen.items())
        log.info("tp_plan of %s for tp=%d:\n%s", model, self.tp, lines)
        if problem:
            log.warning(
                "tp_plan: %s could not be run without its weights (%s%s): its plan will be tried on the first batch, "
                "and refused there if it is not what the model computes. There is nothing to do.",
                model,
                "its forward was replaced, as TRL's trainers do; " if "forward" in vars(innermost(self.model)) else "",
                problem,
            )
        reasons = {_glob(name): reason for name, reason in sorted(self._gathered.items(), key=_vague_first)}
        for (glob, reason), count in _counted({name: reasons[_glob(name)] for name in self._gathered}).items():
            log.warning("tp_plan: the output of %s (%d layers) is gathered after each: %s.", glob, count, reason)
        for (glob, reason), count in _counted(self._whole).items():
            log.warning("tp_plan: %s (%d layers) is computed in full on every tp rank: %s.", glob, count, reason)

    def _in_words(self, module: nn.Module) -> str:
        name = self.styles[module][1].name
        if module not in self.selections:
            return name
        return f"{name}, {self.selections[module].width} of {self.selections[module].size} rows on each rank"


def _shapes(values: Any) -> object:
    """Of a module's parameters, or of all tensors in arguments."""
    if isinstance(values, nn.Module):
        return tuple((key, tuple(p.shape)) for key, p in values._parameters.items() if p is not None)
    return tuple(tuple(x.shape) for x in tree_leaves(values) if isinstance(x, Tensor))


_NO_SINK = "no layer takes slices of what it computes"


def _vague_first(said: tuple[str, str]) -> bool:
    return said[1] != _NO_SINK


def _counted(said: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """How many layers of a kind the same is said of."""
    counts: dict[tuple[str, str], int] = {}
    for name, what in said.items():
        counts[_glob(name), what] = counts.get((_glob(name), what), 0) + 1
    return counts


def _in_block(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _ends(model: nn.Module, side: Literal["input", "output"]) -> list[nn.Module]:
    """The input or output embeddings of the models inside."""
    found = []
    for inner in probed_models(model):
        layer = embeddings_of(inner, side)
        if layer is not None:
            found.append(layer)
    return found


def _glob(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)
