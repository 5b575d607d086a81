"""Chunks of the tokens of context parallelism: who has which, how they are exchanged, and what is refused."""

from tests.mutants import Mutant

CP = "tests/lora_parallel/cp/test_context_parallel.py"
GRADIENTS = f"{CP}::test_gradients_equal_one_process"
REFUSED = f"{CP}::test_what_would_be_wrong_is_refused"
AROUND = "tests/lora_parallel/cp/test_around_blocks.py::test_what_is_around_the_blocks_equals_one_process_or_is_refused"

BREAKAGES = [
    Mutant(
        "pass",
        "Under cp the blocks, and the norm behind them, train on their gradient divided by cp.",
        AROUND,
        """        hidden = scale_gradient(hidden, context.chunks.ranks)""",
        """        pass""",
    ),
    Mutant(
        "pass",
        "Under cp the linear layers of a head train on their gradient divided by cp.",
        AROUND,
        """part = part if factor == 1 else scale_gradient(part, factor)""",
        """pass""",
    ),
    Mutant(
        "backward",
        "Under cp blocks lose the gradient of other ranks' tokens, which the trunk mixes behind them.",
        AROUND,
        """hidden = context.chunks.cut(hidden, name)""",
        """hidden = context.chunks.mine(hidden)""",
    ),
    Mutant(
        "pass",
        "Under cp what is before a linear layer of a head trains on cp times its gradient.",
        AROUND,
        """own = part_of(x) if factor == 1 else scale_gradient(part_of(x), 1 / factor)""",
        """own = part_of(x)""",
    ),
    Mutant(
        "pass",
        "Under cp with Ulysses queries attend to the keys of other heads, where cp does not divide the key heads.",
        f"{CP}::test_key_heads_that_are_repeated_stay_with_their_queries",
        """return query, key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)""",
        """return query, key.repeat(1, repeat, 1, 1), value.repeat(1, repeat, 1, 1)""",
    ),
    Mutant(
        "backward",
        "Under cp the blocks train on a multiple of the gradient of a loss of all logits.",
        GRADIENTS,
        """return ctx.chunks.mine(grads[0]).contiguous(), None, None, None""",
        """return ctx.chunks.mine(grads[0]) * ctx.chunks.ranks, None, None, None""",
    ),
    Mutant(
        "backward",
        "Under cp a trained embedding gets the gradient of this rank's tokens at the places of the first ones.",
        AROUND,
        """return _gathered(grads[0], ctx.tokens, ctx.chunks, "input gradient", ctx.where), None, None""",
        """return padded(grads[0], 1, ctx.tokens), None, None""",
    ),
    Mutant(
        "backward",
        "Under cp with Ulysses the gradients of queries, keys and values are divided by the number of ranks.",
        GRADIENTS,
        """return None, None, None, *_to_tokens(grads, ctx.chunks, what, ctx.where)""",
        """return None, None, None, *(x / ctx.chunks.ranks for x in _to_tokens(grads, ctx.chunks, what, ctx.where))""",
    ),
    Mutant(
        "backward",
        "Under cp with Ulysses the gradient of the output of attention is divided by the number of ranks.",
        GRADIENTS,
        """return _to_heads(grads, ctx.tokens, ctx.chunks, "output gradient of attention", ctx.where)[0], None, None""",
        """return _to_heads(grads, ctx.tokens, ctx.chunks, "", ctx.where)[0] / ctx.chunks.ranks, None, None""",
    ),
    Mutant(
        "backward",
        "Under cp with all_gather keys and values train on the queries of this rank's tokens only.",
        GRADIENTS,
        """total = scattered_sum(chunks.parted(packed).contiguous(), chunks.group, "gradients of keys", ctx.where)""",
        """total = chunks.parted(packed)[chunks.rank]""",
    ),
    Mutant(
        "collective",
        "Under cp with all_gather the keys of the second half of a row are in another order than its tokens.",
        GRADIENTS,
        """for rank in reversed(range(self.ranks)) if half else range(self.ranks):""",
        """for rank in range(self.ranks):""",
    ),
    Mutant(
        "collective",
        "Under cp with Ulysses a rank computes its heads with the mask, or the sinks, of the first rank's heads.",
        GRADIENTS,
        """share = chunk_bounds(heads, chunks.ranks, chunks.rank)""",
        """share = chunk_bounds(heads, chunks.ranks, 0)""",
    ),
    Mutant(
        "collective",
        "Under cp the LoRA dropout of all ranks drops the elements of the first tokens.",
        f"{CP}::test_dropout_drops_the_same_elements",
        """token = self.chunks.positions(count, device).expand(rows, mine)""",
        """token = torch.arange(mine, dtype=torch.int32, device=device).expand(rows, mine)""",
    ),
    Mutant(
        "guard",
        "Under cp embeddings that the user computes get the gradient of this rank's tokens.",
        REFUSED,
        """if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    "an input of the model requires a gradient, and under cp""",
        """if False:
                raise ValueError(
                    "an input of the model requires a gradient, and under cp""",
    ),
    Mutant(
        "guard",
        "Under cp gradients of a part of the model that is called by itself are counted on every rank.",
        REFUSED,
        """if torch.is_grad_enabled():
        raise ValueError(
            f"{name} was called with gradients, but not by""",
        """if False:
        raise ValueError(
            f"{name} was called with gradients, but not by""",
    ),
    Mutant(
        "guard",
        "Under cp a model whose attention does not go through transformers' registry attends to this rank's tokens.",
        REFUSED,
        """raise TraceError("its attention does not go through transformers' registry of attention functions")""",
        """pass""",
    ),
    Mutant(
        "style",
        "Under cp attention in both directions is causal.",
        f"{CP}::test_attention_of_gathered_keys_looks_where_that_of_all_tokens_does",
        """if call.mask is not None or not _is_causal(call):""",
        """if call.mask is not None:""",
    ),
    Mutant(
        "style",
        "Under cp attention is causal although its call says that it is not.",
        f"{CP}::test_attention_of_gathered_keys_looks_where_that_of_all_tokens_does",
        """causal = call.kwargs.get("is_causal")""",
        """causal = None""",
    ),
    Mutant(
        "collective",
        "Under cp a block computes with a part of a table that was changed in place since.",
        f"{CP}::test_a_table_that_changes_between_blocks_is_cut_anew",
        """if kept is None or kept[0] is not x or kept[1] != x._version:""",
        """if kept is None or kept[0] is not x:""",
    ),
    Mutant(
        "guard",
        "Under cp an attention that is set after parallelize computes without the mask that it is given.",
        f"{CP}::test_an_attention_that_is_set_afterwards_is_refused",
        """        check_method(implementation)
        return _with""",
        """        return _with""",
    ),
    Mutant(
        "style",
        "Under cp attention sinks of other heads are used.",
        GRADIENTS,
        """self.__dict__[name] = value[share[0] : share[1]] if of_heads else value""",
        """self.__dict__[name] = value""",
    ),
    Mutant(
        "guard",
        "Under cp a block that is called by itself trains on a multiple of its gradient.",
        REFUSED,
        """refuse_gradients(type(block).__name__)""",
        """pass""",
    ),
    Mutant(
        "pass",
        "Under cp blocks in front of a trunk's end that mixes tokens train on their gradient divided by cp.",
        AROUND,
        """context.chunks.whole(scale_gradient(hidden, context.chunks.ranks), tokens""",
        """context.chunks.whole(hidden, tokens""",
    ),
    Mutant(
        "collective",
        "Under cp tokens whose labels are ignored count in the mean of the loss.",
        GRADIENTS,
        """ignored = torch.where(target == ignore_index, -100, 0)""",
        """ignored = torch.zeros_like(target)""",
    ),
]
