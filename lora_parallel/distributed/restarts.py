"""Check that the ranks of a job which torchrun restarts can find each other.

torchrun's agent keeps one store for all starts of a job. The addresses that the ranks of the last start wrote into it
are still there when the ranks of the next start read them: some read old ones, and fail or wait
(https://github.com/pytorch/pytorch/issues/135712, seen with torch 2.13). With the variable
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` and the rendezvous "c10d", every start has a store of its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

__all__ = ["check_restarts"]

log = logging.getLogger(__name__)

_REMEDY = "start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment and with --rdzv-backend c10d"


def check_restarts(environment: Mapping[str, str] = os.environ) -> None:
    """Warn on rank 0 if torchrun could not restart this job, and refuse to go on in a job that it has restarted so.

    Args:
        environment: The variables that torchrun has set.

    Raises:
        RuntimeError: This is a restarted job whose ranks would read the addresses of the last start.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    if int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        raise RuntimeError(
            "torchrun has restarted this job with the store of the last start, in which ranks find the addresses of "
            f"processes that are gone: {_REMEDY}."
        )
    if int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 and environment.get("RANK") == "0":
        log.warning("torchrun's --max-restarts would fail, as its restarts share one store: %s.", _REMEDY)
