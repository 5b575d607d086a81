"""Find the modules inside a LightningModule that are to be parallelized: the models whose forward it calls."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lora_parallel.integration import has_adapters

__all__ = ["find_roots"]


def find_roots(module: nn.Module, inject: bool, require_adapters: bool, trains: bool = True) -> dict[str, nn.Module]:
    """Find the models inside `module` that are to be parallelized, and return them by name.

    A model is a direct child of the LightningModule, or a child of its `nn.ModuleList` or `nn.ModuleDict`, which have
    no forward of their own. Models with adapters are parallelized; with `require_adapters=False`, all models that have
    parameters are.

    Args:
        module: The LightningModule.
        inject: True if an adapter is to be injected into a model that has none.
        require_adapters: As in `ParallelConfig`.
        trains: False for an evaluation: a module without a model, and one that would train outside of it, are accepted.

    Raises:
        ValueError: `module` is to train and holds no model with parameters, or several of which one must be chosen to
            get the adapter; or a parameter trains that is outside of the models to parallelize.
    """
    kind = type(module).__name__
    models = {name: child for name, child in _models(module) if any(True for _ in child.parameters())}
    if not models and trains and require_adapters:
        raise ValueError(
            f"{kind} holds no model with parameters: build it in __init__ or configure_model and keep it in an "
            "attribute, for example self.model."
        )
    adapted = {name: model for name, model in models.items() if has_adapters(model)}
    if not require_adapters:
        roots = models
    elif adapted:
        roots = adapted
    elif inject and len(models) > 1:
        raise ValueError(
            f"lora_config is given, but {kind} holds several models ({', '.join(models)}): call peft.get_peft_model on "
            "the one to adapt."
        )
    else:
        roots = models
    inside = {p for model in roots.values() for p in model.parameters()}
    outside = [name for name, p in module.named_parameters() if trains and p.requires_grad and p not in inside]
    if outside and require_adapters and (adapted or inject):
        raise ValueError(
            f"{outside[0]} of {kind} trains but belongs to no adapter. Freeze it, move its module into the adapted "
            "model and list it in LoraConfig(modules_to_save=[...]), or set require_adapters=False."
        )
    if outside and not require_adapters:
        raise ValueError(
            f"{outside[0]} trains and is {kind}'s own, not that of a module inside it, whose gradients are averaged "
            "over ranks: keep it in a child module that has a forward."
        )
    return roots


def _models(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if type(child) in (nn.ModuleList, nn.ModuleDict):
            yield from _models(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
