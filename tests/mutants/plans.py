"""Guards of tensor parallel plans: what a plan may say about a model, and the proof that it computes the same."""

from tests.mutants import Mutant

PLAN = "tests/lora_parallel/planning/test_plan.py"
SENSITIVITY = "tests/lora_parallel/test_sensitivity.py"

BREAKAGES = [
    Mutant(
        "guard",
        "Heads that tp does not divide are torn apart.",
        f"{PLAN}::test_a_size_that_tp_does_not_divide_is_refused_with_those_it_could_be",
        """if size % tp and name in checked]""",
        """if False and name in checked]""",
    ),
    Mutant(
        "guard",
        "An entry of the user's plan that matches nothing is left out without a word.",
        f"{PLAN}::test_an_entry_that_matches_nothing_is_refused_with_a_hint",
        """if not any(fnmatchcase(name, glob) for name in names):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "A layer with adapters and no style is computed in full on every rank, and cut by nobody.",
        f"{PLAN}::test_adapter_layers_without_a_style_are_refused",
        """if adapted and not whole:""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "A weight that trains and is used without calling its layer gets a wrong gradient under tp.",
        f"{PLAN}::test_a_weight_that_trains_and_is_used_without_calling_its_layer_is_refused",
        """            if plan.name in builder.used_directly:""",
        """            if False:""",
    ),
    Mutant(
        "guard",
        "Of a plan with a style that nobody knows the layers before that one are cut, and its own is not.",
        f"{PLAN}::test_the_error_of_a_model_whose_plan_is_not_understood_and_that_cannot_be_run_names_that_plan",
        """(not declared or set_aside_unshown(builder, declared)):""",
        """not declared:""",
    ),
    Mutant(
        "guard",
        "Styles that are not what the model computes are taken from the user.",
        f"{PLAN}::test_styles_that_do_not_fit_what_the_model_computes_are_refused",
        """check_entries(builder, structures)""",
        """pass""",
    ),
    Mutant(
        "guard",
        "Layers that share a weight and place it differently drift apart.",
        f"{PLAN}::test_tied_layers_must_be_split_alike",
        """if len(set(placements.values())) > 1:""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "A style is applied to a kind of layer that it is not for.",
        f"{PLAN}::test_styles_want_their_kind_of_layer",
        """if refused is None and style_name in _LINEAR_STYLES and not is_linear(base):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "Quantised weights are cut as if their bytes were numbers.",
        f"{PLAN}::test_quantised_weights_are_refused",
        """refused = f"{kind} holds quantised weights\"""",
        """pass""",
    ),
    Mutant(
        "guard",
        "A norm that acts on no slices trains on a multiple of its gradient.",
        "tests/lora_parallel/test_features.py::test_a_partial_gradient_of_what_acts_on_no_slices_is_refused",
        """check_between(builder, structures)""",
        """pass""",
    ),
    Mutant(
        "guard",
        "A plan that is not what the model computes on the first batch trains.",
        f"{SENSITIVITY}::test_a_plan_that_could_not_be_tried_before_is_tried_on_the_first_batch",
        """if name in rows and _alike(rows[name], partition):""",
        """if name in rows or name not in rows:""",
    ),
    Mutant(
        "guard",
        "Fused matrices that are cut in chunks are taken for proven.",
        f"{SENSITIVITY}::test_the_proof_fails_for_a_fused_layer_in_chunks",
        """raise TraceError(f"{call.layer} is not fed what it should be by a rank's share of the features")""",
        """pass""",
    ),
    Mutant(
        "guard",
        "With sequence_parallel blocks that mix tokens compute on chunks of them.",
        "tests/lora_parallel/tp/test_sequence.py::test_what_does_not_work_token_by_token_is_refused",
        """raise ValueError(f"run on a chunk of them, it does not compute the same ({problem})")""",
        """pass""",
    ),
    Mutant(
        "guard",
        "With sequence_parallel a weight that is used on chunks and on all tokens trains on a part of its gradient.",
        "tests/lora_parallel/tp/test_sequence.py::test_a_weight_that_trains_on_chunks_and_on_all_tokens_is_refused",
        """raise ValueError(f"{paths[module]}.{key} trains, and is used on all tokens elsewhere")""",
        """pass""",
    ),
    Mutant(
        "guard",
        "Under cp what mixes tokens outside of attention computes on chunks of them.",
        "tests/lora_parallel/cp/test_context_parallel.py::test_what_would_be_wrong_is_refused",
        """            raise TraceError(problem)
        tracer, real_of =""",
        """            pass
        tracer, real_of =""",
    ),
    Mutant(
        "guard",
        "A fused matrix with several matrices in it is cut in one piece for each rank.",
        f"{PLAN}::test_packed_layers_are_halves_where_the_model_cannot_be_run",
        """plan.partition = RowPartition.packed([half, half], builder.tp)""",
        """plan.partition = RowPartition.packed([2 * half], builder.tp)""",
    ),
    Mutant(
        "pass",
        "Experts of a class without expert parallelism are refused: a rank adds its first for those of other ranks.",
        "tests/lora_parallel/tp/test_experts.py::test_the_trial_refuses_wrong_shares",
        "return x.masked_fill(others, 0) if x.is_floating_point() and x.shape == others.shape else x",
        "return x",
    ),
    Mutant(
        "guard",
        "Shares of experts that compute something else are taken for proven.",
        "tests/lora_parallel/tp/test_experts.py::test_the_trial_refuses_wrong_shares",
        """return None if right else "what its forward""",
        """return None if True else "what its forward""",
    ),
    Mutant(
        "style",
        "What a subclass of nn.Linear adds to its output is added on each tp rank.",
        "tests/lora_parallel/layers/test_linear_classes.py::test_roles_of_what_a_subclass_adds",
        """mine[name] = values[name] * (part == 0)""",
        """pass""",
    ),
    Mutant(
        "guard",
        "A layer that cannot be cut in training is cut, as it can be in evaluation.",
        "tests/lora_parallel/layers/test_linear_classes.py::test_whether_a_subclass_can_be_cut",
        """for training in (True, False)):""",
        """for training in (False,)):""",
    ),
]
