"""Hold training against one process of plain PEFT on the same device: each function is a step's, on every rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TorchAoConfig,
)

from benchmarks.gpu.outcomes import NotInstalled, NotSupported
from benchmarks.gpu.records import ROOT
from benchmarks.gpu.training import (
    AS_PLAIN,
    PRECISIONS,
    SIZES,
    TELLING,
    adapted,
    apart,
    batches,
    cast,
    judged,
    llama,
    place,
    sharded,
    train,
    whole,
)
from lora_parallel import (
    ParallelConfig,
    TenantPool,
    load_checkpoint,
    meta_init,
    parallelize,
    save_adapter,
    save_checkpoint,
)
from lora_parallel.integration import dp_rank, dp_size
from tests.oracle import SEVEN, trained
from tests.oracle.quantised_rows import ROUNDING_OF_PRODUCTS

Figures = dict[str, Any]


def oracle(device: str, mesh: str, precision: str, config: dict[str, Any]) -> Figures:
    """Losses, gradients and adapters of a Llama on a mesh, with these options of `ParallelConfig`."""
    kind = PRECISIONS[precision]
    where, settings = place(mesh, device, {"param_dtype": kind.computed, **config})
    want = train(cast(adapted(llama()), kind, device, torch.float64), device)
    plain = train(cast(adapted(llama()), kind, device, kind.computed), device)
    return judged(sharded(cast(adapted(llama()), kind, device), where, settings), plain, want, kind)


def demo(device: str, gpus: int, max_steps: int) -> Figures:
    """`examples/lightning_sft.py`, whose report compares with plain PEFT in one process."""
    tp = 2 if gpus % 2 == 0 else 1
    with tempfile.TemporaryDirectory() as output:
        command = [
            *(sys.executable, "examples/lightning_sft.py", "--strategy", "lora_fsdp2_tp", "--tp", str(tp)),
            *("--devices", str(gpus), "--accelerator", "gpu" if device == "cuda" else "cpu"),
            *("--max-steps", str(max_steps), "--batch-size", str(4 * gpus), "--output", output),
        ]
        # With a rank in the environment Lightning would wait for a launcher to start the others.
        environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    print(ran.stdout)
    found = re.search(r"largest logit difference (\S+), where logits reach (\S+)", " ".join(ran.stdout.split()))
    if lacks := re.search(r"ModuleNotFoundError: .*", ran.stdout):
        raise NotInstalled(lacks[0])
    if ran.returncode or found is None:
        raise RuntimeError(f"{' '.join(command[1:])} ended with exit code {ran.returncode}")
    return {"errors": {"logits": [float(found[1]) / float(found[2]), 1e-4]}}


# ---------------------------------------------------------------------- other bases


def quantised(device: str, mesh: str, kind_of_base: str) -> Figures:
    """Gradients on a quantised base, in float32: read by slices, and quantised in memory before it is sharded."""
    where, settings = place(mesh, device, {})
    with quantised_llama(device, kind_of_base) as load:
        want = _gradients(adapted(load()), device)
        in_memory = _gradients(parallelize(adapted(load()), where, settings), device, where)
        with meta_init():
            model = adapted(load(on_meta=True))
        by_slices = _gradients(parallelize(model, where, settings), device, where)
    return {
        "errors": {
            "in memory": [apart(in_memory, want), ROUNDING_OF_PRODUCTS],
            "by slices": [apart(by_slices, want), ROUNDING_OF_PRODUCTS],
        }
    }


@contextmanager
def quantised_llama(device: str, kind: str) -> Iterator[Callable[..., nn.Module]]:
    """Give a function that loads a quantised Llama from a folder, onto the device or, in `meta_init`, onto meta."""
    form = _format(kind)
    with tempfile.TemporaryDirectory() as folder:  # on every rank, with the same content
        model: Any = llama()
        model.config.save_pretrained(folder)
        save_file(model.state_dict(), Path(folder, "model.safetensors"), {"format": "pt"})

        def load(on_meta: bool = False) -> nn.Module:
            here = {"device_map": {"": device if device == "cpu" else torch.cuda.current_device()}}
            return AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=form, dtype=torch.float32, **({} if on_meta else here)
            )

        yield load


def _format(kind: str) -> Any:
    """Transformers' configuration of the quantiser; its products are in float32."""
    package = kind.partition(" ")[0] if kind.startswith("torchao") else "bitsandbytes"
    try:
        __import__(package)
    except Exception as error:  # also of one that is there and does not fit this torch
        raise NotInstalled(f"{package} cannot be imported: {error}") from error
    if package == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": True}
    return BitsAndBytesConfig(**four, bnb_4bit_compute_dtype=torch.float32)


def _gradients(
    model: nn.Module, device: str, mesh: DeviceMesh | None = None, vocabulary: int = SIZES["vocab_size"]
) -> dict[str, Tensor]:
    shares, share = (1, 0) if mesh is None else (dp_size(mesh), dp_rank(mesh))
    ids = batches(vocabulary)[0].chunk(shares)[share].to(device)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: whole(p.grad) for name, p in trained(model).items() if p.grad is not None}


MIXTURE = {
    **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
    "moe_intermediate_size": 128,
    "num_experts": 8,
}


def mixture(implementation: str, chosen: int) -> nn.Module:
    """A Qwen3-MoE whose experts are multiplied in one of transformers' ways; `chosen` of them for each token."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**MIXTURE, num_experts_per_tok=chosen, experts_implementation=implementation)
    )


def experts(device: str, mesh: str, precision: str) -> Figures:
    """Gradients of LoRA on fused experts, which transformers multiplies by torch's grouped product.

    In bf16 every token goes to all experts: of two experts that are nearly even, rounding would choose another than in
    the reference.
    """
    kind = PRECISIONS[precision]
    where, settings = place(mesh, device, {})
    chosen = 2 if precision == "float32" else MIXTURE["num_experts"]

    def adapted_mixture(implementation: str) -> nn.Module:
        stacks = ["experts.gate_up_proj", "experts.down_proj"]
        return adapted(mixture(implementation, chosen), target_modules=SEVEN[:4], target_parameters=stacks)

    want = _gradients(cast(adapted_mixture("eager"), kind, device, torch.float64), device)
    try:
        plain = _gradients(cast(adapted_mixture("grouped_mm"), kind, device), device)
    except RuntimeError as error:
        raise NotSupported(f"plain PEFT in {precision} with torch's grouped product here: {error}") from error
    ours = _gradients(parallelize(cast(adapted_mixture("grouped_mm"), kind, device), where, settings), device, where)
    own = apart(plain, want)
    bound = max(kind.gradients, AS_PLAIN * own)
    errors = {"gradients": [apart(ours, want), bound], "plain PEFT itself": [own, TELLING]}
    return {"errors": errors, "plain PEFT": own}


# ---------------------------------------------------------------------- tenants


RATE = 1e3
TENANTS: dict[str, dict[str, Any]] = {
    "ada": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "bea": {"r": 16, "lora_alpha": 8, "target_modules": "all-linear"},
    "cyd": {"r": 8, "lora_alpha": 24, "target_modules": ["down_proj", "o_proj"], "use_rslora": True},
}


def tenants(device: str, mesh: str, precision: str) -> Figures:
    """Gradients of three tenants in one forward, each against plain PEFT alone on its rows.

    The optimizer is SGD, so that a step is the gradient; with a large rate, which leaves its digits in the difference.
    """
    kind = PRECISIONS[precision]
    where, settings = place(mesh, device, {"require_adapters": False})
    rows = dict(zip(TENANTS, batches(), strict=True))
    bound = kind.gradients
    want: dict[str, dict[str, Tensor]] = {}
    own = 0.0
    for seed, (name, ids) in enumerate(rows.items()):
        want[name] = _alone(name, seed, ids, kind, device, torch.float64)
        own = max(own, apart(_alone(name, seed, ids, kind, device, None), want[name]))

    pool = TenantPool(parallelize(cast(llama(), kind, device), where, settings).train())
    for seed, name in enumerate(TENANTS):
        pool.add(name, tenant(name), lambda parameters: torch.optim.SGD(parameters, lr=RATE), seed)
    before = {name: _of_tenant(pool.model, name) for name in TENANTS}
    shares, share = dp_size(where), dp_rank(where)
    mine = [ids.chunk(shares)[share].to(device) for ids in rows.values()]
    with pool.route([name for name, ids in zip(TENANTS, mine, strict=True) for _ in ids]):
        logits = pool.model(input_ids=torch.cat(mine)).logits.chunk(len(mine))
        torch.stack([_loss(each, ids) for each, ids in zip(logits, mine, strict=True)]).sum().backward()
    errors = {}
    for name in TENANTS:
        pool.step(name)
        after = _of_tenant(pool.model, name)
        stepped = {key: (before[name][key].double() - after[key].double()) / RATE for key in after}
        errors[name] = [apart(stepped, want[name]), max(bound, AS_PLAIN * own)]
    return {"errors": {**errors, "plain PEFT itself": [own, TELLING]}, "plain PEFT": own}


def tenant(name: str, **more: Any) -> LoraConfig:
    return LoraConfig(**TENANTS[name], init_lora_weights=False, task_type="CAUSAL_LM", **more)


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _of_tenant(model: nn.Module, name: str) -> dict[str, Tensor]:
    found = {key: p for key, p in model.named_parameters() if f".{name}." in key}
    return {key.replace(f".{name}.", ".default."): whole(p) for key, p in found.items()}


def _alone(name: str, seed: int, ids: Tensor, kind: Any, device: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    base = cast(llama(), kind, "cpu")
    torch.manual_seed(seed)
    model = cast(get_peft_model(base, tenant(name)), kind, device, dtype).train()
    mine = ids.to(device)
    _loss(model(input_ids=mine).logits, mine).backward()
    grads = {key.replace("base_model.model.", ""): p.grad for key, p in trained(model).items()}
    return {key: whole(grad).double() for key, grad in grads.items() if grad is not None}


# ---------------------------------------------------------------------- save and resume


def resume(device: str, mesh: str) -> Figures:
    """A run that is stopped and goes on in another model, against one that is not; and the adapter in plain PEFT."""
    kind = PRECISIONS["float64"]
    where, settings = place(mesh, device, {})
    steps = batches()
    straight, _ = _fit(where, settings, steps)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(_of_rank_zero(own))
        first, optimizer = _fit(where, settings, steps[:1])
        save_checkpoint(first, optimizer, folder / "checkpoint")
        stored = {name: whole(p) for name, p in trained(first).items()}
        again, optimizer = _fit(where, settings, [])
        load_checkpoint(again, optimizer, folder / "checkpoint")
        loaded = {name: whole(p) for name, p in trained(again).items()}
        _steps(again, optimizer, where, steps[1:])
        save_adapter(again, folder / "adapter")
        plain = PeftModel.from_pretrained(cast(llama(), kind, device), folder / "adapter").eval()
        with torch.no_grad():
            ids = steps[0].to(device)
            logits = again.eval()(input_ids=ids).logits
            differ = ((logits - plain(input_ids=ids).logits).norm() / logits.norm()).item()
        if dist.get_world_size() > 1:
            dist.barrier()  # before rank 0 removes what others may be reading
    ended = ({name: whole(p) for name, p in trained(model).items()} for model in (again, straight))
    unequal = sum(not torch.equal(loaded[name], stored[name]) for name in stored)
    return {
        "errors": {
            "loaded tensors that differ": [float(unequal), 0.0],
            "adapters": [apart(*ended), kind.adapters_after],
            "logits in plain PEFT": [differ, 1e-6],  # float32 constants of the model, and kernels of another shape
        }
    }


def _fit(mesh: DeviceMesh, config: ParallelConfig, steps: list[Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parallelize(cast(adapted(llama()), PRECISIONS["float64"], mesh.device_type), mesh, config)
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    _steps(model, optimizer, mesh, steps)
    return model, optimizer


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, steps: list[Tensor]) -> None:
    for batch in steps:
        mine = batch.chunk(dp_size(mesh))[dp_rank(mesh)].to(mesh.device_type)
        model(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _of_rank_zero(path: str) -> str:
    if dist.get_world_size() == 1:
        return path
    paths = [path] * dist.get_world_size()
    dist.all_gather_object(paths, path)
    return paths[0]
