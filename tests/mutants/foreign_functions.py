"""Replaced functions of torch, PEFT and transformers that no other file here breaks."""

from tests.mutants import Mutant

PEFT = "tests/lora_parallel/adapters/test_peft_private.py"
TRANSFORMERS = "tests/lora_parallel/loading/test_transformers_private.py"
META = "tests/lora_parallel/loading/test_meta_init.py"
MATERIALIZE = "tests/lora_parallel/lazy/test_materialize.py"

BREAKAGES = [
    Mutant(
        "replaced",
        "PEFT pads the adapters of a sharded model for a hotswap: nothing reduces the gradients of the new factors.",
        "tests/lora_parallel/runtime/test_refusals.py::test_what_is_refused_has_changed_nothing",
        """("hotswap_adapter_from_state_dict", "_convert_scalings_to_tensor")""",
        """("hotswap_adapter_from_state_dict",)""",
    ),
    Mutant(
        "replaced",
        "load_adapter of transformers loads onto meta: the adapter has no values.",
        f"{PEFT}::test_load_adapter_of_transformers",
        """self.hf_device_map = {"": "cpu"}""",
        """self.hf_device_map = {"": "meta"}""",
    ),
    Mutant(
        "guard",
        "Adapters that decompose weights of which nobody knows the file start from none.",
        "tests/lora_parallel/lazy/test_lazy_parameter.py::test_an_adapter_that_needs_the_base_is_refused_if_no_file_holds_it",
        """if wants is None or (alone and all(map(is_readable, model.parameters()))):""",
        """if wants is None or alone:""",
    ),
    Mutant(
        "replaced",
        "An adapter that is drawn after sharding is in every rank's memory in full until then.",
        "tests/lora_parallel/lazy/test_lazy_parameter.py::test_an_adapter_that_is_drawn_later_has_no_memory_until_then",
        """getattr(new_module, key).to("meta")""",
        """getattr(new_module, key)""",
    ),
    Mutant(
        "guard",
        "What PiSSA and OLoRA start with is added to a base on disk, and not taken from it.",
        f"{MATERIALIZE}::test_adapters_computed_from_the_base_are_those_of_one_process",
        """    waiting.source.node = Residual(""",
        """    Residual(""",
    ),
    Mutant(
        "guard",
        "A rank takes from its part of the base what its own decomposition gave, and trains rank 0's adapter.",
        f"{MATERIALIZE}::test_ranks_that_decompose_a_weight_otherwise_take_what_rank_zero_has",
        """tensors_of(setup.model) | factors_in(setup.model)""",
        """tensors_of(setup.model)""",
    ),
    Mutant(
        "guard",
        "Another part of what PiSSA starts with is taken from a rank's part of the base.",
        f"{MATERIALIZE}::test_adapters_computed_from_the_base_are_those_of_one_process",
        """self.left[region[0]].to(device)""",
        """self.left[: region[0].stop - region[0].start].to(device)""",
    ),
    Mutant(
        "replaced",
        "An adapter that PEFT is told to put on a device stays with its base.",
        f"{PEFT}::test_a_base_in_memory_is_as_ever",
        """original(self, adapter_name, torch.device("cpu") if stay else device)""",
        """original(self, adapter_name, torch.device("cpu") if stay else None)""",
    ),
    Mutant(
        "replaced",
        "DoRA takes the norm of one rank's columns for that of the weight.",
        f"{PEFT}::test_the_weight_norm_of_dora_is_what_it_was",
        "return total(norm.square()).sqrt().to(weight.dtype)",
        "return norm.to(weight.dtype)",
    ),
    Mutant(
        "replaced",
        "Resized embeddings of a deferred model draw their new rows from rows that were not read.",
        "tests/lora_parallel/lazy/test_lazy_parameter.py::test_a_vocabulary_may_be_resized_inside",
        "            if layer is not None:\n                read_whole(layer)",
        "            if False:\n                read_whole(layer)",
    ),
    Mutant(
        "replaced",
        "With Accelerate's launcher ranks other than 0 load a model without values.",
        f"{TRANSFORMERS}::test_accelerates_launcher_asks_for_no_broadcast",
        """FSDP_CPU_RAM_EFFICIENT_LOADING="false\"""",
        "",
    ),
    Mutant(
        "guard",
        "from_pretrained(tp_plan=...) lets transformers shard a model that parallelize shards again.",
        f"{TRANSFORMERS}::test_arguments_that_spread_a_model_are_refused",
        'if kwargs.get(name) is not None:\n            raise ValueError(\n                f"from_pretrained({name}',
        'if False:\n            raise ValueError(\n                f"from_pretrained({name}',
    ),
    Mutant(
        "guard",
        "A tensor of another shape than the config's is left out, and the base starts from random numbers there.",
        f"{TRANSFORMERS}::test_a_head_of_another_size_that_is_not_expected",
        "if info.mismatched_keys and not load_config.ignore_mismatched_sizes:",
        "if False:",
    ),
    Mutant(
        "guard",
        "A base is loaded without some of the layers of its checkpoint.",
        f"{TRANSFORMERS}::test_a_config_that_is_given",
        "    if unclaimed:\n        return ValueError(",
        "    if False:\n        return ValueError(",
    ),
    Mutant(
        "guard",
        "A base that lacks some of its layers on disk starts from random numbers there.",
        f"{TRANSFORMERS}::test_a_base_that_lacks_some_layers",
        "    if lost or not filled:\n",
        "    if False:\n",
    ),
    Mutant(
        "replaced",
        "After meta_init every module of the process is still built on meta.",
        f"{META}::test_all_is_normal_after_an_exception",
        "yield\n    finally:\n        for name, value in before.items():\n            setattr(owner,",
        "yield\n    finally:\n        for name, value in ():\n            setattr(owner,",
    ),
]
