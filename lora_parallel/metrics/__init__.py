"""Measure a training run on the whole mesh: tokens a second, MFU, memory, communication.

In: sharded models, and the beginnings and ends of steps. Out: numbers for a logger, the same on every rank.
"""
