"""Keep what ranks make many times: meshes, tiny base models, and tensor parallel plans.

Each process keeps its own. `TESTS_CACHES=0` turns all of it off. A plan is kept under everything that it was made from:
the model's classes, sizes, parameters and configs, the arguments, and the code of the engine as it is at that moment,
so that a test that breaks the planner on purpose gets the plan of the broken planner. A model or a plan that does not
fit this description is not kept.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lora_parallel.layers.styles import STYLES, Style

ON = os.environ.get("TESTS_CACHES", "1") != "0"
CODE = (FunctionType, BuiltinFunctionType, MethodType, property, staticmethod, classmethod)
NOT_WRITTEN = (AttributeError, TypeError, ValueError, RuntimeError, pickle.PicklingError)
"""Errors that pickle raises for closures and for objects that cannot leave their process."""

Function = TypeVar("Function", bound=Callable[..., Any])
Build = TypeVar("Build", bound=Callable[..., nn.Module])


def kept(function: Function) -> Function:
    """Call a function once for each set of arguments in this process."""
    return cache(function) if ON else function  # type: ignore[return-value]


def copied(build: Build) -> Build:
    """Build a model once for each set of arguments, and return copies of it.

    The random state afterwards is the one that building leaves. Arguments have to be plain values; with others, on
    meta, and where constructors are replaced (`meta_init`), the model is built anew.
    """
    models: dict[str, tuple[nn.Module, Tensor]] = {}
    register = nn.Module.register_parameter

    @wraps(build)
    def call(*args: Any, **kwargs: Any) -> nn.Module:
        usual = nn.Module.register_parameter is register and torch.get_default_device().type == "cpu"
        if not (ON and usual and _is_plain((args, kwargs))):
            return build(*args, **kwargs)
        key = repr((args, sorted(kwargs.items()), torch.get_default_dtype()))
        if key not in models:
            models[key] = build(*args, **kwargs), torch.get_rng_state()
        model, state = models[key]
        torch.set_rng_state(state)
        return deepcopy(model)

    return call  # type: ignore[return-value]


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


# ---------------------------------------------------------------------- plans


class _Describe(pickle.Pickler):
    """Writes a model as all that a plan may depend on: everything but the values of its tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        number = self.tensors.setdefault(id(value), len(self.tensors))  # a tied tensor has one number
        return number, type(value), value.shape, value.dtype, value.device, value.requires_grad


class _Store(pickle.Pickler):
    """Writes a plan, with numbers in the place of the model's modules and names in the place of shared styles."""

    def __init__(self, file: io.BytesIO, model: nn.Module) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.modules = {module: number for number, module in enumerate(model.modules())}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            if value not in self.modules:
                raise pickle.PicklingError("a module of another model")
            return "module", self.modules[value]
        if isinstance(value, Tensor):
            raise pickle.PicklingError("a tensor")
        if isinstance(value, Style) and STYLES.get(value.name) is value:
            return "style", value.name
        return None


class _Load(pickle.Unpickler):
    """Reads a plan for a model that is described alike."""

    def __init__(self, file: io.BytesIO, model: nn.Module) -> None:
        super().__init__(file)
        self.modules = list(model.modules())

    def persistent_load(self, pid: Any) -> Any:
        kind, which = pid
        return STYLES[which] if kind == "style" else self.modules[which]


def keep_plans() -> None:
    """Let `parallelize` take plans from this process's cache."""
    if not ON:
        return
    parallelize: Any = import_module("lora_parallel.parallelize")
    resolve = parallelize.resolve_plan
    plans: dict[Any, bytes] = {}

    @wraps(resolve)
    def resolve_plan(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        description, plan = io.BytesIO(), io.BytesIO()
        try:
            _Describe(description).dump((model, args, kwargs))
        except NOT_WRITTEN:
            return resolve(model, *args, **kwargs)
        key = description.getvalue(), _code(model)
        if key in plans:
            return _Load(io.BytesIO(plans[key]), model).load()
        found = resolve(model, *args, **kwargs)
        with suppress(*NOT_WRITTEN):
            _Store(plan, model).dump(found)
            plans[key] = plan.getvalue()
        return found

    parallelize.resolve_plan = resolve_plan


def _code(model: nn.Module) -> tuple[Any, ...]:
    """Return the functions and tables that the engine and the classes of a model have at this moment."""
    owners = [module for name, module in list(sys.modules.items()) if name.startswith("lora_parallel.")]
    values = [value for owner in owners for value in vars(owner).values()]
    classes = {value for value in values if isinstance(value, type) and value.__module__.startswith("lora_parallel.")}
    found = [value for owner in [*owners, *classes] for value in vars(owner).values() if isinstance(value, CODE)]
    found += [type(module).forward for module in model.modules()]
    planners = [owner for owner in owners if owner.__name__.split(".")[1] in ("layers", "planning", "tracing")]
    tables = [repr(value) for owner in planners for name, value in vars(owner).items() if name.strip("_").isupper()]
    return tuple(map(Identity, found)), tuple(tables)


@dataclass(frozen=True, eq=False)
class Identity:
    """A value that is equal to itself alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
