"""Train with `lora_parallel` in any command: `LORA_PARALLEL=mesh.yaml torchrun --nproc-per-node 4 train.py`.

torch calls `autoload` at the end of `import torch`, in every process, and fails where it fails (the entry points of the
group "torch.backends": https://github.com/pytorch/pytorch/issues/122468). So this module imports nothing that takes
time, and the rest of the library only after Accelerate, transformers or Lightning has been imported.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Set
from functools import wraps
from importlib.machinery import ModuleSpec
from typing import Any

from lora_parallel_failures import repeat_failure

__all__ = ["autoload"]

VARIABLE = "LORA_PARALLEL"
_USED = {
    *("torch", "accelerate", "transformers", "peft", "lightning", "lightning_fabric", "pytorch_lightning"),
    *("lora_parallel", "lightning_lora", "accelerate_plugin"),
}
"""The library and the packages that it imports from: no module of them may be half imported when it is needed."""

_waiting: dict[str, Callable[[], None]] = {}
"""What to call once a module has been imported."""


def autoload() -> None:
    """Prepare this process for the mesh in the file that the variable names, as soon as what it needs is imported."""
    if not os.environ.get(VARIABLE):
        return
    try:
        os.environ[VARIABLE] = os.path.abspath(os.environ[VARIABLE])  # for processes that start in another folder
        if not os.path.isfile(os.environ[VARIABLE]) and sys.argv[1:2] != ["config"]:  # which writes it
            what = "it is a folder" if os.path.isdir(os.environ[VARIABLE]) else "there is no such file"
            sys.exit(_text(what + ": write it with `accelerate-lora config`."))
        _waiting["accelerate.commands.config.config_args"] = _set_default_file
        _waiting["lightning.pytorch"] = _waiting["pytorch_lightning"] = _register_strategies
        is_rank = _is_rank()
        atexit.register(repeat_failure)
        _waiting["accelerate"] = _activate if is_rank else _refuse_alone
        if is_rank:
            _waiting["transformers"] = _activate
        sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
        _call_for_imported()
    except Exception as error:
        _say(error)


def _is_rank() -> bool:
    """Return True in a process that trains, which is no launcher, and no worker that such a process has started."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    launches = spec is not None and spec.name.startswith(("torch.distributed.", "accelerate.commands."))
    is_worker = any("multiprocessing" in word for word in sys.orig_argv)
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys() and not launches and not is_worker


# Python has no public hook for the end of an import. A finder sees its beginning, and not that of a package which is
# just importing torch. The end is marked by an attribute of the module's specification, which a subclass can watch.


class _WatchedSpec(ModuleSpec):
    """Specification of a module, which calls what waits for imports when the module's own ends."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            _call_for_imported()


class _Finder:
    """Watch modules that are waited for."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return what the other finders find of a module that is waited for."""
        others = (finder for finder in sys.meta_path if finder is not cls and name in _waiting)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None:
            spec.__class__ = _WatchedSpec
        return spec


def _call_for_imported() -> None:
    """Call what waits for a module that is imported now; where the library is needed, once nothing is half imported."""
    half = _half_imported()
    for spec in half.values():
        spec.__class__ = _WatchedSpec
    imported = [name for name in _waiting if name in sys.modules and name not in half]
    calls = dict.fromkeys(_waiting[name] for name in imported if not half or _waiting[name] is _set_default_file)
    for name in [name for name, call in _waiting.items() if call in calls]:
        del _waiting[name]
    for call in calls:
        call()


def _half_imported() -> dict[str, ModuleSpec]:
    """Return the specifications of the modules of those packages that are being imported."""
    names = [name for name in sys.modules if name.partition(".")[0] in _USED]
    specs = {name: getattr(sys.modules[name], "__spec__", None) for name in names}
    return {name: spec for name, spec in specs.items() if getattr(spec, "_initializing", False)}


def _set_default_file() -> None:
    """Let `accelerate launch` take the file where it is given none, in commands that launch by themselves."""
    config_args: Any = sys.modules["accelerate.commands.config.config_args"]
    config_args.default_config_file = os.environ[VARIABLE]
    original = config_args.load_config_from_file

    @wraps(original)
    def load_config_from_file(config_file: str | None) -> Any:
        try:
            return original(config_file)
        except AttributeError as error:  # no mapping: Accelerate looks for its keys at once
            if config_file is not None:
                raise
            raise ValueError(_text("it is no configuration: `accelerate-lora config` writes one.")) from error

    config_args.load_config_from_file = load_config_from_file


def _activate() -> None:
    """Give this rank the environment that `accelerate launch` would make of the file, and prepare Accelerate."""
    try:
        from accelerate_plugin.launch_options import join

        join(os.environ[VARIABLE])
    except Exception as error:
        from accelerate.state import PartialState  # TrainingArguments make one, which come before an Accelerator

        _refuse(PartialState, _say(error))


def _refuse_alone() -> None:
    """Let no process train that is no rank. (One that starts ranks makes no Accelerator.)"""
    from accelerate import Accelerator

    text = "this process is no rank: start it by torchrun, `accelerate launch` or a command that calls one of them."
    # `accelerate-lora check` sets both; ms-swift sets RANK where nobody has, and Axolotl the other one.
    _refuse(Accelerator, _text(text), unless={"RANK", "ACCELERATE_USE_FSDP"})


def _register_strategies() -> None:
    """Register the strategies that Lightning knows by name."""
    try:
        import lightning_lora  # noqa: F401
    except Exception as error:
        _say(error)


def _refuse(kind: type, text: str, unless: Set[str] = frozenset()) -> None:
    """Let a class raise an error, unless variables are set: what would train is not what was asked for."""
    original = kind.__init__  # type: ignore[misc]

    @wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        if not unless or unless - os.environ.keys():
            raise RuntimeError(text)
        original(*args, **kwargs)

    kind.__init__ = init  # type: ignore[misc]


def _say(error: Exception) -> str:
    text = _text(str(error) or repr(error))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr)
    return text


def _text(text: str) -> str:
    return f"{VARIABLE}={os.environ[VARIABLE]}: {text.rstrip('.')}. Unset it to train without this library."
