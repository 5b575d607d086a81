"""Check and time everything on the GPUs of one machine: `python -m benchmarks.gpu`, or `make gpu`.

What is here imports no torch until a step's own processes do, see `ranks.py`.
"""
