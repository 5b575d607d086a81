"""Lightning's checkpoints: what a run goes on from, on Trainer's side and on Fabric's, and what is refused."""

from tests.mutants import Mutant

FABRIC_FILES = "tests/test_formats.py::test_training_goes_on_from_the_files[fabric on 1x1-0.2.0]"
FILES = "tests/test_formats.py::test_training_goes_on_from_the_files[lightning on 1x1-0.2.0]"
FOLDER = "tests/lightning_lora"
POSITION = f"{FOLDER}/test_loader_position.py"
LOADING = f"{FOLDER}/test_loading.py"
MOVED = f"{FOLDER}/test_fabric_checkpoint.py::test_rows_and_random_numbers_go_on_on_another_number_of_ranks"
UNLIKE = f"{LOADING}::test_a_module_that_is_built_otherwise_is_refused"

BREAKAGES = [
    Mutant(
        "checkpoint",
        "A resumed run begins with the adapters that its script made.",
        FILES,
        "for commit in load_models(contents, self._train_state()):\n                commit()",
        "for commit in load_models(contents, self._train_state()):\n                pass",
    ),
    Mutant(
        "checkpoint",
        "A resumed run starts with an empty state of its optimizers.",
        FILES,
        """for commit in load_optimizers(contents, state):
            commit()
        resume_counting(contents, state)""",
        "resume_counting(contents, state)",
    ),
    Mutant(
        "checkpoint",
        "A resumed run drops other elements in LoRA dropout than the run would have that was not interrupted.",
        FILES,
        "commit()\n        resume_counting(contents, state)\n        restore_random_state(contents.record",
        "commit()\n        restore_random_state(contents.record",
    ),
    Mutant(
        "checkpoint",
        "On another number of ranks a dataloader repeats rows or leaves some out.",
        f"{POSITION}::test_the_next_rows_are_those_that_no_rank_has_seen",
        "rows, left = divmod(value * before, after)",
        "rows, left = divmod(value * after, before)",
    ),
    Mutant(
        "guard",
        "A dataloader goes on in the midst of the rows of a step, of which some are seen twice.",
        f"{POSITION}::test_ranks_that_do_not_divide_the_rows_are_refused",
        "            if left:\n                raise ValueError",
        "            if False:\n                raise ValueError",
    ),
    Mutant(
        "guard",
        "Batches that were fetched after a snapshot of the dataloader are repeated on other rows.",
        f"{POSITION}::test_batches_after_a_snapshot_cannot_move",
        "if _HOLDERS & state.keys() and state.get(_SINCE):",
        "if False:",
    ),
    Mutant(
        "checkpoint",
        "A one-file checkpoint lacks values of the module beside its parameters.",
        f"{LOADING}::test_one_file",
        """packed = {**entries, "state_dict": whole, PACKED: files}""",
        """packed = {**entries, "state_dict": {}, PACKED: files}""",
    ),
    Mutant(
        "guard",
        "A one-file checkpoint of someone else writes files outside of its own folder.",
        f"{LOADING}::test_a_file_that_would_be_written_elsewhere_is_refused",
        """if parts.is_absolute() or ".." in parts.parts:""",
        "if False:",
    ),
    # load_from_checkpoint
    Mutant(
        "replaced",
        "load_from_checkpoint returns a module with the parameters of its constructor.",
        f"{LOADING}::test_a_folder_is_loaded",
        "tensors[name].copy_(values)",
        "pass",
    ),
    Mutant(
        "replaced",
        "load_from_checkpoint loses the state of metrics and of other modules.",
        f"{LOADING}::test_a_folder_is_loaded",
        "unknown = module.load_state_dict(others, strict=False).unexpected_keys",
        "unknown = ()",
    ),
    Mutant(
        "guard",
        "load_from_checkpoint leaves a module as it was whose names are others than the checkpoint's.",
        f"{LOADING}::test_a_module_that_does_not_fit_is_refused",
        "    if strict and (unknown or untouched):\n",
        "    if False:\n",
    ),
    Mutant(
        "guard",
        "load_from_checkpoint broadcasts factors of another rank.",
        UNLIKE,
        "if name in tensors and tensors[name].shape != value.shape:",
        "if False:",
    ),
    Mutant(
        "guard",
        "load_from_checkpoint loads adapters whose config computes another function of them.",
        UNLIKE,
        """check_config(folder if adapter == "default" else folder / adapter, configs[adapter], model)""",
        "pass",
    ),
    Mutant(
        "guard",
        "load_from_checkpoint loads adapters onto another base than they were trained on.",
        UNLIKE,
        "_check_base(contents, name, model)\n\n\n",
        "pass\n\n\n",
    ),
    # Fabric
    Mutant(
        "checkpoint",
        "fabric.load leaves the optimizer as it was.",
        FABRIC_FILES,
        "commits = [*load_models(contents, target), *load_optimizers(contents, target)]",
        "commits = [*load_models(contents, target)]",
    ),
    Mutant(
        "checkpoint",
        "A loop that resumes drops other elements in LoRA dropout.",
        FABRIC_FILES,
        "resume_counting(contents, target)",
        "pass",
    ),
    Mutant(
        "checkpoint",
        "fabric.load leaves plain values of the state, such as the step, as they were.",
        FABRIC_FILES,
        "state.update({key: rest.pop(key) for key in wanted.rest if key in rest})",
        "[rest.pop(key) for key in wanted.rest if key in rest]",
    ),
    Mutant(
        "checkpoint",
        "fabric.load leaves schedulers and dataloaders as they were.",
        FABRIC_FILES,
        "value.load_state_dict(moved_position(rest.pop(key), contents.dp, dp_size(self.device_mesh)))",
        "rest.pop(key)",
    ),
    Mutant(
        "checkpoint",
        "A dataloader that fabric.load moves to another number of ranks repeats rows or leaves some out.",
        MOVED,
        "value.load_state_dict(moved_position(rest.pop(key), contents.dp, dp_size(self.device_mesh)))",
        "value.load_state_dict(rest.pop(key))",
    ),
    Mutant(
        "checkpoint",
        "A loop that resumes draws other random numbers than the loop would have that was not interrupted.",
        MOVED,
        """if wanted.optimizers:
            restore_random_state""",
        """if False:
            restore_random_state""",
    ),
    Mutant(
        "guard",
        "Options for the storage have no effect: a checkpoint is written elsewhere or otherwise than asked for.",
        f"{FOLDER}/test_fabric_checkpoint.py::test_refused",
        '            if storage_options is not None:\n                raise TypeError(f"fabric.save does',
        '            if False:\n                raise TypeError(f"fabric.save does',
    ),
    Mutant(
        "guard",
        "A run goes on with the first of several optimizers, and the others start anew.",
        f"{FOLDER}/test_refusals.py::test_a_checkpoint_of_more_optimizers_is_refused",
        """if len(contents.optimizers) != len(self.optimizers):""",
        """if False:""",
    ),
    Mutant(
        "checkpoint",
        "A file of the user's, which is no checkpoint, is replaced by one.",
        f"{FOLDER}/test_loading.py::test_one_file",
        """if not may_be_replaced(path) and not _is_packed(path):""",
        """if False:""",
    ),
    Mutant(
        "checkpoint",
        "Ranks whose clocks differ write parts of one checkpoint to several paths.",
        f"{FOLDER}/test_loading.py::test_one_file",
        """name = self.broadcast(str(filepath))""",
        """name = str(filepath)""",
    ),
]
