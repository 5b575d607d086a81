"""Hold other libraries and this project against one process of plain PEFT, into docs/results/comparison.md.

    python -m benchmarks.peer                                   # all cells
    python -m benchmarks.peer --peers ours --meshes 1x2         # some; the page keeps the others
    python -m benchmarks.peer --missing                         # what has no result yet

- Each cell runs in processes of its own, which are killed after a minute: a crash is a cell.
- Results are kept in benchmarks/out/peer.json; the page is written from them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

from benchmarks.peer.jobs import Mesh, compute_in_float64
from benchmarks.peer.page import PAGE, read_results, write_page, write_results
from benchmarks.peer.rows import PEERS, ROWS, Cell, References

MESHES = [Mesh(2, 1), Mesh(1, 2), Mesh(2, 2)]


def main() -> int:
    """Run, print progress, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", metavar="GLOB", help="rows by name")
    parser.add_argument("--peers", default="*", metavar="GLOB", help="libraries by name")
    parser.add_argument("--meshes", nargs="+", default=[str(mesh) for mesh in MESHES], help="dp_shard x tp")
    parser.add_argument("--missing", action="store_true", help="leave out cells that have a result")
    parser.add_argument("--traces", action="store_true", help="print where an error was raised")
    args = parser.parse_args()
    compute_in_float64()
    for peer in PEERS.values():
        if fnmatch(peer.name, args.peers):
            peer.load()  # once, for all forks
    with tempfile.TemporaryDirectory() as scratch:
        references = References(Path(scratch) / "one_process")
        for row in (row for name, row in ROWS.items() if fnmatch(name, args.rows)):
            for peer in (peer for name, peer in PEERS.items() if fnmatch(name, args.peers)):
                for mesh in (mesh for mesh in MESHES if str(mesh) in args.meshes):
                    key = f"{row.name} | {peer.name} | {mesh}"
                    if args.missing and key in read_results():
                        continue
                    with tempfile.TemporaryDirectory(dir=scratch) as folder:
                        cell: Cell = row.cell(peer, mesh, references, Path(folder))
                    write_results({**read_results(), key: cell})  # another run may have added some
                    print(f"{key}: {cell.text()}", flush=True)
                    if args.traces and cell.trace:
                        print(cell.trace, flush=True)
    results = read_results()
    write_page(results)
    print(f"{len(results)} cells, written to {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
