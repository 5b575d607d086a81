"""A small pretrained model and a real text to fine-tune it on, made from nothing but Python itself.

There is no model hub and no download here, so that the examples run on any machine:

* the *base model* in `examples/base_model` is a Llama with 0.7 million parameters that reads bytes, one byte a token;
  `examples/make_base_model.py` made it, and to the examples it is a checkpoint like any other;
* the *fine-tuning text* is questions and answers made of the docstrings of the standard library.
"""

from __future__ import annotations

import importlib
import inspect
import random
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

BASE_MODEL = Path(__file__).resolve().parent / "base_model"
SEQUENCE_LENGTH = 128

# Modules whose docstrings become questions and answers. One that this Python lacks is skipped.
DOCUMENTED_MODULES = """
    argparse array ast asyncio base64 bisect builtins calendar cmath codecs collections colorsys concurrent.futures
    configparser contextlib copy csv ctypes dataclasses datetime decimal difflib dis email.message enum fileinput
    fractions ftplib functools gettext glob gzip hashlib heapq hmac html http.client http.cookiejar http.server imaplib
    importlib.util inspect io ipaddress itertools json keyword linecache locale logging math mimetypes multiprocessing
    numbers operator os pathlib pdb pickle pickletools platform poplib pprint profile queue random re reprlib sched
    secrets shelve shlex shutil signal smtplib socket socketserver sqlite3 ssl statistics string struct subprocess
    tarfile tempfile textwrap threading time timeit tokenize traceback types typing unittest unittest.mock
    urllib.parse urllib.request uuid warnings wave weakref xml.dom.minidom xml.etree.ElementTree zipfile zlib
""".split()


def encode(text: str) -> Tensor:
    """Bytes as token ids, shape ``(length,)``. What is not ASCII is dropped: it is 0.4 % of these texts."""
    return torch.tensor(list(text.encode("ascii", "ignore")), dtype=torch.long)


def decode(ids: Tensor) -> str:
    return bytes(ids.tolist()).decode("ascii", "replace")


# ------------------------------------------------------------------------------------------------------------ texts


def questions_and_answers() -> list[str]:
    """About 2,500 of ``Q: What does textwrap.dedent do?``, new line, ``A: Remove any common leading whitespace ...``.

    The answer is the first paragraph of a docstring. Each answer occurs once, so that a held-out question is really
    new; the order depends on nothing but the Python version.
    """
    name_of_answer: dict[str, str] = {}
    for module_name in DOCUMENTED_MODULES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                members = sorted(vars(importlib.import_module(module_name)).items())
            except ImportError:
                continue
        for name, member in members:
            if name.startswith("_") or not (inspect.isroutine(member) or inspect.isclass(member)):
                continue
            documented = {name: member}
            if inspect.isclass(member):
                documented |= {f"{name}.{key}": value for key, value in sorted(vars(member).items()) if key[0] != "_"}
            for path, value in documented.items():
                docstring = getattr(value, "__doc__", None)
                # A constant has no docstring of its own: it shows the one of its class.
                if not (callable(value) or isinstance(value, property)) or not isinstance(docstring, str):
                    continue
                first_paragraph = inspect.cleandoc(docstring).split("\n\n")[0]
                answer = " ".join(first_paragraph.split())
                if 30 <= len(answer) <= 400 and answer[0].isupper() and "(" not in answer.split()[0]:
                    name_of_answer.setdefault(answer, f"{module_name}.{path}")
    return [f"Q: What does {name} do?\nA: {answer}\n\n" for answer, name in name_of_answer.items()]


def train_and_validation_rows(
    seed: int, validation_rows: int = 64, style: Callable[[str], str] = str
) -> tuple[Tensor, Tensor]:
    """Rows of ``SEQUENCE_LENGTH`` tokens, packed end to end; the seed decides which questions are held out.

    ``style`` rewrites the texts, as ``str.upper`` does.
    """
    pairs = questions_and_answers()
    random.Random(seed).shuffle(pairs)
    held_out = len(pairs) // 10

    def pack(texts: list[str]) -> Tensor:
        ids = encode(style("".join(texts)))
        return ids[: len(ids) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH)

    return pack(pairs[held_out:]), pack(pairs[:held_out])[:validation_rows]
