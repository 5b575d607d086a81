"""Lightning's strategies: shares of the data, values of all ranks, gradients, precision, and what is refused."""

from tests.mutants import Mutant

FOLDER = "tests/lightning_lora"
LOOPS = f"{FOLDER}/test_loops.py"
SAMPLERS = f"{FOLDER}/test_data.py::test_injected_samplers"
DIFFERENTIABLE = f"{LOOPS}::test_gather_with_gradients"
TOGETHER = f"{LOOPS}::test_all_ranks_stop_together"
FABRIC_VALUES = f"{FOLDER}/test_fabric_loop.py::test_data_and_communication_are_over_data_parallel_ranks"
REPLICAS = f"{FOLDER}/test_fabric_loop.py::test_each_shard_of_each_replica_counts_as_one_data_parallel_rank"

BREAKAGES = [
    Mutant(
        "guard",
        "Where the process that started the others fails, they wait for it over NCCL until the timeout.",
        "tests/lightning_lora/test_launch.py::test_an_error_is_told_before_it_ends_the_processes_that_were_started",
        """                process.kill()""",
        """                pass""",
    ),
    # values of all ranks
    Mutant(
        "backward",
        "A loss of gathered values trains on what one rank says of its row.",
        DIFFERENTIABLE,
        "dist.all_reduce(total, group=ctx.group)\n        return total[dist.get_rank(ctx.group)], None",
        "return total[dist.get_rank(ctx.group)], None",
    ),
    Mutant(
        "backward",
        "A loss of gathered values gives every rank the gradient of the first rank's row.",
        DIFFERENTIABLE,
        "return total[dist.get_rank(ctx.group)], None",
        "return total[0], None",
    ),
    Mutant(
        "collective",
        "Gathering a view of a tensor returns its elements in another order.",
        DIFFERENTIABLE,
        "dist.all_gather(parts, tensor.contiguous(), group=group)",
        "dist.all_gather(parts, tensor.as_strided(tensor.shape, parts[0].stride()), group=group)",
    ),
    Mutant(
        "collective",
        "Sums that are logged count a batch once for each tensor-parallel rank.",
        FABRIC_VALUES,
        """for axis in ("dp_replicate", "dp_shard"):
            if self.device_mesh[axis].size() > 1:""",
        """for axis in ("dp_replicate", "dp_shard", "tp"):
            if self.device_mesh[axis].size() > 1:""",
    ),
    Mutant(
        "collective",
        "Means that are logged are sums over data-parallel ranks.",
        FABRIC_VALUES,
        "return tensor / dp_size(self.device_mesh) if mean else tensor",
        "return tensor",
    ),
    Mutant(
        "collective",
        "Ranks decide by themselves whether to stop: some wait for ever for those that did.",
        TOGETHER,
        "dist.all_reduce(flag, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)",
        "pass",
    ),
    Mutant(
        "collective",
        "broadcast gives the object of rank 0, whichever rank it was asked of.",
        FABRIC_VALUES,
        "dist.broadcast_object_list(holder, src)",
        "dist.broadcast_object_list(holder, 0)",
    ),
    Mutant(
        "replaced",
        "fabric.all_reduce leaves the tensor as it was, where Fabric's other strategies reduce it in place.",
        FABRIC_VALUES,
        "tensor.detach().copy_(self.reduce(tensor, group, reduce_op))\n        return tensor",
        "return self.reduce(tensor, group, reduce_op)",
    ),
    Mutant(
        "collective",
        "A mean over a process group of the user's is a sum.",
        REPLICAS,
        "return tensor / dist.get_world_size(group) if mean else tensor",
        "return tensor",
    ),
    Mutant(
        "collective",
        "With several replicas, gathered values are in another order than the data-parallel ranks.",
        REPLICAS,
        """for axis in ("dp_shard", "dp_replicate"):
                tensor""",
        """for axis in ("dp_replicate", "dp_shard"):
                tensor""",
    ),
    Mutant(
        "collective",
        "Values that are logged leave out those of the other replicas.",
        REPLICAS,
        """for axis in ("dp_replicate", "dp_shard"):
            if self.device_mesh[axis].size() > 1:""",
        """for axis in ("dp_shard",):
            if self.device_mesh[axis].size() > 1:""",
    ),
    Mutant(
        "collective",
        "Metrics of torchmetrics leave out the rows of the other replicas.",
        REPLICAS,
        "._flatten().get_group() if replicas else",
        "._flatten().get_group() if False else",
    ),
    Mutant(
        "replaced",
        "A callback that copies another, or itself, copies the module and its sharded model.",
        f"{FOLDER}/test_callbacks.py::test_callbacks_of_the_user_stay_and_ours_goes",
        "def __deepcopy__(self, memo: dict[int, Any]) -> Logging:\n        return self",
        "def __deepcopy__(self, memo: dict[int, Any]) -> Logging:\n"
        "        return Logging(__import__('copy').deepcopy(self._method, memo))",
    ),
    # shares of the data
    Mutant(
        "collective",
        "Lightning's samplers deal the same rows to every replica.",
        REPLICAS,
        """"rank": at["dp_replicate"] * shards + at["dp_shard"]}""",
        """"rank": at["dp_shard"]}""",
    ),
    Mutant(
        "collective",
        "Lightning's samplers deal the rows by process, not by data-parallel rank.",
        SAMPLERS,
        """"rank": at["dp_replicate"] * shards + at["dp_shard"]}""",
        """"rank": self.global_rank % (sizes["dp_replicate"] * shards)}""",
    ),
    Mutant(
        "collective",
        "Lightning's samplers deal some rows to nobody.",
        SAMPLERS,
        """return {"num_replicas": sizes["dp_replicate"] * shards, "rank":""",
        """return {"num_replicas": self.num_nodes * self.num_processes, "rank":""",
    ),
    Mutant(
        "replaced",
        "Workers of tensor-parallel peers draw different augmentations of the same rows.",
        f"{FOLDER}/test_data.py::test_worker_seeds_are_by_data_parallel_rank",
        "dataloader.worker_init_fn = partial(worker_init_function, rank=rank)",
        "dataloader.worker_init_fn = partial(worker_init_function, rank=dist.get_rank())",
    ),
    Mutant(
        "replaced",
        "With Fabric workers of tensor-parallel peers draw different augmentations of the same rows.",
        FABRIC_VALUES,
        "if present is None or (isinstance(present, partial) and present.func is worker_init_function):",
        "if present is None:",
    ),
    # training
    Mutant(
        "replaced",
        "fabric.clip_gradients with a norm_type clips by the Euclidean norm.",
        f"{FOLDER}/test_fabric_loop.py::test_gradients_are_clipped_by_the_norm_that_is_asked_for",
        "clip_grad_norm_(self.precision.main_params(optimizer), max_norm, norm_type)",
        "clip_grad_norm_(self.precision.main_params(optimizer), max_norm)",
    ),
    Mutant(
        "guard",
        "Precision 16-true is asked for, and the run trains in float32 without loss scaling.",
        f"{FOLDER}/test_precision.py::test_refused_precision",
        "if type(plugin) not in known or flag not in SUPPORTED:",
        "if False:",
    ),
    Mutant(
        "replaced",
        "The name lora_fsdp2_tp4 trains with another tensor-parallel size.",
        f"{FOLDER}/test_registry.py::test_a_trainer_takes_the_name",
        "tensor_parallel_size=size,\n            )",
        "tensor_parallel_size=1,\n            )",
    ),
    Mutant(
        "pass",
        "A model that a LightningModule compiles itself cannot be trained.",
        "tests/lightning_lora/test_compile.py::test_a_model_that_the_module_compiles_is_compiled_by_blocks",
        """            self._uncompile(self.lightning_module)\n""",
        """            pass\n""",
    ),
]
