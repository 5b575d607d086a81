"""Lightning's private names that the strategy relies on, in both namespaces: an upgrade that changes one fails here."""

from __future__ import annotations

import inspect
import os
import random
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_lora.namespace import fabric_namespace, is_lightning_module, trainer_namespace
from lightning_lora.trainer_strategy import _REFUSED_CALLBACKS
from tests.lightning_lora.harness import Tokens, tidy

pytestmark = pytest.mark.matrix

PAIRS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


@pytest.fixture(params=PAIRS)
def pytorch(request) -> str:
    return request.param


@pytest.fixture
def fabric(pytorch) -> str:
    return PAIRS[pytorch]


@pytest.fixture
def names(pytorch, fabric) -> SimpleNamespace:
    return trainer_namespace(pytorch, fabric)


@pytest.fixture
def fabric_names(fabric) -> SimpleNamespace:
    return fabric_namespace(fabric)


def test_every_name_is_its_own_namespaces(names, fabric_names, pytorch, fabric):
    for found, homes in ((names, (pytorch, fabric)), (fabric_names, (fabric,))):
        for field, value in vars(found).items():
            for each in value if isinstance(value, tuple) else (value,):
                home = inspect.getmodule(each if hasattr(each, "__module__") else type(each)).__name__  # type: ignore[union-attr]
                shared = "lightning_utilities"
                assert home.startswith((*homes, shared)), (field, home)


def test_each_strategy_uses_its_namespace(names, fabric_names, pytorch):
    ours = import_module("lightning_lora" if pytorch == "lightning.pytorch" else "lightning_lora.legacy")
    assert ours.LoRAParallelStrategy.lightning == names
    assert ours.FabricLoRAParallelStrategy.lightning == fabric_names


def test_precision_plugins(names):
    assert names.Precision.precision == "32-true"
    assert names.Precision is names.DoublePrecision.__mro__[1]
    for plugin in (
        names.HalfPrecision("bf16-true"),
        names.MixedPrecision("bf16-mixed", "cpu"),
        names.DoublePrecision(),
    ):
        assert isinstance(plugin, names.Precision)
        assert plugin.precision in ("bf16-true", "bf16-mixed", "64-true")
    # What the base class does and ours does not: `convert_module` is called by `Strategy.setup` of other strategies.
    for method in ("clip_grad_by_norm", "clip_grad_by_value", "main_params", "convert_module", "convert_input"):
        assert callable(getattr(names.Precision, method))


def test_clipping_goes_through_the_plugin(names):
    """`clip_gradients` hands over the optimizer, which is how the strategy's plugin knows what to clip."""
    seen: list[Any] = []

    class Plugin(names.Precision):
        def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
            seen.append((optimizer, clip_val))

    plugin, optimizer = Plugin(), torch.optim.SGD([torch.zeros(1)], lr=1.0)
    plugin.clip_gradients(optimizer, 0.5)
    plugin.clip_gradients(optimizer, 0)
    assert seen == [(optimizer, 0.5)]


def test_trainer_states(names):
    assert names.fitting.value == "fit"
    assert names.interrupted.value == "interrupted"


def test_launcher(names):
    assert list(inspect.signature(names.SubprocessScriptLauncher.__init__).parameters)[1:] == [
        "cluster_environment",
        "num_processes",
        "num_nodes",
    ]
    launcher = names.SubprocessScriptLauncher(SimpleNamespace(creates_processes_externally=False), 4, 1)
    assert not launcher.is_interactive_compatible, "notebooks would not be refused any more"


def test_checkpoint_io_is_the_default(names, pytorch):
    """A strategy whose `checkpoint_io` is of another type was given a plugin."""
    run = import_module(pytorch).Trainer(accelerator="cpu", devices=1, logger=False)
    assert type(run.strategy.checkpoint_io) is names.TorchCheckpointIO


def test_wrapped_optimizer(names):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    assert names.LightningOptimizer(optimizer)._optimizer is optimizer


def test_rank_zero_only(names, pytorch, fabric):
    """The rank that decides who logs is an attribute of these functions."""
    before = [function.rank for function in names.rank_zero_only]
    try:
        for rank, calls in ((1, 0), (0, 1)):
            for function in names.rank_zero_only:
                function.rank = rank
            for package in (pytorch, fabric):
                seen: list[int] = []
                import_module(f"{package}.utilities.rank_zero").rank_zero_only(seen.append)(1)
                assert len(seen) == calls
    finally:
        for function, rank in zip(names.rank_zero_only, before, strict=True):
            function.rank = rank


def connect(pytorch: str, fabric: str) -> bool:
    """In a process that has a group, nothing happens: not even the address is asked for."""
    names = trainer_namespace(pytorch, fabric)
    group, before = torch.distributed.group.WORLD, dict(os.environ)
    names.init_dist_connection(None, "gloo", timeout=None, device_id=None)
    return torch.distributed.group.WORLD is group and dict(os.environ) == before


def test_init_dist_connection(pool, names, pytorch, fabric):
    assert pool.run(1, connect, pytorch, fabric) == [True]
    parameters = inspect.signature(names.init_dist_connection).parameters
    assert list(parameters)[:2] == ["cluster_environment", "torch_distributed_backend"]
    assert any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()), "no timeout can be passed on"


def test_default_backend(names):
    assert names.default_backend(torch.device("cpu")) == "gloo"
    assert names.default_backend(torch.device("cuda", 0)) == "nccl"


def test_reset_seed(names, pytorch):
    with tidy():
        names.reset_seed()  # without a seed: nothing
        import_module(pytorch).seed_everything(5, verbose=False)
        first = torch.rand(3)
        assert not torch.equal(torch.rand(3), first)
        names.reset_seed()
        assert torch.equal(torch.rand(3), first)


def test_update_properties(names, pytorch):
    """It sets what a module says of itself, and converts nothing."""
    module = import_module(pytorch).LightningModule()
    module.inner = torch.nn.Linear(2, 2)
    names.update_properties(module, dtype=None)
    assert module.dtype == torch.float32
    names.update_properties(module, dtype=torch.float64)
    assert module.dtype == torch.float64
    assert module.inner.weight.dtype == torch.float32


def test_seed_variables(pytorch):
    """`seed_everything` leaves what `config.seed` and `seed_workers` read."""
    with tidy():
        import_module(pytorch).seed_everything(5, workers=True, verbose=False)
        assert os.environ["PL_GLOBAL_SEED"] == "5"
        assert os.environ["PL_SEED_WORKERS"] == "1"


def test_optimizers_to_device(names):
    parameter = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    names.optimizers_to_device([optimizer], torch.device("meta"))
    state = optimizer.state[parameter]
    assert state["exp_avg"].device.type == "meta"
    assert state["step"].device.type == "cpu"


def test_worker_init_function(names):
    def draw(worker: int, rank: int) -> tuple[float, float]:
        torch.manual_seed(3 + worker)  # what torch does before it calls the function
        names.worker_init_function(worker, rank=rank)
        return torch.rand(1).item(), random.random()

    state = random.getstate()
    with torch.random.fork_rng():
        assert draw(0, 1) == draw(0, 1)
        assert len({draw(0, 0), draw(0, 1), draw(1, 0), draw(1, 1)}) == 4
    random.setstate(state)


def test_lightning_seeds_workers_only_where_nobody_has(names, fabric):
    """The strategy sets the function first; Lightning's own, by global rank, must not replace it."""
    add = import_module(f"{fabric}.utilities.data")._auto_add_worker_init_fn
    with tidy():
        os.environ["PL_SEED_WORKERS"] = "1"
        bare = torch.utils.data.DataLoader(Tokens(2))
        add(bare, 3)
        assert bare.worker_init_fn.func is names.worker_init_function  # type: ignore[union-attr]
        assert bare.worker_init_fn.keywords == {"rank": 3}  # type: ignore[union-attr]
        ours = torch.utils.data.DataLoader(Tokens(2), worker_init_fn=print)
        add(ours, 3)
        assert ours.worker_init_fn is print


def test_refused_callbacks_exist(pytorch):
    callbacks = import_module(f"{pytorch}.callbacks")
    for name in _REFUSED_CALLBACKS:
        assert inspect.isclass(getattr(callbacks, name)), name
    assert issubclass(callbacks.EMAWeightAveraging, callbacks.WeightAveraging)
    assert issubclass(callbacks.BackboneFinetuning, callbacks.BaseFinetuning)


def test_prediction_sampler(pytorch):
    """Prediction never repeats a sample, so shares differ; the strategy recognises the sampler by its name."""
    module = import_module(f"{pytorch}.overrides.distributed")
    sampler = module.UnrepeatedDistributedSamplerWrapper(
        torch.utils.data.SequentialSampler(Tokens(5)), num_replicas=2, rank=1
    )
    assert len(list(sampler)) == 2
    assert len(sampler.dataset) == 5


def test_evaluation_loops_read_inference_mode_as_they_run(pytorch):
    """The strategy clears it at setup, after the Trainer has made its loops."""
    utilities = import_module(f"{pytorch}.loops.utilities")
    run = import_module(pytorch).Trainer(accelerator="cpu", devices=1, logger=False)

    class Loop(import_module(f"{pytorch}.loops").loop._Loop):
        inference_mode = True

        @utilities._no_grad_context
        def run(self) -> bool:
            return torch.is_inference_mode_enabled()

    loop = Loop(run)
    assert loop.run()
    loop.inference_mode = False
    assert not loop.run()
    for each in (run.validate_loop, run.test_loop, run.predict_loop):
        assert each.inference_mode is True
    assert run.fit_loop.epoch_loop.val_loop.inference_mode is False


def test_hooks_of_the_strategy(pytorch):
    """Methods of the base class that ours replaces, and attributes of it that ours reads."""
    strategies = import_module(f"{pytorch}.strategies")
    base = strategies.ParallelStrategy
    ours = import_module("lightning_lora" if pytorch == "lightning.pytorch" else "lightning_lora.legacy")
    for name in (
        "_configure_launcher", "distributed_sampler_kwargs", "setup_environment", "setup", "setup_optimizers",
        "setup_precision_plugin",
        "model_to_device", "process_dataloader", "block_backward_sync", "reduce", "barrier", "broadcast", "all_gather",
        "reduce_boolean_decision", "predict_step", "on_predict_end", "teardown", "save_checkpoint", "load_checkpoint",
        "load_model_state_dict", "load_optimizer_state_dict", "optimizer_state", "lightning_module_state_dict",
        "restore_checkpoint_after_setup",
    ):  # fmt: skip
        assert hasattr(base, name), f"{name}: Lightning calls it no more"
    made = ours.LoRAParallelStrategy()
    for name in ("_launcher", "_layer_sync", "_lightning_module", "cluster_environment", "accelerator", "optimizers"):
        assert hasattr(made, name), name
    assert not made.restore_checkpoint_after_setup


# ---------------------------------------------------------------------- Fabric's own


def made(fabric: str) -> Any:
    """A Fabric that has launched nothing, and its strategy."""
    package = "lightning_lora" if fabric == "lightning.fabric" else "lightning_lora.legacy"
    strategy = import_module(package).FabricLoRAParallelStrategy()
    return import_module(fabric).Fabric(strategy=strategy, accelerator="cpu", devices=2), strategy


def test_fabric_precision_plugins(fabric_names):
    """As Fabric chooses them; ours are of the same base class, and replace these methods of it."""
    for plugin in (
        fabric_names.HalfPrecision("bf16-true"),
        fabric_names.MixedPrecision("bf16-mixed", "cpu"),
        fabric_names.DoublePrecision(),
    ):
        assert isinstance(plugin, fabric_names.Precision)
        assert plugin.precision in ("bf16-true", "bf16-mixed", "64-true")
    for method in ("convert_module", "convert_input", "convert_output", "main_params", "module_init_context"):
        assert callable(getattr(fabric_names.Precision, method))


def test_fabric_takes_our_plugin(fabric):
    run, strategy = made(fabric)
    assert run._precision is strategy.precision
    assert type(strategy.precision).__name__ == "ShardedPrecision"


def test_fabric_looks_at_no_precision_before_it_chooses_one(fabric):
    """What the connector takes for a plugin that came with the strategy would win over `precision=`."""
    package = "lightning_lora" if fabric == "lightning.fabric" else "lightning_lora.legacy"
    strategy = import_module(package).FabricLoRAParallelStrategy()
    assert strategy.config.param_dtype is None
    run = import_module(fabric).Fabric(strategy=strategy, accelerator="cpu", devices=2, precision="bf16-mixed")
    assert run.strategy.config.param_dtype is torch.bfloat16


def test_number_of_nodes_reaches_the_strategy(fabric):
    package = "lightning_lora" if fabric == "lightning.fabric" else "lightning_lora.legacy"
    strategy = import_module(package).FabricLoRAParallelStrategy()
    import_module(fabric).Fabric(strategy=strategy, accelerator="cpu", devices=2, num_nodes=3)
    assert strategy.num_nodes == 3
    assert strategy.world_size == 6


def test_no_backward_sync_asks_the_control(fabric):
    """With the module that was set up; the control need not be of Fabric's own class."""
    run, strategy = made(fabric)
    seen: list[Any] = []
    wrapped = import_module(f"{fabric}.wrappers")._FabricModule(torch.nn.Linear(1, 1), strategy)
    strategy._backward_sync_control = SimpleNamespace(no_backward_sync=lambda *args: seen.append(args))
    run.no_backward_sync(wrapped, enabled=False)
    assert seen == [(wrapped.module, False)]


def test_lightning_modules_are_known_by_fabrics_mark(pytorch):
    assert is_lightning_module(import_module(pytorch).LightningModule())
    assert not is_lightning_module(torch.nn.Linear(1, 1))


def test_fabric_seeds_workers_before_the_strategy_does(fabric):
    """Why the strategy replaces Lightning's own function, and no other."""
    source = inspect.getsource(import_module(fabric).Fabric._setup_dataloader)
    assert source.index("_auto_add_worker_init_fn(") < source.index("_strategy.process_dataloader(")


def test_hooks_of_the_fabric_strategy(fabric):
    base = import_module(f"{fabric}.strategies").ParallelStrategy
    for name in (
        "_configure_launcher", "distributed_sampler_kwargs", "setup_environment", "process_dataloader", "precision",
        "checkpoint_io", "module_init_context", "module_to_device", "setup_module", "setup_optimizer",
        "setup_module_and_optimizers", "clip_gradients_norm", "clip_gradients_value", "save_checkpoint",
        "load_checkpoint", "all_reduce", "all_gather", "barrier", "broadcast", "reduce_boolean_decision",
    ):  # fmt: skip
        assert hasattr(base, name), f"{name}: Fabric calls it no more"
    _, strategy = made(fabric)
    for name in ("_launcher", "_precision", "_backward_sync_control", "_num_nodes", "cluster_environment"):
        assert hasattr(strategy, name), name
