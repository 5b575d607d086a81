"""Compute a chunk of the tokens of each batch on each rank of the cp axis (context parallelism).

In: the places that `tracing/prove_token_chunks.py` has found and proven. Out: a model whose blocks compute on chunks.
`attention` exchanges heads for tokens (Ulysses) or gathers keys; there is no ring.
"""
