"""TRL's trainers, each held against stock TRL and plain PEFT in one process.

`tuned` trains as a script would, on every rank of a mesh or, without a mesh, in this process. A trainer whose
completions are sampled draws them from a seed of each data-parallel process; here a rollout chooses each completion's
first word by its place in the global batch, and generates the rest greedily: they are the same on any mesh.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl.models import unwrap_model_for_generation

from tests.accelerate_plugin.harness import environment, launched
from tests.oracle import SEVEN, differing, dp_of, fill_adapters, full, relative_error, trained
from tests.oracle.workers import attempt

WORDS = 64
BATCH = 8
STEPS = 3
PAIRED = BATCH // 2
"""Rows that KTO pairs with each other: those of one process's batch, where there are two data-parallel processes."""

CHAT = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }} "
    "{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %} {% endfor %}"
)
LORA: dict[str, Any] = {"r": 4, "target_modules": SEVEN, "task_type": "CAUSAL_LM"}


# ---------------------------------------------------------------------- models and data


def word_tokenizer(
    count: int, first: Sequence[str] = (), special: Iterable[str] = (), **settings: Any
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `count` words, the ends and `first` among them, and of special words behind these."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *first]
    words += [f"w{index}" for index in range(len(words), count)]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in special])
    ends = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends, **settings)


def write_base(path: Path) -> Path:
    """Write a small model with a tokenizer, a classifier in `reward`, and texts in `data`."""
    tokenizer = word_tokenizer(WORDS, chat_template=CHAT)
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **sizes}
    LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **settings)).save_pretrained(path)
    LlamaForSequenceClassification(LlamaConfig(vocab_size=WORDS, num_labels=1, **settings)).save_pretrained(
        path / "reward"
    )
    tokenizer.save_pretrained(path / "reward")
    (path / "data").mkdir()
    with open(path / "data" / "train.json", "w") as file:
        for text in texts(48):
            file.write(json.dumps({"text": text}) + "\n")
    return path


def texts(count: int, seed: int = 0, lengths: tuple[int, int] = (5, 14)) -> list[str]:
    """Return texts of random words, of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(*lengths, (count,), generator=generator).tolist()
    return [" ".join(f"w{i}" for i in torch.randint(4, WORDS, (n,), generator=generator).tolist()) for n in numbers]


def plain(count: int) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts(count)]


def conversations(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in zip(texts(count), texts(count, 1), strict=True)
    ]


def preferences(count: int, lengths: tuple[int, int] = (5, 14)) -> list[dict[str, Any]]:
    columns = zip(texts(count, 0, lengths), texts(count, 1, lengths), texts(count, 2, lengths), strict=True)
    return [{"prompt": a, "chosen": f" {b}", "rejected": f" {c}"} for a, b, c in columns]


def ratings(count: int) -> list[dict[str, Any]]:
    columns = zip(texts(count), texts(count, 1), strict=True)
    return [{"prompt": a, "completion": f" {b}", "label": index % 3 > 0} for index, (a, b) in enumerate(columns)]


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": text} for text in texts(count)]


# ---------------------------------------------------------------------- completions and rewards


def even_words(completions: list[str], **_: Any) -> list[float]:
    """Return the share of even words in each completion."""
    return [sum(int(word[1:]) % 2 == 0 for word in text.split()) / max(1, len(text.split())) for text in completions]


def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
    """Generate a completion for each prompt: its first word by its place in the global batch, the others greedily."""
    tokenizer = trainer.processing_class
    first_row = trainer.accelerator.process_index * len(texts)
    prompt_ids = [tokenizer(text)["input_ids"] for text in texts]
    begun = [[*ids, 4 + 7 * (first_row + row) % (WORDS - 4)] for row, ids in enumerate(prompt_ids)]
    batch = tokenizer.pad({"input_ids": begun}, padding_side="left", return_tensors="pt")
    with torch.no_grad(), unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        made = model.generate(**batch, max_new_tokens=5, do_sample=False)
    width = batch["input_ids"].shape[1]
    completion_ids = []
    for row in made[:, width - 1 :].tolist():
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        completion_ids.append(row[:end])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def rewarded(base: Path) -> dict[str, Any]:
    """Return the arguments of a trainer with two rewards: a function, and a classifier that is a model."""
    model = LlamaForSequenceClassification.from_pretrained(base / "reward", num_labels=1, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "reward")
    return {"reward_funcs": [even_words, model], "reward_processing_classes": [None, tokenizer]}


def referenced(base: Path) -> dict[str, Any]:
    """Return the arguments of a trainer whose reference is a model of its own."""
    return {"ref_model": LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)}


# ---------------------------------------------------------------------- the rows


@dataclass(frozen=True)
class Row:
    """Describe one trainer and what it is given."""

    name: str
    """Name of the trainer's class, without "Trainer"."""

    data: Callable[[], list[dict[str, Any]]]
    settings: dict[str, Any] = field(default_factory=dict)
    module: str = "trl"
    more: Callable[[Path], dict[str, Any]] = lambda base: {}
    """Further arguments of the trainer."""

    adapted: bool = False
    """The model comes with an adapter that is not zero, as one that was trained before."""

    lora: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    mesh: str = "2x2"
    loose: tuple[str, ...] = ()
    """Logged values that TRL averages over parts of a batch, whichever tokens they have."""

    about: str = ""
    """What is special, in the words of the table."""


SAME_LENGTHS = (9, 10)
GENERATING: dict[str, Any] = {"max_completion_length": 6, "beta": 0.1, "num_generations": BATCH}
ROWS: dict[str, Row] = {
    "SFT": Row("SFT", lambda: plain(32), {"max_length": 32}),
    "SFT, packing": Row("SFT", lambda: plain(96), {"max_length": 32, "packing": True}),
    "SFT, assistant only": Row("SFT", lambda: conversations(32), {"max_length": 32, "assistant_only_loss": True}),
    "SFT, rebalanced": Row(
        "SFT",
        lambda: plain(32),
        {"max_length": 32, "train_sampling_strategy": "batch_rebalance"},
        about='`train_sampling_strategy="batch_rebalance"`',
    ),
    "DPO": Row("DPO", lambda: preferences(32), {"max_length": 32}, about="reference: the adapter off"),
    "DPO, a trained adapter": Row(
        "DPO", lambda: preferences(32), {"max_length": 32}, adapted=True, about="reference: a copy of the adapter"
    ),
    "DPO, a reference model": Row(
        "DPO", lambda: preferences(32), {"max_length": 32}, more=referenced, about="reference: a model of its own"
    ),
    "KTO": Row("KTO", lambda: ratings(32), {"max_length": 32}, about="reference: the adapter off"),
    "KTO, a trained adapter": Row(
        "KTO", lambda: ratings(32), {"max_length": 32}, adapted=True, about="reference: a copy of the adapter"
    ),
    "KTO, a reference model": Row(
        "KTO", lambda: ratings(32), {"max_length": 32}, more=referenced, about="reference: a model of its own"
    ),
    "Reward": Row(
        "Reward",
        lambda: preferences(32),
        {"max_length": 32, "center_rewards_coefficient": 0.1},
        lora={"task_type": "SEQ_CLS", "modules_to_save": ["score"]},
        accumulate=2,
        about="the head `score` trains and is saved in full; 2 micro-batches a step",
    ),
    "ORPO": Row(
        "ORPO",
        lambda: preferences(32, SAME_LENGTHS),
        {"max_length": 64},
        module="trl.experimental.orpo",
        about="texts of one length",
    ),
    "CPO": Row(
        "CPO",
        lambda: preferences(32, SAME_LENGTHS),
        {"max_length": 64},
        module="trl.experimental.cpo",
        about="texts of one length",
    ),
    "GRPO": Row(
        "GRPO",
        lambda: prompts(32),
        GENERATING,
        more=lambda base: {**rewarded(base), "rollout_func": rollout},
        about="greedy completions; groups span the data-parallel processes; a function and a classifier as rewards; "
        "reference: the adapter off",
    ),
    "GRPO, accumulated": Row(
        "GRPO",
        lambda: prompts(32),
        {**GENERATING, "num_generations": 4, "num_iterations": 2},
        more=lambda base: {"reward_funcs": even_words, "rollout_func": rollout},
        adapted=True,
        accumulate=2,
        loose=("kl", "entropy", "clip_ratio"),
        about="greedy completions; 2 micro-batches a step, 2 steps a round; reference: a copy of the adapter",
    ),
    "GRPO, sampled": Row(
        "GRPO",
        lambda: prompts(32),
        GENERATING,
        more=lambda base: {"reward_funcs": even_words},
        mesh="1x2",
        about="completions sampled by TRL: one data-parallel process, whose seed is that of one process",
    ),
    "RLOO, sampled": Row(
        "RLOO",
        lambda: prompts(32),
        GENERATING,
        more=lambda base: {"reward_funcs": even_words},
        mesh="1x2",
        about="as above",
    ),
}


# ---------------------------------------------------------------------- training


@dataclass
class Tuned:
    """Hold what a trainer leaves."""

    log: list[dict[str, float]]
    begun: dict[str, Tensor]
    """The parameters that train, before training, in full."""

    adapters: dict[str, Tensor]
    """The same afterwards."""

    saved: dict[str, Tensor]
    """Tensors of the adapter folders, the reference's included."""

    files: set[str]


class _Begun(TrainerCallback):
    """Note the parameters that train as training begins."""

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.parameters = {name: full(p).clone() for name, p in trained(model).items()}


def tuned(names: list[str], base: Path, output: Path, mesh: str) -> dict[str, Any]:
    """Train with each of these trainers; without a mesh by stock TRL in one process."""
    found = {}
    for name in names:
        with launched(**(environment(mesh) if mesh else {})):
            found[name] = attempt(_tuned, ROWS[name], base, output / name.replace(" ", "_"), dp_of(mesh) if mesh else 1)
    return found


def _tuned(row: Row, base: Path, output: Path, dp: int) -> Tuned:
    module = importlib.import_module(row.module)
    rows = BATCH // dp // (row.accumulate if row.name == "Reward" else 1)
    arguments = getattr(module, f"{row.name}Config")(
        str(output),
        per_device_train_batch_size=PAIRED if row.name == "KTO" else rows,
        gradient_accumulation_steps=row.accumulate,
        max_steps=STEPS,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=STEPS,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        **row.settings,
    )
    torch.manual_seed(4)
    scores = row.name == "Reward"
    kind: Any = LlamaForSequenceClassification if scores else LlamaForCausalLM
    model = kind.from_pretrained(base / "reward" if scores else base, dtype=torch.float32)
    config: LoraConfig | None = LoraConfig(**{**LORA, **row.lora})
    if row.adapted:
        model, config = get_peft_model(model, config), None
        fill_adapters(model)
    begun = _Begun()
    trainer = getattr(module, f"{row.name}Trainer")(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(row.data()),
        processing_class=PreTrainedTokenizerFast.from_pretrained(base),
        peft_config=config,
        callbacks=[begun],
        **row.more(base),
    )
    trainer._train_batch_size = arguments.per_device_train_batch_size = rows
    trainer.train()
    trainer.save_model()
    return Tuned(
        log=[each for each in trainer.state.log_history if "loss" in each],
        begun=begun.parameters,
        adapters={name: full(p) for name, p in trained(trainer.model).items()},
        saved={
            f"{path.parent.relative_to(output)}/{name}": tensor
            for path in (output / "adapter_model.safetensors", output / "ref" / "adapter_model.safetensors")
            if path.exists()
            for name, tensor in load_file(path).items()
        },
        files={path.name for path in (output / f"checkpoint-{STEPS}").iterdir()},
    )


ONLY_STOCK = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
"""Files of a checkpoint of stock Trainer, whose contents are in `train_state` of ours."""


@dataclass
class Errors:
    """Hold what differs between two runs of a row."""

    losses: float
    logged: float
    """The largest error of another logged value, relative to the value if that is above 1."""

    adapters: float
    """The largest relative error of a tensor, by norm, of those that train and those that are saved."""

    alike: bool
    """True if both runs began with the same parameters, bit by bit, and a checkpoint has the files that it should."""

    @property
    def good(self) -> bool:
        """Return True if all are within their bounds."""
        return self.alike and self.losses <= 1e-5 and self.logged <= 1e-4 and self.adapters <= 1e-3


def errors(name: str, got: Tuned, want: Tuned) -> Errors:
    """Compare two runs of a row."""
    worst: dict[str, float] = {}
    for mine, theirs in zip(got.log, want.log, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            if key != "step_time" and not key.startswith(ROWS[name].loose or ("step_time",)):
                error = abs(mine[key] - value) / max(1.0, abs(value))
                worst[key] = max(worst.get(key, 0.0), error if math.isfinite(error) else math.inf)
    losses = worst.pop("loss")
    return Errors(
        losses,
        max(worst.values()),
        max(
            relative_error(got.adapters, want.adapters, rounding_counts=True),
            relative_error(got.saved, want.saved, rounding_counts=True),
        ),
        not differing(got.begun, want.begun) and got.files == want.files - ONLY_STOCK | {"train_state"},
    )
