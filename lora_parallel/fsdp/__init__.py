"""Shard a model over data-parallel ranks with FSDP2, and keep its units in one order on every rank.

In: a model (its layers tensor parallel already) and the mesh. Out: the same model with a unit a block, and hooks
that compare the order of units and the use of parameters between ranks.
"""
