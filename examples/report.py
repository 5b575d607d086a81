"""What the examples print when a run ends: mesh, parameters per rank, losses, and a check of the saved adapter.

Nothing here is needed to train. `Report` is a Lightning callback that works on any strategy: it watches, and asks the
model for nothing but a forward.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib
import torch
from peft import PeftModel
from rich.console import Console
from rich.markup import escape
from tiny_base import decode, encode
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

matplotlib.use("Agg")  # draws to a file: needs no screen
from matplotlib import pyplot as plt

_console = Console(highlight=False)


class Report(L.Callback):
    """Records a run; `print` tells the story on rank 0 when the run is over.

    Args:
        base: Folder of the base model.
        adapter: Folder where the adapter is once training has ended.
        batch: Token ids of shape (rows, tokens), on which the two models' logits are compared.
        steps: How many steps the run takes.
    """

    def __init__(self, base: Path, adapter: Path, batch: Tensor, steps: int) -> None:
        self.base, self.adapter, self.batch, self.steps = base, adapter, batch, steps
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []  # (steps taken, loss)
        self.mesh = "one process"
        self.axes: dict[str, int] = {}
        self.bytes: list[tuple[int, int]] = []  # of each rank: (adapter, base)
        self.whole = 0  # bytes of the model in one process
        self.logits = torch.empty(0)
        self.precision = ""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        mesh = getattr(trainer.strategy, "device_mesh", None)
        if mesh is not None:
            self.mesh = " x ".join(f"{axis} {size}" for axis, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True))
            self.axes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        parameters = list(pl_module.parameters())
        trained = sum(_local(p).nbytes for p in parameters if p.requires_grad)
        mine = trained, sum(_local(p).nbytes for p in parameters) - trained
        self.whole = sum(p.numel() * p.element_size() for p in parameters)
        self.bytes = [mine]
        if trainer.world_size > 1:
            self.bytes = [mine] * trainer.world_size
            torch.distributed.all_gather_object(self.bytes, mine)
        self.bar = tqdm(total=self.steps, desc="fine-tuning", unit="step", disable=not trainer.is_global_zero)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.losses.append(trainer.callback_metrics["train_loss"].item())
        self.bar.set_postfix(loss=f"{self.losses[-1]:.3f}", refresh=False)
        self.bar.update()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validation.append((trainer.global_step, trainer.callback_metrics["val_loss"].item()))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.bar.close()
        # Here and not after `fit`: a strategy may take the model off its devices when fit returns. A sharded forward
        # is collective: every rank calls it, with the same batch.
        pl_module.eval()
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            logits = pl_module.model(input_ids=self.batch.to(pl_module.device)).logits
        pl_module.train()
        self.logits, self.precision = logits.cpu(), trainer.precision

    def print(self, picture: Path, question: str) -> None:
        """Tell everything that was recorded. Only rank 0 calls it."""
        _say("mesh", self.mesh)
        for line in drawn_mesh(self.axes, self.bytes):
            _say("", line)
        most = max(adapter + base for adapter, base in self.bytes)
        _say("memory", f"weights take {most:,} bytes a rank at most; in one process {self.whole:,}")
        first, last = _mean(self.losses[:5]), _mean(self.losses[-5:])
        _say("loss", f"{sparkline(self.losses)}  {first:.3f} -> {last:.3f} in {len(self.losses)} steps")
        _say("held out", ", ".join(f"{loss:.3f} after {step}" for step, loss in self.validation))
        draw_losses(self.losses, self.validation, picture)
        _say("picture", str(picture))
        _say("adapter", str(self.adapter))
        self._compare_with_plain_peft(question)
        load = f'AutoModelForCausalLM.from_pretrained("{self.base}")'
        _say("load it", "from peft import PeftModel; from transformers import AutoModelForCausalLM")
        _say("", f'model = PeftModel.from_pretrained({load}, "{self.adapter}")')
        _say("next", "your own model: docs/lightning.md, and examples/own_model.py for one without a plan")

    def _compare_with_plain_peft(self, question: str) -> None:
        """Load the adapter as anyone would, in this process alone, and hold it against the model that was trained."""
        dtype = torch.float64 if self.logits.dtype == torch.float64 else torch.float32
        base = AutoModelForCausalLM.from_pretrained(self.base, dtype=dtype)
        plain = PeftModel.from_pretrained(base, self.adapter).eval()
        with torch.no_grad():
            expected = plain(input_ids=self.batch).logits
            tuned_answer = _answer(plain, question)
            with plain.disable_adapter():
                without = plain(input_ids=self.batch).logits
                base_answer = _answer(plain, question)
        name = str(dtype).removeprefix("torch.")
        difference = (self.logits.to(dtype) - expected).abs().max().item()
        _say(
            "check", f"the model as trained ({self.precision}) against that folder in plain PEFT, one process, {name}:"
        )
        _say("", f"largest logit difference {difference:.1e}, where logits reach {expected.abs().max():.1f}")
        _say("", f"(without the adapter it would be {(without - expected).abs().max():.1f})")
        _say("asked", f"{question}   (of a model with 0.7 million parameters expect the form, not facts)")
        _say("base", base_answer)
        _say("tuned", tuned_answer)


def quiet_libraries() -> None:
    """Silence bars and remarks of the libraries that say nothing about this run."""
    transformers_logging.disable_progress_bar()
    for package in ("lightning.pytorch", "pytorch_lightning"):  # with both installed, the one imported last logs
        lightning_remarks = logging.getLogger(f"{package}.utilities.rank_zero")
        lightning_remarks.addFilter(lambda record: "Tip:" not in record.getMessage())
    for message in (
        ".*it is recommended to use `Trainer.devices=1.*",  # the held-out rows divide evenly
        ".*does not have many workers.*",  # the data is in memory
        ".*`is_gradient_checkpointing` is deprecated.*",
        ".*LeafSpec.*",
        ".*Checkpoint directory .* exists and is not empty.*",
    ):
        warnings.filterwarnings("ignore", message=message)


def _say(label: str, text: str) -> None:
    _console.print(f"[bold]{label:9}[/]{escape(text)}", soft_wrap=True)


def _local(parameter: Tensor) -> Tensor:
    """The part of a parameter that this rank holds."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def _answer(model: PeftModel, question: str) -> str:
    """How the model goes on after the question, for 100 bytes, drawn with a fixed seed."""
    prompt = encode(f"Q: {question}\nA:")[None]
    torch.manual_seed(0)
    output = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=100, do_sample=True, temperature=0.7
    )
    return " ".join(decode(output[0, prompt.shape[1] :]).split())


def drawn_mesh(axes: dict[str, int], held: list[tuple[int, int]]) -> list[str]:
    """The ranks as a grid, tp across and data parallelism down, with the bytes of weights that each holds."""
    across = axes.get("tp", 1)
    cells = [f"rank {rank}: {adapter + base:,} B" for rank, (adapter, base) in enumerate(held)]
    width = max(map(len, cells)) + 2
    rule = "+" + "+".join(["-" * width] * across) + "+"
    rows = [cells[start : start + across] for start in range(0, len(cells), across)]
    lines = [rule]
    for row in rows:
        lines += ["|" + "|".join(cell.center(width) for cell in row) + "|", rule]
    if len(cells) > 1:
        lines.append("across: tp, one batch; down: data parallel, a batch each" if axes else "each with all of it")
    return lines


def sparkline(values: list[float], width: int = 40) -> str:
    """One line of blocks, high for a high loss."""
    width = min(width, len(values))
    bins = [_mean(values[i * len(values) // width : (i + 1) * len(values) // width]) for i in range(width)]
    low, span = min(bins), (max(bins) - min(bins)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / span)] for value in bins)


def draw_losses(losses: list[float], validation: list[tuple[int, float]], path: Path) -> None:
    """Write the loss of each step, a smoothed line and the held-out losses to a PNG."""
    smoothed = [_mean(losses[max(0, i - 5) : i + 6]) for i in range(len(losses))]
    steps = range(1, len(losses) + 1)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, label="training, each step")
    axes.plot(steps, smoothed, color="tab:blue", label="training, mean of 11 steps")
    axes.plot(*zip(*validation, strict=True), "o-", color="tab:orange", label="held out")
    axes.set(title="LoRA fine-tuning on questions and answers", xlabel="optimizer step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
