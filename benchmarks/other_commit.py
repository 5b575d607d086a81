"""Takes the steps of another commit's package when `sides.OtherCommit`, which starts it, asks for them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import astuple
from typing import Any

import torch.distributed as dist
from peers import CASES, build_model, build_ours, draw_batch, join
from sides import Cost


def serve(rendezvous: str, arguments: dict[str, Any]) -> None:
    """Take the steps that `OtherCommit` asks for, on the batch that it has too; answers are lines of JSON."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        case = CASES[arguments["case"]]
        device = join(case, arguments["rank"], rendezvous, arguments["threads"])
        model = build_model(arguments["hidden"], arguments["layers"])
        side = build_ours(model.to(device), case, device, arguments["adamw"], arguments["compiled"])
        tokens = draw_batch(case, arguments["hidden"], arguments["batch"], arguments["sequence"], device)
        for line in sys.stdin:
            found = getattr(side, line.strip())(tokens)
            answers.write(json.dumps({"found": astuple(found) if isinstance(found, Cost) else found}) + "\n")
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        raise
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
