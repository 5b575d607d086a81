"""Name the call that wrote a checkpoint of this format, and the call that reads it."""

from __future__ import annotations

from pathlib import Path

from lora_parallel.checkpoint.layout import META
from lora_parallel.checkpoint.meta import read_meta

__all__ = ["of_another", "written_here"]

_CALLS = {
    "lora_parallel": ("lora_parallel.save_checkpoint", "lora_parallel.load_checkpoint(model, optimizer, {path!r})"),
    "Accelerator": ("accelerator.save_state", "accelerator.load_state({path!r})"),
    "Trainer of transformers": ("transformers' Trainer", "trainer.train(resume_from_checkpoint={folder!r})"),
    "Trainer": ("Lightning's Trainer", "trainer.fit(module, ckpt_path={path!r})"),
    "Fabric": ("fabric.save", "fabric.load({path!r}, state)"),
}
"""Calls that write and read a checkpoint, by the writer that meta.json names.

`{path}` stands for the checkpoint and `{folder}` for the folder that it is in: under transformers' Trainer that folder
is the Trainer's own checkpoint, from which it resumes.
"""


def of_another(path: Path, wrote: str, reads: str) -> str:
    """Return a message that says which call wrote a checkpoint, which one reads it, and how to load its adapter.

    Args:
        path: The checkpoint, a folder with a meta.json.
        wrote: The writer that meta.json names.
        reads: The writer whose checkpoints the caller reads.
    """
    asked = _CALLS.get(reads, (reads, ""))[0]
    call, counterpart = _CALLS.get(wrote, (wrote, ""))
    by = f"{counterpart.format(path=str(path), folder=str(path.parent))} reads it. " if counterpart else ""
    return (
        f"{path} was written by {call}, and this reads what {asked} writes, with other loops and schedulers: {by}"
        f"Its adapter alone: lora_parallel.load_adapter(model, {str(path / 'adapter')!r})."
    )


def written_here(path: Path, reads: str) -> str | None:
    """Return a message about the checkpoints in a folder that is no checkpoint itself; None if it holds none.

    Args:
        path: The folder, which need not exist.
        reads: The writer whose checkpoints the caller reads.
    """
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
