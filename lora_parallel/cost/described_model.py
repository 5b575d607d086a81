"""Build a model on meta from its config alone, as a whole or shortened to few of its blocks."""

from __future__ import annotations

import copy
import json
import struct
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lora_parallel.config import ParallelConfig
from lora_parallel.fsdp.wrapping import fsdp_blocks
from lora_parallel.loading.meta_init import meta_init
from lora_parallel.pp.schedules import layer_cost, total_cost

_LAST = 3
"""Number of last blocks that stay in: FSDP2 holds up to two gathered blocks, and the first of backward are the last."""


@dataclass(frozen=True)
class Stack:
    """Describe a model's blocks, which lie in one list of modules."""

    name: str
    """Name of the list in the model."""

    kinds: tuple[int, ...]
    """Kind of each block: those of one number have equal parameters and equal settings in the model's config."""

    @property
    def few(self) -> list[int]:
        """Return the blocks of the shortest model: the first of each kind and the last of all."""
        first = {kind: index for index, kind in reversed([*enumerate(self.kinds)])}
        return sorted({*first.values(), *range(max(0, len(self.kinds) - _LAST), len(self.kinds))})

    def pairs(self) -> dict[int, tuple[list[int], list[int]]]:
        """Map each kind to the blocks of two models, of which the first has one more of that kind: one is `few`."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for index, kind in enumerate(self.kinds):
            if index not in self.few:
                found.setdefault(kind, (sorted([*self.few, index]), self.few))
        for index in self.few if len(self.few) > 1 else ():
            found.setdefault(self.kinds[index], (self.few, [each for each in self.few if each != index]))
        return found


def find_stack(model: nn.Module) -> Stack:
    """Return the model's blocks and their kinds.

    Raises:
        ValueError: The model has no blocks, or they do not lie in one list of modules.
    """
    blocks = fsdp_blocks(model, ParallelConfig())
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    held = [name for name, each in lists.items() if set(blocks) & set(each)]
    if len(held) != 1 or list(lists[held[0]]) != blocks:
        raise ValueError(
            f"{type(model).__name__} has {len(blocks)} blocks in {len(held)} lists of modules: a plan can be made for "
            "models whose blocks lie in one list."
        )
    kinds: dict[Any, int] = {}
    numbers = []
    for index, block in enumerate(blocks):
        shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters())
        settings = tuple(str(value[index]) for _, _, value in _settings_of_blocks(model, len(blocks)))
        numbers.append(kinds.setdefault((type(block), shapes, settings), len(kinds)))
    return Stack(held[0], tuple(numbers))


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
    configs = {id(each): each for module in model.modules() if (each := getattr(module, "config", None)) is not None}
    for config in configs.values():
        for key, value in vars(config).items():
            if isinstance(value, (list, tuple)) and len(value) == count:
                yield config, key, value


@dataclass
class DescribedModel:
    """Describe a model by files that hold no weights.

    Args:
        config: A folder with a config.json, or that file.
        lora: Folder with an adapter_config.json; None trains all parameters.
        dtype: Name of the dtype of the weights: "bfloat16".
        quantization: Settings of the quantisation, as in a config's `quantization_config`; None quantises nothing.
    """

    config: str
    lora: str | None
    dtype: str
    quantization: dict[str, Any] | None = None

    def widths(self) -> dict[str, int]:
        """Return the width of the hidden states between blocks, and that of the logits."""
        config: Any = AutoConfig.from_pretrained(self.config, trust_remote_code=False).get_text_config()
        return {"hidden": int(config.hidden_size), "vocabulary": int(config.vocab_size)}

    def stack(self) -> Stack:
        """Return the model's blocks and their kinds.

        Raises:
            ValueError: The config describes no causal language model with one list of blocks.
        """
        return find_stack(self._base())

    def layer_costs(self, stack: Stack) -> dict[str, Any]:
        """Return what a pipeline is divided by: the costs of all blocks, of what is before them, and after them."""
        model, blocks = self.build(stack, stack.few)
        config = model.config
        of_kind = {
            stack.kinds[index]: layer_cost(block, config) for index, block in zip(stack.few, blocks, strict=True)
        }
        inside = {each for block in blocks for each in block.modules()}
        around = [each for each in model.modules() if each not in inside and each._parameters]
        before = [layer_cost(each, config) for each in around if isinstance(each, nn.Embedding)]
        after = [layer_cost(each, config) for each in around if not isinstance(each, nn.Embedding)]
        return {
            "blocks": [of_kind[kind] for kind in stack.kinds],
            "before": total_cost(before),
            "after": total_cost(after),
        }

    def build(self, stack: Stack, keep: list[int]) -> tuple[nn.Module, list[nn.Module]]:
        """Return the model on meta with the blocks `keep` only, and these blocks."""
        model = self._short(stack, keep)
        blocks = [*model.get_submodule(stack.name).children()]
        if self.lora is None:
            return model, blocks
        peft_config = LoraConfig.from_pretrained(self.lora)
        return get_peft_model(model, peft_config, low_cpu_mem_usage=True), blocks

    def _short(self, stack: Stack, keep: list[int]) -> PreTrainedModel:
        if self.quantization is not None:  # such a model remembers the files of its weights, which no copy does
            model = self._base()
            shorten(model, stack, keep)
            return model
        key = tuple(keep)
        if key not in self._built:
            self._built[key] = self._base()
            shorten(self._built[key], stack, keep)
        return copy.deepcopy(self._built[key])

    @cached_property
    def _built(self) -> dict[tuple[int, ...], PreTrainedModel]:
        return {}

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
        folder = self._checkpoint.name
        if not any(Path(folder).iterdir()):
            _write_without_values(model, Path(folder))
        with meta_init():
            return kind.from_pretrained(folder, dtype=dtype, quantization_config=self._quantization())

    @cached_property
    def _checkpoint(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory()

    def _quantization(self) -> Any:
        from transformers.quantizers.auto import AutoQuantizationConfig

        return AutoQuantizationConfig.from_dict(dict(self.quantization or {}))


def _class_of(config: PretrainedConfig) -> Any:
    """Return the class of model that a config describes.

    Raises:
        ValueError: It is no causal language model of transformers.
    """
    name = (config.architectures or [""])[0]
    if not name:
        return AutoModelForCausalLM
    found = getattr(transformers, name, None)
    if found is None or not name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        raise ValueError(
            f"architectures: {name}: a plan can be made for causal language models that transformers "
            f"{transformers.__version__} has."
        )
    return found


_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


def _write_without_values(model: PreTrainedModel, folder: Path) -> None:
    """Write a checkpoint of a model on meta: its header, and a hole of the size of its tensors, which takes no disk.

    Format: https://huggingface.co/docs/safetensors, "Format".
    """
    model.config.save_pretrained(folder)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in model.state_dict().items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        kind = _NAMES.get(tensor.dtype) or f"I{8 * tensor.element_size()}"
        header[name] = {"dtype": kind, "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
