"""Name the classes of transformers whose plan, as few of their blocks show it, is known to be that of all blocks.

`make table NAME=classes` finds both plans of each class and writes those that are the same into a file, by the version
of transformers. A class, or a version, that is not in the file has its plan proven on all blocks.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import transformers
from torch import nn

FILE = Path(__file__).with_name("proven_plans.json")


def proven_plan(model: nn.Module) -> dict[str, str] | None:
    """Return the styles of a model's layer groups, by globs of names, or None for a class that is not in the file."""
    kind = type(model)
    return _plans().get(kind.__name__) if getattr(transformers, kind.__name__, None) is kind else None


@cache
def _plans() -> dict[str, dict[str, str]]:
    """Return the plans of this version of transformers, by class."""
    plans: dict[str, dict[str, str]] = json.loads(FILE.read_text()).get(transformers.__version__, {})
    return plans
