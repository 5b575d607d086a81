"""Represent tensors that are still in files, and read the parts of them that a rank needs.

In: checkpoint files, operations on lazy tensors. Out: a graph of operations for each parameter, and the values of any
region of it. `materialize` reads the regions that a rank owns of DTensors on a mesh; no other file knows of meshes, and
none of transformers.
"""
