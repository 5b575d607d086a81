"""Guard the steps of a sharded model: hooks on forward and backward, checks, refusals, generation.

In: a model that has been sharded. Out: hooks on it, errors for what would go wrong in silence.
"""
