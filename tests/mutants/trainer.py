"""What a Trainer of transformers goes on from."""

from tests.mutants import Mutant

FILES = "tests/test_formats.py::test_training_goes_on_from_the_files[trainer on 1x2-0.2.0]"
GOES_ON = "tests/accelerate_plugin/test_trainer.py::test_states_of_callbacks_and_random_numbers_go_on"

OWN = "tests/accelerate_plugin/test_own_saves.py::test_each_leaves_the_files_of_one_process"
SENTENCES = "tests/accelerate_plugin/test_sentence_transformers.py::test_its_trainer_trains_as_in_one_process"

BREAKAGES = [
    Mutant(
        "replaced",
        "A save that a trainer's class overrides asks for the state dict of the whole model, and the base is gathered.",
        OWN,
        """partial(self._save, directory, state_dict=given), given)""",
        """partial(self._save, directory))""",
    ),
    Mutant(
        "replaced",
        "Trainer writes the state dict of a module of the user's beside the adapters, for which the base is gathered.",
        "tests/accelerate_plugin/test_whole_model.py::test_what_trains_is_saved_resumed_and_the_best_taken[2x1-around]",
        """{"model": object.__new__(_SavedAlready)}""",
        """{}""",
    ),
    Mutant(
        "replaced",
        "A trainer of sentence-transformers cannot resume.",
        SENTENCES,
        """            kind._load_from_checkpoint = standing_in(load, load_from_checkpoint)""",
        """            pass""",
    ),
    Mutant(
        "checkpoint",
        "A resumed Trainer begins with fresh adapters.",
        FILES,
        """    for commit in load_models(contents, state):
        commit()
    resume_counting(contents, state)""",
        "    resume_counting(contents, state)",
    ),
    Mutant(
        "checkpoint",
        "A resumed Trainer starts with an empty state of its optimizer.",
        FILES,
        """for commit in load_optimizers(contents, _train_state(self)):
        commit()""",
        "pass",
    ),
    Mutant(
        "checkpoint",
        "A resumed Trainer starts its learning-rate schedule again.",
        FILES,
        "self.lr_scheduler.load_state_dict(saved)",
        "pass",
    ),
    Mutant(
        "checkpoint",
        "A resumed Trainer draws other random numbers than the run would have that was not interrupted.",
        GOES_ON,
        'restore_random_state(_read(checkpoint).record["random"], '
        "self.accelerator.state.parallelism_config.device_mesh)",
        "pass",
    ),
    Mutant(
        "checkpoint",
        "EarlyStoppingCallback, and any other with a state, counts from the start again in a resumed run.",
        GOES_ON,
        "                _note_callbacks(self)\n",
        "",
    ),
    Mutant(
        "checkpoint",
        "A resumed Trainer drops other elements in LoRA dropout.",
        FILES,
        """        commit()
    resume_counting(contents, state)


@replaces""",
        """        commit()


@replaces""",
    ),
    Mutant(
        "guard",
        "A run after merge_and_unload ends well, and has trained nothing.",
        "tests/accelerate_plugin/test_check.py::test_what_a_script_s_run_refuses_check_refuses_in_the_same_words",
        """        check_trains(f"the model ({type(self.model).__name__})", self.model.parameters())
""",
        "",
    ),
    Mutant(
        "replaced",
        "accelerate-lora check reads a model's weights, and lets pass what a run refuses of a model on disk.",
        "tests/accelerate_plugin/test_check.py::test_what_a_script_s_run_refuses_check_refuses_in_the_same_words",
        """with end_after_set_up(), alone, patched():""",
        """with end_after_set_up(), alone:""",
    ),
    Mutant(
        "guard",
        "accelerate-lora check lets a script without a mesh fail in torch's own DDP, with an internal error.",
        "tests/accelerate_plugin/test_check.py::test_a_script_that_shards_nothing_is_told_what_it_uses",
        """            stack.enter_context(replaced(kind, {"__init__": standing_in(kind.__init__, _refuse_wrapper)}))
""",
        """            pass
""",
    ),
    Mutant(
        "guard",
        "A command whose LORA_PARALLEL file is missing starts ranks, and each of them fails by itself.",
        "tests/accelerate_plugin/test_autoload.py::test_a_file_that_is_not_there_ends_a_process_at_once",
        """        if not os.path.isfile(os.environ[VARIABLE]) and""",
        """        if False and""",
    ),
    Mutant(
        "guard",
        "A misspelt name in target_modules, beside a right one, is said by nobody.",
        "tests/lora_parallel/runtime/test_description.py::test_names_that_match_no_layer_are_said",
        r"""if not any(re.fullmatch(rf"(.*\.)?({pattern})", layer) for layer in adapted):""",
        """if not adapted:""",
    ),
]
