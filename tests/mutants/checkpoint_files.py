"""The files of a checkpoint: complete, undamaged, of one save, and the newest ones kept."""

from tests.mutants import Mutant

SAVE = "tests/lora_parallel/checkpoint/test_save_load.py"
DAMAGED = f"{SAVE}::test_a_damaged_checkpoint_is_refused"
NEWEST = f"{SAVE}::test_the_newest_are_kept"

BREAKAGES = [
    Mutant(
        "checkpoint",
        "The newest checkpoint is one whose files are cut off.",
        f"{SAVE}::test_only_complete_ones_are_found",
        """if file.stat().st_size != size:""",
        """if False:""",
    ),
    Mutant(
        "checkpoint",
        "The newest checkpoint is one that lacks files.",
        f"{SAVE}::test_only_complete_ones_are_found",
        """and not find_damage(path, meta := read_meta(path)):""",
        """and (meta := read_meta(path)):""",
    ),
    Mutant(
        "checkpoint",
        "A checkpoint of another front end is read, whose loops and schedules are lost.",
        DAMAGED,
        """if meta["writer"] != writer:""",
        """if False:""",
    ),
    Mutant(
        "checkpoint",
        "A checkpoint of a later format is read as one of this.",
        DAMAGED,
        """if stated not in range(1, FORMAT + 1):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "Ranks go on from the states of different steps.",
        f"{SAVE}::test_ranks_that_found_different_checkpoints",
        '''alike["checkpoint"] = f"{meta['name']} ({digest})"''',
        """pass""",
    ),
    Mutant(
        "checkpoint",
        "A job resumes from an older checkpoint than its last.",
        NEWEST,
        """max((read_meta(path)["number"] for path in before), default=0) + 1""",
        """len(before) + 1""",
    ),
    Mutant(
        "checkpoint",
        "The newest checkpoints are removed, and the oldest kept.",
        NEWEST,
        """complete_checkpoints(target.parent)[: -self._keep_last]""",
        """complete_checkpoints(target.parent)[self._keep_last :]""",
    ),
]
