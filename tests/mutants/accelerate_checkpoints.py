"""Accelerate's save_state and load_state, its gradients, and what it prepares."""

from tests.mutants import Mutant

FILES = "tests/test_formats.py::test_training_goes_on_from_the_files[accelerate on 1x1-0.2.0]"
CHECKPOINT = "tests/accelerate_plugin/test_checkpoint.py"
NAMES = f"{CHECKPOINT}::test_automatic_naming_and_a_limit"
BAD = f"{CHECKPOINT}::test_bad_checkpoints_are_one_error_on_every_rank"
NO_MODEL = f"{CHECKPOINT}::test_what_a_script_registers_is_saved_without_a_model"
UNITS = f"{CHECKPOINT}::test_a_schedule_goes_on_at_its_update_on_half_as_many_processes"
NEXT_EPOCH = f"{CHECKPOINT}::test_the_next_epoch_is_shuffled_anew_where_one_is_saved_at_its_end"
SCHEDULE = "tests/accelerate_plugin/test_schedule.py"
CLIPPED = "tests/accelerate_plugin/test_data.py::test_clipping_by_value"

BREAKAGES = [
    Mutant(
        "checkpoint",
        "A resumed run starts its learning-rate schedule again.",
        FILES,
        "resume_schedule(scheduler.scheduler, saved, _scale(self, extra))",
        "pass",
    ),
    Mutant(
        "checkpoint",
        "On another number of processes a resumed schedule is at a step of the other number.",
        FILES,
        """return Fraction(saved["rows"], here)""",
        """return Fraction(here, saved["rows"])""",
    ),
    Mutant(
        "checkpoint",
        "A run that resumes with other gradient accumulation is at another step of its schedule.",
        UNITS,
        "return size * accelerator.gradient_accumulation_steps if size is not None else None",
        "return size",
    ),
    Mutant(
        "checkpoint",
        "Without a prepared dataloader a resumed schedule is at a step of the other number of processes.",
        UNITS,
        """return Fraction(accelerator.num_processes, saved["processes"])""",
        "return Fraction(1)",
    ),
    Mutant(
        "checkpoint",
        "A dataloader for evaluations, with a batch size of its own, changes where a schedule goes on.",
        UNITS,
        "return next((index for index, loader in enumerate(accelerator._dataloaders) if loader is active), 0)",
        "return max(len(accelerator._dataloaders) - 1, 0)",
    ),
    Mutant(
        "checkpoint",
        "A run that is saved in mid-accumulation steps its optimizer at another micro-batch once resumed.",
        NO_MODEL,
        """self.step = extra["step"]""",
        "pass",
    ),
    Mutant(
        "checkpoint",
        "A stateful dataloader begins its epoch again, and rows are seen twice.",
        f"{CHECKPOINT}::test_a_stateful_dataloader_goes_on_in_mid_epoch",
        "loader.load_state_dict(saved)",
        "pass",
    ),
    Mutant(
        "checkpoint",
        "A run that was saved at the end of an epoch sees the rows of the next one in the same order again.",
        NEXT_EPOCH,
        "loader.iteration + int(active and loader.end_of_dataloader)",
        "loader.iteration",
    ),
    Mutant(
        "checkpoint",
        "A run that was saved at the end of an epoch draws the order of the next one as in that epoch.",
        NEXT_EPOCH,
        "inside = active and not loader.end_of_dataloader",
        "inside = active",
    ),
    Mutant(
        "checkpoint",
        "With use_seedable_sampler a resumed run shuffles as in its first epoch, by the seed of the script.",
        NEXT_EPOCH,
        """sampler.epoch = loader.iteration = saved["epoch"]
        sampler.initial_seed = saved["seed"]""",
        "pass",
    ),
    Mutant(
        "checkpoint",
        "What a script registers for checkpointing starts again in a resumed run.",
        FILES,
        "registered.load_state_dict(saved)\n    self.step",
        "pass\n    self.step",
    ),
    Mutant(
        "checkpoint",
        "A resumed run draws other random numbers than the run would have that was not interrupted.",
        NO_MODEL,
        """self.step = extra["step"]
    restore_random_state(contents.record["random"], state.mesh)""",
        """self.step = extra["step"]""",
    ),
    Mutant(
        "checkpoint",
        "A resumed run drops other elements in LoRA dropout than the run would have that was not interrupted.",
        FILES,
        "resume_counting(contents, state)\n    with agreed():",
        "with agreed():",
    ),
    Mutant(
        "checkpoint",
        "A resumed run starts with an empty state of its optimizers.",
        FILES,
        """commits = [*load_models(contents, state), *load_optimizers(contents, state)]
    with agreed():""",
        """commits = [*load_models(contents, state)]
    with agreed():""",
    ),
    Mutant(
        "checkpoint",
        "Schedules inside of a SequentialLR are at steps of another number of processes.",
        f"{SCHEDULE}::test_a_schedule_goes_on_in_another_unit",
        """mixed["_schedulers"] = [_scaled(mine, theirs, scale) for mine, theirs in parts]""",
        """mixed["_schedulers"] = saved["_schedulers"]""",
    ),
    Mutant(
        "checkpoint",
        "A limit on the number of checkpoints removes the newest ones and keeps the oldest.",
        NAMES,
        "for old in _numbered(path.parent)[: -self.project_configuration.total_limit]:",
        "for old in _numbered(path.parent)[self.project_configuration.total_limit :]:",
    ),
    Mutant(
        "checkpoint",
        "load_state without a path goes back to the oldest checkpoint.",
        NAMES,
        "input_dir = there[-1]",
        "input_dir = there[0]",
    ),
    Mutant(
        "checkpoint",
        "accelerator.get_state_dict leaves out an adapter that does not train, and it is lost when that is saved.",
        f"{CHECKPOINT}::test_the_state_dict_has_the_adapter_that_does_not_train",
        "trained |= adapter_parameters(model)",
        "pass",
    ),
    Mutant(
        "replaced",
        "accelerator.get_state_dict after a forward without its backward has weights in sixteen bits.",
        f"{CHECKPOINT}::test_the_state_dict_has_the_shards_of_weights_that_a_forward_has_gathered",
        """        reshard(model)
        trained = {name: p""",
        "        trained = {name: p",
    ),
    Mutant(
        "guard",
        "A schedule of another kind resumes with fields of the one that was saved.",
        BAD,
        '    if differing:\n        raise ValueError(\n            f"the saved schedule',
        '    if False:\n        raise ValueError(\n            f"the saved schedule',
    ),
    Mutant(
        "guard",
        "A checkpoint is written that holds objects, which no later run can read.",
        BAD,
        'check_loadable(\n                f"the state_dict of {kind}, registered',
        '(lambda *_: None)(\n                f"the state_dict of {kind}, registered',
    ),
    Mutant(
        "guard",
        "A dataloader that shuffles goes on from a checkpoint of one that did not, in an order of its own.",
        BAD,
        "if (saved is not None and kind not in saved) or present != (saved is not None):",
        "if False:",
    ),
    Mutant(
        "guard",
        "A checkpoint is loaded before the model is prepared, and the adapters stay as the script made them.",
        BAD,
        """if contents.record["models"] and not state.models:""",
        "if False:",
    ),
    Mutant(
        "guard",
        "A checkpoint is loaded before the optimizer is prepared, whose state starts empty.",
        BAD,
        "if contents.optimizers.keys() != state.optimizers.keys():",
        "if False:",
    ),
    Mutant(
        "guard",
        "Where automatic naming meets a checkpoint of an earlier run, nobody says how to go on.",
        NAMES,
        "if naming and path.exists():",
        "if False:",
    ),
    Mutant(
        "replaced",
        "accelerator.clip_grad_norm_ with a norm_type clips by the Euclidean norm.",
        CLIPPED,
        "clip_norm(parameters, max_norm, float(norm_type))",
        "clip_norm(parameters, max_norm)",
    ),
    Mutant(
        "replaced",
        "accelerator.clip_grad_value_ clips nothing.",
        CLIPPED,
        "clip_value_([parameters] if isinstance(parameters, Tensor) else parameters, clip_value)",
        "pass",
    ),
    Mutant(
        "checkpoint",
        "A run that resumes in mid-epoch shuffles anew: some rows are seen twice, others never.",
        f"{CHECKPOINT}::test_shuffling_goes_on_in_mid_epoch",
        """_dealer(loader).sampler = _Resumable(sampler)""",
        """pass""",
    ),
]
