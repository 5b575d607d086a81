"""Break what a checkpoint holds: each field is saved, compared and restored."""

from tests.mutants import Mutant

SAVE = "tests/lora_parallel/checkpoint/test_save_load.py"
RESUME = "tests/lora_parallel/checkpoint/test_resume.py"
FORMATS = "tests/test_formats.py::test_training_goes_on_from_the_files"
DRAWN = f"{FORMATS}[2x2 on 1x1-0.2.0]"
BUFFERS = f"{SAVE}::test_buffers_go_on_where_they_were"
MISFITS = f"{SAVE}::test_what_does_not_fit_is_refused"

BREAKAGES = [
    Mutant(
        "checkpoint",
        "A resumed run drops the elements that its first steps have dropped already.",
        f"{RESUME}::test_dropout_goes_on_where_it_was",
        """model_state.forward_count.done = found.record["forward_counts"][name]""",
        """pass""",
    ),
    Mutant(
        "checkpoint",
        "A resumed run draws other numbers than one that was never stopped.",
        f"{RESUME}::test_the_models_own_randomness_goes_on_where_it_was",
        """torch.set_rng_state(state["torch"])""",
        """pass""",
    ),
    Mutant(
        "checkpoint",
        "A resumed run shuffles and augments with other numbers of Python's generator.",
        DRAWN,
        """random.setstate((version, tuple(inner), gauss))""",
        """pass""",
    ),
    Mutant(
        "checkpoint",
        "A resumed run augments with other numbers of NumPy's generator.",
        DRAWN,
        """np.random.set_state(tuple(state["numpy"]))""",
        """pass""",
    ),
    Mutant(
        "checkpoint",
        "Running statistics begin anew after a resume.",
        BUFFERS,
        """return [(buffer, stored[name]) for name, buffer in here.items()]""",
        """return []""",
    ),
    Mutant(
        "checkpoint",
        "What modules keep beside tensors begins anew after a resume.",
        BUFFERS,
        """state.load_other_state(others)""",
        """pass""",
    ),
    Mutant(
        "checkpoint",
        "A resumed optimizer goes on with the learning rate of the script, not with that of its schedule.",
        BUFFERS,
        """group.update(copy.deepcopy(saved["settings"]))""",
        """pass""",
    ),
    Mutant(
        "checkpoint",
        "A state that an optimizer keeps for all parameters begins anew after a resume.",
        BUFFERS,
        """optimizer.state.update(copy.deepcopy(record["shared"]))""",
        """pass""",
    ),
    Mutant(
        "checkpoint",
        "Moments from before a resume stay in an optimizer where the checkpoint has none.",
        f"{SAVE}::test_a_save_before_the_first_step",
        """optimizer.state.clear()
        optimizer.state.update(state)""",
        """optimizer.state.update(state)""",
    ),
    Mutant(
        "checkpoint",
        "Weights that train without an adapter start from the base again after a resume.",
        f"{SAVE}::test_what_was_frozen_after_it_trained_is_restored",
        """(local(p), reader(loose_key(name), region_of(p)) if local(p).numel() else local(p))""",
        """(local(p), local(p))""",
    ),
    Mutant(
        "checkpoint",
        "A weight that trained for a while and was frozen then is not in the checkpoint.",
        f"{SAVE}::test_what_was_frozen_after_it_trained_is_restored",
        """if (p.requires_grad or p in trained) and p not in adapted""",
        """if p.requires_grad and p not in adapted""",
    ),
    Mutant(
        "checkpoint",
        "A run goes on with the states of another kind of optimizer.",
        MISFITS,
        """if record["class"] != kind:""",
        """if False:""",
    ),
    Mutant(
        "checkpoint",
        "Parameters that the saved optimizer did not have train on without moments, unnoticed.",
        MISFITS,
        """if mine != theirs:
            raise ValueError(
                f"parameter group""",
        """if False:
            raise ValueError(
                f"parameter group""",
    ),
    Mutant(
        "checkpoint",
        "An adapter goes on on another base than it was trained on.",
        MISFITS,
        """other = [name for name in stored if name in present and present[name] != stored[name]]""",
        """other: list[str] = []""",
    ),
    Mutant(
        "checkpoint",
        "An adapter goes on on a base with more layers than it was trained on.",
        f"{SAVE}::test_a_larger_base_is_another_one_and_so_is_a_smaller_one",
        """more = [name for name in present if name not in stored]""",
        """more: list[str] = []""",
    ),
    Mutant(
        "checkpoint",
        "An adapter goes on on a base with fewer layers than it was trained on.",
        f"{SAVE}::test_a_larger_base_is_another_one_and_so_is_a_smaller_one",
        """missing = [name for name in stored if name not in names]""",
        """missing: list[str] = []""",
    ),
    Mutant(
        "checkpoint",
        "Layers of a checkpoint that the model lacks are left out without a word.",
        f"{SAVE}::test_a_model_with_more_trained_layers_is_another_one_and_so_is_one_with_less",
        """    if more or lacking:""",
        """    if False:""",
    ),
    Mutant(
        "checkpoint",
        "LBFGS goes on with directions whose elements are of other parameters.",
        f"{SAVE}::test_an_optimizer_that_joins_its_parameters_resumes_with_them_in_the_same_order",
        """if [names[parameter] for parameter in group["params"]] != saved["parameters"]:""",
        """if False:""",
    ),
    Mutant(
        "checkpoint",
        "Data-parallel ranks that a larger mesh adds draw the same numbers for other rows.",
        f"{RESUME}::test_ranks_that_a_larger_mesh_adds_draw_numbers_of_their_own",
        """.tobytes() + rank.to_bytes(4, "little"), digest_size=4)""",
        """.tobytes(), digest_size=4)""",
    ),
    Mutant(
        "checkpoint",
        "Adapters of a dtype that the optimizer's states do not belong to are resumed.",
        MISFITS,
        """if same_dtypes and values[key].dtype != parameter.dtype:""",
        """if False:""",
    ),
    Mutant(
        "checkpoint",
        "An adapter that the checkpoint lacks keeps its initial values in a resumed run.",
        MISFITS,
        """if sorted(saved) != sorted(here):""",
        """if False:""",
    ),
    Mutant(
        "checkpoint",
        "A run whose weights train in another dtype resumes, and rounds them.",
        f"{SAVE}::test_what_was_whole_is_not_put_beside_shards",
        """if here is not None and (leaf.shape, leaf.dtype) != (tuple(here.shape), here.dtype):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "The rows of one rank's optimizer state are saved for all ranks.",
        MISFITS,
        """elif not whole and any(_is_part(leaf, parameter) for leaf in tree_leaves(value)):""",
        """elif False:""",
    ),
    Mutant(
        "guard",
        "A state of a whole parameter is put beside the shards of a rank.",
        f"{SAVE}::test_what_was_whole_is_not_put_beside_shards",
        """if any(_is_part(leaf, parameter) for leaf in tree_leaves(value)):
                raise ValueError(
                    f"the {kind} that was saved""",
        """if False:
                raise ValueError(
                    f"the {kind} that was saved""",
    ),
    Mutant(
        "guard",
        "A tensor that an optimizer keeps for all parameters is saved as rank 0 has it.",
        BUFFERS,
        """if not whole and any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in tree_leaves(value)):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "Of a sharded tensor among the caller's own entries rank 0's rows are saved, and loaded on every rank.",
        MISFITS,
        """if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
                raise ValueError(
                    f"{key!r} holds""",
        """if False:
                raise ValueError(
                    f"{key!r} holds""",
    ),
    Mutant(
        "guard",
        "A checkpoint holds values that no job can read back.",
        MISFITS,
        """torch.load(buffer, weights_only=True)
    except""",
        """pass
    except""",
    ),
    Mutant(
        "guard",
        "An adapter is saved while its base holds it too.",
        MISFITS,
        """if isinstance(module, BaseTunerLayer) and module.merged_adapters:""",
        """if False:""",
    ),
    Mutant(
        "checkpoint",
        "A save after a forward that no backward follows fails, and the run ends without it.",
        f"{SAVE}::test_a_save_after_a_forward_that_no_backward_follows",
        """reshard(model)  # a forward may have left full parameters in place of the shards that optimizers hold""",
        """pass""",
    ),
]
