"""Represent tensors that are still in files, and read the parts of them that a rank needs.

In: checkpoint files, operations on lazy tensors. Out: a graph of operations for each parameter, and the values of any
region of it. Knows nothing of transformers or of meshes.
"""
