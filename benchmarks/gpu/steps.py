"""The steps, as data: what is run in which order, on which mesh, for how long at most."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

PRECISIONS = ("float64", "float32", "bf16", "bf16-mixed")
FEATURES: dict[str, dict[str, Any]] = {
    "compile": {"compile": True},
    "loss_parallel": {"loss_parallel": True},
    "activation checkpointing": {"activation_checkpointing": True},
    "sequence parallel": {"sequence_parallel": True},
    "cpu_offload": {"cpu_offload": True},
    "base whole": {"shard_base": False},
    "prefetch": {"prefetch_blocks": 1},
}
_OF_SEVERAL_RANKS = ("sequence parallel", "base whole", "prefetch")
LLAMA_8B = {
    "hidden": 4096,
    "intermediate": 14336,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "vocabulary": 128256,
    "sequence": 4096,
    "r": 16,
}
TINY = {
    "hidden": 128,
    "intermediate": 256,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "vocabulary": 512,
    "sequence": 64,
    "r": 8,
}
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, compile": {"compile": True},
    "ours, compile, loss_parallel": {"compile": True, "loss_parallel": True},
    "ours, compile, base whole": {"compile": True, "shard_base": False},
}
"""Our sides, with their options of `ParallelConfig`."""

PEERS = ("PEFT", "PEFT + torch.compile", "Liger", "Unsloth's fused LoRA")


@dataclass(frozen=True)
class Step:
    """One row of the page."""

    name: str
    kind: Literal["check", "rate", "speed"]
    function: str
    """"module:name"; called on each rank with `device` and the options, returns the row's figures on rank 0."""

    options: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    seconds: float = 300
    """Limit of its time."""

    alone: bool = False
    """True for what is timed: nothing may run beside it."""

    fallbacks: tuple[dict[str, Any], ...] = ()
    """Options to put in the place of those above, one after the other, as long as memory does not suffice."""


def steps(device: str, gpus: int, quick: bool) -> list[Step]:
    """All steps for a machine with so many devices, those first whose absence would hurt most."""
    meshes = meshes_for(gpus, quick)
    last = meshes[-1]
    limit = 900.0  # on a CPU, which others may use too
    if device == "cuda":
        limit = 150.0 if quick else 300.0  # one that hangs must leave time for the others
    shared = device == "cuda" and gpus == 1
    chosen = ["1x1"] if gpus == 1 else ([last] if quick else ["1x1", last])
    planned = [
        _alone("bf16 matmul rate", "speed:matmul_rate", kind="rate", size=8192 if device == "cuda" else 256),
        _speed(device, "1x1", PEERS, quick),
        _alone("LoRA dropout", "device_checks:dropout", size=4096 if device == "cuda" else 256),
        _check("demo", "checks:demo", gpus=gpus, max_steps=20 if device == "cuda" else 4),
        *_oracle(meshes[:1], PRECISIONS),
        _check("host waits 1x1", "device_checks:waits", mesh="1x1"),
        _speed(device, "1x1", PEERS[:2], quick, ours=("ours", "ours, compile"), autocast=True),
        _speed(device, "1x1", PEERS[:2], quick, ours=("ours", "ours, compile"), rows=2),
        *(_on_one_gpu() if shared else [_check(f"host waits {last}", "device_checks:waits", mesh=last)]),
        *_features(chosen),
        *(each for mesh in chosen for each in _rest(mesh)),
        *_oracle(meshes[1:], PRECISIONS),
        *(
            _speed(device, mesh, _peers_on(mesh), quick)
            for mesh in meshes[1:]
            if not quick or mesh in ("2x1", "1x2", last)
        ),
    ]
    # What is compiled for the first time takes minutes.
    return [replace(step, seconds=max(limit, 300.0) if step.kind == "speed" else limit) for step in planned]


def meshes_for(gpus: int, quick: bool) -> list[str]:
    """1x1, and every dp_shard x tp that fills a power of two of the devices; replicas of both from eight on.

    Quick: of two devices, and of all.
    """
    found = ["1x1"]
    sizes = [2**power for power in range(1, gpus.bit_length()) if 2**power <= gpus]
    for size in sizes:
        if quick and size not in (sizes[0], sizes[-1]):
            continue
        found += [f"{size // tp}x{tp}" for tp in (2**power for power in range(size.bit_length()))]
        if size >= 8:
            found.append(f"2x{size // 4}x2")
    if gpus >= 4:  # a mesh with all mechanisms comes last: it is the one that features are tried on
        found.append(found.pop(found.index(f"{sizes[-1] // 2}x2")))
    return found


def world_size_of(mesh: str) -> int:
    return prod(int(size) for size in re.findall(r"\d+", mesh))


def _check(name: str, function: str, kind: Any = "check", mesh: str | None = None, **options: Any) -> Step:
    if mesh is not None:
        options["mesh"] = mesh
    return Step(name, kind, f"benchmarks.gpu.{function}", options, world_size_of(mesh or "1x1"))


def _alone(*args: Any, **options: Any) -> Step:
    return replace(_check(*args, **options), alone=True)


def _oracle(meshes: list[str], precisions: tuple[str, ...], **config: Any) -> list[Step]:
    return [
        _check(f"oracle {mesh} {precision}", "checks:oracle", mesh=mesh, precision=precision, config=config)
        for mesh in meshes
        for precision in precisions
    ]


def _features(meshes: list[str]) -> list[Step]:
    return [
        _check(f"{name} {mesh} {precision}", "checks:oracle", mesh=mesh, precision=precision, config=config)
        for mesh in meshes
        for name, config in FEATURES.items()
        for precision in (("float32", "bf16") if name == "compile" else ("float32",))
        if mesh != "1x1" or name not in _OF_SEVERAL_RANKS
    ]


def _rest(mesh: str) -> list[Step]:
    return [
        _check(f"QLoRA bitsandbytes nf4 {mesh}", "checks:quantised", mesh=mesh, kind_of_base="nf4"),
        _check(f"QLoRA torchao int8 {mesh}", "checks:quantised", mesh=mesh, kind_of_base="torchao int8"),
        _check(f"experts, grouped_mm {mesh} float32", "checks:experts", mesh=mesh, precision="float32"),
        _check(f"experts, grouped_mm {mesh} bf16", "checks:experts", mesh=mesh, precision="bf16"),
        _check(f"tenants {mesh} float64", "checks:tenants", mesh=mesh, precision="float64"),
        _check(f"tenants {mesh} bf16", "checks:tenants", mesh=mesh, precision="bf16"),
        _check(f"save and resume {mesh}", "checks:resume", mesh=mesh),
    ]


def _on_one_gpu() -> list[Step]:
    """Return steps on meshes whose ranks share a GPU: what they compute is checked; what they cost says nothing."""
    steps = [
        *_oracle(["2x2"], PRECISIONS),
        *_oracle(["1x2", "2x1", "2x1x2", "1x1cp2"], ("float32",)),
        *_oracle(["1x1pp2"], ("float32",), pp_microbatches=4),
        _check("host waits 2x2", "device_checks:waits", mesh="2x2"),
        *_features(["2x2"]),
        *_rest("2x2"),
    ]
    return [replace(step, name=f"{step.name}, ranks share a GPU") for step in steps]


def _peers_on(mesh: str) -> tuple[str, ...]:
    """What people write by hand for a mesh, where there is such a thing."""
    sizes = [int(size) for size in mesh.split("x")]
    if len(sizes) == 2 and 1 in sizes:
        return ("fully_shard by hand" if sizes[1] == 1 else "separate stock styles",)
    return ()


def _speed(
    device: str,
    mesh: str,
    peers: tuple[str, ...],
    quick: bool,
    ours: tuple[str, ...] = tuple(OURS),
    autocast: bool = False,
    rows: int = 1,
) -> Step:
    shape = LLAMA_8B if device == "cuda" else TINY
    options = {
        "mesh": mesh,
        "peers": peers,
        "ours": ours,
        "autocast": autocast,
        "rows": rows,
        "shape": shape,
        "layers": shape["layers"],
        "rounds": 5 if quick else 20,
        "warmup": 2 if quick else 4,
        "backend": "inductor" if device == "cuda" else "aot_eager",
    }
    fewer = tuple({"layers": layers} for layers in (24, 16, 8, 4, 2) if layers < shape["layers"])
    name = f"speed {mesh}" + (", autocast" if autocast else "") + (f", {rows} rows" if rows > 1 else "")
    return Step(name, "speed", "benchmarks.gpu.speed:speed", options, world_size_of(mesh), alone=True, fallbacks=fewer)
