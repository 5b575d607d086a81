"""Plan for sequence parallelism: where tokens are split, and the styles of the layers there."""

from __future__ import annotations

from torch.distributed.tensor.placement_types import Shard

from lora_parallel.layers.module_names import block_of, innermost
from lora_parallel.layers.styles import STYLES, with_gathered_input, with_token_input, with_token_output
from lora_parallel.planning.plan_builder import PlanBuilder
from lora_parallel.tracing.structure import Structure
from lora_parallel.tracing.token_chunks import find_sequence

__all__ = ["split_tokens"]


def split_tokens(builder: PlanBuilder, structures: list[Structure], problem: str) -> None:
    """Split the tokens of a model's blocks between tp ranks.

    Args:
        builder: The plan.
        structures: Of the models inside that were run.
        problem: What kept a model from being run, if anything did.

    Raises:
        ValueError: A model's blocks do not work token by token between the layers that are cut.
    """
    remedy = "Use sequence_parallel=False."
    if not structures:
        raise ValueError(
            f"sequence_parallel=True: {type(innermost(builder.model)).__name__} cannot be run without its weights "
            f"({problem}), so that nothing shows where its tokens may be split. {remedy}"
        )
    for structure in structures:
        groups = [group for group in structure.layer_groups if any(group is each for each in builder.layer_groups)]
        model = type(structure.tracer.model).__name__
        in_group = {name for group in groups for name in group.layers}
        for _, plan in builder.plans_of(sorted(structure.called - in_group)):
            if plan.style is not None and block_of(plan.name) and isinstance(plan.style.weight, Shard):
                raise ValueError(
                    f"sequence_parallel=True: {plan.name!r} is {plan.style.name}, and its output would have to be "
                    f"gathered with that of other tokens. {remedy[:-1]}, or the style replicate for it."
                )
        try:
            sequence = find_sequence(structure, groups, builder.tp)
        except ValueError as error:
            raise ValueError(
                f"sequence_parallel=True: the tokens of {model} cannot be split: {error}. {remedy}"
            ) from error
        builder.sequences.append(sequence)
        for module, plan in builder.layers.items():
            if plan.style is None or (module not in sequence.inside and plan.name not in in_group):
                continue
            if plan.name not in in_group:
                plan.style = STYLES["replicated_with_grad_allreduce"]
            elif plan.name in sequence.consumers:
                plan.style = with_token_output(plan.style)
            elif plan.style.enter == "copy":
                plan.style = (
                    with_token_input(plan.style) if plan.name in sequence.layers else with_gathered_input(plan.style)
                )
