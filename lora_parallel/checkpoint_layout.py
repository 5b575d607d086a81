"""Where in a checkpoint's folder things are.

adapter/     PEFT's folders; other adapters in subfolders of their names, several models in one of their own
state/       torch DCP: optimizer states and trained parameters that no adapter holds, by parameter name
extra.pt     what is no shard of a tensor: settings of optimizers, random states, whatever the caller adds
meta.json    format version, mesh, fingerprints of the base, versions, the size of each file, checksums of rank 0's;
             written last
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["EXTRA", "FORMAT", "LAYOUT", "META", "SHARDS", "STATE", "adapter_folder", "loose_key", "optimizer_key"]

FORMAT = 1
ADAPTER, EXTRA, STATE, META = "adapter", "extra.pt", "state", "meta.json"
LAYOUT = frozenset({ADAPTER, EXTRA, STATE, META})
"""What is ours in a checkpoint's folder."""
SHARDS = ".distcp"
"""How the files in state/ end that each rank writes its shards into."""


def adapter_folder(path: Path, model: str, models: Iterable[str]) -> Path:
    """One folder where a checkpoint holds one model, one for each where it holds several."""
    return path / ADAPTER if len(list(models)) == 1 else path / ADAPTER / model


def loose_key(parameter: str) -> str:
    """The name in state/ of a trained parameter that no adapter holds."""
    return f"model.{parameter}"


def optimizer_key(optimizer: str, parameter: str, key: str) -> str:
    """The name in state/ of a state that an optimizer keeps of a parameter."""
    return f"optimizer_{optimizer}.{parameter}.{key}"
