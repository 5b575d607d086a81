"""Say once more, last, why a rank failed: after the table of torchrun, which has no word of it.

A rank writes its error to the file that torchrun gives it, and its launcher reads the files as it ends
(https://docs.pytorch.org/docs/stable/elastic/errors.html). A module by itself, which imports nothing that takes time.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

__all__ = ["hint", "record_failure", "repeat_failure"]

_NO_GPU = (
    'there is no GPU here that torch can use: leave .to("cuda") and device_map out of the script. What shards the '
    "model puts it on the device of its rank."
)
_HINTS = {"Torch not compiled with CUDA enabled": _NO_GPU, "Found no NVIDIA driver": _NO_GPU}
"""Map a part of an error's text to what the user should do about the error."""

_OF_A_PEER = ("gloo", "DistBackendError", "DistNetworkError", "DistStoreError", "Connection", "(SIGTERM)")
"""Parts of errors that a rank has because another one has ended: torchrun ends the others by SIGTERM."""


def hint(text: str) -> str:
    """Return a line that says what to do about an error of this text, or nothing if there is no more to say."""
    return next((f"\nHint: {advice}" for part, advice in _HINTS.items() if part in text), "")


def record_failure() -> None:
    """Let this rank write the error that ends it to torchrun's file, beside what it prints."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    original = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        last = trace
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        try:  # it writes the error that is handled; torchrun's table would repeat the whole trace of each rank
            raise error.with_traceback(last)
        except Exception:
            get_error_handler().record_exception(error)
        except BaseException:  # such as KeyboardInterrupt: torchrun reports the signal itself
            pass
        original(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook


def repeat_failure() -> None:
    """Print the error of the rank that failed first, as this launcher exits with torchrun's error (by `atexit`)."""
    failures: Any = getattr(getattr(sys, "last_value", None), "failures", None)  # of a ChildFailedError that ends this
    if not isinstance(failures, dict):
        return
    texts = {rank: _text(each) for rank, each in failures.items()}
    first = min(texts, key=lambda rank: (any(part in texts[rank] for part in _OF_A_PEER), failures[rank].timestamp))
    print(f"\nRank {first} failed: {texts[first]}{hint(texts[first])}", file=sys.stderr)


def _text(failure: Any) -> str:
    """Return the error that a rank has written, or how its process has ended."""
    if isinstance(failure.message, dict):
        return str(failure.message["message"]).removesuffix(": ")
    return str(failure.message) if failure.exitcode < 0 else f"it ended with code {failure.exitcode}"
