"""Divide the blocks of a model into stages, one or more on each pp rank, and run micro-batches through them.

In: the layers that `tracing/prove_stages.py` has found, and where stages begin. Out: a model that holds this rank's
stages only, whose forward runs the schedule and returns on every rank what it returns in one process.
"""
