"""Write models from shards: the base with its adapters merged in, and `save_pretrained` in the user's own code.

In: a sharded model. Out: a folder that plain `from_pretrained` loads, written a region at a time.
"""
