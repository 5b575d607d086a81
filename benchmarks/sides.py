"""One contestant of a case: a model with its optimizer, in this process or in one that runs another commit.

python benchmarks/sides.py RENDEZVOUS ARGUMENTS    # started by step.py: steps of another commit's package
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meters import metered_step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MAX_NORM = 1.0
SERVER = Path(__file__).parent / "other_commit.py"


@dataclass
class Cost:
    """What one step costs a process, apart from time."""

    memory: int
    """Bytes of parameters, buffers and optimizer states here, and the most that a step adds."""

    collectives: dict[str, int]
    """Number of collectives by kind."""

    sent: int
    """Bytes of the tensors of all collectives: of an all-gather its output, of a reduce-scatter its input."""


@dataclass
class Side:
    """A contestant in this process."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[list[nn.Parameter], float], Tensor]
    device: str
    backward: Callable[[Tensor], Any] = field(default=Tensor.backward)

    def trainables(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def forward_backward(self, tokens: Tensor) -> Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.backward(loss)
        return loss.detach()

    def update(self) -> Tensor:
        """Clip, step, zero; returns the norm of the gradient before clipping."""
        norm = self.clip(self.trainables(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def first_step(self, tokens: Tensor) -> tuple[float, float]:
        """Take a step; returns the loss and the gradient norm."""
        return self.forward_backward(tokens).item(), self.update().item()

    def timed_step(self, tokens: Tensor) -> tuple[float, float]:
        """Seconds for forward + backward, and for the whole step, on this process."""
        synchronize = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        self.forward_backward(tokens)
        synchronize()
        middle = time.perf_counter()
        self.update()
        synchronize()
        return middle - start, time.perf_counter() - start

    def cost(self, tokens: Tensor) -> Cost:
        """Take a step under the profiler."""
        states = [each for state in self.optimizer.state.values() for each in state.values()]
        held = {_local(t) for t in (*self.model.parameters(), *self.model.buffers(), *states) if isinstance(t, Tensor)}
        with metered_step(self.device) as met:
            self.forward_backward(tokens)
            self.update()
        kinds = Counter(each.kind for each in met.calls)
        return Cost(
            sum(t.numel() * t.element_size() for t in held) + met.memory,
            dict(sorted(kinds.items())),
            sum(each.bytes for each in met.calls),
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class OtherCommit:
    """A contestant in a process of its own, which imports the package of a commit and steps when it is told to.

    Each process of a case has one such partner, and the partners have a process group of their own. The processes that
    wait for their partners sleep, so both commits see the same machine, in turns.
    """

    def __init__(self, package: Path, rendezvous: str, arguments: dict[str, Any]) -> None:
        command = [sys.executable, "-W", "ignore", str(SERVER), rendezvous, json.dumps(arguments)]
        # PYTHONPATH comes before site-packages, and so before the package that is installed.
        environment = {**os.environ, "PYTHONPATH": str(package)}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def _ask(self, what: str) -> Any:
        dist.barrier()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        answer = json.loads(self._process.stdout.readline() or '{"error": "the process of the other commit has ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["found"]

    def first_step(self, tokens: Tensor) -> tuple[float, float]:
        loss, norm = self._ask("first_step")
        return loss, norm

    def timed_step(self, tokens: Tensor) -> tuple[float, float]:
        forward_backward, step = self._ask("timed_step")
        return forward_backward, step

    def cost(self, tokens: Tensor) -> Cost:
        return Cost(*self._ask("cost"))

    def close(self) -> None:
        self._process.communicate()  # the end of its input ends it
