"""Export a base with its adapters merged in, from shards to a folder that plain `from_pretrained` loads.

The format (https://github.com/huggingface/safetensors#format): the header's length in 8 bytes, a JSON header with the
dtype, shape and place of each tensor, the values. The safetensors library itself can only write tensors that are all in
memory.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from lora_parallel.adapters.inspection import check_unmerged
from lora_parallel.distributed.dtensors import class_of, reshard
from lora_parallel.distributed.meetings import collective_call
from lora_parallel.distributed.rank_checks import agreed, is_rank_zero
from lora_parallel.export.merged_weights import MergedModel, WeightForm, forms_of, held_by_ranks, merged_weights
from lora_parallel.layers.layer_parameters import innermost
from lora_parallel.lazy.files import INDEX
from lora_parallel.lazy.graph import Leaf, Node, Region, read
from lora_parallel.lazy.lazy_tensor import LazyTensor
from lora_parallel.loading.quantisers import reverted
from lora_parallel.state import state_of
from lora_parallel.storage import Scratch, bytes_bar, check_free, is_taken, local_path

_CHUNK_BYTES = 64 * 2**20
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(
    path: Path, tensors: Mapping[str, Node], writer: bool, progress: Callable[[int], object]
) -> Exception | None:
    """Write lazy tensors to a file, on the rank where `writer` is True. Collective if reading them is.

    Return the error that ended writing, or None: reading goes on after it, because other ranks take part in it.
    `progress` is called with the number of bytes that each step has read.
    """
    failure: Exception | None = None
    file: IO[bytes] | None = None
    try:
        if writer:
            file = open(path, "wb")  # noqa: SIM115 - closed below, whatever fails in between
            file.write(safetensors_header(tensors))
    except (OSError, KeyError) as error:
        failure = error
    for node in tensors.values():
        for region in _chunks(node):
            block = read(node, region)
            if file is not None and failure is None:
                try:
                    file.write(block.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
                except OSError as error:
                    failure = error
            progress(block.numel() * block.element_size())
    if file is not None:
        try:
            file.close()
        except OSError as error:
            failure = failure or error
    return failure


def safetensors_header(tensors: Mapping[str, Node | Tensor]) -> bytes:
    """Return the beginning of a file that holds tensors one after the other: the length of a header, and the header."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, node in tensors.items():
        start, end = end, end + prod(node.shape) * node.dtype.itemsize
        entries[name] = {"dtype": _NAMES[node.dtype], "shape": list(node.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values start at a multiple of eight
    return len(text).to_bytes(8, "little") + text


def _chunks(node: Node) -> Iterator[Region]:
    """Divide a tensor into regions of whole rows of `_CHUNK_BYTES` at most (or one row), in the order of its memory."""
    shape = node.shape
    if not prod(shape):
        return
    row = prod(shape[1:]) * node.dtype.itemsize
    rows = max(1, _CHUNK_BYTES // max(1, row))
    whole = tuple(slice(0, size) for size in shape)
    if not shape:
        yield whole
        return
    for start in range(0, shape[0], rows):
        yield (slice(start, min(start + rows, shape[0])), *whole[1:])


_SIZE = re.compile(r"\s*(?=.*[1-9])\d+(\.\d+)?\s*[KMGT]B\s*", re.IGNORECASE)
"""Pattern of the sizes, as text, that huggingface_hub accepts, such as "5GB"; a size of zero does not match."""

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@collective_call("export_merged")
def export_merged(model: nn.Module, directory: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> Path:
    """Write the model with its active adapters merged into the base, as `merge_and_unload` and `save_pretrained` would
    in one process. Collective.

    Each rank merges the part of a weight that it holds; rank 0 receives and writes a few megabytes at a time, so no
    rank ever holds a full tensor beside its shard. The model in memory does not change. A model without adapters is
    written as it is.

    Args:
        model: The model that `parallelize` returned.
        directory: The folder to write. It must be empty or not exist.
        max_shard_size: The maximum size of a safetensors file, as in transformers' `save_pretrained`.

    Returns:
        The path of the folder.

    Raises:
        FileExistsError: `directory` exists and is not empty.
        ValueError: The model was not parallelized; it has adapter layers that cannot be merged part by part or are
            merged already; it has tenants, and none or several of them are active; `max_shard_size` is no positive
            size; or ranks call with different arguments.
        OSError: The folder cannot be written. All on every rank.
    """
    return write_merged(model, directory, max_shard_size, beside_others=False)


@torch.inference_mode(False)  # a DTensor cannot be detached in inference mode
def write_merged(
    model: nn.Module, directory: str | os.PathLike[str], max_shard_size: int | str, beside_others: bool
) -> Path:
    """Write the model as `export_merged` does. Collective.

    `beside_others` writes into a folder that holds other files too, which stay, as `save_pretrained` of transformers
    does. Weights that an earlier save has written there are replaced.
    """
    with agreed() as alike:
        target = local_path(directory)
        _check_size(max_shard_size)
        alike.update(directory=str(target), max_shard_size=max_shard_size)
    scratch, writer = Scratch(target), is_rank_zero()
    reshard(model)
    try:
        with agreed():
            state = state_of(model)
            if state is None:
                raise ValueError(f"this {type(model).__name__} was not parallelized; pass what parallelize returned.")
            check_unmerged(model)
            if state.pool is not None:
                state.pool.check_export()
            base = innermost(model)
            weights = merged_weights(base)
            if writer:
                if not beside_others:
                    check_free(target)
                elif target.is_file():
                    raise NotADirectoryError(f"{target} is a file: give a folder.")
                scratch.make()
        start = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
        held = held_by_ranks(model, weights, start)
        with agreed():
            forms = forms_of(held)
            source = MergedModel(Path(class_of(base).__name__), weights, held, forms)
            stored = _as_saved(base, source.list(), forms)
            files = split_state_dict_into_shards_factory(
                stored,
                get_storage_size=lambda tensor: tensor.numel() * tensor.element_size(),
                filename_pattern="model{suffix}.safetensors",
                max_shard_size=max_shard_size,
            )
        total = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
        with bytes_bar("Merging", total, shown=writer) as progress:
            for name, keys in files.filename_to_tensors.items():
                failure = write_safetensors(
                    scratch.path / name, {key: stored[key].node for key in keys}, writer, progress.update
                )
                with agreed():
                    if failure is not None:
                        raise failure
        with agreed():
            if writer:
                if files.is_sharded:
                    index = {"metadata": {"total_size": total}, "weight_map": files.tensor_to_filename}
                    (scratch.path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
                _write_configs(base, scratch.path, forms)
                _check(scratch.path, stored, files.tensor_to_filename)
                if is_taken(target):
                    _place_beside(scratch, [*files.filename_to_tensors, *([INDEX] if files.is_sharded else [])])
                else:
                    scratch.place()
    except BaseException:
        scratch.discard()
        raise
    return target


def _place_beside(scratch: Scratch, weights: list[str]) -> None:
    """Move the files into a folder with others, and remove weights that were there before."""
    # While shards are moved, a killed process leaves a folder without an index, not one whose shards are of two saves.
    target = scratch.target
    if len(weights) > 1:
        (target / INDEX).unlink(missing_ok=True)
    scratch.place_files(last=weights[-1])
    for path in list(target.iterdir()):
        if path.name not in weights and (path.name == INDEX or _WEIGHTS.fullmatch(path.name)):
            path.unlink()


def _check_size(size: Any) -> None:
    is_count = isinstance(size, int) and not isinstance(size, bool) and size > 0
    if not is_count and not (isinstance(size, str) and _SIZE.fullmatch(size)):
        raise ValueError(f"max_shard_size={size!r}: give a positive number of bytes, or a text such as '5GB'.")


def _as_saved(base: nn.Module, merged: Mapping[str, Leaf], forms: Mapping[str, WeightForm]) -> dict[str, LazyTensor]:
    """Return the merged weights as lazy tensors, by the names and in the shapes that checkpoints of the model have."""
    stored = {name: LazyTensor(leaf) for name, leaf in merged.items()}
    for name, form in forms.items():
        if form.selected is not None:
            partition, dim = form.selected
            stored[name] = partition.restored(stored[name], dim)  # type: ignore[assignment]
        if form.transposed:
            stored[name] = stored[name].T  # type: ignore[assignment]
    return dict(reverted(base, stored)) if isinstance(base, PreTrainedModel) else stored  # type: ignore[arg-type]


def _write_configs(base: nn.Module, folder: Path, forms: Mapping[str, WeightForm]) -> None:
    config = copy.deepcopy(getattr(base, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [class_of(base).__name__]  # type: ignore[union-attr]
        config.dtype = str(base.dtype).removeprefix("torch.")  # type: ignore[union-attr]
        if any(form.is_quantised for form in forms.values()):
            del config.quantization_config  # type: ignore[union-attr]
        tied = getattr(base, "all_tied_weights_keys", {})
        if tied and forms.keys() >= {*tied, *tied.values()}:  # adapters have made them differ
            config.tie_word_embeddings = False  # type: ignore[union-attr]
        config.save_pretrained(folder)  # type: ignore[union-attr]
    generation = getattr(base, "generation_config", None)
    if hasattr(generation, "save_pretrained") and base.can_generate():  # type: ignore[operator]
        generation.save_pretrained(folder)  # type: ignore[union-attr]


def _check(folder: Path, stored: Mapping[str, LazyTensor], files: Mapping[str, str]) -> None:
    for key, tensor in stored.items():
        with safe_open(folder / files[key], framework="pt") as file:
            if key not in file.keys() or tuple(file.get_slice(key).get_shape()) != tuple(tensor.shape):  # noqa: SIM118
                raise RuntimeError(f"{folder / files[key]} does not hold {key}: nothing was put in place.")
