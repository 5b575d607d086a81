"""Collectives whose results are used before they are there: gloo's often are, NCCL's are not."""

from tests.mutants import Mutant

FEATURE = "tests/test_late_features.py::test_a_feature_is_that_of_one_process[{}-lazy]"
FRONT_END = "tests/test_late_front_ends.py::test_a_front_end_trains_as_one_process[{}-lazy]"

BREAKAGES = [
    Mutant(
        "collective",
        "On GPUs a sharded tenant computes with factors that have not arrived.",
        FEATURE.format("a tenant that goes on"),
        """dist.all_gather(list(everyone.split(longest)), padded, group=mesh.get_group("dp_shard"))""",
        """dist.all_gather(list(everyone.split(longest)), padded, group=mesh.get_group("dp_shard"), async_op=True)""",
    ),
    Mutant(
        "collective",
        "On GPUs adapters and states are written before they have arrived from other ranks.",
        FEATURE.format("a tenant that goes on"),
        """dist.gather(padded, received, dst=0)""",
        """dist.gather(padded, received, dst=0, async_op=True)""",
    ),
    Mutant(
        "collective",
        "On GPUs a merged model is written before other ranks' parts of it have arrived.",
        FEATURE.format("export of shards"),
        """dist.recv(part, src=owner)""",
        """dist.irecv(part, src=owner)""",
    ),
    Mutant(
        "collective",
        "On GPUs sliced layers and experts compute with sums that have not arrived.",
        FEATURE.format("experts"),
        """dist.all_reduce(summed, group=group)""",
        """dist.all_reduce(summed, group=group, async_op=True)""",
    ),
    Mutant(
        "collective",
        "On GPUs what Lightning logs is read before other ranks' parts of it have arrived.",
        FRONT_END.format("Lightning, evaluation"),
        """dist.all_reduce(tensor, operation, group=self.device_mesh.get_group(axis))""",
        """dist.all_reduce(tensor, operation, group=self.device_mesh.get_group(axis), async_op=True)""",
    ),
    Mutant(
        "collective",
        "On GPUs gradients are clipped by a norm that has not arrived.",
        FRONT_END.format("Accelerate, accumulated and clipped"),
        """dist.all_reduce(part, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)""",
        """dist.all_reduce(part, dist.ReduceOp.SUM, group=group, async_op=True)""",
    ),
]
