"""Time training steps side by side, and the matrix product that they are measured by: functions of steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from sides import Side
from torch import Tensor, nn

from benchmarks.gpu.sides import bare, sides, twin
from benchmarks.gpu.steps import PEERS, world_size_of
from benchmarks.gpu.trace import kernels_of
from tests.oracle import parse_mesh

TOLERANCES = {"loss": 1e-2, "gradient norm": 5e-2}
"""Relative, between the sides in bf16: another sum, or another model, is far above."""


def matmul_rate(device: str, size: int) -> dict[str, Any]:
    """The rate of a large bf16 product on this very device, TFLOP/s: the median of ten windows of 0.1 s or more."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def window(count: int) -> float:
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            torch.mm(left, right)
        _synchronize(device)
        return (time.perf_counter() - start) / count

    window(3)
    count = max(3, int(0.1 / window(3)))
    seconds = statistics.median(window(count) for _ in range(10))
    return {"tflops": 2 * size**3 / seconds / 1e12, "size": size}


def speed(
    device: str,
    mesh: str,
    peers: Sequence[str],
    ours: Sequence[str],
    autocast: bool,
    rows: int,
    shape: dict[str, int],
    layers: int,
    rounds: int,
    warmup: int,
    backend: str,
) -> dict[str, Any]:
    """Whole steps of all sides in turn on this mesh; a step takes as long as its slowest rank."""
    alone = world_size_of(mesh) == 1
    first = bare(shape, layers, device) if alone else None
    linear = _linear_weights(first if first is not None else bare(shape, layers, "meta"))

    def base() -> nn.Module:
        return bare(shape, layers, device) if first is None else twin(first)

    found: dict[str, Side] = {}
    refused: dict[str, str] = {}
    held: dict[str, int] = {}
    shared = marked = _allocated(device)
    tokens = _tokens(mesh, shape, rows, device)
    for name, side in sides(base, mesh, ours, peers, shape["r"], device, backend, autocast):
        if isinstance(side, str):
            refused[name] = side
            continue
        try:
            agreed = _first_step(side, tokens)
        except Exception as error:
            if name not in PEERS or isinstance(error, torch.OutOfMemoryError):
                raise
            refused[name] = f"failed: {type(error).__name__}: {error}"  # a peer that breaks takes no other side along
            continue
        found[name] = side
        if name == next(iter(found)):
            expected = agreed
        _check_equal_work(name, agreed, expected)
        if device == "cuda":
            torch.cuda.empty_cache()  # what building one side has left in pieces is no use to the next
        held[name], marked = _allocated(device) - marked, _allocated(device)

    seconds: dict[str, list[list[float]]] = {name: [] for name in found}
    above: dict[str, int] = dict.fromkeys(found, 0)
    for number in range(-warmup, rounds):
        order = list(found) if number % 2 == 0 else list(reversed(found))
        for name in order:
            resting = _allocated(device)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            took = _timed(found[name], tokens, device)
            if number >= 0:
                seconds[name].append(took)
                peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
                above[name] = max(above[name], peak - resting)
    traced = {name: kernels_of(_whole_step(side, tokens)) for name, side in found.items()}
    return {
        "sides": {
            name: {
                "seconds": _slowest(seconds[name], device),
                # As if the side were alone: the shared base, what it holds itself, what a step takes above that.
                "peak bytes": _largest(shared + held[name] + above[name], device) if device == "cuda" else None,
                "kernels": traced.get(name),
            }
            for name in found
        },
        "refused": refused,
        "tokens": rows * shape["sequence"] * world_size_of(mesh) // parse_mesh(mesh)["tp"],
        "linear weights": linear,
        "llama flops": llama_flops(shape, layers, next(iter(found.values())).model),
        "world size": world_size_of(mesh),
        "layers": layers,
        "of layers": shape["layers"],
        "sequence": shape["sequence"],
    }


def _linear_weights(model: nn.Module) -> int:
    """The elements of the frozen weights that a token is multiplied with: linear layers, the head too."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def llama_flops(shape: Mapping[str, int], layers: int, model: nn.Module) -> float:
    """Return the FLOPs of a token in a Llama with LoRA, as `llama2_flops` of NeMo Automodel counts them.

    The count of a full fine-tune has the head, and the causal half of attention. LoRA takes (2 + trained / frozen) / 3
    of it. A token of Llama-3-8B with rows of 4096 tokens takes 32.25e9.
    """
    width = shape["hidden"]
    of_a_layer = 12 + 12 * shape["kv_heads"] / shape["heads"] + 18 * shape["intermediate"] / width
    full = width**2 * (layers * (of_a_layer + 6 * shape["sequence"] / width) + 6 * shape["vocabulary"] / width)
    sizes = {
        trains: sum(p.numel() for p in model.parameters() if p.requires_grad is trains) for trains in (True, False)
    }
    return full * (2 + sizes[True] / sizes[False]) / 3


def _tokens(mesh: str, shape: dict[str, int], rows: int, device: str) -> Tensor:
    """The rows of each data-parallel rank; tp peers have the same."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank // parse_mesh(mesh)["tp"])
    return torch.randint(shape["vocabulary"], (rows, shape["sequence"]), generator=generator).to(device)


def _first_step(side: Side, tokens: Tensor) -> dict[str, float]:
    return {"loss": side.forward_backward(tokens).item(), "gradient norm": side.update().item()}


def _check_equal_work(name: str, got: dict[str, float], want: dict[str, float]) -> None:
    for what, bound in TOLERANCES.items():
        apart = abs(got[what] - want[what]) / abs(want[what])
        if not apart <= bound:
            raise RuntimeError(f"the sides do not do equal work: {what} of {name} {got[what]}, of ours {want[what]}")


def _whole_step(side: Side, tokens: Tensor) -> Callable[[], None]:
    def step() -> None:
        side.forward_backward(tokens)
        side.update()

    return step


def _timed(side: Side, tokens: Tensor, device: str) -> list[float]:
    """Seconds of forward + backward and of the whole step."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    _synchronize(device)
    start = time.perf_counter()
    side.forward_backward(tokens)
    _synchronize(device)
    middle = time.perf_counter()
    side.update()
    _synchronize(device)
    return [middle - start, time.perf_counter() - start]


def _slowest(seconds: list[list[float]], device: str) -> list[list[float]]:
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def _largest(number: int, device: str) -> int:
    value = torch.tensor(number, dtype=torch.int64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
