"""Fine-tune Gemma 3 270M by TRL and by Lightning, at 2x2 and in one process, and write what came out into its page.

    make suite NAME=gemma                # ten minutes on 2 cores; about 2 GB of disk

The model is made once, into benchmarks/out/gemma.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

import torch
from peft import PeftModel
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.applications.comparison import logged, saved
from benchmarks.applications.made import write_mesh
from benchmarks.gemma.made import ROOT, make
from benchmarks.tables import RESULTS, dated, write_between

OUT = ROOT / "benchmarks" / "out" / "gemma"
MADE = OUT / "made"
PAGE = RESULTS / "real_model.md"
MARK = "<!-- written by make suite NAME=gemma -->"
RUN_SECONDS = 1200
BOUND = 1e-5
"""Largest difference of a loss."""
PROMPT = "A rank that raises an error"
HEAD = [
    "| trainer | loss of the first and last step | losses differ by | adapters differ by | what plain PEFT generates |",
    "|---|---|---|---|---|",
]
TRL, LIGHTNING = "TRL", "Lightning"


def command(trainer: str, processes: int, out: Path) -> list[str]:
    """Return the command that fine-tunes in one process, or in four at 2x2."""
    arguments = [str(MADE), str(out)]
    if trainer == LIGHTNING:
        return [sys.executable, "-m", "benchmarks.gemma.lightning_fit", *arguments, str(processes)]
    module = ["benchmarks.gemma.trl_sft", *arguments, "8" if processes == 1 else "4"]
    launcher = [] if processes == 1 else ["torch.distributed.run", f"--nproc-per-node={processes}", "-m"]
    return [sys.executable, "-m", *launcher, *module]


def train(trainer: str, processes: int) -> Path:
    """Fine-tune, and return the folder with what was logged and saved."""
    out = OUT / f"{trainer.lower()}{processes}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    mesh = {"LORA_PARALLEL": str(MADE / "mesh.yaml")} if trainer == TRL and processes > 1 else {}
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **mesh}
    with (out / "log").open("w") as log:
        asked = command(trainer, processes, out)
        done = subprocess.run(asked, cwd=ROOT, env=variables, stdout=log, stderr=log, timeout=RUN_SECONDS)
    if done.returncode:
        raise SystemExit(f"{trainer} on {processes} processes: exit code {done.returncode}: {out / 'log'}")
    return out


def generate(folder: Path | None) -> str:
    """Return what plain PEFT says with an adapter, or the base without one."""
    model = AutoModelForCausalLM.from_pretrained(MADE / "model", dtype=torch.float32)
    if folder is not None:
        model = PeftModel.from_pretrained(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(MADE / "model")
    asked = tokenizer(PROMPT, return_tensors="pt")
    ids = model.eval().generate(**asked, max_new_tokens=16, do_sample=False)
    return " ".join(tokenizer.decode(ids[0], skip_special_tokens=True).split())


def compared(trainer: str, progress: tqdm) -> tuple[str, bool]:
    """Return a row of the table, and whether the losses are equal within the bound."""
    outs = []
    for processes in (1, 4):
        progress.set_description(f"{trainer}, {processes} processes")
        outs.append(train(trainer, processes))
        progress.update()
    alone, mesh = ([each["loss"] for each in logged(out)] for out in outs)
    difference = max(abs(a - b) for a, b in zip(alone, mesh, strict=True))
    files = [saved(out)[0] for out in outs]
    want, got = map(load_file, files)
    assert want.keys() == got.keys()
    apart = max(float((got[name] - each).abs().max()) for name, each in want.items())
    texts = [generate(file.parent) for file in files]
    said = texts[1] if texts[0] == texts[1] else f"**{texts[0]}** / **{texts[1]}**"
    cells = [trainer, f"{alone[0]:.4f} to {alone[-1]:.4f}", f"{difference:.1e}", f"{apart:.1e}", said]
    return f"| {' | '.join(cells)} |", difference <= BOUND and texts[0] == texts[1]


def planned() -> str:
    """Return what a plan for four GPUs takes and recommends."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    asked = [str(Path(sys.executable).with_name("accelerate-lora")), "plan", str(MADE / "model"), "--gpus", "4"]
    run = subprocess.run([*asked, "--seq", "512", "--json"], capture_output=True, text=True, check=True)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    meshes = json.loads(run.stdout)["meshes"]
    return f"A plan for four GPUs compares {len(meshes)} meshes in {seconds:.0f} s of processor time."


def main() -> int:
    """Do all of it; return 1 if losses or texts differ."""
    done = MADE / "done"
    with tqdm(total=6, unit="run", dynamic_ncols=True) as progress:
        progress.set_description("model")
        if not done.exists():
            shutil.rmtree(MADE, ignore_errors=True)
            MADE.mkdir(parents=True)
            make(MADE)
            write_mesh(MADE / "mesh.yaml", 4)
            done.touch()
        progress.update()
        progress.set_description("plan")
        plan = planned()
        progress.update()
        rows = [compared(trainer, progress) for trainer in (TRL, LIGHTNING)]
    base = f"| none: the base | | | | {generate(None)} |"
    text = "\n".join([*HEAD, *(row for row, _ in rows), base, "", plan])
    print(text)
    total = f"{len(rows)} trainers, {sum(good for _, good in rows)} with the losses and the text of one process"
    write_between(PAGE, MARK, f"{dated(total)}\n\n{text}")
    return 0 if all(good for _, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
