"""The worker pool's server imports Lightning once, not each process anew."""

from __future__ import annotations

from tests import workers

workers._PRELOAD += [
    name for name in ("lightning_lora", "tests.lightning_lora.harness") if name not in workers._PRELOAD
]
