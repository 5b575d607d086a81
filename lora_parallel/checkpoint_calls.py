"""Name the call that wrote a checkpoint of this format, and the one that reads it."""

from __future__ import annotations

from pathlib import Path

from lora_parallel.checkpoint_layout import META
from lora_parallel.retention import read_meta

__all__ = ["of_another", "written_here"]

_CALLS = {
    "lora_parallel": ("lora_parallel.save_checkpoint", "lora_parallel.load_checkpoint(model, optimizer, {path!r})"),
    "Accelerator": ("accelerator.save_state", "accelerator.load_state({path!r})"),
    "Trainer of transformers": ("transformers' Trainer", "trainer.train(resume_from_checkpoint={folder!r})"),
    "Trainer": ("Lightning's Trainer", "trainer.fit(module, ckpt_path={path!r})"),
    "Fabric": ("fabric.save", "fabric.load({path!r}, state)"),
}
"""What writes and what reads, by the writer that meta.json names. transformers' Trainer has its in a folder in its own
checkpoint, `{folder}`.
"""


def of_another(path: Path, wrote: str, reads: str) -> str:
    """Tell which call wrote the checkpoint at `path`, which one reads it, and what can be had of it elsewhere.

    Args:
        path: A folder with a meta.json.
        wrote: Its writer.
        reads: The writer whose counterpart was asked to read it.
    """
    asked = _CALLS.get(reads, (reads, ""))[0]
    call, counterpart = _CALLS.get(wrote, (wrote, ""))
    by = f"{counterpart.format(path=str(path), folder=str(path.parent))} reads it. " if counterpart else ""
    return (
        f"{path} was written by {call}, and this reads what {asked} writes, with other loops and schedulers: {by}"
        f"Its adapter alone: lora_parallel.load_adapter(model, {str(path / 'adapter')!r})."
    )


def written_here(path: Path, reads: str) -> str | None:
    """Tell what is in a folder that is no checkpoint itself and holds some; None if it holds none."""
    found = []
    for each in sorted(path.iterdir()) if path.is_dir() else ():
        if not each.name.startswith(".") and (each / META).is_file():
            found.append(each)
    if not found:
        return None
    wrote = [read_meta(each)["writer"] for each in found]
    if reads in wrote:
        return (
            f"{path} is not a checkpoint, but has {len(found)} in it ({', '.join(each.name for each in found[:4])}): "
            f"give the path of one. lora_parallel.latest_checkpoint({str(path)!r}) finds the newest."
        )
    return of_another(found[0], wrote[0], reads)
