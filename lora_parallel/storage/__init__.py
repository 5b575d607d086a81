"""Write folders that are complete or not there, and only values that `torch.load(weights_only=True)` reads back.

Show a progress bar of the bytes.

In: paths and values, numbers of bytes. Out: folders on disk, a progress bar on rank 0. Knows nothing of models.
"""
