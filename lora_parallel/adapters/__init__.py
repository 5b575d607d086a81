"""Add PEFT adapters to a model, draw their values alike on every mesh, save and load their folders.

In: a model and a LoraConfig, or an adapter folder. Out: a model with adapters, or a folder that plain PEFT loads.
All private API of PEFT is in `peft_private`, except the attribute `_did_swap_in_out_features` of PEFT's layers, which
`export/merged_weights.py` and `tp/experts.py` read too.
"""
