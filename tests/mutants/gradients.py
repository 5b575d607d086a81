"""How gradients are finished, accumulated, divided and clipped."""

from tests.mutants import Mutant

GRADIENTS = "tests/lora_parallel/distributed/test_gradients.py"
HOOKS = "tests/lora_parallel/distributed/test_gradient_hooks.py"
FINISHED = f"{GRADIENTS}::test_gradients_are_finished_when_backward_returns"

CLIPPING = "tests/lora_parallel/distributed/test_gradients.py::test_clipping_equals_torchs_in_one_process"

RETURNED = f"{GRADIENTS}::test_gradients_are_finished_whatever_a_model_returns"

RECOMPUTED = (
    "tests/lora_parallel/tenants/test_steps.py::test_a_recompute_is_of_its_own_forward_wherever_the_loss_is_from"
)

BREAKAGES = [
    Mutant(
        "pass",
        "A backward of one tenant that fails makes the next tenant's fail too.",
        RECOMPUTED,
        """if self._has_tenants():""",
        """if False:""",
    ),
    Mutant(
        "pass",
        "After a tenant's backward that failed, FSDP2 does not end the next one.",
        RECOMPUTED,
        """self.begin_backward(after_failure=True)""",
        """self.begin_backward()""",
    ),
    Mutant(
        "pass",
        "Partial sums are finished before FSDP2 has reduced them, if it does not find the tensors a model returns.",
        RETURNED,
        """            queue_fsdp_end(self._fsdp_root, after_failure)""",
        """            pass""",
    ),
    Mutant(
        "guard",
        "Gradients that FSDP2 reduces later than is expected are left out of the sums over tp.",
        f"{GRADIENTS}::test_sums_are_refused_that_would_miss_what_fsdp_has_not_reduced",
        """            check_fsdp_end(self._fsdp_root)""",
        """            pass""",
    ),
    Mutant(
        "pass",
        "A layer outside of the blocks computes its backward with freed weights, where FSDP2 does not see the outputs.",
        RETURNED,
        """                    gather_for_backward(unit, tensor)""",
        """                    pass""",
    ),
    Mutant(
        "pass",
        "A block is recomputed with the dropout masks of a later forward, where nobody sees what the model returns.",
        f"{GRADIENTS}::test_a_block_is_recomputed_with_the_masks_of_its_forward_whatever_a_model_returns",
        """                module.register_forward_hook(partial(self._inner_returned, unit))""",
        """                pass""",
    ),
    Mutant(
        "pass",
        "Nothing finishes the gradients of a loss that comes from inside of a block alone.",
        f"{GRADIENTS}::test_a_loss_from_inside_of_a_block_has_one_processs_gradients",
        """    gradients.reached = setup.step.begin_backward
""",
        "",
    ),
    Mutant(
        "backward",
        "A user's hook of a parameter that only a loss term of its own reaches is not called.",
        f"{HOOKS}::test_the_hook_of_a_parameter_that_only_its_own_term_reaches_is_called",
        """finished |= dict.fromkeys(p for p in self._met if p in self._unfinished)""",
        """pass""",
    ),
    Mutant(
        "pass",
        "What each tp rank holds whole of an adapter that is active later drifts apart.",
        f"{GRADIENTS}::test_a_second_adapters_gradients_are_equal_too",
        """p.requires_grad or p in adapters)""",
        """p.requires_grad)""",
    ),
    Mutant(
        "pass",
        "What each tp rank holds whole drifts apart, by what the kernels of its ranks round otherwise.",
        f"{GRADIENTS}::test_tp_ranks_have_equal_gradients_of_what_each_has_whole",
        """    if axis_size(mesh, "tp") > 1:
        # Each""",
        """    if False:
        # Each""",
    ),
    Mutant(
        "backward",
        "Adapter factors that tp ranks share train on the mean of the ranks' parts instead of their sum.",
        FINISHED,
        """gradient.mul_(self.ranks)""",
        """pass""",
    ),
    Mutant(
        "collective",
        "Each tp rank trains the adapter factors that it shares on its own part of their gradient.",
        FINISHED,
        """flat = all_reduce(flat, self._group, "adapter gradients", "all partial factors") / self._group.size()""",
        """flat = flat / self._group.size()""",
    ),
    Mutant(
        "collective",
        "A loss term of a shared adapter factor counts once for each tp rank.",
        FINISHED,
        """"adapter gradients", "all partial factors") / self._group.size()""",
        """"adapter gradients", "all partial factors")""",
    ),
    Mutant(
        "collective",
        "Of the batches accumulated under no_sync only the last one trains shared adapter factors.",
        FINISHED,
        """self._pending[index] = partial if known is None else known + partial""",
        """self._pending[index] = partial""",
    ),
    Mutant(
        "collective",
        "A second backward pass overwrites the gradients of shared adapter factors.",
        FINISHED,
        """self._pending[index] if parameter.grad is None else parameter.grad.add_(self._pending[index])""",
        """self._pending[index]""",
    ),
    Mutant(
        "backward",
        "After a step that failed the next one trains shared adapter factors on what no_sync had accumulated before.",
        f"{GRADIENTS}::test_an_error_in_a_step_leaves_nothing_behind",
        """        self._finished = []
        self._pending.clear()""",
        """        self._finished = []""",
    ),
    Mutant(
        "backward",
        "Under cp the blocks train on a part of their gradient.",
        "tests/lora_parallel/cp/test_around_blocks.py::test_what_is_around_the_blocks_equals_one_process_or_is_refused",
        """return grads[0] * ctx.factor, None""",
        """return grads[0], None""",
    ),
    Mutant(
        "collective",
        "A hook that waits for the finished gradient is given one rank's part of it.",
        "tests/lora_parallel/distributed/test_gradient_hooks.py::test_post_accumulate_hooks_have_the_finished_gradient",
        """registered.update(dict.fromkeys(registered, self._due.append))""",
        """pass""",
    ),
    Mutant(
        "collective",
        "Clipping by a norm scales gradients up that are smaller than the limit.",
        CLIPPING,
        """scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)""",
        """scale = max_norm / (norm + 1e-6)""",
    ),
    Mutant(
        "guard",
        "Gradients that are still parts of a sum are clipped by the norm of one rank's part.",
        f"{GRADIENTS}::test_a_partial_gradient_is_refused",
        """if placement.is_partial():""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "torch.autograd.grad of a parameter gives no gradient.",
        "tests/lora_parallel/distributed/test_gradient_hooks.py::test_other_ways_to_a_gradient_are_right_or_refused",
        """if self._leaves_of is None or not accumulate:""",
        """if False:""",
    ),
    Mutant(
        "collective",
        "A loss term of a parameter itself, whose layer no rank used, is lost.",
        "tests/lora_parallel/fsdp/test_unused_parameters.py::test_a_loss_term_of_the_parameters_reaches_them_all",
        """index in self._used or self._has_more(index) for index""",
        """index in self._used for index""",
    ),
    Mutant(
        "collective",
        "After a failed step parameters that no rank reached get zeros, and weight decay.",
        "tests/lora_parallel/fsdp/test_unused_parameters.py::test_what_was_accumulated_before_a_failure_is_dropped",
        """        self._used.clear()
""",
        """""",
    ),
    Mutant(
        "collective",
        "Each rank clips by the norm of its own shards, so that the parts of a tensor are scaled differently.",
        CLIPPING,
        """dist.all_reduce(part, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)""",
        """pass""",
    ),
    Mutant(
        "collective",
        "A parameter that an earlier step reached gets zeros, and weight decay.",
        "tests/lora_parallel/fsdp/test_unused_parameters.py::test_ranks_that_reach_other_layers_of_a_block_train_as_one_process",
        """self._used -= reduced""",
        """pass""",
    ),
    Mutant(
        "collective",
        "A compiled layer that is used without gradients alone gets zeros, and weight decay, after an accumulation.",
        "tests/lora_parallel/runtime/test_compiled_blocks.py::test_a_layer_that_is_used_without_gradients_alone_gets_none",
        """if gradient is not None and not (hasattr(gradient, _ZEROS) and local(gradient)._version == 0):""",
        """if gradient is not None:""",
    ),
    Mutant(
        "collective",
        "The adapter of a tied layer that no forward runs gets zeros, and weight decay.",
        "tests/lora_parallel/fsdp/test_unused_parameters.py::test_a_tied_layer_that_does_not_run_has_no_gradient",
        """units.setdefault(module._get_fsdp_state(), [])""",
        """units.setdefault(module, [])""",
    ),
    Mutant(
        "backward",
        "backward(inputs=parameters) gives no gradients to parameters of layers that tp cuts.",
        "tests/lora_parallel/distributed/test_gradient_hooks.py::test_other_ways_to_a_gradient_are_right_or_refused",
        """            reached += self._leaves_of(tensor)\n""",
        """""",
    ),
    Mutant(
        "backward",
        "A second backward pass overwrites the gradients of factors that tp cuts.",
        FINISHED,
        """            local_tensor(parameter.grad).add_(gradient)""",
        """            parameter.grad = place(gradient)""",
    ),
    Mutant(
        "guard",
        "A loss of gradients that have no graph trains nothing.",
        "tests/lora_parallel/distributed/test_gradient_hooks.py::test_gradients_have_no_graph_and_say_so",
        """        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True)""",
        """        if False:
            raise RuntimeError(
                "backward(create_graph=True)""",
    ),
    Mutant(
        "backward",
        "Layers go on with the values from before model.to.",
        "tests/lora_parallel/distributed/test_gradients.py::test_a_model_that_is_moved_trains_as_in_one_process",
        """            and (self.local is None or local_tensor(parameter) is self.local)\n""",
        """""",
    ),
    Mutant(
        "pass",
        "An earlier gradient is lost in a step that does not reach the parameter: sums are finished in another order.",
        "tests/lora_parallel/fsdp/test_unused_parameters.py::test_ranks_that_reach_other_layers_of_a_block_train_as_one_process",
        """gradients.finish_by(finishing, trained,""",
        """gradients.finish_by(finishing[::-1], trained,""",
    ),
    Mutant(
        "pass",
        "Hooks of the user's see gradients that are not finished.",
        "tests/lora_parallel/distributed/test_gradient_hooks.py::test_post_accumulate_hooks_have_the_finished_gradient",
        """(parameter for parameter in due if parameter not in self._unfinished)""",
        """due""",
    ),
    Mutant(
        "backward",
        "A user's hook is called twice, and first too early, where the loss has a term of the parameter itself.",
        "tests/lora_parallel/distributed/test_gradient_hooks.py::test_hooks_are_called_once_where_the_loss_has_a_term_of_the_parameters",
        """meets_terms=not is_pipeline""",
        """meets_terms=False""",
    ),
    Mutant(
        "guard",
        "A hook of register_hook on a parameter is never called, or is given one rank's part.",
        "tests/lora_parallel/distributed/test_gradient_hooks.py::test_other_ways_to_a_gradient_are_right_or_refused",
        """            if gradient_hooks(parameter) > self._own[parameter]:
                raise RuntimeError(""",
        """            if False:
                raise RuntimeError(""",
    ),
    Mutant(
        "replaced",
        "Under torch.amp.GradScaler a rank whose gradient overflowed skips the step alone, and ranks part.",
        "tests/lora_parallel/distributed/test_dtensor_operators.py::test_all_ranks_skip_a_step_together",
        """dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)""",
        """pass""",
    ),
    Mutant(
        "collective",
        "Gradients of layers that compute in bfloat16 are added up in bfloat16.",
        "tests/lora_parallel/test_parallelize.py::test_gradients_of_bfloat16_compute_are_added_up_in_float32",
        """reduce_dtype=_reduce_dtype(model, config)""",
        """reduce_dtype=None""",
    ),
]
