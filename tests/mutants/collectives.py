"""Collectives of tensor parallelism and their backwards."""

from tests.mutants import Mutant

LAYER = "tests/lora_parallel/tp/test_layer.py"

BREAKAGES = [
    Mutant(
        "backward",
        "Layers in front of a colwise layer train on one rank's part of their gradient.",
        "tests/lora_parallel/distributed/test_collectives.py",
        """return None, None, all_reduce(grads[0], ctx.group, "input gradient", ctx.where)""",
        """return None, None, grads[0]""",
    ),
]
