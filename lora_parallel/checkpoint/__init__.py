"""Save and load the state of training on any mesh: adapters, optimizers, counters, random state.

In: models, optimizers and values of the caller's. Out: a folder, complete or not there; and back, sliced for each rank.
`save_load` has the public functions; `writer` and `reader` do the work on what `files` lays out and `states` hold.
"""
