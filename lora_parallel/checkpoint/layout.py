"""Name the files and folders of a checkpoint.

adapter/     PEFT's folder of the adapter "default", with subfolders for other adapters, by adapter name; if there are
             several models, one such folder for each in a subfolder, by model name
state/       torch DCP: optimizer states and trained parameters that no adapter holds, by parameter name
extra.pt     values that are no shards of tensors: settings of optimizers, random states, the caller's own entries
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
"""Format version that is written, and the first version in which meta.json has a digest of itself and the files in
state/ have checksums. All versions up to FORMAT can be read.
"""

ADAPTER, EXTRA, STATE, META = "adapter", "extra.pt", "state", "meta.json"
LAYOUT = frozenset({ADAPTER, EXTRA, STATE, META})
"""Names that this library writes in a checkpoint's folder; everything else there is the user's."""


def adapter_folder(path: Path, model: str, models: Iterable[str]) -> Path:
    """Return the folder of a model's adapters: adapter/ if the checkpoint holds one model, else adapter/<model>.

    Args:
        path: The checkpoint.
        model: The name of the model.
        models: The names of all models in the checkpoint.
    """
    return path / ADAPTER if len(list(models)) == 1 else path / ADAPTER / model


def loose_key(parameter: str) -> str:
    """Return the name in state/ of a trained parameter that no adapter holds."""
    return f"model.{parameter}"


def optimizer_key(optimizer: str, parameter: str, key: str) -> str:
    """Return the name in state/ of a tensor that an optimizer keeps for a parameter.

    Args:
        optimizer: The name of the optimizer.
        parameter: The name of the parameter.
        key: The optimizer's name for the tensor, such as "exp_avg".
    """
    return f"optimizer_{optimizer}.{parameter}.{key}"
