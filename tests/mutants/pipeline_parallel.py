"""Micro-batches, stages and their messages, and what a pipeline refuses."""

from tests.mutants import Mutant

PP = "tests/lora_parallel/pp"
GRADIENTS = f"{PP}/test_pipeline.py::test_gradients_equal_one_process"
LOOPED = f"{PP}/test_pipeline.py::test_several_stages_of_a_rank"
OVER_DP = f"{PP}/test_pipeline.py::test_with_other_axes[2x1pp2-names1]"
CALLS = f"{PP}/test_refusals.py::test_calls_are_refused_on_every_rank"

BREAKAGES = [
    Mutant(
        "guard",
        "A frozen teacher under pp is refused as a model whose gradients take memory twice.",
        "tests/lora_parallel/pp/test_refusals.py::test_models_and_configs_are_refused_by_name_and_left_as_they_are",
        """if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"pp=""",
        """if False:
        raise ValueError(
            f"pp=""",
    ),
    Mutant(
        "pass",
        "A block in modules_to_save has no name: neither stages nor a proof on few blocks are found.",
        "tests/lora_parallel/planning/test_proven_plans.py::test_blocks_that_train_as_a_whole_are_left_out_too",
        """next(names[module] for module in block.modules() if module in names)""",
        """names[block]""",
    ),
    Mutant(
        "backward",
        "Under pp a factor on the loss, as of accumulation, is lost.",
        GRADIENTS,
        """scaled = local(gradient).mul_(grads[0].to(local(gradient).device))""",
        """scaled = local(gradient)""",
    ),
    Mutant(
        "guard",
        "Under pp a second backward of one loss adds no gradient, or the first ones times the factor again.",
        CALLS,
        """held, ctx.held = ctx.held, None""",
        """held = ctx.held""",
    ),
    Mutant(
        "backward",
        "Under 1f1b the part of a loss that is computed from the logits trains nothing.",
        CALLS,
        """raise RuntimeError(
            "a gradient came back through an output""",
        """return None, None
        raise RuntimeError(
            "a gradient came back through an output""",
    ),
    Mutant(
        "backward",
        "Under gpipe a micro-batch trains on the gradient of another one's logits.",
        LOOPED,
        """chunks = grad.chunk(count) if count > 1 else [grad]""",
        """chunks = grad.chunk(count)[::-1] if count > 1 else [grad]""",
    ),
    Mutant(
        "backward",
        "Under gpipe a loss of logits trains nothing.",
        LOOPED,
        """run_backwards(grads)""",
        """run_backwards([None for _ in grads])""",
    ),
    Mutant(
        "guard",
        "Under 1f1b data-parallel ranks that weigh their losses train on a wrong sum.",
        f"{PP}/test_guards.py::test_weights_of_data_parallel_ranks_are_refused_or_right",
        """self._order.all_reduce("factor of the loss", both, dist.ReduceOp.MAX, self._groups)""",
        """pass""",
    ),
    Mutant(
        "guard",
        "Stages that multiply the loss by different factors train on gradients of different losses.",
        f"{PP}/test_guards.py::test_another_factor_on_another_stage_is_refused",
        """self._links.all_reduce_max(both)""",
        """pass""",
    ),
    Mutant(
        "collective",
        "Under pp all ranks read what the first stage has in the place of the model's outputs.",
        f"{PP}/test_steps.py::test_every_rank_has_what_the_model_returns",
        """self.wait(dist.broadcast(tensor, self.ranks[-1], group=self._groups.outputs, async_op=True))""",
        """self.wait(dist.broadcast(tensor, self.ranks[0], group=self._groups.outputs, async_op=True))""",
    ),
    Mutant(
        "collective",
        "Under pp only the last stage trains.",
        LOOPED,
        """self._links.send(torch.zeros_like(hidden) if hidden.grad is None else hidden.grad, False, self._key)""",
        """self._links.send(torch.zeros_like(hidden), False, self._key)""",
    ),
    Mutant(
        "collective",
        "Under pp only the gradients of the first micro-batch are summed over data-parallel ranks.",
        OVER_DP,
        """self._backward(action, start, at == backwards[-1])""",
        """self._backward(action, start, at == backwards[0])""",
    ),
    Mutant(
        "replaced",
        "Under pp every micro-batch's loss is divided by its own number of labels.",
        LOOPED,
        """self._loss_function(*args, **{**kwargs, "num_items_in_batch": self._number})""",
        """self._loss_function(*args, **kwargs)""",
    ),
    Mutant(
        "collective",
        "Under pp LoRA dropout drops the same elements in each micro-batch.",
        f"{PP}/test_steps.py::test_micro_batches_drop_what_the_batch_drops",
        """self._count.microbatch, self._count.microbatches = action.microbatch, count""",
        """self._count.microbatch, self._count.microbatches = 0, 1""",
    ),
    Mutant(
        "guard",
        "A model that hands more than hidden states from block to block loses it between stages.",
        f"{PP}/test_guards.py::test_stages_are_proven_in_training_too",
        """            self._tracer.run_otherwise()
            if self._run_whole()""",
        """            return
            if self._run_whole()""",
    ),
    Mutant(
        "guard",
        "Under pp the attentions, or hidden states, that a model returns are those of the last stage's blocks.",
        CALLS,
        """refuse_outputs(self._inner, kwargs)""",
        """pass""",
    ),
    Mutant(
        "pass",
        "Micro-batches get the positions of other rows (multimodal rotary positions).",
        f"{PP}/test_guards.py::test_arguments_of_a_micro_batch",
        """dim = 1 if name == "position_ids" and x.dim() == 3 else 0""",
        """dim = 0""",
    ),
    Mutant(
        "pass",
        "Under pp an evaluation counts the shifted labels of rows that pad its last micro-batch.",
        f"{PP}/test_guards.py::test_arguments_of_a_micro_batch",
        """_LABELS = ("labels", "shift_labels")""",
        """_LABELS = ("labels",)""",
    ),
    Mutant(
        "pass",
        "Under pp a number of items with as many elements as the batch has rows is cut as rows are.",
        f"{PP}/test_guards.py::test_arguments_of_a_micro_batch",
        """_WHOLE = ("logits_to_keep", "num_items_in_batch")""",
        """_WHOLE = ("logits_to_keep",)""",
    ),
    Mutant(
        "pass",
        "Under pp an evaluation counts rows that pad its last micro-batch.",
        f"{PP}/test_steps.py::test_every_rank_has_what_the_model_returns",
        """more = torch.full_like(last, self._ignored) if name in _LABELS else last""",
        """more = last""",
    ),
    Mutant(
        "pass",
        "Under pp rows that pad micro-batches are returned.",
        f"{PP}/test_steps.py::test_every_rank_has_what_the_model_returns",
        """torch.cat(values)[: leaf.shape[0]]""",
        """torch.cat(values)""",
    ),
    Mutant(
        "guard",
        "Under pp a model returns the values of one name for those of another, of some micro-batches.",
        f"{PP}/test_guards.py::test_outputs_of_micro_batches_that_cannot_be_joined_are_refused",
        """if any(other != structure for _, other in flat):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "Under pp a value without rows is that of the first micro-batch.",
        f"{PP}/test_guards.py::test_outputs_of_micro_batches_that_cannot_be_joined_are_refused",
        """if not is_plain or any(type(part) is not type(first) or part != first for part in parts):""",
        """if not is_plain:""",
    ),
    Mutant(
        "guard",
        "Under pp hidden states whose dtype changes are received as bytes of another dtype.",
        f"{PP}/test_guards.py::test_hidden_states_of_one_dtype_and_then_another_are_refused",
        """if f"sent {key}" in self._dtypes:""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "Under pp the losses of a model that calls its loss function several times are added up.",
        f"{PP}/test_guards.py::test_a_loss_function_that_is_called_twice_is_refused",
        """if len(self.losses) != calls + 1:""",
        """if False:""",
    ),
    Mutant(
        "pass",
        "Under pp with sequence_parallel or cp ranks of one batch draw other orders of the data.",
        f"{PP}/test_guards.py::test_random_states_are_restored_as_a_stage_ends",
        """for entry in reversed(self._entries):
                entry.leave(hidden.device)""",
        """pass""",
    ),
]
