"""Resolve a model's tensor parallel plan: from its own `tp_plan`, the user's globs and what running it shows to a style
for each module.

A plan names modules as the model's author named them. PEFT and wrappers put components of their own into module names
(`base_model.model.`, `.base_layer`, `.modules_to_save.default`). These components are taken out before a name is
matched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lora_parallel.adapters.peft_private import keep_factored
from lora_parallel.fsdp.wrapping import check_dtypes, check_scalars, check_whole_base, wants_fsdp
from lora_parallel.layers.layer_parameters import clean_names, innermost
from lora_parallel.layers.styles import EXPERT_SPLITS, STYLES, RowPartition, Style, style_named
from lora_parallel.lazy.tracking import check_fresh
from lora_parallel.planning.entries import PlanBuilder, entries_of_models, set_aside_unshown, take_entries
from lora_parallel.planning.experts import plan_experts
from lora_parallel.planning.passes import (
    add_replicated,
    check_between,
    check_entries,
    complete,
    fit_groups,
    keep_small_whole,
    keep_whole,
    log_plan,
    partition_packed,
    split_tokens,
)
from lora_parallel.planning.plan_checks import FirstBatchCheck, check_kinds, check_ties, check_widths
from lora_parallel.planning.proven_plans import proven_plan
from lora_parallel.runtime.description import is_checked
from lora_parallel.state import Setup
from lora_parallel.tp.experts import ExpertSharing
from lora_parallel.tp.sequence import Sequence
from lora_parallel.tracing.inputs import TraceError, viewed_with
from lora_parallel.tracing.prove_feature_slices import Structure, find_structure
from lora_parallel.tracing.tracer import traced_models

_WHOLE = "tp_plan={} to compute what no entry names in full on every tp rank"


@dataclass(frozen=True)
class Plan:
    """Hold the tensor parallel style of each module, and all else that is needed to apply the styles."""

    # Name (without PEFT's additions) and style of each module that has a style.
    styles: dict[nn.Module, tuple[str, Style]]
    # Output features of each rank, for each colwise layer that is not cut into one chunk a rank.
    partitions: dict[nn.Module, RowPartition] = field(default_factory=dict)
    # Parameters that act on slices and have values for each feature or head, by the module that holds them and their
    # name in it: the dim that is cut, and the rows of each rank.
    cuts: dict[nn.Module, dict[str, tuple[int, RowPartition]]] = field(default_factory=dict)
    # Sizes that modules keep (numbers of heads, widths) as they are on a rank, by module and attribute name.
    attributes: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    # Checks that are to be made on the first batch, one for each model that could not be run before.
    first_batch_checks: list[FirstBatchCheck] = field(default_factory=list)
    # Part of the experts that each rank has, for each module of experts that ranks share.
    sharings: dict[nn.Module, ExpertSharing] = field(default_factory=dict)
    # Places where tokens are split among ranks and gathered (sequence parallelism), for each model that was run.
    sequences: list[Sequence] = field(default_factory=list)

    def of(self, twins: Mapping[nn.Module, nn.Module]) -> Plan:
        """Return the plan of modules that are like the modules of this plan; one that has no twin is left out."""
        parts = {
            attribute.name: {twins[module]: value for module, value in value_of.items() if module in twins}
            for attribute in fields(self)
            if isinstance(value_of := getattr(self, attribute.name), dict)
        }
        return replace(self, **parts)  # type: ignore[arg-type]


def check_globs(model: nn.Module, globs: Mapping[str, str]) -> None:
    """Check the user's plan as far as the size of the mesh does not matter."""
    names = set(clean_names(model).values()) - {""}
    for glob, style in globs.items():
        style_named(style, f"the entry {glob!r}")
        if not any(fnmatchcase(name, glob) for name in names):
            near = sorted({name for name in names if name.rsplit(".", 1)[-1] == glob.rsplit(".", 1)[-1]})
            deepest = sorted(names, key=lambda name: (-name.count("."), name))
            hint = f"Modules: {', '.join([*deepest[:3], '...'])}"
            hint = f"Modules of that last name: {', '.join(near[:3])}" if near else hint
            raise ValueError(
                f"tp_plan: the entry {glob!r} ({style}) matches no module. {hint}. Write names without "
                "base_model.model. and .base_layer."
            )


def resolve_plan(model: nn.Module, globs: Mapping[str, str] | None, tp: int, sequence_parallel: bool = False) -> Plan:
    """Return the plan of a model at this `tp`, or raise an error that names the layer. The model is not changed."""
    # `globs` replace entries of the model's own plan (`*` matches dots too; in its own plan one component). Without
    # entries ({}) a model that has no plan is computed in full on every tp rank; None does not allow that.
    check_globs(model, globs or {})
    names = clean_names(model)
    builder = PlanBuilder(model, names, tp)
    declared = entries_of_models(builder)
    take_entries(builder, declared, globs or {})
    check_kinds({module: entry for module, entry in builder.styles.items() if builder.layers[module].asked}, tp)
    between = {name for name, style in builder.styles.values() if style is STYLES["replicated_with_grad_allreduce"]}
    structures, first_batch_checks, problem = _structures(model, names, tp, between, trusted=globs is None)
    if globs is None and not structures and (not declared or set_aside_unshown(builder, declared)):
        lack = "no tp_plan"
        for _, key, style in builder.set_aside:
            lack = f"a plan whose entry {key!r} asks for the style {style!r}, which is not known without a run"
        raise ValueError(
            f"tp={tp}, but {type(innermost(model)).__name__} carries {lack}, and none can be derived, as "
            f"running it without its weights fails ({problem}): "
            f'pass tp_plan={{"<glob of module names>": "colwise" | "rowwise" | ...}}, {_WHOLE}, or use tp=1. '
            '"colwise_gather_output" is right for any linear layer.'
        )
    for structure in structures:
        fit_groups(builder, structure)
    check_entries(builder, structures)
    check_between(builder, structures)
    plan_experts(builder, structures, sequence_parallel)
    of_layers = [glob for glob, style in (globs or {}).items() if style not in EXPERT_SPLITS]
    if structures and not of_layers:
        complete(builder, structures)
    keep_whole(builder, structures)
    keep_small_whole(builder)
    partition_packed(builder)
    if declared and globs is None and not builder.styles:
        raise ValueError(
            f"tp={tp}: no entry of the plan that {type(innermost(model)).__name__} carries matches a module of it: "
            f'pass tp_plan={{"<glob>": "<style>"}}, or {_WHOLE}.'
        )
    add_replicated(builder, whole=globs is not None and not globs)
    if sequence_parallel:
        split_tokens(builder, structures, problem)
    styles = builder.styles
    check_kinds(styles, tp)
    check_widths(names, styles, builder.proven, tp)
    check_ties(model, styles)
    log_plan(builder, problem, bool(first_batch_checks))
    for check in first_batch_checks:
        check.expect(styles, builder.partitions)
    return Plan(
        styles,
        builder.partitions,
        builder.cuts,
        builder.attributes,
        first_batch_checks,
        builder.sharings,
        builder.sequences,
    )


def _structures(
    model: nn.Module, names: Mapping[nn.Module, str], tp: int, whole: Collection[str], trusted: bool
) -> tuple[list[Structure], list[FirstBatchCheck], str]:
    """Run the transformers models in `model` without their weights; return what they show."""
    # A model inside of another (a vision tower) is run by itself if the outer one fails or does not reach it.
    structures: list[Structure] = []
    first_batch_checks: list[FirstBatchCheck] = []
    problem = ""
    reached: set[nn.Module] = set()
    for inner in traced_models(model):
        if any(module in reached for module in inner.modules()):
            continue
        try:
            known = proven_plan(inner) if trusted and not is_checked() else None
            structure = find_structure(inner, names, tp, whole, known=known)
        except TraceError as error:
            problem = problem or str(error)
            with suppress(TraceError):
                if inner in (model, innermost(model)):
                    first_batch_checks.append(FirstBatchCheck(inner, names, tp))
            continue
        structures.append(structure)
        reached.update(module for module, name in names.items() if name in structure.called)
    return structures, first_batch_checks, problem


def plan_layers(setup: Setup) -> None:
    """Refuse parameters that cannot be sharded, and resolve the model's plan, which is empty without a tp axis."""
    check_fresh(setup.model)
    tp = setup.mesh["tp"].size()
    if wants_fsdp(setup.mesh, setup.config):
        check_scalars(setup.model)
        check_whole_base(setup)
        if tp > 1:
            check_dtypes(setup.model)
    keep_factored(setup.model)  # the plan is made of what is computed on a mesh
    config = setup.config
    globs = None if isinstance(config.tp_plan, str) else config.tp_plan
    if setup.plan is None:
        setup.plan = resolve_plan(setup.model, globs, tp, config.sequence_parallel) if tp > 1 else Plan({})


def set_local_sizes(setup: Setup) -> None:
    """Set the sizes that modules keep (numbers of heads, widths) to those of this rank's slices."""
    for module, values in setup.plan.attributes.items():
        for key, value in values.items():
            setattr(module, key, viewed_with(getattr(module, key), value))
