"""Numbers of a run: tokens, operations, communication."""

from tests.mutants import Mutant

METER = "tests/lora_parallel/metrics/test_meter.py"

BREAKAGES = [
    Mutant(
        "pass",
        "MFU is that of a model whose base trains.",
        "tests/lora_parallel/metrics/test_flops.py::test_by_hand",
        """return 4 * self.frozen + 6 * self.trained""",
        """return 6 * self.frozen + 6 * self.trained""",
    ),
    Mutant(
        "pass",
        "The hidden features of each token count as tokens.",
        f"{METER}::test_tokens_of_a_forward",
        """first.shape[:-1] if first.is_floating_point() else first.shape""",
        """first.shape""",
    ),
    Mutant(
        "pass",
        "Collectives that overlap count twice.",
        f"{METER}::test_collectives_that_overlap_count_once",
        """max(0.0, end - max(start, last))""",
        """max(0.0, end - start)""",
    ),
]
