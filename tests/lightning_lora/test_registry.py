"""The registered names, in both of Lightning's namespaces, and the strategy on LightningCLI's command line."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig

from lightning_lora.registry import NAMES, register_strategies
from tests.lightning_lora.harness import tidy

NAMESPACES = {"lightning.pytorch": "lightning_lora", "pytorch_lightning": "lightning_lora.legacy"}


FABRICS = {"lightning.fabric": "lightning_lora", "lightning_fabric": "lightning_lora.legacy"}


@pytest.fixture(params=NAMESPACES)
def namespace(request):
    """(the namespace, our module for it)."""
    return request.param, NAMESPACES[request.param]


def test_names():
    """Hold that every size up to 16 has its name: 3 and 1 too, which somebody will write."""
    sizes = {f"lora_fsdp2_tp{size}": size for size in range(1, 17)}
    assert {"lora_fsdp2": 1, "lora_fsdp2_tp": 2, **sizes} == NAMES


@pytest.mark.parametrize("name", [*NAMES, "LoRA_FSDP2_TP"])
def test_a_trainer_takes_the_name(namespace, name):
    lightning, ours = namespace
    size = NAMES[name.lower()]
    run = import_module(lightning).Trainer(strategy=name, accelerator="cpu", devices=2 * size, logger=False)
    assert type(run.strategy) is import_module(ours).LoRAParallelStrategy
    assert run.strategy.config.tp == size
    assert run.strategy.config.dp_replicate == 1
    assert run.world_size == 2 * size
    assert run.strategy.launcher is not None


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("name", [*NAMES, "LoRA_FSDP2_TP"])
def test_a_fabric_takes_the_name(fabric, name):
    size = NAMES[name.lower()]
    run = import_module(fabric).Fabric(strategy=name, accelerator="cpu", devices=2 * size)
    assert type(run.strategy) is import_module(FABRICS[fabric]).FabricLoRAParallelStrategy
    assert run.strategy.config.tp == size
    assert run.world_size == 2 * size
    assert run.strategy.launcher is not None


@pytest.mark.parametrize("fabric", FABRICS)
def test_registering_again_with_fabric(fabric):
    registry = import_module(f"{fabric}.strategies").STRATEGY_REGISTRY
    before = {name: dict(registry[name]) for name in NAMES}
    register_strategies()
    assert {name: dict(registry[name]) for name in NAMES} == before


def test_registering_again_changes_nothing(namespace):
    registry = import_module(f"{namespace[0]}.strategies").StrategyRegistry
    before = {name: dict(registry[name]) for name in NAMES}
    register_strategies()
    assert {name: dict(registry[name]) for name in NAMES} == before
    assert all("LoRA" in entry["description"] for entry in before.values())


def test_namespaces_are_disjoint():
    """Why there are two classes: Lightning takes only strategies of its own namespace."""
    strategies = {lightning: import_module(ours).LoRAParallelStrategy for lightning, ours in NAMESPACES.items()}
    one, other = strategies.values()
    assert not issubclass(one, other)
    assert not issubclass(other, one)
    for lightning, strategy in strategies.items():
        base = import_module(f"{lightning}.strategies")
        assert issubclass(strategy, base.ParallelStrategy)
        assert not issubclass(strategy, base.ModelParallelStrategy)
    for lightning, wrong in zip(NAMESPACES, reversed(strategies.values()), strict=True):
        with pytest.raises(Exception, match="strategy"):
            import_module(lightning).Trainer(strategy=wrong(), accelerator="cpu", devices=2, logger=False)


ARGUMENTS = [
    "--trainer.strategy.tensor_parallel_size=2",
    "--trainer.strategy.data_parallel_size=4",
    "--trainer.strategy.replicate_size=2",
    "--trainer.strategy.lora_config=peft.LoraConfig",
    "--trainer.strategy.lora_config.r=16",
    "--trainer.strategy.lora_config.lora_alpha=32",
    "--trainer.strategy.lora_config.target_modules=[q_proj,v_proj]",
    '--trainer.strategy.tp_plan={"*.up": "colwise", "*.down": "rowwise"}',
    "--trainer.strategy.block_classes=[Block]",
    "--trainer.strategy.reshard_after_forward=false",
    "--trainer.strategy.activation_checkpointing=true",
    "--trainer.strategy.autocast_adapter_dtype=false",
    "--trainer.strategy.seed=7",
    "--trainer.strategy.process_group_backend=gloo",
    "--trainer.strategy.timeout_seconds=600",
]


def command_line(namespace: tuple[str, str], arguments: list[str], devices: int) -> Any:
    """The strategy that LightningCLI makes."""
    pytest.importorskip("jsonargparse")
    lightning, ours = namespace

    class Module(import_module(lightning).LightningModule):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.model = torch.nn.Linear(width, width)

    trainer = ["--trainer.accelerator=cpu", f"--trainer.devices={devices}", "--trainer.logger=false"]
    chosen = f"--trainer.strategy={ours}.LoRAParallelStrategy"
    with tidy():
        cli = import_module(f"{lightning}.cli").LightningCLI(
            Module, run=False, args=[*trainer, chosen, *arguments], save_config_callback=None
        )
    return cli.trainer.strategy


def test_command_line(namespace):
    strategy = command_line(namespace, ARGUMENTS, 8)
    config = strategy.config
    assert (config.tp, config.dp_shard, config.dp_replicate) == (2, 2, 2)
    assert isinstance(strategy._lora_config, LoraConfig)
    assert (strategy._lora_config.r, strategy._lora_config.lora_alpha) == (16, 32)
    assert set(strategy._lora_config.target_modules) == {"q_proj", "v_proj"}
    assert config.tp_plan == {"*.up": "colwise", "*.down": "rowwise"}
    assert config.block_classes == ["Block"]
    assert config.reshard_after_forward is False
    assert config.activation_checkpointing is True
    assert strategy._autocast_adapter_dtype is False
    assert config.seed == 7
    assert strategy._process_group_backend == "gloo"
    assert config.timeout_seconds == 600


def in_a_file(namespace: tuple[str, str], strategy: Any, folder: Path) -> Any:
    """The strategy that LightningCLI makes of a YAML file with this `strategy:`."""
    pytest.importorskip("jsonargparse")
    file = folder / "config.yaml"
    trainer = {"accelerator": "cpu", "devices": 8, "logger": False, "strategy": strategy}
    file.write_text(yaml.safe_dump({"trainer": trainer}))
    lightning = import_module(namespace[0])

    class Module(lightning.LightningModule):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.model = torch.nn.Linear(width, width)

    with tidy():
        command = import_module(f"{namespace[0]}.cli").LightningCLI
        made = command(Module, run=False, args=["--config", str(file)], save_config_callback=None)
    return made.trainer.strategy


PATHS = {
    "lightning.pytorch": ["lightning_lora.LoRAParallelStrategy", "lightning_lora.strategy.LoRAParallelStrategy"],
    "pytorch_lightning": ["lightning_lora.legacy.LoRAParallelStrategy"],
}


def test_every_way_to_write_the_strategy_in_a_file(namespace, tmp_path):
    """Names, class paths and the class's bare name; with arguments, without, and as nothing but a string."""
    kind = import_module(namespace[1]).LoRAParallelStrategy
    for name, size in NAMES.items():
        if 8 % size:  # of 8 devices
            continue
        strategy = in_a_file(namespace, name, tmp_path)
        assert (type(strategy), strategy.config.tp) == (kind, size)
    for path in [*PATHS[namespace[0]], "LoRAParallelStrategy"]:
        written = {"class_path": path, "init_args": {"tensor_parallel_size": 4, "lora_config": {"r": 16}}}
        strategy = in_a_file(namespace, written, tmp_path)
        assert (type(strategy), strategy.config.tp, strategy._lora_config.r) == (kind, 4, 16), path
        for bare in ({"class_path": path}, path):
            strategy = in_a_file(namespace, bare, tmp_path)
            assert (type(strategy), strategy.config.tp) == (kind, 1), bare


@pytest.mark.matrix  # jsonargparse imports it; what it makes of the file is above
@pytest.mark.processes
def test_a_class_path_with_arguments_needs_no_import(tmp_path):
    """LightningCLI imports the class: the script does not have to."""
    file = tmp_path / "config.yaml"
    strategy = {"class_path": "lightning_lora.LoRAParallelStrategy", "init_args": {"tensor_parallel_size": 2}}
    file.write_text(yaml.safe_dump({"trainer": {"accelerator": "cpu", "devices": 2, "strategy": strategy}}))
    script = (
        "import lightning.pytorch.cli as c, lightning as L\n"
        "cli = c.LightningCLI(L.LightningModule, run=False, save_config_callback=None)\n"
        "print(cli.trainer.strategy.config.tp)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--config", str(file)], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.split()[-1] == "2"


@pytest.mark.matrix
@pytest.mark.processes
def test_what_lightning_says_where_the_import_was_forgotten():
    """docs/troubleshooting.md has it: no code of this library runs before Lightning looks the name up."""
    script = "import lightning as L\nL.Trainer(strategy='lora_fsdp2_tp', accelerator='cpu', devices=2)\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "You selected an invalid strategy name: `strategy='lora_fsdp2_tp'`." in done.stderr


def test_command_line_without_the_class_of_lora_config(namespace):
    """As the docs have it: the class is known from the argument's type."""
    arguments = ["--trainer.strategy.tensor_parallel_size=2", "--trainer.strategy.lora_config.r=16"]
    strategy = command_line(namespace, arguments, 4)
    assert strategy._lora_config.r == 16
    assert strategy.config.dp_shard == "auto"


def test_command_line_defaults(namespace):
    strategy = command_line(namespace, ["--trainer.strategy.tensor_parallel_size=1"], 2)
    direct = import_module(namespace[1]).LoRAParallelStrategy()
    assert strategy._options == direct._options
    assert strategy._lora_config is None


def test_command_line_refuses_what_is_no_argument(namespace, capsys):
    with pytest.raises(SystemExit):
        command_line(namespace, ["--trainer.strategy.tensor_parallel=2"], 4)
    assert "tensor_parallel" in capsys.readouterr().err
