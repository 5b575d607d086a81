"""Models that the tests train, and the kinds of LightningModules that hold them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import Tensor, nn

from tests.lightning_lora.harness import language_loss, tuner
from tests.oracle import causal_lm, fill_adapters, lora_config

SEED = 11
"""What `seed_everything` is given where a test injects adapters."""


def adapted(**lora: Any) -> nn.Module:
    """A PEFT model with non-zero adapters, float32."""
    model = get_peft_model(causal_lm(dtype=torch.float32), lora_config(**lora))
    fill_adapters(model)
    return model


def injected() -> nn.Module:
    """A Hugging Face model with PEFT layers inside and no PeftModel around it."""
    model = inject_adapter_in_model(lora_config(), causal_lm(dtype=torch.float32))
    fill_adapters(model)
    return model


def plain() -> nn.Module:
    """A Hugging Face model without adapters."""
    return causal_lm(dtype=torch.float32)


def plain_with_peft() -> nn.Module:
    """What the strategy must make of `plain` with `random_lora`."""
    model = plain()
    torch.manual_seed(SEED)
    return get_peft_model(model, random_lora())


def random_lora() -> LoraConfig:
    """An adapter whose B is drawn too."""
    return lora_config(init_lora_weights=False)


def unseeded() -> nn.Module:
    """Another model on every rank; rank 0's is `adapted`'s."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = get_peft_model(causal_lm(dtype=torch.float32, seed=rank), lora_config())
    fill_adapters(model, seed=1 + rank)
    return model


class Block(nn.Module):
    """A residual MLP whose layers have names that no library knows."""

    def __init__(self, width: int = 12, hidden: int = 20) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, hidden)
        self.narrow = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.widen(self.norm(x))))


PLAN = {"*.widen": "colwise", "*.narrow": "rowwise"}


def perceptron() -> nn.Module:
    """A plain nn.Module with injected, non-zero LoRA layers."""
    torch.manual_seed(2)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["widen", "narrow"])
    model = inject_adapter_in_model(config, nn.Sequential(Block(), Block()))
    fill_adapters(model)
    return model


def squared_error(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(module.model(batch["x"]), batch["y"])


def distillation(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """The student's distance from a teacher that the LightningModule holds too."""
    with torch.no_grad():
        wanted = module.teacher(input_ids=batch["input_ids"]).logits
    return nn.functional.mse_loss(module.model(input_ids=batch["input_ids"]).logits, wanted)


class Distillation(tuner()):  # type: ignore[misc]
    """Two models: one trains, one is frozen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(adapted, loss=distillation, **options)
        self.teacher = causal_lm(dtype=torch.float32, seed=4).requires_grad_(False).eval()


def summed(module: Any, batch: dict[str, Tensor]) -> Tensor:
    ids = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    return module.models["first"](**ids).loss + 2 * module.models["second"](**ids).loss


class Pair(tuner()):  # type: ignore[misc]
    """Two models in an `nn.ModuleDict`, and both train."""

    def __init__(self, **options: Any) -> None:
        super().__init__(adapted, loss=summed, **options)
        self.models = nn.ModuleDict({"first": self.model, "second": injected()})
        self.model = nn.Identity()


class Manual(tuner()):  # type: ignore[misc]
    """Manual optimization: two backward passes a step, clipped by hand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(adapted, **options)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        total = torch.zeros(())
        for half in range(2):
            part = {name: tensor.chunk(2)[half] for name, tensor in batch.items()}
            loss = language_loss(self, part) / 2
            self.manual_backward(loss)
            total = total + loss.detach()
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()
        self.losses.append(total)


class Toggled(Pair):
    """Manual optimization of two models in turn, each with an optimizer of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW([p for p in self.models[name].parameters() if p.requires_grad], lr=self.lr)
            for name in ("first", "second")
        ]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        for name, optimizer in zip(("first", "second"), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            ids = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
            loss = self.models[name](**ids).loss
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.detach())
