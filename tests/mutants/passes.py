"""The passes of `parallelize`, each left out."""

from tests.mutants import Mutant

ENGINE = "tests/lora_parallel"
RUNTIME = f"{ENGINE}/runtime"

BREAKAGES = [
    Mutant(
        "guard",
        "With shard_base=False a base in another dtype than the one to compute in is not cast, and computes as it is.",
        f"{ENGINE}/fsdp/test_whole_base.py::test_what_would_be_wrong_is_refused",
        """    check_whole_base(setup)\n""",
        """    pass\n""",
    ),
    Mutant(
        "pass",
        "A base in bfloat16 with saved norms ends in an assertion of FSDP2 in the first forward.",
        f"{ENGINE}/fsdp/test_whole_base.py::test_a_block_that_trains_in_two_dtypes_is_as_in_one_process",
        """units = [*blocks, *_of_other_dtypes(model)]""",
        """units = blocks""",
    ),
    Mutant(
        "pass",
        "With shard_base=False each block gathers its adapters by itself.",
        f"{ENGINE}/fsdp/test_whole_base.py::test_one_gather_of_what_trains_and_none_of_the_base",
        """        blocks = []
    units =""",
        """    units =""",
    ),
    Mutant(
        "pass",
        "A block trains on weights that were gathered for it before the last step, and were not used then.",
        f"{ENGINE}/fsdp/test_prefetch.py::"
        "test_what_was_gathered_for_a_block_that_did_not_run_is_not_that_of_the_next_step",
        """if self._prefetches and is_being_gathered(unit):  # ahead""",
        """if False:  # ahead""",
    ),
    Mutant(
        "pass",
        "Ranks of an unseeded job train slices of different models.",
        f"{ENGINE}/loading/test_sync_module_states.py::test_unseeded_models_become_those_of_rank_zero",
        """adopt_rank_zero(values, setup.mesh)""",
        """pass""",
    ),
    Mutant(
        "pass",
        "Tensor parallel peers of an unseeded job draw other elements to drop in the model's own dropout.",
        f"{ENGINE}/loading/test_sync_module_states.py::test_tp_peers_share_the_random_state_of_the_first",
        """    share_random_state(setup.mesh)\n""",
        """    pass\n""",
    ),
    Mutant(
        "pass",
        "Frozen weights that no file of the checkpoint holds stay random.",
        f"{ENGINE}/lazy/test_materialize.py::test_a_new_head_trains_and_may_not_be_frozen",
        """    check_fresh(setup.model)\n""",
        """    pass\n""",
    ),
    Mutant(
        "pass",
        "Ranks read their shards from different checkpoints.",
        f"{ENGINE}/lazy/test_materialize.py::test_ranks_that_would_read_other_files",
        """check_same_files(setup.model)""",
        """pass""",
    ),
    Mutant(
        "pass",
        "Data-parallel ranks drop the same elements of different rows.",
        f"{ENGINE}/adapters/test_dropout.py::test_every_mesh_drops_the_same_elements",
        """setup.count, dp_rank(setup.mesh))""",
        """setup.count, 0)""",
    ),
    Mutant(
        "pass",
        "A config that differs between ranks shards each rank's part in another way.",
        f"{ENGINE}/test_features.py::test_what_would_be_wrong_without_a_word_is_refused_on_every_rank",
        """alike.update(_comparable(config))""",
        """pass""",
    ),
    Mutant(
        "pass",
        "Tensor parallel ranks with different seeds drop other elements of the same activations.",
        f"{RUNTIME}/test_step.py::test_a_seed_that_differs_between_ranks_is_refused",
        """for name, value in fields.items()}""",
        """for name, value in fields.items() if name != "seed"}""",
    ),
    Mutant(
        "pass",
        "Gradient hooks from before stay with tensors that do not train, and are never called.",
        f"{ENGINE}/distributed/test_gradient_hooks.py::test_hooks_that_sharding_would_leave_behind_are_refused",
        """            refuse_early_hooks(model)\n""",
        """            pass\n""",
    ),
    Mutant(
        "pass",
        "A base parameter that trains, or an adapter that does not, is found by nobody.",
        f"{RUNTIME}/test_guards.py::test_parallelize_runs_the_guards_and_require_adapters_lifts_them",
        """    verify(model, state, setup.ties, setup.trains)\n""",
        """    pass\n""",
    ),
    Mutant(
        "pass",
        "An optimizer that was made before sharding steps tensors that nobody computes with.",
        f"{RUNTIME}/test_optimizer_params.py::test_a_step_of_what_sharding_replaced_is_refused",
        """refuse_stale_steps(setup.before, setup.model)""",
        """pass""",
    ),
    Mutant(
        "pass",
        "An optimizer that needs whole tensors is given one rank's shards of them.",
        f"{ENGINE}/optimizers/test_step.py::test_ranks_with_other_seeds_and_losses_step_alike",
        """    register_optimizer_step_pre_hook(_before)\n""",
        """    pass\n""",
    ),
    Mutant(
        "pass",
        "load_state_dict of full tensors writes them over one rank's shards.",
        f"{RUNTIME}/test_refusals.py::test_what_is_refused_has_changed_nothing",
        """seal(model, mesh.size())""",
        """pass""",
    ),
    Mutant(
        "pass",
        "LBFGS takes directions of its own on each pipeline stage.",
        f"{ENGINE}/pp/test_guards.py::test_lbfgs_is_refused",
        """refuse_joined_steps(setup.model)""",
        """pass""",
    ),
    Mutant(
        "pass",
        "A part of the model that is called by itself computes with a shard of its weights.",
        f"{ENGINE}/fsdp/test_submodule_calls.py::test_what_is_called_by_itself_computes_as_in_one_process",
        """gather_for_calls(setup.model, setup.tied_across, {*setup.blocks, *lora_layers(setup.model)})""",
        """pass""",
    ),
    Mutant(
        "pass",
        "Ranks that run different blocks compute with the rows of each other's blocks.",
        f"{ENGINE}/fsdp/test_unit_order.py::test_ranks_that_run_different_blocks_are_all_told_which",
        """setup.order = install_order_check(setup.model, stage_mesh(setup.mesh), setup.gradients)""",
        """pass""",
    ),
    Mutant(
        "pass",
        "Adapter factors that tp ranks share train on each rank's own part of their gradient.",
        f"{ENGINE}/distributed/test_gradients.py::test_gradients_are_finished_when_backward_returns",
        """    if over_tp:
        finishing.append(PartialSums(""",
        """    if False:
        finishing.append(PartialSums(""",
    ),
    Mutant(
        "pass",
        "merge_and_unload gives a model of slices that computes without its collectives.",
        f"{ENGINE}/test_features.py::test_what_would_be_wrong_without_a_word_is_refused_on_every_rank",
        """    refuse_unload(model)\n""",
        """    pass\n""",
    ),
    Mutant(
        "pass",
        "A plan that could not be tried before is never held against what the model computes.",
        f"{ENGINE}/test_sensitivity.py::test_a_plan_that_could_not_be_tried_before_is_tried_on_the_first_batch",
        """first = [each.check for each in plan.first_batch_checks]""",
        """first = []""",
    ),
    Mutant(
        "pass",
        "A model's own save_pretrained writes one rank's shards.",
        f"{ENGINE}/export/test_save_pretrained.py::test_what_users_call",
        """    allow_save_pretrained,\n""",
        """""",
    ),
    Mutant(
        "pass",
        "What was frozen after it had trained is missing from checkpoints.",
        f"{ENGINE}/checkpoint/test_save_load.py::test_what_was_frozen_after_it_trained_is_restored",
        """state.trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)""",
        """pass""",
    ),
    Mutant(
        "pass",
        "With sequence_parallel the model's dropout drops the same places of each chunk.",
        f"{ENGINE}/tp/test_sequence.py::test_each_rank_draws_numbers_of_its_own_in_each_forward",
        """torch.manual_seed((seed + self._rank + forward * _APART) % 2**63)""",
        """torch.manual_seed((seed + forward * _APART) % 2**63)""",
    ),
    Mutant(
        "pass",
        "With sequence_parallel the model's dropout drops the same places in every forward.",
        f"{ENGINE}/tp/test_sequence.py::test_each_rank_draws_numbers_of_its_own_in_each_forward",
        """torch.manual_seed((seed + self._rank + forward * _APART) % 2**63)""",
        """torch.manual_seed((seed + self._rank) % 2**63)""",
    ),
    Mutant(
        "pass",
        "With sequence_parallel ranks of one batch draw other orders of the data.",
        f"{ENGINE}/tp/test_sequence.py::test_each_rank_draws_numbers_of_its_own_in_each_forward",
        """torch.set_rng_state(self._shared[0])""",
        """pass""",
    ),
    Mutant(
        "pass",
        "A wrapped block keeps all of its activations: under FSDP2 transformers' checkpointing does not recompute it.",
        f"{ENGINE}/layers/test_wrapped_forward.py::test_a_class_that_the_module_is_given_later_recomputes",
        """    is_method = getattr(instance_forward, "__self__", None) is module
""",
        """    is_method, instance_forward = True, module.forward
""",
    ),
    Mutant(
        "pass",
        "Several adapters of a layer drop the same elements.",
        f"{ENGINE}/adapters/test_dropout.py::test_every_adapter_has_a_key_of_its_own",
        'key = name if adapter == "default" else f"{name}:{adapter}"',
        """key = name""",
    ),
    Mutant(
        "pass",
        "A model from meta draws its adapter from another seed.",
        f"{ENGINE}/lazy/test_materialize.py::test_injected_adapters_are_those_of_one_process",
        """draw_adapter(self._twin, self._config, seed, keep)""",
        """draw_adapter(self._twin, self._config, 0, keep)""",
    ),
    Mutant(
        "pass",
        "An adapter of a fused layer is merged into other rows.",
        f"{ENGINE}/test_features.py::test_an_adapter_is_merged_in_place",
        """_merge_arranged(module, features_dim(base), partition)""",
        """pass""",
    ),
    Mutant(
        "pass",
        "LoRA dropout drops the same elements of the rows of all replicas.",
        f"{ENGINE}/distributed/test_mesh.py::test_tp_is_innermost_and_dp_rank_counts_replicas_and_shards",
        """return mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")""",
        """return mesh.get_local_rank("dp_shard")""",
    ),
]
