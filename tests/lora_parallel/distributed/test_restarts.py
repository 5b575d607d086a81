"""A job that torchrun restarts with the store of its last start."""

from __future__ import annotations

import pytest

from lora_parallel.distributed.mesh import check_restarts
from tests.logs import listening

SHARED = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3", "RANK": "0"}


def test_a_restart_with_the_last_store_is_refused():
    with pytest.raises(RuntimeError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment and with --rdzv-b"):
        check_restarts({**SHARED, "TORCHELASTIC_RESTART_COUNT": "1"})


def test_the_first_start_says_so_on_rank_zero():
    with listening("lora_parallel.distributed.mesh") as told:
        check_restarts({**SHARED, "TORCHELASTIC_RESTART_COUNT": "0"})
        assert len(told) == 1
        check_restarts({**SHARED, "RANK": "1"})
        check_restarts({**SHARED, "TORCHELASTIC_MAX_RESTARTS": "0"})
        check_restarts({**SHARED, "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RESTART_COUNT": "1"})
        check_restarts({})
        assert len(told) == 1
