"""Communicate between ranks: the mesh, collectives, gathering, gradients, errors that every rank raises.

In: process groups, local tensors, DTensors. Out: the same tensors reduced or gathered, or one error on every rank.
All private API of torch.distributed and autograd is in `torch_private`, with the workarounds of gloo.
Knows nothing of layers or models' structure. Of adapters only `gradients` knows that their gradients may be partial
sums over tp.
"""
