"""Collectives of tensor parallelism and their backwards."""

from tests.mutants import Mutant

DISTRIBUTED = "tests/lora_parallel/distributed"
EACH = f"{DISTRIBUTED}/test_collectives.py::test_forward_and_backward_of_each"
OF_TOKENS = "tests/lora_parallel/tp/test_sequence.py::test_forward_and_backward_of_each_collective"
EXPERTS = "tests/lora_parallel/tp/test_experts.py"

BREAKAGES = [
    Mutant(
        "collective",
        "A parameter that one rank's data has not reached decays on the other ranks only, while its gradient is zero.",
        "tests/lora_parallel/fsdp/test_unused_parameters.py"
        "::test_ranks_that_reach_other_layers_of_a_block_train_as_one_process[2x2-False]",
        """self._order.all_reduce("use of the parameters", by_any, dist.ReduceOp.MAX, self._groups)""",
        "pass",
    ),
    Mutant(
        "backward",
        "Layers in front of a colwise layer train on one rank's part of their gradient.",
        EACH,
        """return None, None, all_reduce(grads[0], ctx.group, "input gradient", ctx.where)""",
        """return None, None, grads[0]""",
    ),
    Mutant(
        "backward",
        "All layers in front of a rowwise layer get a multiple of their gradient.",
        EACH,
        """return grads[0], None, None\n""",
        """return 2 * grads[0], None, None\n""",
    ),
    Mutant(
        "collective",
        "A rowwise layer returns one rank's part of its output.",
        EACH,
        """return all_reduce(x, group, "output", where)""",
        """return x.clone()""",
    ),
    Mutant(
        "backward",
        "A layer whose output is gathered trains on a multiple of its gradient, as if each rank had a part of it.",
        EACH,
        """return _my_chunk(grads[0], ctx.group), None, None, None""",
        """return _my_chunk(grads[0], ctx.group) * ctx.group.size(), None, None, None""",
    ),
    Mutant(
        "backward",
        "What is in front of a layer that takes slices of its input has a gradient in this rank's slice only.",
        EACH,
        """return chunks_over_tp(grads[0], ctx.size, ctx.group, ctx.where, "input gradient slices"), None, None""",
        """return padded(grads[0], -1, ctx.size), None, None""",
    ),
    Mutant(
        "backward",
        "With sequence_parallel, norms and layers in front of a colwise layer train on one rank's part of a gradient.",
        OF_TOKENS,
        """return _reduce_scattered(grads[0], ctx.chunks, "input gradient", ctx.where), None, None, None""",
        """return ctx.chunks.mine(grads[0]).contiguous(), None, None, None""",
    ),
    Mutant(
        "backward",
        "With sequence_parallel, a rowwise layer trains on the tokens of one rank.",
        OF_TOKENS,
        """return _gathered(grads[0], ctx.tokens, ctx.chunks, "output gradient", ctx.where), None, None""",
        """return padded(grads[0], 1, ctx.tokens), None, None""",
    ),
    Mutant(
        "collective",
        "With sequence_parallel, a rowwise layer returns one rank's part of its output.",
        OF_TOKENS,
        """mine = scattered_sum(parted, chunks.group, what, where).narrow(""",
        """mine = parted[chunks.rank].narrow(""",
    ),
    Mutant(
        "collective",
        "The sum over ranks is the largest of their parts.",
        EACH,
        """    dist.all_reduce(summed, group=group)""",
        """    dist.all_reduce(summed, dist.ReduceOp.MAX, group=group)""",
    ),
    Mutant(
        "collective",
        "The last features, or tokens, are on no rank where the ranks do not divide their number.",
        f"{DISTRIBUTED}/test_collectives.py::test_chunk_bounds_cut_as_torch_chunk",
        """width = -(-size // parts)""",
        """width = size // parts""",
    ),
    Mutant(
        "collective",
        "DoRA scales a rowwise layer by the norm of one rank's columns.",
        "tests/lora_parallel/test_features.py::test_dora_drops_the_same_elements_on_every_mesh",
        """return all_reduce(x, context.group, "DoRA weight norm", "" if torch.compiler.is_compiling() else name)""",
        """return x""",
    ),
    Mutant(
        "backward",
        "Experts that see no token on a rank have no gradient there, for which other ranks wait.",
        f"{EXPERTS}::test_experts_that_saw_no_token_have_zeros_that_are_kept",
        """return grads[0], *zeros""",
        """return grads[0], *(None for _ in zeros)""",
    ),
    Mutant(
        "collective",
        "Tensor parallel ranks of an unseeded job drop other elements of the same activations.",
        "tests/lora_parallel/loading/test_sync_module_states.py::test_tp_peers_share_the_random_state_of_the_first",
        """dist.broadcast(state, src=dist.get_global_rank(group, 0), group=group)""",
        """pass""",
    ),
    Mutant(
        "collective",
        "Ranks of an unseeded job keep slices of different models.",
        "tests/lora_parallel/loading/test_sync_module_states.py::test_rank_zero_wins_where_copies_differ",
        """dist.broadcast(staged, src=0)""",
        """pass""",
    ),
    Mutant(
        "collective",
        "A model of which any rank but the last built another copy keeps it.",
        "tests/lora_parallel/loading/test_sync_module_states.py::test_rank_zero_wins_where_copies_differ",
        """if len(set(of_ranks)) > 1]""",
        """if of_ranks[-1] != of_ranks[0]]""",
    ),
    Mutant(
        "guard",
        "Gradients of gradients through a sum over tp lack what other ranks have of them.",
        f"{DISTRIBUTED}/test_collectives.py::test_gradients_of_gradients_are_refused",
        """@once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None""",
        """def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None""",
    ),
    Mutant(
        "collective",
        "A process that ends well aborts, as gloo's thread lets go of the last tensor when there is no GIL any more.",
        "tests/lora_parallel/distributed/test_gloo.py::"
        "test_the_end_of_a_process_needs_no_python_reference_from_gloos_thread",
        """_VIEW = _NOTHING.view(0)""",
        """_VIEW = None""",
    ),
]
