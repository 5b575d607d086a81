"""The worker pool's server imports Accelerate and Trainer once, not each process anew."""

from __future__ import annotations

from tests import workers

workers._PRELOAD += [
    name for name in ("tests.accelerate_plugin.harness", "tests.trainer_rows") if name not in workers._PRELOAD
]
