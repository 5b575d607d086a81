"""Check and time everything on the GPUs of one machine: `python -m benchmarks.gpu`, or `make gpu`.

What is here imports no torch until a step's own processes do, see `ranks.py`.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the benchmarks beside it are scripts: they import each other bare
