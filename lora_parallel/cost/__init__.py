"""Predict what a step costs a rank of any mesh, from a model's config alone: bytes, messages, operations, seconds.

In: a config, the sizes of a cluster and of a batch. Out: `plan_memory`'s plan, with a cost for each mesh. A rank's step
is run as it is, on tensors without memory and on a process group that sends nothing. Equal blocks are run once.
"""
