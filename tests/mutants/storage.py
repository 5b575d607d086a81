"""Folders that are complete or not there."""

from tests.mutants import Mutant

ATOMIC = "tests/lora_parallel/storage/test_atomic.py"
FOLDER = "tests/lora_parallel/adapters/test_adapter_folder.py"
REPLICAS = (
    "tests/lora_parallel/distributed/test_replicas.py::"
    "test_what_differs_between_ranks_is_told_and_the_first_ranks_values_are_saved"
)

BREAKAGES = [
    Mutant(
        "guard",
        "An adapter is saved without a word though ranks that should hold the same have trained it otherwise.",
        REPLICAS,
        """    warn_of_unequal_replicas(saved, mesh_of(model))
""",
        "",
    ),
    Mutant(
        "guard",
        "Of an adapter that ranks hold otherwise, some values are saved of one rank and some of another.",
        REPLICAS,
        """if keys[name] not in held})""",
        """if True})""",
    ),
    Mutant(
        "guard",
        "A save replaces a folder that the user did not ask to replace.",
        f"{ATOMIC}::test_what_is_there_is_replaced_if_asked",
        """if not replace:
            check_free(self.target)""",
        """pass""",
    ),
    Mutant(
        "guard",
        "A folder is put in place that lacks tensors, or holds other values than the model.",
        f"{FOLDER}::test_a_failed_save_raises_on_every_rank_and_leaves_the_old_folder",
        """_compare(scratch.path / WEIGHTS, self.tensors)""",
        """pass""",
    ),
    Mutant(
        "guard",
        "Two processes write one folder, and it holds files of both.",
        f"{ATOMIC}::test_what_is_discarded_is_gone_and_what_is_anothers_is_not",
        """if self.path.exists() and _in_use(self.path):""",
        """if False:""",
    ),
    Mutant(
        "checkpoint",
        "A replacement that fails removes what was there.",
        f"{ATOMIC}::test_a_failed_rename_leaves_the_old",
        """if there:
                os.replace(old, target)
            raise""",
        """raise""",
    ),
    Mutant(
        "checkpoint",
        "A folder that another process is writing is swept away.",
        f"{ATOMIC}::test_what_is_discarded_is_gone_and_what_is_anothers_is_not",
        """(path.name.endswith(_WRITING) and not _in_use(path))""",
        """path.name.endswith(_WRITING)""",
    ),
    Mutant(
        "checkpoint",
        "A killed replacement loses the old folder for good.",
        f"{ATOMIC}::test_a_replacement_that_was_cut_in_two_is_undone",
        """restore_replaced(path.with_name(path.name[1 : -len(_REPLACED)]))
            _remove(path)""",
        """_remove(path)""",
    ),
    Mutant(
        "checkpoint",
        "A worker of a dataloader that outlives a killed job keeps the next job from saving.",
        f"{ATOMIC}::test_what_a_killed_process_left_is_swept",
        """scratch._release()""",
        """pass""",
    ),
]
