"""Write folders that are complete or not there, values that `torch.load(weights_only=True)` reads back, and a bar.

In: paths and values, numbers of bytes. Out: folders on disk, a progress bar on rank 0. Knows nothing of models.
"""
