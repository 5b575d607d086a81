"""The loss from slices of the logits, and tensors that stand for all logits."""

from tests.mutants import Mutant

LOSS = "tests/lora_parallel/tp/test_vocabulary_loss.py::test_losses_and_gradients_are_those_of_torch"
SLICED = "tests/lora_parallel/tp/test_loss_parallel.py"
OPERATIONS = f"{SLICED}::test_every_operation_has_the_result_of_all_logits"

BREAKAGES = [
    Mutant(
        "backward",
        "With loss_parallel the logit of the label is pushed down like all others.",
        LOSS,
        """p.scatter_add_(-1, places[chunk, None], -at_labels[chunk, None])""",
        """pass""",
    ),
    Mutant(
        "backward",
        "With loss_parallel tokens whose labels are ignored are trained on.",
        LOSS,
        """losses = grads[0].masked_fill(ignored, 0)""",
        """losses = grads[0]""",
    ),
    Mutant(
        "backward",
        "With loss_parallel each rank that does not hold a token's label pushes its first logit up.",
        LOSS,
        """at_labels = losses.masked_fill(outside, 0)""",
        """at_labels = losses""",
    ),
    Mutant(
        "collective",
        "With loss_parallel the loss is that of the slice with the largest logits.",
        LOSS,
        """terms = torch.stack([stacked[:, 0].logsumexp(0), stacked[:, 1].sum(0)])""",
        """terms = torch.stack([stacked[:, 0].amax(0), stacked[:, 1].sum(0)])""",
    ),
    Mutant(
        "guard",
        "With loss_parallel a label outside of the vocabulary has the loss of none.",
        "tests/lora_parallel/tp/test_vocabulary_loss.py::test_labels_outside_of_the_vocabulary_are_refused",
        """valid = (ignored | ((labels >= 0) & (labels < vocabulary))).all()""",
        """valid = (ignored | (labels == labels)).all()""",
    ),
    Mutant(
        "backward",
        "With loss_parallel the head trains on a part of the gradient of its logits.",
        OPERATIONS,
        """return SlicedTensor(_Held(grads[0]), ctx.like, ctx.slicing)""",
        """return SlicedTensor(_Held(grads[0] / 2), ctx.like, ctx.slicing)""",
    ),
    Mutant(
        "backward",
        "With loss_parallel every rank trains its slice of the head on the gradient of the first slice.",
        OPERATIONS,
        """return ctx.slicing.slice_of(grad).to(ctx.dtype), None""",
        """return grad[..., : ctx.slicing.end - ctx.slicing.start].to(ctx.dtype), None""",
    ),
    Mutant(
        "replaced",
        "With loss_parallel tokens whose labels are ignored count in the mean of the loss.",
        OPERATIONS,
        """losses = losses / (target != ignore_index).sum()""",
        """losses = losses / target.numel()""",
    ),
    Mutant(
        "replaced",
        "With loss_parallel the loss of logits that were changed in place is that of the values before.",
        OPERATIONS,
        """isinstance(logits, SlicedTensor) and not logits.held.is_gathered:""",
        """isinstance(logits, SlicedTensor):""",
    ),
    Mutant(
        "replaced",
        "With loss_parallel class weights, or label smoothing, of the loss are left out.",
        OPERATIONS,
        """others = weight is not None or size_average is not None or reduce is not None or label_smoothing""",
        """others = size_average is not None or reduce is not None""",
    ),
]
