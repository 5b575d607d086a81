"""Hold the weights of bitsandbytes and torchao layers as bytes that FSDP2 and tensor parallelism can shard.

In: a model with quantised layers, in memory or in files. Out: the same model with `QuantisedLayer`s
(`layers/linear_classes.py`) in their place. `loading/quantisers.py` quantises weights that are read.
"""
