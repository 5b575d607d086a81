"""Check and time everything on this machine's GPUs, and write what was found into docs/results/gpu.md.

    python -m benchmarks.gpu --quick                       # everything once, under nine minutes on one GPU
    python -m benchmarks.gpu                               # more rounds and meshes
    python -m benchmarks.gpu --steps 'oracle*' 'speed 1x1'
    python -m benchmarks.gpu --device cpu --quick          # proves the script; writes to --output alone

- Nothing is downloaded; models are made from configurations. Packages that are not installed, or older than the
  oldest versions that are supported, are reported so. `--wheels FOLDER` installs the wheels of a folder into
  `--output`, and this command imports them before what the machine has.
- Each step runs in processes of its own, so that one that crashes, hangs or runs out of memory is one failed row.
- What a step came to is kept at once in `--output`. A rerun with the same code, versions, device and options runs what
  has not settled; keep the folder to go on later.
- The command fails if a step failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import suppress
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from benchmarks.gpu.outcomes import WRONG
from benchmarks.gpu.page import write_page
from benchmarks.gpu.records import ROOT, Record, Records, code_identity
from benchmarks.gpu.run import run_all
from benchmarks.gpu.steps import Step, steps

PACKAGES = (
    *("torch", "transformers", "peft", "accelerate", "lightning", "triton"),
    *("bitsandbytes", "torchao", "liger-kernel", "unsloth"),
)
QUICK_SECONDS = 8.5 * 60
DESCRIBE = """
import torch
device = torch.cuda.get_device_properties(0)
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
memory = f"{device.total_memory / 2**30:.0f} GiB"
print(torch.cuda.device_count(), memory, torch.version.cuda, nccl, device.name, sep="|")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and meshes, at most nine minutes")
    parser.add_argument("--steps", nargs="+", default=["*"], metavar="GLOB", help="steps by name")
    parser.add_argument("--list", action="store_true", help="print the names of the steps and end")
    parser.add_argument("--minutes", type=float, help="begin no step later; with --quick 8.5")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="a folder of wheels that go before what is here")
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu"), help="records, page and plot")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    output = args.output.resolve()
    if args.wheels is not None:
        use_wheels(args.wheels, output / "packages")
    environment, devices = describe(args.device)
    for told in lacking(environment):
        print(told)
    planned = steps(args.device, devices, args.quick)
    chosen = [step for step in planned if any(fnmatch(step.name, glob) for glob in args.steps)]
    if args.list or not chosen:
        print("\n".join(step.name for step in planned))
        return 0 if args.list else 2
    records = Records(output / "records", environment, code_identity())
    seconds = args.minutes * 60 if args.minutes else QUICK_SECONDS if args.quick else float("inf")
    about = {**environment, "code": records.code, "commit": commit()}
    pages = [output / "gpu.md"]
    if args.device == "cuda":  # a proof on CPUs must never look like a result
        pages.append(ROOT / "docs" / "results" / "gpu.md")
    found: list[Record] = []
    try:
        for record in run_all(chosen, records, args.device, seconds):
            found.append(record)
            publish(pages, planned, records, about)  # at once: the run may be ended from outside
    except KeyboardInterrupt:
        print("interrupted: what has finished is kept")
    wrong = [record for record in found if record.status in WRONG]
    missing = len(chosen) - sum(record.status != "not run" for record in found)
    for record in wrong:
        print(f"\n{record.status}: {record.step}: {record.detail}\n{record.output}")
    print(f"\n{len(chosen)} steps, {len(wrong)} went wrong, {missing} not run; written to {', '.join(map(str, pages))}")
    return 1 if wrong else 3 if missing else 0


def publish(pages: list[Path], planned: list[Step], records: Records, about: dict[str, str]) -> None:
    """Write all that is known of this code on this machine, whatever was chosen now."""
    rows = [records.find(step) or Record(step.name, "not run") for step in planned]
    for page in pages:
        write_page(page, planned, rows, about)


def use_wheels(folder: Path, target: Path) -> None:
    """Install every wheel of a folder, without what it depends on, where this command and its steps look first.

    Raises:
        SystemExit: The folder has no wheels, or pip refuses one.
    """
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise SystemExit(f"--wheels {folder}: there is no *.whl in this folder.")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    if subprocess.run([*pip, "--upgrade", "--target", str(target), *wheels], check=False).returncode:
        raise SystemExit(f"--wheels {folder}: pip did not install these wheels; see above.")
    sys.path.insert(0, str(target))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])


def lacking(environment: dict[str, str]) -> list[str]:
    """Return a line for each package that is missing, or older than the oldest version that is supported."""
    pinned = (ROOT / "tools" / "constraints" / "oldest.txt").read_text().splitlines()
    oldest = dict(line.split("==") for line in pinned if "==" in line)
    told = []
    for package in PACKAGES:
        found, needed = environment.get(package), oldest.get(package)
        wanted = f"{package} >= {needed}" if needed else package
        if found is None:
            told.append(f"{wanted} is not installed: {'needed' if needed else 'what needs it is reported so'}.")
        elif needed and Version(found) < Version(needed):
            told.append(f"{wanted} is needed, and {found} is installed.")
    return told


def describe(device: str) -> tuple[dict[str, str], int]:
    """Return the name that records are kept under, and the number of devices: a CPU counts as two."""
    environment = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            environment[package] = version(package)
    if "torch" not in environment:
        raise SystemExit(f"{sys.executable} has no torch: make gpu PYTHON=... with the Python that has it.")
    if device == "cpu":
        return {"device": "CPU", **environment}, 2
    # In a process of its own: this one must not hold a GPU.
    asked = subprocess.run([sys.executable, "-c", DESCRIBE], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise SystemExit(f"torch finds no GPU: {(asked.stderr.strip().splitlines() or ['?'])[-1]}")
    count, memory, cuda, nccl, name = asked.stdout.strip().splitlines()[-1].split("|")
    return {"device": f"{count} x {name}, {memory}", **environment, "CUDA": cuda, "NCCL": nccl}, int(count)


def commit() -> str:
    """The commit, and whether files differ from it; "unknown" in a copy without history."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" with changes" if changed.stdout.strip() else "")


if __name__ == "__main__":
    sys.exit(main())
