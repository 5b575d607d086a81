"""Run the Python blocks of a page of the documentation on a rank: in order, with a tiny model put in.

The blocks of a page share their names. What a page takes as given (`model`, `train_loader`, ...) is in `GIVEN`. To
Lightning and Accelerate the rank is one that torchrun has started; a Trainer takes one step.
"""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.accelerate_plugin.harness import launched
from tests.lightning_lora.harness import tidy
from tests.oracle.families import SIZES, Family

ROOT = Path(__file__).parent.parent
NOT_RUN = "<!-- not run: "
_BLOCK = re.compile(
    r"^(?P<mark><!-- not run: [^\n]* -->\n)?```python(?P<title>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S
)

_SIZES = {**SIZES, "hidden_size": 128, "intermediate_size": 128}  # two blocks of a 4-bit quantiser for tp 2
_LATENT: dict[str, Any] = {
    **{key: SIZES[key] for key in SIZES if key != "num_key_value_heads"},
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TINY = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", _SIZES),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**SIZES, "head_dim": 8}),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", {**SIZES, "head_dim": 8}),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", {**SIZES, **_EXPERTS}),
    "gpt-oss": Family("GptOssForCausalLM", "GptOssConfig", {**SIZES, "head_dim": 8, **_EXPERTS}),
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "deepseek-v2": Family("DeepseekV2ForCausalLM", "DeepseekV2Config", _LATENT),
}
NAMES = {
    "path/to/model": "llama",
    "meta-llama/Llama-3.1-8B": "llama",
    "meta-llama/Llama-3.1-70B": "llama",
    "Qwen/Qwen3-32B": "qwen3",
    "Qwen/Qwen3-30B-A3B": "qwen3-moe",
    "google/gemma-2-27b": "gemma2",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral",
    "gpt-oss-20b-bf16": "gpt-oss",
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek-v2",
}

SMALLER = [  # what is for other numbers of processes than four
    (r"\bdevices=\d+", "devices=4"),
    (r"\bnum_nodes=\d+", "num_nodes=1"),
    (r"\b(tensor_parallel_size|context_parallel_size)=[48]\b", r"\1=2"),
    (r"\b(data_parallel_size|replicate_size)=8\b", r"\1=4"),
    (r'"lora_fsdp2_tp[48]"', '"lora_fsdp2_tp2"'),
]

COMMON = """
import lightning as L, torch
from lightning_lora import LoRAParallelStrategy
from lora_parallel import *
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from torch.utils.data import DataLoader

config = ParallelConfig(tp=2)
lora_config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
torch.manual_seed(0)
ids = torch.randint(4, 100, (2, 8))
batch = {"input_ids": ids, "labels": ids}
def base(): return AutoModelForCausalLM.from_pretrained("path/to/model")
def adapted(): return get_peft_model(base(), lora_config)
def sharded(): return parallelize(base(), build_mesh(config), config, lora_config=lora_config)
def trained(model): return torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
"""
GIVEN: dict[str, dict[int, str]] = {
    "checkpoints.md": {0: "model, steps = base(), 100"},
    "engine.md": {0: "loader = [batch, batch]", 2: "micro_batches = [batch, batch]"},
    "fidelity.md": {0: "seed, model = 0, base()"},
    "lightning.md": {
        0: "class Module(L.LightningModule):\n"
        "    def configure_model(self): self.model = getattr(self, 'model', None) or adapted()\n"
        "    def training_step(self, batch, index): return self.model(**batch).loss\n"
        "    def configure_optimizers(self): return trained(self)\n"
        "module, train_loader = Module(), DataLoader([{k: v[0] for k, v in batch.items()}] * 4, batch_size=2)\n",
        5: "model = adapted(); optimizer = trained(model)",
        6: "raw = optimizer",
        7: "step, scheduler = 1, torch.optim.lr_scheduler.LinearLR(raw)",
    },
    "loading.md": {
        0: "mesh = build_mesh(config)",
        2: "with meta_init(): model = base()",
        3: "from safetensors.torch import save_file\n"
        "class MyModel(torch.nn.Sequential):\n"
        "    def __init__(self): super().__init__(torch.nn.Linear(4, 4))\n"
        "if torch.distributed.get_rank() == 0: save_file(MyModel().state_dict(), 'weights.safetensors')\n"
        "torch.distributed.barrier()\n",
        4: "from transformers import BitsAndBytesConfig\n"
        "from peft import prepare_model_for_kbit_training\n"
        "name = 'path/to/model'\n",
    },
    "speed.md": {
        1: "from transformers import Trainer, TrainingArguments\n"
        "model, rows = base(), [{key: value[0] for key, value in batch.items()}] * 4\n"
        "args = TrainingArguments('outputs', report_to=[], use_cpu=True)\n",
    },
    "optimizers.md": {0: "model = sharded()"},
    "serving.md": {
        0: "import os\nmodel = sharded(); save_adapter(model, 'adapter')\n",
        1: "del model\n"
        "os.makedirs(f'alone/{torch.distributed.get_rank()}')\n"
        "os.chdir(f'alone/{torch.distributed.get_rank()}')\n"
        "os.symlink('../../adapter', 'adapter')\n",
    },
    "several_machines.md": {
        1: "model = sharded(); optimizer = trained(model); save_checkpoint(model, optimizer, 'checkpoints/step-0')",
        2: "loader = [batch, batch]",
    },
    "tenants.md": {
        0: "ids = torch.randint(4, 100, (3, 8)); base = base()\n"
        "def loss_of(logits, ids): return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())\n"
    },
}
"""Code that defines what a page takes as given, by the number of the block before which it is run."""


def blocks(page: Path) -> list[tuple[str, str, bool]]:
    """The title line, the text, and whether it is run, of each Python block."""
    return [
        (found["title"], textwrap.dedent(found["text"]), found["mark"] is None)
        for found in _BLOCK.finditer(page.read_text())
    ]


def run_page(name: str, folder: str) -> int:
    """Run the blocks of a page in the folder, which holds the tiny models; returns how many were run.

    Blocks with a title are whole scripts: `tests/test_docs.py` starts these.
    """
    page = ROOT / "docs" / name if name != "README.md" else ROOT / name
    here, given, done = os.getcwd(), GIVEN.get(name, {}), 0
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        os.chdir(folder)
        with launched(TORCHELASTIC_RUN_ID="docs", PL_TRAINER_MAX_STEPS="1"), tidy():
            exec(put_in(COMMON, folder), names)
            for index, (title, text, is_run) in enumerate(blocks(page)):
                if title or not is_run:
                    continue
                code = f"{given.get(index, '')}\n{text}"
                try:
                    exec(compile(put_in(code, folder), f"{name}[{index}]", "exec"), names)
                except Exception as error:
                    raise RuntimeError(
                        f"block {index} of {name} fails: {type(error).__name__}: {error}\n{text}"
                    ) from error
                done += 1
    finally:
        os.chdir(here)
        dist.barrier()
    return done


def put_in(text: str, folder: str) -> str:
    """Put tiny models in the place of large ones, and four processes in the place of more."""
    for name, tiny in NAMES.items():
        text = text.replace(f'"{name}"', f'"{folder}/../{tiny}"').replace(f"'{name}'", f"'{folder}/../{tiny}'")
    for pattern, smaller in SMALLER:
        text = re.sub(pattern, smaller, text)
    return text
