"""What front ends replace, refuse and hand on."""

from tests.mutants import Mutant

GUARDS = "tests/lora_parallel/runtime/test_guards.py"

BREAKAGES = [
    Mutant(
        "guard",
        "Tensor parallel ranks that are fed different batches train on sums that are of neither.",
        f"{GUARDS}::test_tp_peers_must_be_fed_the_same_batch",
        """total = total * 1000003 + fingerprint_on_device(tensor).to(total.device)""",
        """total = total * 1000003""",
    ),
]
