"""Build a model on meta from its config alone, as a whole or shortened to few of its blocks."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lora_parallel.config import ParallelConfig
from lora_parallel.cp.regions import Places
from lora_parallel.export.export_merged import safetensors_header
from lora_parallel.fsdp.wrapping import fsdp_blocks
from lora_parallel.loading.meta_init import meta_init
from lora_parallel.parallelize import run_passes
from lora_parallel.planning.plan import Plan
from lora_parallel.pp.schedules import layer_cost, total_cost
from lora_parallel.state import Setup

_LAST = 3  # last blocks that stay in: FSDP2 holds up to two gathered blocks, and the first of backward are the last


@dataclass(frozen=True)
class Stack:
    """Describe a model's blocks, which lie in one list of modules."""

    name: str  # of the list in the model
    kinds: tuple[int, ...]  # of each block: those of one number have equal parameters and settings in the config

    @property
    def few(self) -> tuple[int, ...]:
        """Return the blocks of the shortest model: the first of each kind and the last of all."""
        last = range(max(0, len(self.kinds) - _LAST), len(self.kinds))
        return tuple(sorted({*map(self.kinds.index, self.kinds), *last}))

    def pairs(self) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Map each kind to the blocks of two models, of which the first has one more of that kind: one is `few`."""
        pairs: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        without = {index: tuple(other for other in self.few if other != index) for index in self.few}
        for index in self.few[:-_LAST] if len(self.few) > _LAST + 1 else ():  # what is left has more than the last ones
            pairs[self.kinds[index]] = (self.few, without[index])
        for index, kind in enumerate(self.kinds):
            if index not in self.few:
                pairs.setdefault(kind, (tuple(sorted((*self.few, index))), self.few))
        for index in self.few if len(self.few) > 1 else ():
            pairs.setdefault(self.kinds[index], (self.few, without[index]))
        return pairs


def find_stack(model: nn.Module) -> Stack:
    """Return the model's blocks and their kinds; the blocks must lie in one list of modules."""
    blocks = fsdp_blocks(model, ParallelConfig())
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    names = [name for name, modules in lists.items() if set(blocks) & set(modules)]
    if len(names) != 1 or list(lists[names[0]]) != blocks:
        raise ValueError(
            f"{type(model).__name__} has {len(blocks)} blocks in {len(names)} lists of modules: a plan can be made for "
            "models whose blocks lie in one list."
        )
    kinds: dict[Any, int] = {}
    numbers = []
    for index, block in enumerate(blocks):
        shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters())
        settings = tuple(str(value[index]) for _, _, value in _settings_of_blocks(model, len(blocks)))
        numbers.append(kinds.setdefault((type(block), shapes, settings), len(kinds)))
    return Stack(names[0], tuple(numbers))


def shorten(model: nn.Module, stack: Stack, keep: Collection[int]) -> None:
    """Leave only the blocks `keep` in a model, in place. Lists in its config with an entry for each block follow."""
    settings = list(_settings_of_blocks(model, len(stack.kinds)))
    parent, _, name = stack.name.rpartition(".")
    blocks = model.get_submodule(stack.name)
    assert isinstance(blocks, nn.ModuleList)
    setattr(model.get_submodule(parent), name, nn.ModuleList(blocks[index] for index in sorted(keep)))
    for config, key, value in settings:
        setattr(config, key, [value[index] for index in sorted(keep)])


def _settings_of_blocks(model: nn.Module, count: int) -> Iterator[tuple[Any, str, Any]]:
    """Yield the config, the name and the value of each list in the model's configs with an entry for each block."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    for config in {id(config): config for config in configs if config is not None}.values():
        for key, value in vars(config).items():
            if isinstance(value, (list, tuple)) and len(value) == count:
                yield config, key, value


@dataclass
class DescribedModel:
    """Describe a model by files that hold no weights."""

    config: str  # folder with a config.json, or that file
    lora: str | None  # folder with an adapter_config.json; None trains all parameters
    dtype: str
    quantization: dict[str, Any] | None = None  # settings as in a config's `quantization_config`
    _built: dict[tuple[int, ...], PreTrainedModel] = field(default_factory=dict, init=False)
    # Modules of a model with few blocks, and what was proven of them, by these blocks and what else that depends on.
    _proven: dict[tuple[Any, ...], tuple[list[nn.Module], Plan | Places]] = field(default_factory=dict, init=False)

    @cached_property
    def stack(self) -> Stack:
        """Find the model's blocks."""
        return find_stack(self._base())

    def describe(self) -> dict[str, Any]:
        """Return the widths of the hidden states between blocks and of the logits, and what a pipeline is divided by:
        the costs of all blocks, of what is before them, and after them.
        """
        text_config: Any = AutoConfig.from_pretrained(self.config, trust_remote_code=False).get_text_config()
        few = self.stack.few
        model, blocks = self.build(few)
        costs = {
            self.stack.kinds[index]: layer_cost(block, model.config) for index, block in zip(few, blocks, strict=True)
        }
        inside = {module for block in blocks for module in block.modules()}
        around = [module for module in model.modules() if module not in inside and module._parameters]
        before = [layer_cost(module, model.config) for module in around if isinstance(module, nn.Embedding)]
        after = [layer_cost(module, model.config) for module in around if not isinstance(module, nn.Embedding)]
        return {
            "hidden": int(text_config.hidden_size),
            "vocabulary": int(text_config.vocab_size),
            "blocks": [costs[kind] for kind in self.stack.kinds],
            "before": total_cost(before),
            "after": total_cost(after),
        }

    def build(self, keep: tuple[int, ...]) -> tuple[nn.Module, list[nn.Module]]:
        """Return the model on meta with the blocks `keep` only, and these blocks."""
        model = self._built.get(keep)
        if model is None:
            model = self._base()
            shorten(model, self.stack, keep)
        if self.quantization is None:  # a quantised model remembers the files of its weights, which no copy does
            model = copy.deepcopy(self._built.setdefault(keep, model))
        blocks = [*model.get_submodule(self.stack.name).children()]
        if self.lora is None:
            return model, blocks
        return get_peft_model(model, LoraConfig.from_pretrained(self.lora), low_cpu_mem_usage=True), blocks

    def parallelize(self, keep: tuple[int, ...], model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> None:
        """Parallelize a model that `build` has returned for the blocks `keep`, with what an earlier one has proven."""
        setup = Setup(model, mesh, config, None, materialize=False, autocast_adapter_dtype=True, trains=True)
        modules = [*model.modules()]
        keys = {
            "plan": (keep, config.tp, config.sequence_parallel, str(config.tp_plan)),
            "places": (keep, config.cp, config.cp_method),  # whether a rank's heads divide is seen in the step
        }
        for name, key in keys.items():
            if key in self._proven:
                others, proven = self._proven[key]
                setattr(setup, name, proven.of(dict(zip(others, modules, strict=True))))
        run_passes(setup)
        if setup.plan.sequences or setup.plan.first_batch_checks:  # which are about one model
            del keys["plan"]
        self._proven |= {key: (modules, getattr(setup, name)) for name, key in keys.items() if getattr(setup, name)}

    def _base(self) -> PreTrainedModel:
        config = AutoConfig.from_pretrained(self.config, trust_remote_code=False)
        config.use_cache = False
        config.__dict__.pop("quantization_config", None)
        kind = _class_of(config)
        dtype = getattr(torch, self.dtype)
        make = kind.from_config if kind is AutoModelForCausalLM else kind._from_config
        with meta_init():
            model: PreTrainedModel = make(config, dtype=dtype)
        if self.quantization is None:
            return model
        from transformers.quantizers.auto import AutoQuantizationConfig  # which imports every quantiser

        folder = Path(self._checkpoint.name)
        if not any(folder.iterdir()):
            _write_without_values(model, folder)
        settings = AutoQuantizationConfig.from_dict(dict(self.quantization))
        with meta_init():
            return kind.from_pretrained(folder, dtype=dtype, quantization_config=settings)

    @cached_property
    def _checkpoint(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory()


def _class_of(config: PretrainedConfig) -> Any:
    """Return the class of model that a config describes, a causal language model of transformers."""
    name = (config.architectures or [""])[0]
    if not name:
        return AutoModelForCausalLM
    kind = getattr(transformers, name, None)
    if kind is None or not name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        raise ValueError(
            f"architectures: {name}: a plan can be made for causal language models that transformers "
            f"{transformers.__version__} has."
        )
    return kind


def _write_without_values(model: PreTrainedModel, folder: Path) -> None:
    """Write a checkpoint of a model on meta: its header, and a hole of the size of its tensors, which takes no disk."""
    model.config.save_pretrained(folder)
    tensors = model.state_dict()
    header = safetensors_header(tensors)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(tensor.nbytes for tensor in tensors.values()))
