"""Placements and partial gradients of each style, and the rows that a rank computes with."""

from tests.mutants import Mutant

TP = "tests/lora_parallel/tp"
EVERY = f"{TP}/test_layer.py::test_every_style_equals_the_unsharded_layer"
FEATURES = "tests/lora_parallel/test_rows.py::test_a_row_equals_one_process_or_is_refused"
EXPERTS = f"{TP}/test_experts.py"

KINDS = "tests/lora_parallel/test_parallelize.py::test_other_kinds_of_training_equal_one_process"

BREAKAGES = [
    Mutant(
        "style",
        "The lora_A of a colwise layer trains on one rank's part of its gradient.",
        EVERY,
        """_OF_OUTPUT_SLICES = frozenset({"lora_A", "per_input", "other"})""",
        """_OF_OUTPUT_SLICES = frozenset({"per_input", "other"})""",
    ),
    Mutant(
        "style",
        "The lora_B of a rowwise layer trains on one rank's part of its gradient.",
        EVERY,
        """_OF_PARTIAL_SUMS = frozenset({"lora_B", "magnitude", "per_output", "addend", "other"})""",
        """_OF_PARTIAL_SUMS = frozenset({"magnitude", "per_output", "addend", "other"})""",
    ),
    Mutant(
        "style",
        "DoRA's magnitude of a rowwise layer trains on one rank's part of its gradient.",
        f"{FEATURES}[DoRA, grouped-1x2]",
        """_OF_PARTIAL_SUMS = frozenset({"lora_B", "magnitude", "per_output", "addend", "other"})""",
        """_OF_PARTIAL_SUMS = frozenset({"lora_B", "per_output", "addend", "other"})""",
    ),
    Mutant(
        "style",
        "The bias of an adapter of a rowwise layer is added once for each rank.",
        f"{FEATURES}[lora_bias, gpt2-1x2]",
        """is_zero=tensor.role == "addend" and sums and context.rank > 0,""",
        """is_zero=False,""",
    ),
    Mutant(
        "style",
        "Adapters of experts train on one rank's part of their gradient.",
        f"{EXPERTS}::test_the_auxiliary_loss_counts_once",
        """_OF_EXPERTS = frozenset({"lora_A", "lora_B", "addend", "other"})""",
        """_OF_EXPERTS = frozenset({"addend", "other"})""",
    ),
    Mutant(
        "style",
        "Layers in front of a colwise layer train on one rank's part of their gradient, by the table of styles.",
        EVERY,
        """enter="copy",""",
        """enter="keep",""",
    ),
    Mutant(
        "style",
        "Tokens are routed to the first rank's experts on every rank.",
        f"{EXPERTS}::test_the_other_implementations_of_experts",
        """start, stop = chosen.ranks[rank][0]""",
        """start, stop = chosen.ranks[0][0]""",
    ),
    Mutant(
        "style",
        "The weights of a norm between slices train on one rank's heads.",
        KINDS,
        """_PARTIAL_GRADIENTS = frozenset({"weight", "bias"}) | _OF_OUTPUT_SLICES""",
        """_PARTIAL_GRADIENTS = _OF_OUTPUT_SLICES""",
    ),
    Mutant(
        "style",
        "Of tokens whose rows other ranks hold the embedding adds each rank's first row.",
        EVERY,
        """y = y.masked_fill(outside.unsqueeze(-1), 0)""",
        """pass""",
    ),
    Mutant(
        "guard",
        "A token outside of the vocabulary has an embedding of zeros.",
        f"{TP}/test_layer.py::test_a_token_outside_the_vocabulary_is_refused",
        """valid = ((ids >= 0) & (ids < self.vocabulary)).all()""",
        """valid = (ids == ids).all()""",
    ),
    Mutant(
        "style",
        "LoRA dropout drops the elements of the first features on every rank of a rowwise layer.",
        "tests/lora_parallel/adapters/test_dropout.py::test_every_mesh_drops_the_same_elements",
        """dropout.feature_offset = offset""",
        """pass""",
    ),
]
