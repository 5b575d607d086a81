"""Options of a configuration file, of the environment and of command lines that would have no effect, or another."""

from tests.mutants import Mutant

FOLDER = "tests/accelerate_plugin"
LAUNCH = f"{FOLDER}/test_launch.py"
BAD_FILES = f"{FOLDER}/test_check.py::test_a_file_that_cannot_work"
NOT_LAUNCHED = f"{LAUNCH}::test_what_launch_refuses"
HANDED_ON = f"{LAUNCH}::test_what_trains_and_how_layers_are_cut_are_handed_on"
TAKEN_OVER = f"{FOLDER}/test_refusals.py::test_a_plugin_of_accelerates_own_is_taken_over"
COMPILED = f"{FOLDER}/test_compile.py::test_what_accelerates_settings_come_to"

BREAKAGES = [
    Mutant(
        "guard",
        "A key that is misspelt in the configuration file is dropped, and the run has another setting.",
        f"{LAUNCH}::test_a_key_that_accelerate_drops",
        "if option not in known:",
        "if False:",
    ),
    Mutant(
        "guard",
        "A file without distributed_type: FSDP starts processes that train apart.",
        BAD_FILES,
        """if content.get("distributed_type") != "FSDP":""",
        "if False:",
    ),
    Mutant(
        "guard",
        "A file with fsdp_version 1 trains under FSDP2.",
        BAD_FILES,
        """if str(version) != "2":""",
        "if False:",
    ),
    Mutant(
        "guard",
        "A flag of fsdp_config that is neither true nor false is taken for false.",
        BAD_FILES,
        """if key.removeprefix("fsdp_") in _FSDP_FLAGS and str(value).lower() not in _WORDS:""",
        "if False:",
    ),
    Mutant(
        "guard",
        "accelerate-lora launch --cpu starts one process that trains without the mesh of the file.",
        NOT_LAUNCHED,
        "    if options.cpu:\n",
        "    if False:\n",
    ),
    Mutant(
        "guard",
        "Sizes that the command line gives in place of the file's are not checked.",
        NOT_LAUNCHED,
        """said |= {name: getattr(options, name) for name in getattr(options, "nondefault", ())}""",
        "pass",
    ),
    Mutant(
        "guard",
        "A process that was launched launches as many again, which wait for each other.",
        f"{LAUNCH}::test_a_script_that_launches_again_is_refused",
        """{"launch_command": _refuse}), replaced(elastic_launch, {"__call__": _refuse})""",
        "{}), replaced(elastic_launch, {})",
    ),
    Mutant(
        "guard",
        "A module that launches processes is run in each process that was launched.",
        f"{LAUNCH}::test_a_module_that_launches_again_is_refused",
        "if script.startswith(LAUNCHERS):  # its `__main__` has functions of its own",
        "if False:",
    ),
    Mutant(
        "guard",
        "A script that is launched without FSDP trains as many models as there are processes.",
        f"{LAUNCH}::test_the_module_says_why_it_will_not_run",
        "if not asked_by_environment():\n        sys.exit(_nothing_asked())",
        "if False:\n        sys.exit(_nothing_asked())",
    ),
    Mutant(
        "guard",
        "Options of a pipeline are given without one, and the file that is written does not have them.",
        f"{LAUNCH}::test_options_of_config_that_cannot_work",
        "if getattr(options, name) != default:",
        "if False:",
    ),
    Mutant(
        "replaced",
        "accelerate-lora launch drops pp_size, tp_plan and other keys of its own.",
        HANDED_ON,
        "os.environ.setdefault(key.upper(), value)",
        "pass",
    ),
    Mutant(
        "replaced",
        "Keys of this library in the file have no effect with accelerate launch.",
        HANDED_ON,
        "texts = own_keys(content) | {key:",
        "texts = {} | {key:",
    ),
    Mutant(
        "replaced",
        "Keys of this library in the environment have no effect.",
        HANDED_ON,
        "texts = own_keys(content) | {key: os.environ[key.upper()] for key in OWN_KEYS if os.environ.get(key.upper())}",
        "texts = own_keys(content)",
    ),
    Mutant(
        "replaced",
        "The plugin ignores the settings of the configuration that only this library knows.",
        HANDED_ON,
        "**{**self._options, **configured},",
        "**self._options,",
    ),
    Mutant(
        "replaced",
        "mixed_precision: bf16 of Accelerate computes in float32.",
        TAKEN_OVER,
        """param_dtype=torch.bfloat16 if mixed_precision == "bf16" else None,""",
        "param_dtype=None,",
    ),
    Mutant(
        "replaced",
        "The dtype that an FSDP plugin of Accelerate reduces gradients in is ignored.",
        TAKEN_OVER,
        "reduce_dtype=reduce_dtype or torch.float32,",
        "",
    ),
    Mutant(
        "guard",
        "accelerate launch --use_fsdp with a file drops its mesh: the run has another one.",
        f"{LAUNCH}::test_a_mesh_that_accelerate_drops_beside_flags_is_refused",
        """if content.get("parallelism_config") and "ACCELERATE_USE_PARALLELISM_CONFIG" not in os.environ:""",
        "if False:",
    ),
    Mutant(
        "replaced",
        "Processes that torchrun starts on a machine without accelerators train apart.",
        f"{LAUNCH}::test_processes_of_a_machine_without_accelerators_are_joined_where_a_mesh_is_asked_for",
        """return "gloo", DistributedType.MULTI_CPU""",
        "return backend, distributed_type",
    ),
    Mutant(
        "replaced",
        "The block classes that the configuration names are ignored.",
        TAKEN_OVER,
        "block_classes=plugin.transformer_cls_names_to_wrap,\n            reshard_after_forward",
        "reshard_after_forward",
    ),
    Mutant(
        "replaced",
        "fsdp_activation_checkpointing is ignored.",
        TAKEN_OVER,
        "activation_checkpointing=plugin.activation_checkpointing,\n            cpu_offload=isinstance",
        "cpu_offload=isinstance",
    ),
    Mutant(
        "replaced",
        "torch_compile of a Trainer, or dynamo_config of a file, compiles nothing.",
        COMPILED,
        """chosen = {"backend": plugin.backend.value.lower(), **""",
        "chosen = {**",
    ),
    Mutant(
        "guard",
        "An argument that a strategy or the plugin does not have is ignored.",
        "tests/lightning_lora/test_refusals.py::test_options",
        "            if name not in known:\n                taken",
        "            if False:\n                taken",
    ),
]
