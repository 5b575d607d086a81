"""Optimizers that step on shards and on full tensors."""

from tests.mutants import Mutant

STEP = "tests/lora_parallel/optimizers/test_step.py"
ALIKE = f"{STEP}::test_ranks_with_other_seeds_and_losses_step_alike"
KINDS = f"{STEP}::test_steps_are_those_of_one_process_and_go_on_elsewhere"
STALE = "tests/lora_parallel/runtime/test_optimizer_params.py"

BREAKAGES = [
    Mutant(
        "collective",
        "Ranks take steps of different lengths, as each searches along its own loss.",
        ALIKE,
        """return mean / dist.get_world_size()""",
        """return loss""",
    ),
    Mutant(
        "pass",
        "What an optimizer changes of its own settings in a step, as Prodigy its step size, is lost.",
        ALIKE,
        """group.update({key: value for key, value in stepped.items() if key != "params"})""",
        """pass""",
    ),
    Mutant(
        "collective",
        "Copies of a parameter part, as each rank draws noise of its own in a step.",
        ALIKE,
        """self._random.set_rng_state(shared.cpu())""",
        """pass""",
    ),
    Mutant(
        "pass",
        "All ranks draw the same numbers after a step.",
        ALIKE,
        """self._random.set_rng_state(self._before)""",
        """pass""",
    ),
    Mutant(
        "guard",
        "An optimizer that was made before the model was sharded steps, and nothing trains.",
        f"{STALE}::test_a_step_of_what_sharding_replaced_is_refused",
        """if replaced and (stale or all(p.grad is None for p in parameters)):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "Gradients are not clipped, as the list of parameters is from before the model was sharded.",
        f"{STALE}::test_gradients_from_before_are_no_sign_of_life",
        """refuse_clipping_if(parameter, partial(_gradient_elsewhere, ref(parameter)))""",
        """pass""",
    ),
    Mutant(
        "pass",
        "With an adapter that prepare injects, all of it has the settings of the optimizer's first group.",
        f"{STALE}::test_an_injected_adapter_is_in_the_groups_of_its_layers",
        """new_parameters[index].append(parameter)""",
        """new_parameters[0].append(parameter)""",
    ),
    Mutant(
        "pass",
        "Adagrad under Accelerate or Fabric has the state of parameters that sharding has replaced.",
        f"{STALE}::test_an_injected_adapter_is_in_the_groups_of_its_layers",
        """self._has_state = bool(optimizer.state)""",
        """self._has_state = False""",
    ),
]
