"""Run a layer as one of tp ranks: its tensors placed as its style says, its own forward on this rank's part.

In: a plan's style for each layer. Out: layers whose parameters are DTensors over tp and whose forward communicates.
"""
