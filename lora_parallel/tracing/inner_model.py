"""Choose the model that is run without its weights, of those inside of a model, and check what is around it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lora_parallel.layers.module_names import innermost
from lora_parallel.tracing.trace_errors import TraceError
from lora_parallel.tracing.tracer import Tracer, traced_models

__all__ = ["check_outside", "tracer_of"]


def tracer_of(model: nn.Module, names: Mapping[nn.Module, str]) -> Tracer:
    """Return what runs the outermost model inside of `model` that can be run, without autograd's graph.

    A forward that was put in the place of a whole model's own, as by TRL, cannot be copied. Then the trunk is run.

    Raises:
        TraceError: No model inside of `model` can be run.
    """
    problem = TraceError("it holds no model that can be run")
    for inner in traced_models(model):
        try:
            tracer = Tracer(inner, dict(names))
        except TraceError as error:
            problem = error if inner is traced_models(model)[0] else problem
            continue
        tracer.drop_graph()
        return tracer
    raise problem


def check_outside(model: nn.Module, tracer: Tracer) -> None:
    """Check that nothing trains outside of the model that is run, where nobody knows how it is used.

    Raises:
        TraceError: A parameter does.
    """
    inside = {id(parameter) for parameter in tracer.model.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in inside:
            raise TraceError(
                f"{name} trains, and {type(innermost(model)).__name__} cannot be run without its weights to see how it "
                "is used"
            )
