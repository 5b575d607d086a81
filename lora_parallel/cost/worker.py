"""Run the simulated steps of a plan in a process of its own, as a simulated rank needs a process group of its own.

    python -m lora_parallel.cost.worker

reads a job a line from standard input, in JSON, and writes a result a line to standard output.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch

from lora_parallel.config import ParallelConfig
from lora_parallel.cost.described_model import DescribedModel
from lora_parallel.cost.simulated_step import cost_of_a_step


def main() -> None:
    """Answer jobs until standard input ends."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for answer in answers_to(sys.stdin):
        print(json.dumps(answer), file=answers, flush=True)


def answers_to(jobs: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the answer to each job; a model is built once for all jobs about it."""

    @cache
    def described(model: str) -> DescribedModel:
        return DescribedModel(**json.loads(model))

    for line in jobs:
        job = json.loads(line)
        try:
            model = described(json.dumps(job["model"]))
            if job["kind"] == "stack":
                yield model.describe()
                continue
            options = {
                name: getattr(torch, value) if name.endswith("_dtype") and value else value
                for name, value in job["config"].items()
            }
            config = ParallelConfig(**options)
            cost = cost_of_a_step(model, config, job["ranks"], job["rows"], job["tokens"], job["optimizer"])
            yield {"around": cost.around, "blocks": cost.blocks}
        except Exception as error:  # whatever a model's code raises is the answer to this job alone
            text = f"{error}"
            is_written = isinstance(error, (ValueError, RuntimeError, OSError)) and text
            yield {"refused": text if is_written else f"{type(error).__name__}: {text}"}


if __name__ == "__main__":
    main()
