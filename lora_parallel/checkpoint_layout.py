"""Where in a checkpoint's folder things are.

adapter/     PEFT's folders; other adapters in subfolders of their names, several models in one of their own
state/       torch DCP: optimizer states and trained parameters that no adapter holds, by parameter name
extra.pt     what is no shard of a tensor: settings of optimizers, random states, whatever the caller adds
meta.json    format version, mesh, fingerprints of the base, versions, the size and checksum of each file, and a digest
             of itself; written last
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "DIGEST_SINCE",
    "EXTRA",
    "FORMAT",
    "LAYOUT",
    "META",
    "STATE",
    "adapter_folder",
    "loose_key",
    "optimizer_key",
]

FORMAT, DIGEST_SINCE = 2, 2
"""What is written; from which on meta.json has a digest of itself, and files in state/ have checksums. All are read."""

ADAPTER, EXTRA, STATE, META = "adapter", "extra.pt", "state", "meta.json"
LAYOUT = frozenset({ADAPTER, EXTRA, STATE, META})
"""What is ours in a checkpoint's folder."""


def adapter_folder(path: Path, model: str, models: Iterable[str]) -> Path:
    """One folder where a checkpoint holds one model, one for each where it holds several."""
    return path / ADAPTER if len(list(models)) == 1 else path / ADAPTER / model


def loose_key(parameter: str) -> str:
    """The name in state/ of a trained parameter that no adapter holds."""
    return f"model.{parameter}"


def optimizer_key(optimizer: str, parameter: str, key: str) -> str:
    """The name in state/ of a state that an optimizer keeps of a parameter."""
    return f"optimizer_{optimizer}.{parameter}.{key}"
