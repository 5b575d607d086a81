"""Jobs of Lightning, Fabric, Accelerate and transformers: written at step 2 of 4, and gone on with from there."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, set_seed

from tests.accelerate_plugin.harness import Rows, environment, launched, plugin
from tests.formats import bases
from tests.formats.engine import SAVED, STEPS, Outcome, loss_of, own_random_states
from tests.lightning_lora.harness import ROWS, Resumable, Tokens, fabric, global_means, loader, tidy, trainer, tuner
from tests.oracle import dp_of, full, over_stages, trained

# ---------------------------------------------------------------------- Lightning


def _loss(module: Any, rows: dict[str, Tensor]) -> Tensor:
    return loss_of(module.model, rows["input_ids"])


class Module(tuner()):  # type: ignore[misc]
    """An adapter with dropout, and a learning rate that changes every step."""

    def __init__(self, fresh: bool) -> None:
        super().__init__(lambda: _adapted(fresh, "out_proj"), loss=_loss, lr=5.0 if fresh else 1e-2)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _adapted(fresh: bool, target: str) -> nn.Module:
    config = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=[target], task_type="CAUSAL_LM")
    model = get_peft_model(bases.opt(), config)
    bases.fill_adapters(model, scale=0.0 if fresh else 0.5)
    return model


class _Saves(pl.Callback):
    """Save in the middle of an epoch. Unlike ModelCheckpoint it has no state, and so no path in the checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)


@dataclass(frozen=True)
class LightningJob:
    """A LightningModule under the strategy, whose checkpoint is a folder or one file."""

    mesh: str
    one_file: bool

    def _fit(self, mesh_text: str, fresh: bool, resume: Path | None, *callbacks: pl.Callback) -> Outcome:
        module = Module(fresh)
        with tidy(), own_random_states():
            options = {"save_distributed_checkpoint": not self.one_file}
            run = trainer(mesh_text, options, max_epochs=1, callbacks=list(callbacks), precision="64-true")
            rows = loader(Tokens(STEPS * ROWS, vocabulary=bases.VOCABULARY), mesh_text, kind=Resumable)
            run.fit(module, rows, ckpt_path=resume)
            assert run.global_step == STEPS
            adapters = over_stages({name: full(p) for name, p in trained(module).items()}, mesh_text)
            return Outcome(global_means(module.losses)[-(STEPS - SAVED) :], adapters)

    def write(self, mesh_text: str, bases_folder: Path, folder: Path) -> Outcome:
        """Train, and write a checkpoint at step 2."""
        return self._fit(mesh_text, False, None, _Saves(folder / f"step={SAVED}.ckpt"))

    def resume(self, mesh_text: str, bases_folder: Path, folder: Path) -> Outcome:
        """Go on with a module of zeros from the checkpoint."""
        return self._fit(mesh_text, True, folder / f"step={SAVED}.ckpt")


# ---------------------------------------------------------------------- Fabric


@dataclass(frozen=True)
class FabricJob:
    """A loop of the user's own, with Fabric."""

    mesh: str

    @staticmethod
    def _start(mesh_text: str, fresh: bool) -> tuple[Any, dict[str, Any]]:
        made = fabric(mesh_text, precision="64-true")
        module = _adapted(fresh, "q_proj")
        model, optimizer = made.setup(module.train(), torch.optim.AdamW(module.parameters(), lr=1e-2))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return made, {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}

    @staticmethod
    def _train(mesh_text: str, made: Any, state: dict[str, Any], last: int) -> Outcome:
        losses = []
        for rows in list(loader(Tokens(STEPS * ROWS, vocabulary=bases.VOCABULARY), mesh_text))[state["step"] : last]:
            loss = loss_of(state["model"], rows["input_ids"])
            made.backward(loss)
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            state["schedule"].step()
            state["step"] += 1
            losses.append(loss.detach())
        return Outcome(global_means(losses), {name: full(p) for name, p in trained(state["model"].module).items()})

    def write(self, mesh_text: str, bases_folder: Path, folder: Path) -> Outcome:
        """Train, and write a checkpoint at step 2."""
        with tidy(), own_random_states():
            made, state = self._start(mesh_text, fresh=False)
            self._train(mesh_text, made, state, SAVED)
            made.save(folder / "saved", {**state, "note": {"text": "kept"}})
            return self._train(mesh_text, made, state, STEPS)

    def resume(self, mesh_text: str, bases_folder: Path, folder: Path) -> Outcome:
        """Go on with a model of zeros from the checkpoint."""
        with tidy(), own_random_states():
            made, state = self._start(mesh_text, fresh=True)
            assert made.load(folder / "saved", state) == {"note": {"text": "kept"}}
            assert state["step"] == SAVED
            return self._train(mesh_text, made, state, STEPS)


# ---------------------------------------------------------------------- Accelerate


class _Counter:
    """An object that is registered for checkpointing."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@dataclass(frozen=True)
class AccelerateJob:
    """A loop of the user's own, with Accelerate."""

    mesh: str

    @staticmethod
    def _start(mesh_text: str, fresh: bool) -> tuple[Any, ...]:
        accelerator = Accelerator(fsdp_plugin=plugin(mesh_text))
        dp, rows = accelerator.num_processes, 4
        model = _adapted(fresh, "q_proj").train()
        optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / dp))
        ids = torch.randint(0, bases.VOCABULARY, (STEPS * rows, 12), generator=torch.Generator().manual_seed(5))
        prepared = accelerator.prepare(model, optimizer, schedule, DataLoader(Rows(ids), batch_size=rows // dp))
        counter = _Counter()
        accelerator.register_for_checkpointing(counter)
        return accelerator, counter, *prepared

    @staticmethod
    def _train(parts: tuple[Any, ...], last: int) -> Outcome:
        accelerator, counter, model, optimizer, schedule, rows = parts
        losses: list[float] = []
        for batch in accelerator.skip_first_batches(rows, counter.value):
            if counter.value == last:
                break
            loss = loss_of(model, batch["input_ids"])
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            counter.value += 1
            losses.append(accelerator.gather(loss.detach()).double().mean().item())
        return Outcome(losses, {name: full(p) for name, p in trained(model).items()})

    def write(self, mesh_text: str, bases_folder: Path, folder: Path) -> Outcome:
        """Train, and write a checkpoint at step 2."""
        with launched(), own_random_states():
            parts = self._start(mesh_text, fresh=False)
            self._train(parts, SAVED)
            parts[0].save_state(folder / "saved")
            return self._train(parts, STEPS)

    def resume(self, mesh_text: str, bases_folder: Path, folder: Path) -> Outcome:
        """Go on with a model of zeros from the checkpoint."""
        with launched(), own_random_states():
            parts = self._start(mesh_text, fresh=True)
            parts[0].load_state(folder / "saved")
            assert parts[1].value == SAVED
            return self._train(parts, STEPS)


# ---------------------------------------------------------------------- transformers


@dataclass(frozen=True)
class TrainerJob:
    """transformers' Trainer, unchanged."""

    mesh: str

    def _train(
        self, mesh_text: str, bases_folder: Path, output: Path, resume: str | None = None, **settings: Any
    ) -> Outcome:
        with launched(**environment(mesh_text)):
            set_seed(3)
            config = LoraConfig(
                r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"
            )
            model = get_peft_model(bases.read(bases_folder, "llama"), config)
            bases.fill_adapters(model, scale=0.5 if resume is None else 0.0)
            generator = torch.Generator().manual_seed(5)
            ids = torch.randint(0, bases.VOCABULARY, (24, 12), generator=generator)
            made = Trainer(
                model=model,
                args=TrainingArguments(
                    str(output),
                    per_device_train_batch_size=4 // dp_of(mesh_text),
                    gradient_accumulation_steps=2,
                    max_steps=STEPS,
                    learning_rate=1e-2,
                    max_grad_norm=0.3,
                    logging_steps=1,
                    report_to=[],
                    disable_tqdm=True,
                    use_cpu=True,
                    **settings,
                ),
                train_dataset=Rows(ids, uneven=True),
            )
            made.train(resume_from_checkpoint=resume)
            losses = [each["loss"] for each in made.state.log_history if "loss" in each]
            assert len(losses) == made.state.global_step == STEPS
            adapters = over_stages({name: full(p) for name, p in trained(made.model).items()}, mesh_text)
            return Outcome(losses[SAVED:], adapters)

    def write(self, mesh_text: str, bases_folder: Path, folder: Path) -> Outcome:
        """Train, and keep the checkpoint of step 2."""
        outcome = self._train(mesh_text, bases_folder, folder, save_steps=SAVED)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / f"checkpoint-{STEPS}")
        return outcome

    def resume(self, mesh_text: str, bases_folder: Path, folder: Path) -> Outcome:
        """Go on with a model of zeros from the checkpoint."""
        resume = str(folder / f"checkpoint-{SAVED}")
        return self._train(mesh_text, bases_folder, folder / "again", resume, save_strategy="no")
