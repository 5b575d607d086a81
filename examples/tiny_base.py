"""A small pretrained model and two real texts, made from nothing but Python itself.

There is no model hub and no download here, so that the examples run on any machine:

* the *base text* is the Python language reference, which the interpreter carries for ``help()``;
* the *fine-tuning text* is questions and answers made of the docstrings of the standard library;
* the *base model* is a Llama with a million parameters that reads bytes: a token is one byte. It is trained on the
  base text once, for about a minute, and kept in a folder as ``save_pretrained`` writes it: to the example it is a
  checkpoint like any other.
"""

from __future__ import annotations

import importlib
import inspect
import os
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

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


def base_text() -> str:
    """The Python language reference: about 460 kB of English with some code in it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


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


# ------------------------------------------------------------------------------------------------------- base model


def make_base_model(directory: Path, make_it_here: bool, steps: int = 300, wait_seconds: int = 900) -> Path:
    """Train the base model into ``directory`` unless it is there; one process makes it and the others wait.

    The folder appears under its name only when it is complete, so whoever sees it may read it.
    """
    deadline = time.monotonic() + wait_seconds
    while not directory.exists():
        if not make_it_here:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no base model in {directory} after {wait_seconds} s")
            time.sleep(0.5)
            continue
        unfinished = directory.with_name(f"{directory.name}-unfinished-{os.getpid()}")
        _pretrain(steps).save_pretrained(unfinished)
        byte_tokenizer().save_pretrained(unfinished)
        os.replace(unfinished, directory)
    return directory


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """For trainers that want one: a token is one byte; bytes 0 and 3, which no text has, pad and end one."""
    characters = bytes_to_unicode()
    tokenizer = Tokenizer(BPE({character: byte for byte, character in characters.items()}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=characters[0], eos_token=characters[3], clean_up_tokenization_spaces=False
    )


def _pretrain(steps: int, batch_size: int = 16, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=336,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=512,
            # A byte-level model of plain text has no special tokens; generation pads with byte 0, which never occurs.
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    text = encode(base_text())
    # Muon for the matrices inside the layers, AdamW for the rest: in a minute it gets much further than AdamW alone.
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01), torch.optim.AdamW(others, lr=8e-3)]
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.02, total_iters=steps) for o in optimizers]
    with tqdm(range(steps), desc="making the base model (once)", unit="step") as bar:
        for _ in bar:
            starts = torch.randint(len(text) - SEQUENCE_LENGTH, (batch_size, 1))
            batch = text[starts + torch.arange(SEQUENCE_LENGTH)]
            loss = model(input_ids=batch, labels=batch).loss
            model.zero_grad()
            loss.backward()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            bar.set_postfix(loss=f"{loss.item():.2f}")
    return model
