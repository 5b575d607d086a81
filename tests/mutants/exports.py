"""Merged exports, and weights that all ranks start from."""

from tests.mutants import Mutant

MERGED = "tests/lora_parallel/export/test_merged.py"
SAME = f"{MERGED}::test_the_folder_is_that_of_one_process"
REFUSED = f"{MERGED}::test_what_cannot_be_exported_is_refused"
FOLLOWED = (
    "tests/lora_parallel/export/test_save_pretrained.py::test_what_a_save_on_rank_zero_calls_is_followed_by_the_others"
)
OWN = "tests/accelerate_plugin/test_own_saves.py::test_each_leaves_the_files_of_one_process"

PIECES = f"{MERGED}::test_files_are_split_and_read_in_pieces"

BREAKAGES = [
    Mutant(
        "pass",
        "A merged export has the first values of the rows that trainable_token_indices trains.",
        SAME,
        """_replace_rows(merged, a, b, region)""",
        """pass""",
    ),
    Mutant(
        "pass",
        "A rank writes the rows of trainable_token_indices into other rows of a merged export.",
        PIECES,
        """weight[(indices[inside] - region[0].start).to(weight.device)]""",
        """weight[(indices[inside] % (region[0].stop - region[0].start)).to(weight.device)]""",
    ),
    Mutant(
        "checkpoint",
        "from_pretrained draws an embedding with trainable_token_indices at random: its key has another name.",
        SAME,
        """|token_adapter\\.base_layer)""",
        """)""",
    ),
    Mutant(
        "checkpoint",
        "A merged export of a module that holds a PeftModel has keys with PEFT's names in them.",
        f"{MERGED}::test_a_model_inside_of_the_users_module_has_the_keys_of_that_module",
        """name = name.replace(f"{holder}.base_model.model.", f"{holder}.", 1)""",
        """pass""",
    ),
    Mutant(
        "guard",
        "A merged export has one weight for two tied layers, and the adapter of one of them.",
        SAME,
        """if len({form.adapted_by for form in tied}) == 1""",
        """if True""",
    ),
    Mutant(
        "checkpoint",
        "The config of a merged export calls two weights tied that adapters have made differ.",
        SAME,
        """config.tie_word_embeddings = False  # type: ignore[union-attr]""",
        """pass""",
    ),
    Mutant(
        "pass",
        "A merged export has the base's weights without the adapters.",
        SAME,
        """merged += _delta(weight, adapter, a, b, region)""",
        """_delta(weight, adapter, a, b, region)""",
    ),
    Mutant(
        "pass",
        "The rows of a rank get the adapter of the first rows of a merged weight.",
        SAME,
        """wanted = [torch.arange(part.start, part.stop) for part in region]""",
        """wanted = [torch.arange(part.stop - part.start) for part in region]""",
    ),
    Mutant(
        "pass",
        "What trains beside an adapter, such as a module around the model, is lost when the adapter is saved.",
        "tests/accelerate_plugin/test_whole_model.py::test_what_trains_is_saved_resumed_and_the_best_taken[2x1-around]",
        "_write_beside(folder / TRAINED, beside)",
        "pass",
    ),
    Mutant(
        "guard",
        "A merged export has a DoRA adapter without its magnitudes.",
        REFUSED,
        """if adapter in layer.lora_variant:""",
        """if False:""",
    ),
    Mutant(
        "collective",
        "Ranks start from weights that differ.",
        "tests/lora_parallel/loading/test_sync_module_states.py::test_rank_zero_wins_where_copies_differ",
        """tensor.copy_(staged)""",
        """pass""",
    ),
    Mutant(
        "checkpoint",
        "from_pretrained reads the weights of an earlier save from a folder that was saved to again.",
        "tests/lora_parallel/export/test_save_pretrained.py::test_what_users_call",
        """            path.unlink()
""",
        """            pass
""",
    ),
    Mutant(
        "checkpoint",
        "A merged export lacks the settings of generation.",
        SAME,
        """generation.save_pretrained(folder)  # type: ignore[union-attr]""",
        """pass""",
    ),
    Mutant(
        "replaced",
        "A class's `save_pretrained` that calls transformers' own gathers the base.",
        OWN,
        """(PreTrainedModel, "save_pretrained"): partial(""",
        """(PreTrainedModel, "push_to_hub"): partial(""",
    ),
    Mutant(
        "replaced",
        "save_pretrained of sentence-transformers' models, in the user's own code, writes shards of their modules.",
        OWN,
        """            save_on_rank_zero(model, partial(own, holder, *args, **kwargs))""",
        """            own(holder, *args, **kwargs)""",
    ),
    Mutant(
        "collective",
        "The other ranks run the forward of a model card in training mode, with dropout.",
        FOLLOWED,
        """        (nn.Module, "train"): nn.Module.train,
""",
        "",
    ),
    Mutant(
        "collective",
        "A trainer's own save writes one rank's shards of a state dict.",
        FOLLOWED,
        """    state.update(gather_on_rank_zero(tensors))""",
        """    gather_on_rank_zero(tensors)""",
    ),
    Mutant(
        "guard",
        "A trainer's own save writes fused weights with their rows in the order of the ranks.",
        FOLLOWED,
        """any(partition_of(inner, key) for key in inner._parameters)""",
        """False""",
    ),
    Mutant(
        "guard",
        "A trainer's own save calls what every rank must call, and the messages of ranks are taken for one another's.",
        FOLLOWED,
        """    if alone.get() and _current() is not None:""",
        """    if False:""",
    ),
    Mutant(
        "replaced",
        "A trainer's own save that passes its state dict on writes a config that names a class of FSDP2's.",
        OWN,
        """not (state is None or state is given)""",
        """state is not None""",
    ),
    Mutant(
        "checkpoint",
        "A second model, which has no adapters, is saved as the adapters of the first.",
        OWN,
        """(key[0] is nn.Module or "save_pretrained" in vars(module))""",
        """True""",
    ),
    Mutant(
        "guard",
        "A trainer's own save pickles rank 0's parts of the parameters.",
        OWN,
        """        _refuse_parts([tensor], "pickle was given")""",
        """        pass""",
    ),
    Mutant(
        "guard",
        "A trainer's own save that sends a message of its own waits for ranks that wait for its end.",
        OWN,
        """                refuse_alone(str(func))""",
        """                return args[0]""",
    ),
    Mutant(
        "collective",
        "A barrier at the end of a trainer's own save is refused, though the other ranks wait for that end.",
        OWN,
        """senders[_BARRIER] = lambda *args, **kwargs: None""",
        """senders[_BARRIER] = own[_BARRIER]""",
    ),
    Mutant(
        "checkpoint",
        "A state_dict that a class overrides changes the keys twice in a trainer's own save.",
        OWN,
        """nn.Module.state_dict(module, *args, **kwargs)  # an""",
        """module.state_dict(*args, **kwargs)  # an""",
    ),
    Mutant(
        "checkpoint",
        "A trainer's own save under pp writes the parameters of the first stage alone.",
        FOLLOWED,
        """if module in names and "pp" in""",
        """if module in names and "no axis" in""",
    ),
]
