"""Keep what ranks make many times: meshes, tiny base models, and tensor parallel plans.

Each process keeps its own. `TESTS_CACHES=0` turns all of it off. A plan is kept under everything that it was made from:
the model's classes, sizes, parameters and configs, the arguments, and the functions of the engine and of the model's
authors and the planner's tables (whose names are in capitals) as they are at that moment, so that a test that breaks
the planner on purpose gets the plan of the broken planner. What was logged is logged again. A model or a plan that does
not fit this description is not kept.
"""

from __future__ import annotations

import io
import logging
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

ON = os.environ.get("TESTS_CACHES", "1") != "0"
CODE = (FunctionType, BuiltinFunctionType, MethodType, property, staticmethod, classmethod)
NOT_WRITTEN = (AttributeError, TypeError, ValueError, RuntimeError, pickle.PicklingError)
"""Errors that pickle raises for closures and for objects that cannot leave their process."""

Function = TypeVar("Function", bound=Callable[..., Any])
Build = TypeVar("Build", bound=Callable[..., nn.Module])


def _values(owner: Any) -> tuple[Any, ...]:
    """Return the values of a class or a module at this moment, each equal to itself alone."""
    return tuple(map(Identity, vars(owner).values()))


def kept(function: Function) -> Function:
    """Call a function once for each set of arguments in this process."""
    return cache(function) if ON else function  # type: ignore[return-value]


def copied(build: Build) -> Build:
    """Build a model once for each set of arguments, and return copies of it.

    The random state afterwards is the one that building leaves. A model whose classes have changed since is built anew.
    Arguments have to be plain values; with others, on
    meta, and where constructors are replaced (`meta_init`), the model is built anew.
    """
    models: dict[str, tuple[nn.Module, Tensor, Any]] = {}
    register = nn.Module.register_parameter

    @wraps(build)
    def call(*args: Any, **kwargs: Any) -> nn.Module:
        usual = nn.Module.register_parameter is register and torch.get_default_device().type == "cpu"
        if not (ON and usual and _is_plain((args, kwargs))):
            return build(*args, **kwargs)
        key = repr((args, sorted(kwargs.items()), torch.get_default_dtype()))
        if key not in models or models[key][2] != _classes(models[key][0]):
            model = build(*args, **kwargs)
            models[key] = model, torch.get_rng_state(), _classes(model)
        model, state, _ = models[key]
        torch.set_rng_state(state)
        return deepcopy(model)

    return call  # type: ignore[return-value]


def _classes(model: nn.Module) -> dict[type, tuple[Any, ...]]:
    """Return what the classes of a model and of its config hold at this moment: a test may have changed one of them."""
    made = [*model.modules(), *([model.config] if hasattr(model, "config") else [])]
    return {kind: _values(kind) for kind in {kind for each in made for kind in type(each).__mro__}}


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
        styles = _styles()
        if isinstance(value, styles.Style) and styles.STYLES.get(value.name) is value:
            return "style", value.name
        return None


class _Load(pickle.Unpickler):
    """Reads a plan for a model that is described alike."""

    def __init__(self, file: io.BytesIO, model: nn.Module) -> None:
        super().__init__(file)
        self.modules = list(model.modules())

    def persistent_load(self, pid: Any) -> Any:
        kind, which = pid
        return _styles().STYLES[which] if kind == "style" else self.modules[which]


def _styles() -> Any:
    """Return the engine's module of styles, which the oracle, whose models are kept here, has no need of."""
    return import_module("lora_parallel.layers.styles")


def keep_plans() -> None:
    """Let `parallelize` take plans from this process's cache."""
    if not ON:
        return
    planner: Any = import_module("lora_parallel.planning.plan")
    resolve = planner.resolve_plan
    plans: dict[Any, tuple[bytes, list[logging.LogRecord]]] = {}
    logger = logging.getLogger("lora_parallel.planning.passes")

    @wraps(resolve)
    def resolve_plan(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        description, plan = io.BytesIO(), io.BytesIO()
        try:
            _Describe(description).dump((model, args, kwargs))
        except NOT_WRITTEN:
            return resolve(model, *args, **kwargs)
        key = description.getvalue(), _code(model), logger.getEffectiveLevel()
        if key in plans:
            written, records = plans[key]
            for record in records:
                logger.handle(record)
            return _Load(io.BytesIO(written), model).load()
        records = []
        listener = logging.Handler()
        listener.emit = records.append  # type: ignore[method-assign]
        logger.addHandler(listener)
        try:
            found = resolve(model, *args, **kwargs)
        finally:
            logger.removeHandler(listener)
        with suppress(*NOT_WRITTEN):
            _Store(plan, model).dump(found)
            plans[key] = plan.getvalue(), records
        return found

    planner.resolve_plan = resolve_plan


def _code(model: nn.Module) -> tuple[Any, ...]:
    """Return the functions of the engine and of the modules of a model's classes, and the planner's tables, as they are
    at this moment.
    """
    owners = [module for name, module in list(sys.modules.items()) if name.startswith("lora_parallel.")]
    values = [value for owner in owners for value in vars(owner).values()]
    classes = {value for value in values if isinstance(value, type) and value.__module__.startswith("lora_parallel.")}
    found = [value for owner in [*owners, *classes] for value in vars(owner).values() if isinstance(value, CODE)]
    kinds = {type(module) for module in model.modules()}
    found += [kind.forward for kind in kinds]
    planners = [owner for owner in owners if owner.__name__.split(".")[1] in ("layers", "planning", "tracing")]
    authors = [sys.modules[name] for name in {kind.__module__ for kind in kinds} if name in sys.modules]
    # Whatever can be called: a test may put a partial or a mock in the place of a function.
    found += [value for owner in [*planners, *authors] for value in vars(owner).values() if callable(value)]
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
