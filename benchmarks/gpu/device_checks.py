"""Check what only a GPU shows: where the host waits for it, and what the kernel of LoRA dropout drops and takes."""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Phi3Config, Phi3ForCausalLM

from benchmarks.gpu.checks import TENANTS, mixture, quantised_llama, tenant
from benchmarks.gpu.outcomes import NotInstalled
from benchmarks.gpu.records import ROOT
from benchmarks.gpu.trace import kernels_of
from benchmarks.gpu.training import PRECISIONS, SIZES, adapted, batches, cast, llama, place
from lora_parallel import TenantPool, clip_grad_norm_, no_sync, parallelize
from lora_parallel.adapters import dropout as dropouts
from lora_parallel.adapters.dropout import TopologyInvariantDropout
from lora_parallel.integration import dp_rank, dp_size
from lora_parallel.state import ForwardCount
from tests.oracle import trained

Figures = dict[str, Any]
PRODUCT = ("lora_parallel", "accelerate_plugin", "lightning_lora")


# ---------------------------------------------------------------------- where the host waits


Step = Callable[[Tensor], Any]


def waits(device: str, mesh: str) -> Figures:
    """Count the product's lines in which the host waits for the GPU in the third step, by what is trained."""
    kinds: dict[str, Callable[[], Step]] = {
        "llama": lambda: _training(llama(), mesh, device),
        "phi3, fused layers": lambda: _training(_phi3(), mesh, device),
        "recomputation": lambda: _training(llama(), mesh, device, activation_checkpointing=True),
        "experts": lambda: _training(mixture("grouped_mm", 2), mesh, device, dropout=0.0),
        "QLoRA nf4": lambda: _training(_quantised(device), mesh, device),
        "tenants": lambda: _tenants(mesh, device),
    }
    if not mesh.endswith("x1"):
        kinds["sequence parallel"] = lambda: _training(llama(), mesh, device, sequence_parallel=True)
        kinds["loss_parallel"] = lambda: _training(llama(), mesh, device, loss_parallel=True)
    found = {}
    for name, prepare in kinds.items():
        lines: Counter[str] = Counter()
        try:
            step = prepare()
        except NotInstalled as error:
            found[name] = {str(error): 0}
            continue
        for number, batch in enumerate(batches()):
            mine = batch.to(device)
            with noted(lines if number == 2 else Counter(), device):
                step(mine)
        found[name] = dict(lines)
    return {"waits": found}


def _phi3() -> nn.Module:
    torch.manual_seed(0)
    return Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=None))


def _quantised(device: str) -> nn.Module:
    with quantised_llama(device, "nf4") as load:
        return load()


def _training(base: nn.Module, mesh: str, device: str, dropout: float = 0.05, **options: Any) -> Step:
    where, config = place(mesh, device, options)
    model = adapted(base, target_modules="all-linear", lora_dropout=dropout)
    if not getattr(base, "is_quantized", False):
        model = cast(model, PRECISIONS["bf16"], device)
    model = parallelize(model.to(device), where, config)
    parameters = list(trained(model).values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)

    def step(batch: Tensor) -> None:
        first, second = batch.chunk(dp_size(where))[dp_rank(where)].chunk(2)
        with no_sync(model):
            model(input_ids=first, labels=first).loss.backward()
        model(input_ids=second, labels=second).loss.backward()
        clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _tenants(mesh: str, device: str) -> Step:
    where, config = place(mesh, device, {"require_adapters": False})
    pool = TenantPool(parallelize(cast(llama(), PRECISIONS["bf16"], device), where, config).train())
    for seed, name in enumerate(TENANTS):
        pool.add(name, tenant(name, lora_dropout=0.05), lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), seed)

    def step(batch: Tensor) -> None:
        mine = batch.chunk(dp_size(where))[dp_rank(where)]
        names = [name for name, _ in zip(cycle(TENANTS), mine, strict=False)]
        with pool.route(names):
            pool.model(input_ids=mine, labels=mine).loss.backward()
        for name in TENANTS:
            pool.step(name)

    return step


@contextmanager
def noted(lines: Counter[str], device: str) -> Iterator[None]:
    """Count the product's lines in which the host waits for the GPU, as torch warns of it."""

    def note(message: Any, *_: Any) -> None:
        places = [(frame.f_code.co_filename, line) for frame, line in walk_stack(sys._getframe(1))]
        if "synchronizing" in str(message) and (line := _line_of(places)):
            lines[line] += 1

    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _line_of(places: list[tuple[str, int]]) -> str | None:
    """Return the innermost of the product's lines, or of others' where there is none; None for a stand-in for NCCL."""
    named = [(path.removeprefix(f"{ROOT}/"), line) for path, line in places if not path.endswith("/warnings.py")]
    if any(path == "tests/oracle/late_group.py" for path, _ in named):
        return None
    ours = [place for place in named if place[0].startswith(PRODUCT)]
    others = [(_in_package(path), line) for path, line in named if "-packages/torch/" not in path]
    path, line = (ours or others or named)[0]
    return f"{path}:{line}"


def _in_package(path: str) -> str:
    """Return a file's name below the folder that Python imports it from."""
    folder = max((each for each in sys.path if each and path.startswith(f"{each}/")), key=len, default="")
    return path.removeprefix(f"{folder}/")


# ---------------------------------------------------------------------- LoRA dropout


ROUNDS = 20


def dropout(device: str, size: int) -> Figures:
    """Hold the kernel against torch's operators bit by bit, and time both and torch's own dropout at [size, size]."""
    differ = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for shape in ((3, 7, 40), (2, 300), (1, 33, 2, 257), (4, 1024, 1024)):
            for p in (0.05, 0.5):
                module = _module(p)
                x, grad = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
                places = [torch.randint(1000, shape[:-1], dtype=torch.int32, device=device) for _ in range(2)]
                kernel, operators = (
                    [*_there_and_back(module, x, grad), module.drop_at(x, *places, module.keys())]
                    for _ in _each_way(device)
                )
                differ += sum(int((a != b).sum()) for a, b in zip(kernel, operators, strict=True))
    x, grad = (torch.randn(1, size, size, device=device).bfloat16() for _ in range(2))
    module = _module(0.05)
    names = ["one kernel", "torch's operators"]
    times = {
        name: _time(lambda: _there_and_back(module, x, grad), device)
        for _, name in zip(_each_way(device), names, strict=True)
    }
    own = nn.Dropout(0.05)
    times["torch's own dropout"] = _time(lambda: _there_and_back(own, x, grad), device)
    return {
        "errors": {"elements that differ from torch's operators": [float(differ), 0.0]},
        "dropout": times,
        "size": size,
    }


def _each_way(device: str) -> Iterator[None]:
    """Let dropout run as ever, and then by torch's operators."""
    if device == "cuda" and dropouts.kernel(torch.device(device, torch.cuda.current_device())) is None:
        raise RuntimeError("Triton does not run here.")
    yield
    own = TopologyInvariantDropout._in_one_kernel
    TopologyInvariantDropout._in_one_kernel = lambda *_: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        TopologyInvariantDropout._in_one_kernel = own  # type: ignore[method-assign]


def _module(p: float) -> TopologyInvariantDropout:
    return TopologyInvariantDropout(p, "layer", 5, ForwardCount(current=3, running=True), dp_rank=3, feature_offset=7)


def _there_and_back(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    return y.detach(), torch.autograd.grad(y, x, grad)[0]


def _time(call: Callable[[], Any], device: str) -> dict[str, float]:
    """Milliseconds of a forward and a backward: in all, of the host alone, and of the kernels."""
    call()
    kernels = kernels_of(call)
    host, whole = [], []
    for _ in range(ROUNDS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        if device == "cuda":
            torch.cuda.synchronize()
        whole.append(time.perf_counter() - start)
    return {
        "in all": 1e3 * statistics.median(whole),
        "host": 1e3 * statistics.median(host),
        "kernels": kernels["kernels"] if kernels else 0.0,
    }
