"""List the applications, and the commands that start them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["CASES", "MESHES", "Case", "Run"]

MESHES = {"1x2": 2, "2x2": 4}
"""dp_shard x tp, and the number of processes."""


@dataclass(frozen=True)
class Run:
    """One command, with the number of processes that it starts."""

    name: str
    command: str
    mesh: str = ""


@dataclass(frozen=True)
class Case:
    """An application, and the commands that start it.

    `{end}` in a command is the place of `end`; `{processes}`, `{rows}` (of a process in a step), `{out}` are filled in.

    Attributes:
        about: The application, as the table calls it.
        folder: The folder with its configuration files, and with the requirements of its environment.
        alone: The command that trains in one process.
        ranks: The command that trains on a mesh; it runs on each of `MESHES`.
        end: The options that all commands have at their end.
        own: Other commands that train on a mesh; they run on the first of `MESHES`.
        rows: Rows of a global batch.
        bound: The largest difference of a loss or of a gradient norm that passes.
        bound_of_adapter: The same of an element of the saved adapters.
        note: What the table says beside it.
        variables: What the environment has besides.
    """

    about: str
    folder: str
    alone: str
    ranks: str
    end: str
    own: tuple[str, ...] = ()
    rows: int = 8
    bound: float = 1e-5
    bound_of_adapter: float = 1e-3
    note: str = ""
    variables: dict[str, str] = field(default_factory=dict)

    def runs(self) -> Iterator[Run]:
        """Yield the run alone, and then those on meshes."""
        yield self._run("alone", self.alone, "")
        for mesh in MESHES:
            yield self._run(mesh, self.ranks, mesh)
        for number, command in enumerate(self.own):
            yield self._run(f"own{number}", command, next(iter(MESHES)))

    def _run(self, name: str, command: str, mesh: str) -> Run:
        processes = MESHES.get(mesh, 1)
        rows = self.rows // (processes // 2 or 1)  # tensor-parallel peers have the same rows
        filled = command.replace("{end}", self.end).format(processes=processes, rows=rows, out=self.out(name))
        return Run(name, filled, mesh)

    def out(self, name: str) -> str:
        """Return the folder that a run writes, from that of the application."""
        return f"out/{re.sub('[^a-z0-9]+', '-', self.about.lower()).strip('-')}/{name}"


TRL = {"folder": "trl", "end": "--per_device_train_batch_size {rows} --output_dir {out}"}
AXOLOTL = {
    "folder": "axolotl",
    "end": "--micro-batch-size {rows} --output-dir {out}",
    "variables": {"AXOLOTL_DO_NOT_TRACK": "1"},
}
CLM = (
    "run_clm.py --model_name_or_path ../made/llama --train_file ../made/text/train.jsonl --max_steps 6 "
    "--logging_steps 1 --save_steps 6 --learning_rate 0.01 --lr_scheduler_type constant --report_to none --seed 7 {end}"
)

CASES = [
    *(
        Case(
            about=f"TRL 1.16.0, {trainer}",
            alone=f"python -m trl.scripts.{trainer} --config {trainer}.yaml {{end}}",
            ranks=f"torchrun --nproc-per-node {{processes}} -m trl.scripts.{trainer} --config {trainer}.yaml {{end}}",
            own=(f"trl {trainer} --config {trainer}.yaml {{end}}",),
            **TRL,
        )
        for trainer in ("sft", "dpo")
    ),
    Case(
        about="LLaMA-Factory 0.9.5",
        folder="llamafactory",
        alone="python -m llamafactory.launcher sft.yaml {end}",
        ranks="torchrun --nproc-per-node {processes} -m llamafactory.launcher sft.yaml {end}",
        own=("FORCE_TORCHRUN=1 NPROC_PER_NODE={processes} llamafactory-cli train sft.yaml {end}",),
        end="per_device_train_batch_size={rows} output_dir={out}",
        variables={"DISABLE_VERSION_CHECK": "1", "PYTHONPATH": "."},  # where torchaudio.py is
    ),
    Case(
        about="Axolotl 0.21.0",
        alone="python -m axolotl.cli.train sft.yaml {end}",
        ranks="torchrun --nproc-per-node {processes} -m axolotl.cli.train sft.yaml {end}",
        own=(
            "axolotl train sft.yaml {end}",
            "axolotl train sft.yaml --launcher torchrun {end} -- --nproc-per-node {processes}",
        ),
        note="answers of equal length",
        **AXOLOTL,
    ),
    Case(
        about="Axolotl 0.21.0, answers of any length",
        alone="python -m axolotl.cli.train any_length.yaml {end}",
        ranks="torchrun --nproc-per-node {processes} -m axolotl.cli.train any_length.yaml {end}",
        bound=3e-2,
        bound_of_adapter=1e-1,
        note="Axolotl takes each data-parallel process's mean, and then the mean of these",
        **AXOLOTL,
    ),
    Case(
        about="ms-swift 4.6.0",
        folder="swift",
        alone="swift sft sft.yaml {end}",
        ranks="NPROC_PER_NODE={processes} swift sft sft.yaml --external_plugins dp_shards.py {end}",
        end="--per_device_train_batch_size {rows} --output_dir {out}",
        note="with `dp_shards.py`",
    ),
    Case(
        about="sentence-transformers 6.2.0",
        folder="sentence_transformers",
        alone="python train.py {end}",
        ranks="torchrun --nproc-per-node {processes} train.py {end}",
        own=("accelerate launch train.py {end}",),
        end="{rows} {out}",
    ),
    Case(
        about="`run_clm.py`, Trainer 5.23.0",
        folder="run_clm",
        alone=f"python {CLM}",
        ranks=f"torchrun --nproc-per-node {{processes}} {CLM}",
        own=(f"accelerate launch {CLM}",),
        end="--per_device_train_batch_size {rows} --output_dir {out}",
        rows=4,
    ),
]
