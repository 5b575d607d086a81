"""Adapters: their configs and folders, their dropout, their values, and the factors of experts."""

from tests.mutants import Mutant

CONFIG = "tests/lora_parallel/adapters/test_config_check.py"
OTHER = f"{CONFIG}::test_a_config_of_another_function_is_refused"
FOLDER = "tests/lora_parallel/adapters/test_adapter_folder.py"
MISFITS = f"{FOLDER}::test_a_folder_that_does_not_fit_is_refused_on_every_rank"
FORMER = "tests/lora_parallel/adapters/test_former_folders.py::test_former_keys_are_loaded_as_peft_does"
DROPOUT = "tests/lora_parallel/adapters/test_dropout.py"
PLACE = f"{DROPOUT}::test_the_mask_depends_on_the_global_place_only"
OPERATION = "tests/lora_parallel/tp/test_experts.py::test_an_operation_on_factors_is_that_on_their_sum"

TIED = "tests/lora_parallel/test_features.py::test_lora_that_is_tied_by_its_memory_is_refused"

BREAKAGES = [
    Mutant(
        "guard",
        "PEFT copies a module inside of a saved copy, and the copy that nothing calls is trained.",
        "tests/lora_parallel/test_features.py::test_copies_inside_of_a_saved_copy_are_refused",
        """isinstance(child, ModulesToSaveWrapper) and child is not module""",
        """False""",
    ),
    Mutant(
        "guard",
        "KaSA is said to be read a layer at a time, and the weight that it truncates is lost.",
        "tests/lora_parallel/lazy/test_lazy_parameter.py::test_an_adapter_that_is_computed_in_another_way_is_refused",
        """    known = known and not getattr(config, "kasa_config", None)""",
        """    known = known""",
    ),
    Mutant(
        "guard",
        "LoRA on tied weights that PEFT keeps in one memory (ensure_weight_tying) trains apart on a mesh.",
        TIED,
        """if tied := tied_targets(peft_config):""",
        """if tied := set[str]():""",
    ),
    Mutant(
        "guard",
        "LoRA on tied weights that PEFT keeps in one memory trains apart where the base is still on disk.",
        TIED,
        """        _check_layers(model)

    def draw""",
        """
    def draw""",
    ),
    Mutant(
        "guard",
        "An adapter of rsLoRA is loaded with the scale of plain LoRA.",
        OTHER,
        """"target_parameters", "use_dora"),""",
        """"target_parameters", "use_dora", "use_rslora"),""",
    ),
    Mutant(
        "guard",
        "Trained tokens are loaded for other tokens than they were trained for.",
        OTHER,
        """"target_parameters", "use_dora"),""",
        """"target_parameters", "use_dora", "trainable_token_indices"),""",
    ),
    Mutant(
        "guard",
        "An adapter of layers that are repeated is loaded into layers that are not.",
        OTHER,
        """"target_parameters", "use_dora"),""",
        """"target_parameters", "use_dora", "layer_replication"),""",
    ),
    Mutant(
        "guard",
        "An adapter is loaded with another alpha than it was trained with.",
        OTHER,
        """alike = _ranks(theirs, layers) == _ranks(ours, layers)""",
        """alike = True""",
    ),
    Mutant(
        "guard",
        "An adapter that PiSSA has started is added to a base which PiSSA has not changed.",
        OTHER,
        """changes_base = config["init_lora_weights"] not in _LEAVES_BASE""",
        """changes_base = False""",
    ),
    Mutant(
        "guard",
        "A setting of an adapter that the installed PEFT does not know is ignored without a word.",
        f"{CONFIG}::test_an_unknown_field_is_ignored_with_peft_s_warning",
        """type(own).from_peft_type(peft_type=kind, **unknown)""",
        """pass""",
    ),
    Mutant(
        "checkpoint",
        "An adapter of a former transformers' expert layers is compared by the r and alpha of one of these layers.",
        FORMER,
        """    convert_peft_config_for_transformers(config, model, None)""",
        """    pass""",
    ),
    Mutant(
        "checkpoint",
        "Keys of a former transformers release are refused where FSDP2 has changed the model's class.",
        FORMER,
        """(unsharded, config, tensors, adapter_name)""",
        """(base, config, tensors, adapter_name)""",
    ),
    Mutant(
        "checkpoint",
        "Keys that a model's own mapping renames for PEFT are refused.",
        FORMER,
        """key_mapping=renamed""",
        """key_mapping={}""",
    ),
    Mutant(
        "checkpoint",
        "Under pp both parameters of the experts are loaded from the adapter of one parameter.",
        FORMER,
        """for name, tensor in tensors.items()} | tensors
""",
        """for name, tensor in tensors.items()}
""",
    ),
    Mutant(
        "checkpoint",
        "A saved adapter has another alpha on some layers once PEFT reads it.",
        f"{CONFIG}::test_patterns_whose_order_matters_are_written_so_that_peft_reads_the_same",
        """if _ranks(vars(written), layers) == wanted:
        return config""",
        """if True:
        return config""",
    ),
    Mutant(
        "guard",
        "Tensors of a folder that the adapter has no place for are left out.",
        MISFITS,
        """if missing or unexpected:""",
        """if missing:""",
    ),
    Mutant(
        "checkpoint",
        "Tensors of an adapter that PEFT has no key for are not saved.",
        f"{FOLDER}::test_a_tensor_that_peft_has_no_key_for_is_an_error",
        """if lost := sorted(name for name, tensor in adapter.items() if id(tensor) not in named):""",
        """if lost := []:""",
    ),
    Mutant(
        "checkpoint",
        "An adapter that is loaded straight after a training forward is lost with the weights gathered for it.",
        f"{FOLDER}::test_saving_and_loading_in_the_middle_of_a_step",
        """    reshard(model)
    with agreed() as alike:
        alike["adapter_name"]""",
        """    with agreed() as alike:
        alike["adapter_name"]""",
    ),
    Mutant(
        "guard",
        "An adapter that training has broken is saved, or its save fails as if the disk had spoilt it.",
        f"{FOLDER}::test_a_broken_adapter_is_not_saved",
        """    if broken := [name for name, is_fine in zip(floats, fine, strict=True) if not is_fine]:
        more = f", and so do {len(broken)""",
        """    if False:
        more = f", and so do {len(broken)""",
    ),
    Mutant(
        "guard",
        "Of several models of PEFT in one module only one adapter is saved.",
        "tests/lora_parallel/adapters/test_injection.py::test_two_models_of_peft_in_one_module_are_refused",
        """if len(peft_models := _outer_peft_models(model)) > 1:""",
        """if len(peft_models := _outer_peft_models(model)) < 0:""",
    ),
    Mutant(
        "guard",
        "A rank takes rows of a tensor that has another shape than the adapter's.",
        MISFITS,
        """if shape != tuple(parameter.shape):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "Ranks load slices of different folders.",
        MISFITS,
        'alike["directory"] = f"a folder with digest {_digest(folder)}"',
        """pass""",
    ),
    Mutant(
        "guard",
        "An adapter that is broken is loaded, and training goes on with it.",
        "tests/lora_parallel/pp/test_saving.py::test_what_another_stage_lacks_is_an_error_on_every_rank",
        """not torch.isfinite(values[key]).all():""",
        """False:""",
    ),
    Mutant(
        "backward",
        "Dropout makes the adapter's output smaller, as what it keeps is not scaled.",
        f"{DROPOUT}::test_forward_scales_what_it_keeps",
        """return kept * self.scale if""",
        """return kept if""",
    ),
    Mutant(
        "pass",
        "Every step drops the same elements.",
        PLACE,
        """f"{self.seed}\\0{self.name}\\0{number}".encode()""",
        """f"{self.seed}\\0{self.name}".encode()""",
    ),
    Mutant(
        "pass",
        "All layers drop the same elements.",
        PLACE,
        """f"{self.seed}\\0{self.name}\\0{number}".encode()""",
        """f"{self.seed}\\0{number}".encode()""",
    ),
    Mutant(
        "pass",
        "All data-parallel ranks drop the same elements.",
        PLACE,
        """row = (index(rows) + share * rows)[:, None].expand(rows, tokens)""",
        """row = index(rows)[:, None].expand(rows, tokens)""",
    ),
    Mutant(
        "pass",
        "All tp ranks drop the same elements of their slices of the features.",
        PLACE,
        """torch.arange(self.feature_offset, self.feature_offset + features, dtype""",
        """torch.arange(0, features, dtype""",
    ),
    Mutant(
        "guard",
        "A layer that is called by itself drops the same elements in every step.",
        f"{DROPOUT}::test_a_layer_called_around_the_models_forward_is_refused",
        """if torch.is_grad_enabled() and not self.count.running and not in_backward():""",
        """if False:""",
    ),
    Mutant(
        "backward",
        "The factors of experts are multiplied without their scale.",
        OPERATION,
        """multiply(multiply(x, f.left), f.right) * f.scaling""",
        """multiply(multiply(x, f.left), f.right)""",
    ),
    Mutant(
        "backward",
        "The scale of the factors of experts is lost where their weight comes first.",
        OPERATION,
        """multiply(f.left, multiply(f.right, x)) * f.scaling""",
        """multiply(f.left, multiply(f.right, x))""",
    ),
]
