"""Break what Accelerate counts, gathers, reduces and deals, where peers of one batch are one process."""

from tests.mutants import Mutant

PEERS = "tests/accelerate_plugin/test_data.py::test_tensor_parallel_peers_act_as_one_process"
DISPATCH = "tests/accelerate_plugin/test_data.py::test_dispatching_one_batch_to_all_is_refused"
STATES = "tests/accelerate_plugin/test_state.py::test_each_attribute_counts_what_was_decided"
LATER = "tests/accelerate_plugin/test_state.py::test_a_later_accelerator_is_checked_like_the_first"
STREAMS = (
    "tests/accelerate_plugin/test_streams.py::test_rows_and_losses_are_those_of_ddp_on_two_processes"
    "[True-by default-27-2x2]"
)

BREAKAGES = [
    Mutant(
        "replaced",
        "Metrics of accelerator.gather count the rows of tensor-parallel peers several times.",
        PEERS,
        "return recursively_apply(once, gathered)",
        "return gathered",
    ),
    Mutant(
        "replaced",
        "gather_object, and gather_for_metrics of what are no tensors, repeat the objects of tensor-parallel peers.",
        PEERS,
        "return [value for values in parallelism.one_per_batch(original([object])) for value in values]",
        "return original(object)",
    ),
    Mutant(
        "replaced",
        "accelerator.reduce adds up the value of each tensor-parallel peer, as if each had a batch of its own.",
        PEERS,
        "share = tensor if parallelism.is_first_of_batch else torch.zeros_like(tensor)",
        "share = tensor",
    ),
    Mutant(
        "replaced",
        "accelerator.reduce divides a mean by the number of all processes, and it is too small.",
        PEERS,
        """return total / parallelism.dp_size if reduction == "mean" else total""",
        """return total / parallelism.total_size if reduction == "mean" else total""",
    ),
    Mutant(
        "replaced",
        "Scripts scale batch sizes and learning rates by the number of all processes.",
        STATES,
        "self.num_processes = parallelism.data_parallel_size",
        "pass",
    ),
    Mutant(
        "replaced",
        "Tensor-parallel peers draw from other seeds and take other shares of a list.",
        STATES,
        "self.process_index = parallelism.dp_rank",
        "pass",
    ),
    Mutant(
        "replaced",
        "split_between_processes gives tensor-parallel peers different inputs.",
        STATES,
        "num_processes=parallelism.dp_size, process_index=parallelism.dp_rank, device=self.device",
        "num_processes=self.num_processes, process_index=self.process_index, device=self.device",
    ),
    Mutant(
        "replaced",
        "on_last_process and is_last_process pick several processes, or none, and a file is written by each of them.",
        STATES,
        "return bool(PartialState().is_last_process)",
        "return bool(self.process_index == self.num_processes - 1)",
    ),
    Mutant(
        "replaced",
        "A trigger that a tensor-parallel peer sets is heard by no one, and the run goes on past it.",
        PEERS,
        """return operations.reduce(mine, "max").item() >= 1""",
        """return operations.reduce(mine, "sum").item() >= 1""",
    ),
    Mutant(
        "replaced",
        "Tensor-parallel peers shuffle differently: each computes a slice of a layer for another batch.",
        PEERS,
        "sampler.generator.manual_seed(_from_rank_zero(int(torch.empty((), dtype=torch.int64).random_())))",
        "sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))",
    ),
    Mutant(
        "replaced",
        "With batches that Trainer balances by length, tensor-parallel peers get different batches.",
        "tests/accelerate_plugin/test_data.py::test_rows_that_trainer_balances_by_length_are_those_of_the_data_parallel_rank",
        "data_loader.batch_sampler.rank = dp_rank",
        "pass",
    ),
    Mutant(
        "replaced",
        "All tensor-parallel peers prepare a data set at once, and write the same files of its cache.",
        "tests/accelerate_plugin/test_state.py::test_the_main_process_goes_first_among_peers_of_one_batch",
        "    if _asked(self) is None:\n        return original(self, local, desc)",
        "    if True:\n        return original(self, local, desc)",
    ),
    Mutant(
        "replaced",
        "With use_seedable_sampler each process shuffles by its own seed: rows are seen twice, others never.",
        DISPATCH,
        "sampler.initial_seed = _from_rank_zero(sampler.initial_seed)",
        "pass",
    ),
    Mutant(
        "replaced",
        "Workers of tensor-parallel peers draw different augmentations of the same rows.",
        PEERS,
        """partial(init.func, *init.args, **{**init.keywords, "rank": dp_rank})""",
        """partial(init.func, *init.args, **init.keywords)""",
    ),
    Mutant(
        "replaced",
        "gather_for_metrics counts rows that only fill up the last batch of a stream, or leaves some out.",
        PEERS,
        "shard.total_dataset_length = len(shard.dataset)",
        "pass",
    ),
    Mutant(
        "replaced",
        "accelerator.no_sync is Accelerate's own, which a model that FSDP2 does not shard has no method for.",
        PEERS,
        "return engine_no_sync(model) if state_of(model) is not None else super().no_sync(model)",
        "return super().no_sync(model)",
    ),
    Mutant(
        "replaced",
        "A short last batch of a stream is filled up to a whole one: rows count several times.",
        STREAMS,
        "-len(rows) % self.num_processes",
        "whole - len(rows)",
    ),
    Mutant(
        "replaced",
        "Predictions on a stream without a length have more rows than the stream.",
        STREAMS,
        "loader.remainder = int(shard.last_rows)",
        "pass",
    ),
    Mutant(
        "guard",
        "A contrastive loss takes the rows of tensor-parallel peers for negatives, which are the same rows.",
        "tests/accelerate_plugin/test_sentence_transformers.py::test_a_loss_that_gathers_from_peers_of_one_batch_is_refused",
        "if gathering and parallelism_within_batch() is not None:",
        "if False:",
    ),
    Mutant(
        "guard",
        "With dispatch_batches=True every data-parallel process trains on the same batch.",
        DISPATCH,
        "    if config.dispatch_batches:\n        raise ValueError(_DISPATCHED)",
        "    if False:\n        raise ValueError(_DISPATCHED)",
    ),
    Mutant(
        "guard",
        "Accelerate's function prepare_data_loader gives peers of one batch different batches of a stream.",
        DISPATCH,
        "    if parallelism_within_batch() is not None:\n        raise ValueError(_DISPATCHED)",
        "    if False:\n        raise ValueError(_DISPATCHED)",
    ),
    Mutant(
        "guard",
        "A second Accelerator with dispatch_batches=True gives every data-parallel process the same batch.",
        LATER,
        "original(*bound.args, **bound.kwargs)\n        check_dispatch(self)\n        return",
        "original(*bound.args, **bound.kwargs)\n        return",
    ),
    Mutant(
        "guard",
        "A dataloader that is prepared after dataloader_config was replaced gives every process the same batch.",
        PEERS,
        "check_dispatch(self)  # again: `dataloader_config` may be another than the Accelerator was made with",
        "pass",
    ),
    Mutant(
        "guard",
        "join_uneven_inputs with even_batches=False leaves processes waiting for ever in a collective.",
        LATER,
        "if not even and self._parallelism.dp_size > 1:",
        "if False:",
    ),
    Mutant(
        "guard",
        "Processes whose optimizers differ train apart under Accelerate.",
        "tests/accelerate_plugin/test_refusals.py::test_bad_input_is_one_error_on_every_rank",
        """alike["optimizers"] = [describe_optimizer(optimizer, nn.ModuleList(models)) for optimizer in bare]""",
        """pass""",
    ),
    Mutant(
        "replaced",
        "Under pp TRL's trainers are given the loss of one micro-batch.",
        "tests/accelerate_plugin/test_pipeline.py::test_trainers_of_trl",
        """        _leave_out_fused_loss(model)
""",
        """        pass
""",
    ),
]
