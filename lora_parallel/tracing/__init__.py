"""Run a model without its weights, to see what it computes between its layers, and what of that can be cut.

In: a model in full shapes, the size of tp. Out: groups of colwise and rowwise layers, proven by running the model as
each rank would. Nothing is sharded here, and ranks do not communicate.
"""
