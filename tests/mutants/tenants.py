"""Tenants: whose rows go through which adapter, their gradients, steps, budgets and folders."""

from tests.mutants import Mutant

POOL = "tests/lora_parallel/tenants/test_pool.py"
STEPS = "tests/lora_parallel/tenants/test_steps.py"
ALONE = f"{POOL}::test_each_tenant_trains_as_alone"
REFUSED = f"{POOL}::test_what_cannot_be_is_refused_on_every_rank"
FOLDER = f"{POOL}::test_a_folder_is_of_one_save_and_whole"
ELSEWHERE = f"{POOL}::test_a_tenant_goes_on_in_another_job_on_another_mesh"

BREAKAGES = [
    Mutant(
        "collective",
        "A tenant's factors that each tp rank holds whole drift apart.",
        "tests/lora_parallel/tenants/test_whole_factors.py::test_they_stay_equal",
        """if factors[index].partial or factors[index].whole}""",
        """if factors[index].partial}""",
    ),
    Mutant(
        "pass",
        "Padded products of several tenants lack the scales of their adapters.",
        f"{STEPS}::test_products_of_several_tenants",
        """torch.cat([delta[:size] * scale for""",
        """torch.cat([delta[:size] for""",
    ),
    Mutant(
        "pass",
        "Grouped products of several tenants lack the scales of their adapters.",
        f"{STEPS}::test_products_of_several_tenants",
        """torch.cat([delta * scale for""",
        """torch.cat([delta for""",
    ),
    Mutant(
        "collective",
        "A tenant's gradient is the mean of each rank's mean, however few of its samples a rank has.",
        ALONE,
        """int(counts[mine, index[name]]) / int(total[index[name]])""",
        """1 / len(counts)""",
    ),
    Mutant(
        "pass",
        "A tenant's samples are dropped as if those of each rank were its first.",
        ALONE,
        """int(counts[:mine, index[name]].sum())""",
        """0""",
    ),
    Mutant(
        "collective",
        "The gradients of a tenant's sliced layers are those of one tp rank.",
        ALONE,
        """flat[front] = all_reduce(flat[front], mesh.get_group("tp"), "gradients", "tenants")""",
        """pass""",
    ),
    Mutant(
        "collective",
        "The gradient of a tenant is the sum over data-parallel ranks, not their mean.",
        ALONE,
        """weight = 1 / dp_size(self._state.mesh)""",
        """weight = 1.0""",
    ),
    Mutant(
        "checkpoint",
        "A tenant that is loaded drops other elements than it would have.",
        ELSEWHERE,
        """self.seed = record.get("seed", self.seed)""",
        """pass""",
    ),
    Mutant(
        "checkpoint",
        "A tenant that is loaded drops the elements of its first forwards again.",
        ELSEWHERE,
        """self.steps, self.forwards = record.get("steps", 0), record.get("forwards", 0)""",
        """self.steps = record.get("steps", 0)""",
    ),
    Mutant(
        "checkpoint",
        "A tenant that is loaded goes on without its optimizer's states.",
        ELSEWHERE,
        """put = restored(optimizer, names, kept["optimizer"], read)""",
        """restored(optimizer, names, kept["optimizer"], read)""",
    ),
    Mutant(
        "guard",
        "A tenant goes on with another dropout than it was trained with.",
        FOLDER,
        """if kept["dropout"] != _dropout(peft_configs(model)[name]):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "A changed bit in a tenant's optimizer state is taken as it is.",
        FOLDER,
        """if (changed := records.testzip()) is not None:""",
        """if (changed := None) is not None:""",
    ),
    Mutant(
        "guard",
        "An adapter of one save goes on without the optimizer's states, which are of another.",
        FOLDER,
        """elif others := sorted(file.name for file in folder.glob(STATE.format("*"))):""",
        """elif others := []:""",
    ),
    Mutant(
        "guard",
        "A tenant goes on on another base than it was trained on.",
        REFUSED,
        """check_base(kept["base"], base, model, str(folder), ())""",
        """pass""",
    ),
    Mutant(
        "guard",
        "Gradients that wait are lost, as a tenant is saved or loaded before its step.",
        REFUSED,
        """if self.waits():
            raise ValueError(""",
        """if False:
            raise ValueError(""",
    ),
    Mutant(
        "guard",
        "A tenant's optimizer steps without the gradients that wait in the pool, and nothing trains.",
        REFUSED,
        """if (tenant := this()) is not None and not tenant._steps_now:""",
        """if (tenant := this()) is not None and False:""",
    ),
    Mutant(
        "guard",
        "A tenant's gradients are not clipped where the script clips them.",
        REFUSED,
        """if (tenant := this()) is None or tenant._steps_now or not tenant.waits():""",
        """if (tenant := this()) is None or True:""",
    ),
    Mutant(
        "guard",
        "The tp ranks of one batch put its rows through different tenants' adapters.",
        REFUSED,
        """if len(peers[:, 0].unique()) > 1:""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "Rows go through the adapter that set_adapter has chosen, not through their tenant's.",
        REFUSED,
        """if set(self.layer.active_adapters) != set(route.tenants):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "The base alone, or the sum of several tenants, is exported as a merged model.",
        REFUSED,
        """if layers and len(active) != 1:""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "Ranks make one tenant with different settings of its optimizer.",
        REFUSED,
        """alike["optimizer"] = settings_of(made)""",
        """pass""",
    ),
    Mutant(
        "guard",
        "Tenants with sequence_parallel train on the chunk of the tokens that a rank has.",
        "tests/lora_parallel/tp/test_sequence.py::test_tenants_of_chunks_are_refused",
        """    if state.config.sequence_parallel:
        raise""",
        """    if False:
        raise""",
    ),
]
