"""Find a tensor parallel style for each layer: from declared plans, and by running the model without its weights.

In: a model in full shapes, the user's plan, the size of tp. Out: a `Plan`, or an error that names the layer. Nothing is
sharded here, and ranks do not communicate. Memory is planned in `cost`.
"""
