"""Passes of `parallelize` in another order, of which nobody would see more than what is said here."""

from __future__ import annotations

from tests.mutants import ROOT, Mutant

ENGINE = "tests/lora_parallel"
TEXT = (ROOT / "lora_parallel" / "parallelize.py").read_text()


def moved(name: str, to: str) -> tuple[str, str]:
    """Return the lines of the passes from `name` to `to`, and the same with `name` on the other side of `to`."""
    line, other = f"    {name},\n", f"    {to},\n"
    start, end = TEXT.index(line), TEXT.index(other)
    if start < end:
        old = TEXT[start : end + len(other)]
        return old, old.removeprefix(line) + line
    old = TEXT[end : start + len(line)]
    return old, line + old.removesuffix(line)


BREAKAGES = [
    Mutant("pass", harm, f"{ENGINE}/{test}", *moved(name, to))
    for name, to, harm, test in [
        (
            "add_adapter",
            "find_places",
            "Gradients of an adapter that parallelize injects outside of the blocks are cp times too large.",
            "cp/test_around_blocks.py::test_an_injected_adapter_around_the_blocks_equals_one_process",
        ),
        (
            "start_alike",
            "shard_over_tp",
            "Ranks of an unseeded job take the first tensor parallel rank's slices for theirs.",
            "loading/test_sync_module_states.py::test_unseeded_models_become_those_of_rank_zero",
        ),
        (
            "keep_own_stages",
            "fill_shards",
            "Each rank of a pipeline reads and holds the weights of all stages.",
            "pp/test_steps.py::test_each_stage_reads_and_holds_its_own",
        ),
        (
            "fit_parameters",
            "shard_over_tp",
            "A tied weight that sharding unties is not noticed, and its two copies drift apart.",
            "test_sensitivity.py::test_the_comparison_or_a_guard_shows_a_mistake",
        ),
        (
            "share_random_numbers",
            "shard_over_tp",
            "LoRA dropout of rowwise layers drops other features on each tensor parallel mesh.",
            "adapters/test_dropout.py::test_every_mesh_drops_the_same_elements",
        ),
        (
            "share_random_numbers",
            "split_tokens_over_cp",
            "LoRA dropout drops the same places of each cp rank's chunk of the tokens.",
            "cp/test_context_parallel.py::test_dropout_drops_the_same_elements",
        ),
        (
            "shard_over_tp",
            "split_logits",
            "With loss_parallel the logits of each rank are of the whole vocabulary all the same.",
            "tp/test_loss_parallel.py::test_every_operation_has_the_result_of_all_logits",
        ),
        (
            "shard_over_dp",
            "leave_nested_eager",
            "Compiled blocks with a weight of another block compute with the shard of it that is there as they begin.",
            "runtime/test_compiled_blocks.py::test_blocks_that_share_a_weight_with_another_run_eagerly",
        ),
        (
            "shard_over_dp",
            "fill_shards",
            "Each data-parallel rank reads what all of them hold, before FSDP2 shards it.",
            "lazy/test_materialize.py::test_each_rank_reads_the_bytes_it_owns",
        ),
        (
            "guard_optimizers",
            "shard_over_tp",
            "An optimizer that was made before sharding steps tensors that are replaced after it was looked at.",
            "runtime/test_optimizer_params.py::test_a_step_of_what_sharding_replaced_is_refused",
        ),
    ]
]
