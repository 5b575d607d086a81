"""Describe single layers: what a tensor parallel style does to each tensor, which rows a rank computes with.

In: a module, perhaps with PEFT's layers around it. Out: its name, its tensors with their roles, the reason why it
cannot be cut. Modules are changed by `LayerTensor` (`put`, `shadow`, `unshadow`), `set_partition` and `wrap_forward`
only, when their callers ask for it. Nothing here is communicated.
"""
