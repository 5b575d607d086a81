"""Describe models, batches and steps as data, and compute them in one process of plain PEFT."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.loss import loss_utils

from tests.oracle import SEVEN, full
from tests.oracle.expert_rows import ATTENTION, DEEPSEEK3, MIXTRAL, QWEN3, STACKS
from tests.oracle.rows import DECODER, base_model, fill

BATCH, TOKENS, VOCABULARY = 8, 12, 136
DTYPE = torch.float64
MLA = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Mesh:
    """Sizes of the two mesh axes."""

    dp: int
    tp: int

    @property
    def ranks(self) -> int:
        """Return the number of processes that the mesh takes."""
        return self.dp * self.tp

    def __str__(self) -> str:
        return f"{self.dp}x{self.tp}"


@dataclass(frozen=True)
class Model:
    """A tiny model and its adapters."""

    kind: str = "LlamaForCausalLM"
    settings: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)

    def lora_config(self) -> LoraConfig:
        """Return what PEFT is told."""
        settings = {"r": 4, "lora_alpha": 8, "target_modules": SEVEN, "task_type": "CAUSAL_LM", **self.lora}
        return LoraConfig(**settings)

    def save_base(self, folder: Path) -> None:
        """Write a checkpoint of random weights, norms too."""
        # No size is odd: what another library does not do for uneven shards is not what is compared.
        settings = {**DECODER, **self.settings, "vocab_size": VOCABULARY}
        base_model(self.kind, settings).to(DTYPE).save_pretrained(folder)

    def load_base(self, folder: Path, **options: Any) -> Any:
        """Load that checkpoint as any user of transformers would."""
        if self.kind != "LlamaForCausalLM":
            options["experts_implementation"] = "eager"  # others take no float64
        return getattr(transformers, self.kind).from_pretrained(folder, dtype=DTYPE, **options)


MODELS = {
    "llama": Model(),
    "colwise": Model(lora={"target_modules": [name for name in SEVEN if name not in ("o_proj", "down_proj")]}),
    "dropout": Model(lora={"lora_dropout": 0.5}),
    "embeddings": Model(lora={"target_modules": [*SEVEN, "embed_tokens"]}),
    "head": Model(lora={"target_modules": [*SEVEN, "lm_head"]}),
    "tied": Model(
        settings={"tie_word_embeddings": True},
        lora={"target_modules": [*SEVEN, "embed_tokens"]},
    ),
    "dora": Model(lora={"use_dora": True}),
    "modules_to_save": Model(lora={"modules_to_save": ["lm_head"]}),
    "mixtral attention": Model("MixtralForCausalLM", MIXTRAL, {"target_modules": ATTENTION}),
    "mixtral": Model("MixtralForCausalLM", MIXTRAL, {"target_modules": ATTENTION, "target_parameters": STACKS}),
    "qwen3-moe": Model("Qwen3MoeForCausalLM", QWEN3, {"target_modules": ATTENTION, "target_parameters": STACKS}),
    "mla": Model("DeepseekV3ForCausalLM", {**DEEPSEEK3, "q_lora_rank": 16, "head_dim": 4}, {"target_modules": MLA}),
}


@dataclass(frozen=True)
class Job:
    """One training run."""

    model: str = "llama"
    steps: int = 1
    accumulate: int = 1
    clip: float = 0.0
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD shows a factor in a gradient, which AdamW hides; AdamW has a state that a checkpoint must keep."""

    tokens: int = TOKENS
    rows: int = BATCH
    """Rows of one step, over all ranks and accumulated micro-batches."""

    saves: bool = False
    """Save the adapter into `folder / "adapter"` after the last step."""

    checkpoint_at: int = 0
    """Save a checkpoint after this step."""

    resumes: bool = False
    """Begin with that checkpoint."""

    evaluates: bool = False
    """Compute the loss of another batch, in evaluation mode, before anything else."""

    @property
    def rate(self) -> float:
        """Return the learning rate."""
        return 0.5 if self.optimizer == "sgd" else 1e-2

    def data(self, seed: int = 5, steps: int | None = None) -> Tensor:
        """Return the token ids of all steps, in order: [steps * rows, tokens]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(4, VOCABULARY - 5, ((steps or self.steps) * self.rows, self.tokens), generator=generator)

    def evaluation_data(self) -> Tensor:
        """Return the token ids of the batch that is evaluated."""
        return self.data(seed=77, steps=1)


def labels_of(ids: Tensor) -> Tensor:
    """Return labels that count the same shifted or not: the first token of a row is never predicted."""
    labels = ids.clone()
    labels[..., 0] = -100
    return labels


class Rows(torch.utils.data.Dataset):
    """Token ids as a data set."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": labels_of(self.ids[index])}


@dataclass
class Run:
    """Hold what a rank computed: full tensors by PEFT's parameter names."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the first step, before they are clipped."""

    adapters: dict[str, Tensor] = field(default_factory=dict)
    """Values of the parameters that train, after the last step."""

    evaluation: float | None = None


def gradients_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Return the gradients of what trains. Collective for DTensors."""
    return {name: full(p.grad) for name, p in parameters if p.requires_grad and p.grad is not None}


def values_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Return the values of what trains. Collective for DTensors."""
    return {name: full(p) for name, p in parameters if p.requires_grad}


def adapted(job: Job, base: Any, folder: Path) -> Any:
    """Put adapters on a base, and give them the values that all sides begin with: none is zero."""
    model = get_peft_model(base, MODELS[job.model].lora_config())
    place(model, torch.load(folder / "values.pt"))
    return model.train()


def place(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Set what trains, which may be DTensors. What has another shape is left: the library's own error follows."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = values[name].to(parameter.dtype)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements).to_local()
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if local.shape == value.shape:
                local.data.copy_(value)


def make_optimizer(job: Job, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of what trains."""
    trained = [p for p in parameters if p.requires_grad]
    if job.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=job.rate)
    return torch.optim.AdamW(trained, lr=job.rate, weight_decay=0.0)


def micro_batches(job: Job, step: int, rank: int = 0, ranks: int = 1) -> Iterator[Tensor]:
    """Yield a data-parallel rank's micro-batches of a step."""
    for micro in job.data()[step * job.rows : (step + 1) * job.rows].chunk(job.accumulate):
        yield micro.chunk(ranks)[rank]


def prepare(job: Job, folder: Path) -> None:
    """Write the base and the values of the adapters, in one process."""
    MODELS[job.model].save_base(folder / "base")
    torch.manual_seed(2)
    model = get_peft_model(MODELS[job.model].load_base(folder / "base"), MODELS[job.model].lora_config()).to(DTYPE)
    fill(model)
    torch.save(
        {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}, folder / "values.pt"
    )


def one_process(job: Job, folder: Path) -> Run:
    """Plain PEFT in this process."""
    model = adapted(job, MODELS[job.model].load_base(folder / "base"), folder)
    run = Run()
    if job.evaluates:
        ids = job.evaluation_data()
        with torch.no_grad():
            run.evaluation = model.eval()(input_ids=ids, labels=labels_of(ids)).loss.item()
        model.train()
    optimizer = make_optimizer(job, model.parameters())
    for step in range(job.steps):
        for micro in micro_batches(job, step):
            (model(input_ids=micro, labels=labels_of(micro)).loss / job.accumulate).backward()
        if step == 0:
            run.gradients = gradients_of(model.named_parameters())
        if job.clip:
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], job.clip)
        optimizer.step()
        optimizer.zero_grad()
    run.adapters = values_of(model.named_parameters())
    return run


def loss_without_cast(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    **kwargs: Any,
) -> Tensor:
    """Return the loss of transformers without its cast to float32, whose rounding would be compared."""
    flat, targets = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].flatten()
    if num_items_in_batch is None:
        return F.cross_entropy(flat, targets, ignore_index=ignore_index)
    return F.cross_entropy(flat, targets, ignore_index=ignore_index, reduction="sum") / num_items_in_batch


def compute_in_float64() -> None:
    """Take the loss without a cast, in this process and its forks."""
    loss_utils.LOSS_MAPPING["ForCausalLM"] = loss_without_cast
