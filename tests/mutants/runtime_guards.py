"""Guards around a sharded model, its forward and its backward."""

from tests.mutants import Mutant

GUARDS = "tests/lora_parallel/runtime/test_guards.py"
FIRES = f"{GUARDS}::test_each_guard_fires_on_every_rank"
LIFTED = f"{GUARDS}::test_parallelize_runs_the_guards_and_require_adapters_lifts_them"
EVALUATED = f"{GUARDS}::test_a_model_that_is_evaluated_is_checked_once_it_trains"
REFUSED = "tests/lora_parallel/runtime/test_refusals.py"

FINGERPRINTS = "tests/lora_parallel/distributed/test_rank_checks.py"

BREAKAGES = [
    Mutant(
        "guard",
        "A parameter that was never given values trains from garbage.",
        FIRES,
        """if tensor.is_meta:
                raise""",
        """if False:
                raise""",
    ),
    Mutant(
        "guard",
        "A weight of the base trains beside the adapter, and is not saved with it.",
        LIFTED,
        """if parameter.requires_grad and name not in adapters:""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "A frozen adapter trains nothing.",
        LIFTED,
        """if not parameter.requires_grad and parameter.numel() and active & set(name.split(".")):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "A fresh adapter changes the model before the first step.",
        FIRES,
        """and torch.count_nonzero(local(parameter)):""",
        """and False:""",
    ),
    Mutant(
        "guard",
        "A model without adapters that has been evaluated begins to train as a whole, and nothing of it is saved.",
        EVALUATED,
        """if model.training and torch.is_grad_enabled():
            check()""",
        """if False:
            check()""",
    ),
    Mutant(
        "guard",
        "An optimizer steps the base of a model that was prepared for evaluation.",
        EVALUATED,
        """if any(id(parameter) in stepped for parameter in evaluated.parameters()):""",
        """if False:""",
    ),
    Mutant(
        "pass",
        "A model under FSDP2 that ran in inference mode first cannot train afterwards.",
        "tests/lora_parallel/runtime/test_step.py::test_a_model_trains_after_it_ran_in_inference_mode",
        """    if torch.is_inference_mode_enabled():
        left.enter_context""",
        """    if False:
        left.enter_context""",
    ),
    Mutant(
        "guard",
        "Ranks train copies of a factor that differ.",
        f"{GUARDS}::test_copies_that_differ_are_found",
        """if found:
            name, ranks""",
        """if False:
            name, ranks""",
    ),
    Mutant(
        "guard",
        "Tensor parallel peers compute slices of different batches, where these are no keywords.",
        f"{GUARDS}::test_tp_peers_must_be_fed_the_same_batch",
        """for tensor in tensors_in(inputs):""",
        """for tensor in tensors_in(inputs[1]):""",
    ),
    Mutant(
        "guard",
        "Peers that are fed the same tensors as other arguments are not noticed.",
        f"{GUARDS}::test_tp_peers_must_be_fed_the_same_batch",
        """total = total * 1000003 + fingerprint_on_device""",
        """total = total + fingerprint_on_device""",
    ),
    Mutant(
        "guard",
        "Batches with the same words in another order are taken for the same.",
        f"{FINGERPRINTS}::test_words_in_any_other_order_change_the_fingerprint",
        """words += torch.arange(""",
        """words += 0 * torch.arange(""",
    ),
    Mutant(
        "guard",
        "Words of a batch are mixed by shifts that keep the sign, and some of their bits are lost.",
        f"{FINGERPRINTS}::test_a_fingerprint_mixes_each_word_with_its_place",
        """(words >> shift) & (2 ** (64 - shift) - 1)""",
        """words >> shift""",
    ),
    Mutant(
        "guard",
        "Each piece of a large tensor is counted from its own begin, and two that change places are not noticed.",
        f"{FINGERPRINTS}::test_a_fingerprint_mixes_each_word_with_its_place",
        """torch.arange(start // 8, start // 8 + len(words), device=words.device)""",
        """torch.arange(0, len(words), device=words.device)""",
    ),
    Mutant(
        "guard",
        "A weight that is unfrozen after sharding gets no gradient.",
        f"{GUARDS}::test_what_is_unfrozen_after_sharding_is_refused",
        """if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was frozen""",
        """if False:
                raise RuntimeError(
                    f"{name} was frozen""",
    ),
    Mutant(
        "guard",
        "Rows of a fused weight are loaded from a state dict as other rows.",
        f"{REFUSED}::test_rows_that_were_selected_cannot_be_loaded_whole",
        """if partition_of(module.get_submodule(holder), key) is not None and not _same(loaded, parameter):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "Each rank computes with its own slice of parameters that the caller gives by functional_call.",
        "tests/lora_parallel/runtime/test_substitutes.py::test_parameters_of_ones_own_are_refused",
        """if substitute is not None and id(substitute) not in gathered:""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "A head that is put in place after sharding trains apart on each rank.",
        "tests/lora_parallel/runtime/test_substitutes.py::test_layers_that_come_afterwards_and_train_are_refused",
        """self._refuse_new(model)
        holders""",
        """pass
        holders""",
    ),
    Mutant(
        "guard",
        "A backward after one that failed adds up gradients that are not of all ranks.",
        "tests/lora_parallel/fsdp/test_unused_parameters.py"
        "::test_a_backward_after_one_that_failed_is_refused_until_the_next_forward",
        """if self._backward not in (None, backward_pass()):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "Tensor parallel ranks that are fed different batches train on sums that are of neither.",
        f"{GUARDS}::test_tp_peers_must_be_fed_the_same_batch",
        """total = total * 1000003 + fingerprint_on_device(tensor).to(total.device)""",
        """total = total * 1000003""",
    ),
    Mutant(
        "guard",
        "Ranks whose data swaps two blocks of equal shapes compute with rows of both, each as one block.",
        "tests/lora_parallel/fsdp/test_unit_order.py"
        "::test_no_rank_computes_with_the_rows_of_a_block_that_another_has_swapped",
        """if self._expected.get(self._place) != step:""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "The blocks of a forward that one rank leaves out are paired with those of another forward.",
        "tests/lora_parallel/fsdp/test_unit_order.py::test_a_backward_that_one_rank_leaves_out_is_told",
        """        self.take(kind)
        # A forward that adds""",
        """        # A forward that adds""",
    ),
    Mutant(
        "guard",
        "A rank that leaves a backward out is found by nobody who waits for it.",
        "tests/lora_parallel/fsdp/test_unit_order.py::test_a_backward_that_one_rank_leaves_out_is_told",
        """if awaited and (before or failure is not None):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "A layer that is tied to another block's and is called by itself leaves FSDP2 in the middle of a forward.",
        "tests/lora_parallel/fsdp/test_submodule_calls.py::test_a_layer_that_is_tied_to_another_blocks_is_not_called_by_itself",
        """if not self._runs and not in_backward():""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "A module that is called by itself in training trains with weights that are gone in its backward.",
        "tests/lora_parallel/fsdp/test_submodule_calls.py::test_what_is_called_by_itself_computes_as_in_one_process",
        """if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in needed):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "An output that the config asks for is that of this rank's part.",
        "tests/lora_parallel/cp/test_context_parallel.py::test_what_would_be_wrong_is_refused",
        """return bool(value if value is not None else getattr(getattr(model, "config", None), name, False))""",
        """return bool(value)""",
    ),
]
