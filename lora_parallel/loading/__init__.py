"""Build models without weights, and remember which files fill them.

In: `from_pretrained` and constructors under `meta_init`, `attach_checkpoint`. Out: models on meta with lazy parameters,
which `lazy/materialize.py` reads.
All private API of transformers' loading is in `transformers_private` and `quantisers`.
"""
