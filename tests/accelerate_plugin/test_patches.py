"""What is replaced in Accelerate and transformers: checked against the installed versions, undone without a trace."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import operations
from packaging.version import Version
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from accelerate_plugin import patches
from accelerate_plugin.accelerator import AcceleratorOverrides
from accelerate_plugin.patches import PATCHES, check, patched, unpatched
from tests.accelerate_plugin.harness import Rows, launched
from tests.oracle import Case, trained

LINES: dict[tuple[Any, str], str] = {
    (PartialState, "_prepare_backend"): "distributed_type = DistributedType.NO",
    (AcceleratorState, "__init__"): "self.__dict__.update(PartialState._shared_state)",
    (Accelerator, "__init__"): "self.state.device_mesh = self.parallelism_config.get_device_mesh(self.device.type)",
    (Accelerator, "_prepare_device_mesh"): "return self.torch_device_mesh",
    (Accelerator, "prepare"): "result = self._prepare_fsdp2(*args)",
    (Accelerator, "prepare_model"): "FSDP2 preparation should be done via `accelerate.prepare()`",
    (Accelerator, "prepare_data_loader"): "prepared_data_loader = prepare_data_loader(",
    (Accelerator, "no_sync"): "model.set_requires_gradient_sync(False)",
    (
        Accelerator,
        "clip_grad_norm_",
    ): "return self._clip_grad_norm_dtensor_aware(parameters, max_norm",
    (Accelerator, "clip_grad_value_"): "torch.nn.utils.clip_grad_value_(parameters, clip_value)",
    (Accelerator, "gather_for_metrics"): "return tensor[: self.gradient_state.remainder]",
    (operations, "_gpu_gather"): "torch.distributed.all_gather(output_tensors, tensor)",
    (operations, "_gpu_gather_object"): "return [x for y in output_objects for x in y]",
    (operations, "recursively_apply"): "return func(data, *args, **kwargs)",
    (DataLoaderDispatcher, "__init__"): "self.state = PartialState()",
    (PartialState, "split_between_processes"): "start_index = self.process_index * num_samples_per_process",
    (Accelerator, "join_uneven_inputs"): "with Join(joinables, enable=enable_join, throw_on_early_termination=False)",
    (Accelerator, "check_trigger"): "flag_tensor = self.reduce(self.flag_tensor)",
    (Accelerator, "get_state_dict"): "state_dict = get_model_state_dict(model, options=options)",
    (Accelerator, "save_model"): "state_dict = self.get_state_dict(model)",
    (Accelerator, "save_state"): "save_fsdp_model(self.state.fsdp_plugin, self, model, output_dir, i)",
    (Accelerator, "load_state"): "load_fsdp_model(self.state.fsdp_plugin, self, model, input_dir, i)",
    (TrainingArguments, "__post_init__"): "if self.output_dir is None:",
    (Trainer, "train"): "inner_training_loop = find_executable_batch_size(",
    (Trainer, "get_tp_size"): '"_tp_size", None)',
    (Trainer, "get_cp_size"): "return pc.cp_size",
    (TrainingArguments, "world_size"): "return self.distributed_state.num_processes",
    (TrainingArguments, "main_process_first"): "if is_torch_available() and self.world_size > 1:",
    (Trainer, "create_accelerator_and_postprocess"): "self.is_fsdp_enabled = getattr(",
    (Trainer, "store_flos"): "distributed_broadcast_scalars([self.current_flos]",
    (Trainer, "log"): "self.state.log_history.append(output)",
    (Trainer, "save_model"): 'if "FULL_STATE_DICT" in str(self.accelerator.state.fsdp_plugin.state_dict_type):',
    (Trainer, "_save_checkpoint"): "self.state.save_to_json(os.path.join(output_dir, TRAINER_STATE_NAME))",
    (Trainer, "_save_optimizer_and_scheduler"): "save_fsdp_optimizer(",
    (Trainer, "_load_from_checkpoint"): "elif self.is_fsdp_enabled:",
    (Trainer, "_load_optimizer_and_scheduler"): "load_fsdp_optimizer(",
    (Trainer, "_load_rng_state"): 'rng_file = os.path.join(checkpoint, f"rng_state_{process_index}.pth")',
    (Trainer, "_load_best_model"): "load_result = load_fsdp_model(",
    (Trainer, "_has_mixed_mesh_grads"): "self._mixed_mesh_grads = has_mixed_dtensor(",
    (JITCheckpointCallback, "on_step_end"): "if self.jit_manager and self.jit_manager.is_checkpoint_requested:",
    (JITCheckpointCallback, "on_step_begin"): "self.jit_manager.execute_jit_checkpoint()",
    (JITCheckpointCallback, "on_pre_optimizer_step"): "self.jit_manager.execute_jit_checkpoint()",
    (JITCheckpointCallback, "on_epoch_end"): "self.jit_manager.execute_jit_checkpoint()",
}
"""A line of each method that its replacement is written against: an upgrade that changes it has to be read."""
if Version(accelerate.__version__) < Version("1.15"):
    LINES[Accelerator, "clip_grad_norm_"] = "return torch.nn.utils.clip_grad_norm_(parameters, max_norm"


def test_the_installed_versions_are_those_it_was_written_for():
    check()
    for (owner, name), line in LINES.items():
        with unpatched():
            assert line in inspect.getsource(inspect.unwrap(patches._function(vars(owner)[name]))), (owner, name)


def test_reduce_calls_what_is_replaced():
    """`reduce` is told by the name of its inner function, which nothing else has."""
    source = inspect.getsource(inspect.unwrap(operations.reduce))
    assert "    def _reduce_across_processes(tensor, reduction=" in source
    assert "return recursively_apply(\n        _reduce_across_processes, tensor," in source


def test_every_replaced_method_has_a_line_that_it_is_written_against():
    replaced = {(patch.target, patch.name) for patch in PATCHES}
    replaced |= {(Accelerator, name) for name, each in vars(AcceleratorOverrides).items() if inspect.isfunction(each)}
    assert replaced == LINES.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "train_everything"}, "it is gone"),
        ({"parameters": "self models"}, r"its parameters are \(self resume_from_checkpoint .*\), not \(self models\)"),
    ],
)
def test_a_changed_method_is_named(monkeypatch, change, message):
    [train] = [patch for patch in PATCHES if patch.name == "train"]
    monkeypatch.setattr(patches, "PATCHES", (replace(train, **change),))
    with pytest.raises(ImportError, match=r"transformers .* changed transformers\.trainer\.Trainer\.") as error:
        check()
    assert error.match(message)
    with pytest.raises(ImportError), patched():
        pass  # and nothing is replaced


def test_a_changed_method_of_accelerator_is_named(monkeypatch):
    def prepare(self: Any, models: Any) -> None: ...

    monkeypatch.setattr(AcceleratorOverrides, "prepare", prepare)
    with pytest.raises(ImportError, match=r"accelerate .* changed accelerate\.accelerator\.Accelerator\.prepare"):
        check()


def test_an_old_version_is_refused(monkeypatch):
    monkeypatch.setattr(patches, "version", lambda package: "1.12.0")
    with pytest.raises(ImportError, match=r"accelerate_plugin needs accelerate >= 1\.13, and 1\.12\.0 is installed"):
        check()


def test_trainer_lets_the_accelerator_clip():
    """Trainer of transformers 5.16 has no other way; in a newer one `has_mixed_mesh_grads` turns the other way off."""
    clip = inspect.getsource(Trainer._clip_grad_norm)
    assert "return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)" in clip
    assert ("_mixed_mesh" in clip) == ((Trainer, "_has_mixed_mesh_grads") in LINES)


def test_each_has_a_reason_and_a_test_of_its_own():
    assert len({(patch.owner, patch.name) for patch in PATCHES}) == len(PATCHES)
    assert all(len(patch.reason) > 10 for patch in PATCHES)


UNDONE = """
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import operations
from transformers import PreTrainedModel, Trainer, TrainingArguments
KINDS = (Accelerator, Trainer, PreTrainedModel, TrainingArguments, operations)
before = [dict(vars(kind)) for kind in KINDS]
import os
os.environ["ACCELERATE_USE_FSDP"] = "true"
from accelerate_plugin import patches
assert Accelerator.__init__ is not before[0]["__init__"]
assert vars(PreTrainedModel)["from_pretrained"] is not before[2]["from_pretrained"]
with patches.unpatched():
    assert before == [dict(vars(kind)) for kind in KINDS]
assert Accelerator.__init__ is not before[0]["__init__"]
print("undone")
"""


@pytest.mark.matrix  # the test below and that of the lines have the same in a process that has imported all
@pytest.mark.processes
def test_they_can_be_undone():
    done = subprocess.run([sys.executable, "-c", UNDONE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("undone\n", 0), done.stderr
    assert "Error" not in done.stderr


def stock() -> tuple[list[float], dict[str, Any]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = Case(lora={"lora_dropout": 0.3}).model()
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader: Any = DataLoader(Rows(torch.cat(Case().batches())), batch_size=8, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).item())
    return losses, accelerator.get_state_dict(model)


def test_a_run_without_the_flag_is_what_it_was(monkeypatch):
    with launched():
        with_patches = stock()
    monkeypatch.setattr(patches, "check", lambda: None)
    with unpatched():
        functions = [patches._function(vars(patch.target)[patch.name]) for patch in PATCHES]
        assert not any(hasattr(function, patches._STANDS_IN) for function in functions)
        monkeypatch.setattr(patches, "PATCHES", ())
        with launched():
            losses, state = stock()
        monkeypatch.undo()
    assert with_patches[0] == losses
    assert with_patches[1].keys() == state.keys()
    assert all(torch.equal(with_patches[1][name], state[name]) for name in state)
