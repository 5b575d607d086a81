"""The variable LORA_PARALLEL makes ranks of any command train as `accelerate-lora launch` makes those of a script."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from contextlib import contextmanager, nullcontext
from importlib.metadata import entry_points
from unittest.mock import patch

import pytest
from accelerate import Accelerator
from accelerate.commands.config import config_args
from accelerate.state import PartialState

import lora_parallel_autoload as autoload
from accelerate_plugin import launch_options
from accelerate_plugin.parallelism import asked_by_environment
from accelerate_plugin.patches import unpatched
from tests.accelerate_plugin.test_launch import command, written
from tests.cases import cases

SCRIPT = """
{first}
import json, sys, torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
accelerator = Accelerator(cpu=len(sys.argv) > 2)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
rows = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(1))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=4))
losses = []
for batch in loader:
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if accelerator.is_main_process:
    with open(sys.argv[1], "w") as file:
        json.dump([type(accelerator.state.parallelism_config).__name__, losses], file)
accelerator.end_training()
"""
TORCHRUN = "torch.distributed.run --standalone --nproc-per-node 2"


def alone(folder, monkeypatch):
    """Return the losses of the script in this process, which asks for nothing of ours."""
    (folder / "train.py").write_text(SCRIPT.format(first=""))
    monkeypatch.setattr(sys, "argv", ["train.py", str(folder / "alone.json"), "cpu"])
    runpy.run_path(str(folder / "train.py"), run_name="__main__")
    return json.loads((folder / "alone.json").read_text())[1]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("launcher", "first"),
    cases(
        (TORCHRUN, "import accelerate"),  # which imports torch in its midst
        matrix=[
            (TORCHRUN, "import torch"),
            (TORCHRUN, "from transformers import EarlyStoppingCallback, TrainingArguments"),
            (TORCHRUN, "import peft"),
            (TORCHRUN, "import lightning"),
            ("accelerate.commands.accelerate_cli launch", "import transformers"),
        ],
    ),
)
def test_ranks_of_any_launcher_train_on_the_mesh(tmp_path, monkeypatch, launcher, first):
    want = alone(tmp_path, monkeypatch)
    (tmp_path / "train.py").write_text(SCRIPT.format(first=first))
    path = written(tmp_path)
    told = command(*launcher.split(), "train.py", "found.json", cwd=tmp_path, LORA_PARALLEL=path.name)
    assert told.returncode == 0, told.stderr[-3000:]
    kind, losses = json.loads((tmp_path / "found.json").read_text())
    assert kind == "LoRAParallelism"
    assert losses == pytest.approx(want, rel=1e-5)


LIGHTNING = """
import lightning
print(lightning.Trainer(strategy="lora_fsdp2_tp", accelerator="cpu", devices=2).strategy)
"""


@pytest.mark.matrix
@pytest.mark.processes
def test_lightning_knows_the_strategies_without_an_import(tmp_path):
    (tmp_path / "train.py").write_text(LIGHTNING)
    told = command("runpy", "train.py", cwd=tmp_path, LORA_PARALLEL=written(tmp_path).name)
    assert "LoRAParallelStrategy" in told.stdout, told.stderr


@pytest.mark.matrix
@pytest.mark.processes
@pytest.mark.parametrize("gone", ["peft", "lora_parallel", "accelerate_plugin"])
def test_torch_is_imported_whatever_is_missing(tmp_path, gone):
    (tmp_path / "train.py").write_text(
        f"import sys\nsys.modules[{gone!r}] = None\nimport torch, transformers, accelerate\nprint('alive')\n"
        "accelerate.Accelerator()\n"
    )
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    told = command("runpy", "train.py", cwd=tmp_path, LORA_PARALLEL=str(written(tmp_path)), **rank)
    assert told.stdout == "alive\n"
    said = next(line for line in told.stderr.splitlines() if line.startswith("LORA_PARALLEL="))
    assert "config.yaml: " in said
    assert gone in said
    assert "RuntimeError: LORA_PARALLEL=" in told.stderr.splitlines()[-1]


def test_torch_calls_it_and_it_does_nothing_without_the_variable(monkeypatch):
    (entry,) = entry_points(group="torch.backends", name="lora_parallel")
    assert entry.load() is autoload.autoload
    monkeypatch.delenv("LORA_PARALLEL", raising=False)
    before = [*sys.meta_path]
    autoload.autoload()
    assert sys.meta_path == before
    assert not autoload._waiting


def test_an_error_does_not_end_the_import_of_torch(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("LORA_PARALLEL", str(written(tmp_path)))
    monkeypatch.setattr(autoload, "_is_rank", lambda: 1 / 0)
    autoload.autoload()
    assert "config.yaml: division by zero" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "words", "main", "expected"),
    [
        ("RANK LOCAL_RANK WORLD_SIZE", ["python", "train.py"], None, True),
        ("RANK LOCAL_RANK WORLD_SIZE", ["python", "-m", "trl.scripts.sft"], "trl.scripts.sft", True),
        ("", ["python", "train.py"], None, False),
        ("RANK WORLD_SIZE", ["torchrun", "train.py"], None, False),  # as Kubeflow sets them for a machine
        ("RANK LOCAL_RANK WORLD_SIZE", ["python", "-m", "torch.distributed.run"], "torch.distributed.run", False),
        ("RANK LOCAL_RANK WORLD_SIZE", ["python", "-c", "...", "--multiprocessing-fork"], None, False),
    ],
)
def test_which_process_is_a_rank(monkeypatch, variables, words, main, expected):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in variables.split():
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(sys, "orig_argv", words)
    module = type(sys)("__main__")
    module.__spec__ = importlib.machinery.ModuleSpec(main, None) if main else None
    monkeypatch.setitem(sys.modules, "__main__", module)
    assert autoload._is_rank() is expected


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Packages of which one is half imported while the other is; what they call notes what is there by then."""
    files = {
        "outer_package/__init__.py": "import outer_package.part\nafter = 1",
        "outer_package/part.py": "import inner_package\nafter = 1",
        "inner_package/__init__.py": "after = 1",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(autoload, "_USED", {"outer_package", "inner_package"})
    monkeypatch.setattr(autoload, "_waiting", {})
    monkeypatch.setattr(sys, "meta_path", [autoload._Finder, *sys.meta_path])
    yield
    for name in ("outer_package", "outer_package.part", "inner_package"):
        sys.modules.pop(name, None)


def whole(*names):
    return [hasattr(sys.modules.get(name), "after") for name in names]


@pytest.mark.parametrize("first", ["inner_package", "outer_package", "outer_package.part"])
def test_what_waits_is_called_once_when_nothing_is_half_imported(packages, first):
    called = []

    def act():
        called.append(whole(*(name for name in sys.modules if name.startswith(("inner_package", "outer_package")))))

    autoload._waiting.update(inner_package=act, outer_package=act)
    importlib.import_module(first)
    assert called == [[True] * (1 if first == "inner_package" else 3)]
    importlib.import_module("outer_package")
    assert len(called) == 1


def test_an_import_that_has_begun_is_waited_for(packages, tmp_path):
    """torch, which calls `autoload`, is often imported by a package that is waited for."""
    called = []
    (tmp_path / "inner_package" / "__init__.py").write_text("import lora_parallel_autoload as a\na._begin()\nafter = 1")

    def begin():
        autoload._waiting["outer_package"] = lambda: called.append(whole("outer_package", "outer_package.part"))
        autoload._call_for_imported()
        assert not called

    autoload._begin = begin
    try:
        importlib.import_module("outer_package")
    finally:
        del autoload._begin
    assert called == [[True, True]]


def test_commands_that_launch_take_the_file(monkeypatch, tmp_path):
    path = tmp_path / "mesh.yaml"
    path.write_text("- no mapping")
    monkeypatch.setenv("LORA_PARALLEL", str(path))
    for name in ("default_config_file", "load_config_from_file"):
        monkeypatch.setattr(config_args, name, getattr(config_args, name))
    autoload._set_default_file()
    assert config_args.default_config_file == str(path)
    with pytest.raises(ValueError, match=r"mesh.yaml: it is no configuration: `accelerate-lora config` writes one"):
        config_args.load_config_from_file(None)
    with pytest.raises(AttributeError):  # of another file, which is not ours to judge
        config_args.load_config_from_file(str(path))
    path.write_text("distributed_type: FSDP\nnum_processes: 2\n")
    assert config_args.load_config_from_file(None).num_processes == 2


def test_what_cannot_be_prepared_does_not_train(monkeypatch, capsys):
    monkeypatch.setenv("LORA_PARALLEL", "/here/mesh.yaml")
    monkeypatch.setattr(PartialState, "__init__", PartialState.__init__)
    monkeypatch.setitem(sys.modules, "accelerate_plugin.launch_options", None)
    autoload._activate()
    assert "LORA_PARALLEL=/here/mesh.yaml: import of accelerate_plugin.launch_options" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match=r"/here/mesh.yaml: .* Unset it to train without"):
        PartialState()


@pytest.mark.parametrize("name", ["RANK", "ACCELERATE_USE_FSDP"])
def test_a_process_that_is_no_rank_does_not_train(monkeypatch, tmp_path, name):
    """An application may set one of the variables in a process that it has not launched."""
    monkeypatch.setenv("LORA_PARALLEL", str(written(tmp_path)))
    for each in ("RANK", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "0")
    monkeypatch.setattr(Accelerator, "__init__", Accelerator.__init__)
    autoload._refuse_alone()
    with pytest.raises(RuntimeError, match="this process is no rank: start it by torchrun"):
        Accelerator()


@pytest.mark.parametrize("command", ["launch", "config"])
def test_a_file_that_is_not_there_ends_a_process_at_once(monkeypatch, tmp_path, command):
    """Hold that launchers end as well as ranks, and that the command which writes the file does not."""
    monkeypatch.setenv("LORA_PARALLEL", str(tmp_path / "mesh.yaml"))
    monkeypatch.setattr(sys, "argv", ["accelerate-lora", command])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(autoload, "_waiting", {})
    monkeypatch.setattr(autoload, "_call_for_imported", lambda: None)
    text = r"mesh.yaml: there is no such file: write it with `accelerate-lora config`. Unset it"
    with nullcontext() if command == "config" else pytest.raises(SystemExit, match=text):
        autoload.autoload()


@contextmanager
def as_before():
    """Apply the patches anew afterwards, without deferring `from_pretrained`, as the environment asks for nothing."""
    try:
        yield
    finally:
        with patch.dict(os.environ), unpatched():
            os.environ.pop("ACCELERATE_USE_FSDP", None)
            os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)


@pytest.mark.parametrize(
    ("world", "variables", "message"),
    [
        ("4", {}, r"it is for 2 processes, and 4 have been started. Start 2: torchrun --nproc-per-node 2, `acc"),
        ("2", {"ACCELERATE_USE_FSDP": "true", "PARALLELISM_CONFIG_TP_SIZE": "1"}, "with PARALLELISM_CONFIG_TP_SIZE=1"),
        ("2", {}, None),
    ],
)
def test_a_rank_takes_the_file_or_says_why_not(tmp_path, monkeypatch, world, variables, message):
    monkeypatch.setattr(config_args, "default_config_file", config_args.default_config_file)
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)  # a plugin sets it for transformers
    with patch.dict(os.environ, {"WORLD_SIZE": world, "CUDA_VISIBLE_DEVICES": "5", **variables}), as_before():
        if message is not None:
            with pytest.raises(ValueError, match=message):
                launch_options.join(str(written(tmp_path)))
            return
        launch_options.join(str(written(tmp_path, gpu_ids="0,1")))
        assert asked_by_environment()
        assert os.environ["PARALLELISM_CONFIG_TP_SIZE"] == "2"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
