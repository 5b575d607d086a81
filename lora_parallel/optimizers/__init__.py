"""Let any optimizer step on sharded parameters as it does in one process.

In: an optimizer of the user's, at its step. Out: its step, on the tensors that it can compute with.
"""
