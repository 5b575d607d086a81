"""What cannot work is refused, with the reason and before anything is trained, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities import grad_norm
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_lora import LoRAParallelStrategy
from lora_parallel import clip_grad_norm_
from tests.cases import cases
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import ROWS, Points, Tokens, loader, tidy, trainer, tuner
from tests.oracle import causal_lm, lora_config, ranks_of
from tests.oracle.workers import Failure, attempt

Tuner = tuner()


# ---------------------------------------------------------------------- as the Trainer is made, before any launch


def construct(devices: int = 4, **options: Any) -> pl.Trainer:
    return pl.Trainer(strategy=LoRAParallelStrategy(**options), accelerator="cpu", devices=devices, logger=False)


OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "product": ({"tensor_parallel_size": 2, "data_parallel_size": 4}, ValueError, "= 8, but the world size is 4"),
    "tp does not divide": ({"tensor_parallel_size": 3}, ValueError, "does not divide the world size 4"),
    "replicas do not divide": ({"replicate_size": 3}, ValueError, "does not divide the world size 4"),
    "replicas of dp": ({"data_parallel_size": 4, "replicate_size": 3}, ValueError, "replicate_size=3 does not divide"),
    "no replicas": ({"data_parallel_size": 4, "replicate_size": 0}, ValueError, "replicate_size=0"),
    "sequence parallel": ({"sequence_parallel": "yes"}, TypeError, "sequence_parallel='yes'"),
    "loss parallel": ({"loss_parallel": 1}, TypeError, "loss_parallel=1"),
    "zero": ({"tensor_parallel_size": 0}, ValueError, "tp=0"),
    "a string": ({"tensor_parallel_size": "2"}, TypeError, "tp='2'"),
    "plan": ({"tp_plan": "manual"}, ValueError, "tp_plan='manual'"),
    "blocks": ({"block_classes": "Block"}, ValueError, "block_classes='Block'"),
    "timeout": ({"timeout_seconds": 0}, ValueError, "timeout_seconds=0"),
    "the plugin's name": ({"tp_size": 2}, TypeError, "LoRAParallelStrategy has no .* tp_size=2: did you mean tensor_p"),
    "the engine's name": ({"dp_shard": 2}, TypeError, "no argument dp_shard=2: did you mean data_parallel_size"),
    "a slip": (
        {"sequence_paralel": True},
        TypeError,
        "did you mean sequence_parallel.* It has save_dist",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    options, kind, text = OPTIONS[name]
    with pytest.raises(kind, match=text):
        construct(**options)


def test_a_checkpoint_of_more_optimizers_is_refused():
    strategy = LoRAParallelStrategy()
    strategy._optimizers_from = SimpleNamespace(path="saved", optimizers={"0": {}, "1": {}})  # type: ignore[assignment]
    strategy.optimizers = [torch.optim.SGD([torch.ones(1)])]
    with pytest.raises(ValueError, match="saved holds 2 optimizer states; configure_optimizers made 1"):
        strategy.load_optimizer_state_dict({})


def test_registered_name_with_devices_that_do_not_fit():
    with pytest.raises(ValueError, match="does not divide the world size 3"):
        pl.Trainer(strategy="lora_fsdp2_tp", accelerator="cpu", devices=3, logger=False)


def test_mesh_before_the_launch():
    strategy = construct(tensor_parallel_size=2).strategy
    assert isinstance(strategy, LoRAParallelStrategy)
    assert strategy.num_processes == 4
    with pytest.raises(RuntimeError, match="once the processes have started"):
        _ = strategy.device_mesh


# ---------------------------------------------------------------------- at setup


class Freezing(BaseFinetuning):
    """A finetuning callback, as users write them."""

    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        pass


class Early(tuner()):  # type: ignore[misc]
    """Its optimizer is made in `__init__`."""

    def __init__(self) -> None:
        super().__init__(m.adapted)
        self.made = torch.optim.AdamW(p for p in self.parameters() if p.requires_grad)

    def configure_optimizers(self) -> Any:
        return self.made


class Headed(tuner()):  # type: ignore[misc]
    """A head that trains, outside of the adapted model."""

    def __init__(self) -> None:
        super().__init__(m.adapted)
        self.head = nn.Linear(4, 4)


class Scaled(tuner()):  # type: ignore[misc]
    """A parameter of its own: no model's, so nothing averages its gradient."""

    def __init__(self) -> None:
        super().__init__(m.adapted)
        self.scale = nn.Parameter(torch.ones(2))


class Empty(tuner()):  # type: ignore[misc]
    """Forgot its model."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Identity())


class Twins(tuner()):  # type: ignore[misc]
    """Two plain models, one lora_config."""

    def __init__(self) -> None:
        super().__init__(m.plain)
        self.other = m.plain()


def sized(**sizes: Any) -> nn.Module:
    return get_peft_model(causal_lm(dtype=torch.float32, **sizes), lora_config())


def thawed() -> nn.Module:
    model = m.adapted()
    model.get_input_embeddings().weight.requires_grad_(True)
    return model


def partly_frozen() -> nn.Module:
    model = m.adapted()
    next(p for n, p in model.named_parameters() if "lora_B" in n).requires_grad_(False)
    return model


Attempt = tuple[Any, dict[str, Any], dict[str, Any], str, str]


def attempts() -> dict[str, Attempt]:
    """Name: module, the strategy's options, Trainer's, and the type and text of the error."""
    plain = Tuner(m.adapted)
    callbacks: list[tuple[pl.Callback, str]] = [
        (StochasticWeightAveraging(1e-3), "copies the model"),
        (WeightAveraging(), "deep-copies the model"),
        (EMAWeightAveraging(), "deep-copies the model"),
        (ModelPruning("l1_unstructured"), "replaces parameters"),
        (Freezing(), "unfreezes base weights"),
    ]
    found: dict[str, Attempt] = {}
    for callback, reason in callbacks:
        name = type(callback).__name__
        found[name] = (plain, {}, {"callbacks": [callback]}, "ValueError", f"callback {name}: it {reason}")
    perceptron = Tuner(m.perceptron, loss=m.squared_error)
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24, "head_dim": 8}
    found |= {
        "sync_batchnorm": (plain, {}, {"sync_batchnorm": True}, "ValueError", "sync_batchnorm=True"),
        "async io": (
            plain,
            {},
            {"plugins": [AsyncCheckpointIO(TorchCheckpointIO())]},
            "ValueError",
            "AsyncCheckpointIO",
        ),
        "optimizer": (Early(), {}, {}, "ValueError", "before the model was sharded"),
        "head": (Headed(), {}, {}, "ValueError", "head.weight of Headed trains but belongs to no adapter"),
        "its own": (Scaled(), {"require_adapters": False}, {}, "ValueError", "scale trains and is Scaled's own"),
        "no model": (Empty(), {}, {}, "ValueError", "holds no model with parameters"),
        "two models": (Twins(), {"lora_config": lora_config()}, {}, "ValueError", "several models (model, other)"),
        "no adapters": (Tuner(m.plain), {}, {}, "ValueError", "no PEFT layers and no lora_config"),
        "both": (plain, {"lora_config": lora_config()}, {}, "ValueError", "already has PEFT layers"),
        "heads": (Tuner(lambda: sized(**heads)), {}, {}, "ValueError", "3 heads (of width 8)"),
        "widths": (Tuner(lambda: sized(intermediate_size=45)), {}, {}, "ValueError", "45"),
        "no plan": (Tuner(unguessable, loss=m.squared_error), {}, {}, "ValueError", "carries no tp_plan"),
        "no match": (perceptron, {"tp_plan": {"*.sideways": "colwise"}}, {}, "ValueError", "matches no module"),
        "no style": (perceptron, {"tp_plan": {"*.widen": "diagonal"}}, {}, "ValueError", "'diagonal'"),
        "half a plan": (
            perceptron,
            {"tp_plan": {"*.widen": "colwise_gather_output"}},
            {},
            "ValueError",
            "no tensor parallel style",
        ),
        "base trains": (Tuner(thawed), {}, {}, "RuntimeError", "embed_tokens.weight would train"),
        "adapter does not": (Tuner(partly_frozen), {}, {}, "RuntimeError", "would not train"),
        "blocks": (plain, {"block_classes": ["Layer"]}, {}, "ValueError", "Layer is no class of a module"),
    }
    return found


class Unguessable(nn.Module):
    """Its inputs cannot be made up, so that no plan can be derived."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return self.up(x) * scale


def unguessable() -> nn.Module:
    return get_peft_model(Unguessable(), LoraConfig(target_modules=["up"]))


def attempt_all(names: list[str]) -> dict[str, Any]:
    """What each raises; then the process group still trains."""
    answers: dict[str, Any] = {}
    with tidy():
        modules = attempts()
        for name in names:
            module, lora, options, _, _ = modules[name]
            run = trainer("1x2", lora, max_epochs=1, **options)
            points = getattr(module, "loss", None) is m.squared_error
            data = loader(Points(ROWS) if points else Tokens(ROWS), "1x2")
            answers[name] = attempt(run.fit, module, data)
        run = trainer("1x2", max_epochs=1)
        run.fit(Tuner(m.adapted), loader(Tokens(ROWS), "1x2"))
        answers["good"] = run.global_step
    return answers


def test_refused_at_setup(pool):
    wanted = attempts()
    for rank, answers in enumerate(pool.run(2, attempt_all, list(wanted))):
        assert answers.pop("good") == 1
        for name, (_, _, _, kind, text) in wanted.items():
            failure = answers[name]
            assert isinstance(failure, Failure), f"{name} was accepted on rank {rank}"
            assert failure.kind == kind, (name, rank, failure.kind, failure.message)
            assert text in failure.message, (name, rank, failure.message)


def one_rank_differs(what: str) -> list[Any]:
    """Only the last rank's module is wrong."""
    wrong = torch.distributed.get_rank() == 1
    with tidy():
        run = trainer("2x1", max_epochs=1)
        if what == "model":
            module = Tuner(m.plain if wrong else m.adapted)
        else:
            run.callbacks += [StochasticWeightAveraging(1e-3)] if wrong else []
            module = Tuner(m.adapted)
        return [attempt(run.fit, module, loader(Tokens(ROWS), "2x1"))]


@pytest.mark.parametrize(("what", "text"), [("model", "no PEFT layers"), ("callback", "StochasticWeightAveraging")])
def test_a_mistake_on_one_rank_is_an_error_on_all(pool, what, text):
    for (failure,) in pool.run(2, one_rank_differs, what):
        assert isinstance(failure, Failure)
        assert failure.kind == "ValueError"
        assert text in failure.message


def another_mesh() -> list[Any]:
    module = Tuner(m.adapted)
    with tidy():
        trainer("2x1", max_epochs=1).fit(module, loader(Tokens(ROWS), "2x1"))
        return [attempt(trainer("1x2", max_epochs=1).fit, module, loader(Tokens(ROWS), "1x2"))]


def test_a_second_trainer_with_another_mesh(pool):
    for (failure,) in pool.run(2, another_mesh):
        assert isinstance(failure, Failure)
        assert failure.kind == "ValueError"
        assert "was parallelized over a mesh of (1, 2, 1) before; this one has (1, 1, 2)" in failure.message


class MadeInInit(m.Manual):
    """Manual optimization, with an optimizer that is made before the strategy has seen the model."""

    def __init__(self, clips: bool) -> None:
        super().__init__()
        self.clips = clips
        self.early = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def configure_optimizers(self) -> None:
        return None

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return self.early

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        if self.clips:
            super().clip_gradients(*args, **kwargs)


def stepped_by_hand() -> list[Any]:
    with tidy():
        return [
            attempt(trainer("2x1", max_epochs=1).fit, MadeInInit(clips), loader(Tokens(ROWS), "2x1"))
            for clips in (False, True)
        ]


def test_an_optimizer_made_before_the_model_is_sharded(pool):
    for stepped, clipped in pool.run(2, stepped_by_hand):
        assert "this AdamW optimizer holds base_model.model." in stepped.message, stepped.message
        assert "its gradient would not be clipped" in clipped.message, clipped.message
        for failure in (stepped, clipped):
            assert "return it from configure_optimizers" in failure.message


class Looks(Tuner):
    """Looks at gradients before the optimizer steps, as Lightning's documentation has it or as ours has."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        super().__init__(m.adapted)
        self.look, self.seen = look, []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(self.look(self))


def norm(module: Any) -> float:
    return clip_grad_norm_(module.parameters(), float("inf")).item()


def looking(mesh: str) -> list[Any]:
    with tidy():
        data, steps = loader(Tokens(ROWS), mesh), {"max_epochs": 1, "limit_train_batches": 1}
        refused = attempt(trainer(mesh, **steps).fit, Looks(lambda module: grad_norm(module, 2)), data)
        module = Looks(norm)
        trainer(mesh, **steps).fit(module, data)
        return [refused, *module.seen]


@pytest.mark.parametrize("mesh", cases("1x2", "2x1", matrix=["2x2"]))
def test_norms_of_gradients(pool, mesh):
    """Lightning's utility says what to take instead, and that is what the utility gives in one process."""
    module = Looks(lambda module: grad_norm(module, 2)["grad_2.0_norm_total"].item())
    with tidy():
        trainer(None, max_epochs=1, limit_train_batches=1).fit(module, loader(Tokens(ROWS), None))
    for refused, seen in pool.run(ranks_of(mesh), looking, mesh):
        assert isinstance(refused, Failure)
        assert "clip_grad_norm_(parameters, float('inf'))" in refused.message, refused.trace
        assert seen == pytest.approx(module.seen[0], rel=1e-5)
