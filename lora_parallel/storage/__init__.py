"""Write folders that are complete or not there, and only values that `torch.load(weights_only=True)` reads back.

In: paths and values. Out: folders on disk. Knows nothing of models.
"""
