"""List the tensors of a checkpoint and read parts of them: safetensors, pickled state dicts, torch DCP directories.

A source lists its tensors without reading their values, and reads rectangles of them. A pickle can execute only what
`weights_only=True` allows; for the metadata of DCP, `_MetadataUnpickler` allows only the classes that DCP needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lora_parallel.lazy.graph import Leaf, Region

Reader = Callable[[str, Region], Tensor]

INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Source:
    """Represent a file, or the directory of one checkpoint."""

    path: Path

    def list(self) -> dict[str, Leaf]:
        """Return the tensors of the source by name, in the order of the file."""
        raise NotImplementedError

    def open(self) -> AbstractContextManager[Reader]:
        """Open the source, and give the context a function that reads a region of a tensor into memory."""
        raise NotImplementedError


def _check_there(path: Path) -> None:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: the checkpoint is incomplete. Download or copy it again.")


def opened_safetensors(path: Path) -> Any:
    """Open a safetensors file as `safe_open` does; raise an error that names the file if it cannot be read."""
    _check_there(path)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as safetensors ({error}): it is truncated or damaged. Download or copy it again."
        ) from error


@dataclass(frozen=True)
class SafetensorsFile(Source):
    """Read one safetensors file. The file is memory-mapped, so reading a slice touches only the pages of the slice."""

    def list(self) -> dict[str, Leaf]:
        leaves: dict[str, Leaf] = {}
        with opened_safetensors(self.path) as file:
            for key in file.offset_keys():
                view = file.get_slice(key)
                dtype = _DTYPES.get(view.get_dtype())
                if dtype is None:
                    raise ValueError(f"{self.path}: {key} has dtype {view.get_dtype()}, which is not supported.")
                leaves[key] = Leaf(self, key, tuple(view.get_shape()), dtype)
        return leaves

    @contextmanager
    def open(self) -> Iterator[Reader]:
        with opened_safetensors(self.path) as file:
            yield lambda key, region: file.get_slice(key)[region] if region else file.get_tensor(key)


@dataclass(frozen=True)
class PickleFile(Source):
    """Read a state dict that torch.save wrote; the file is memory-mapped, and read with weights_only=True."""

    def list(self) -> dict[str, Leaf]:
        return {
            key: Leaf(self, key, tuple(value.shape), value.dtype)
            for key, value in self._load().items()
            if isinstance(value, Tensor)
        }

    @contextmanager
    def open(self) -> Iterator[Reader]:
        state = self._load()
        yield lambda key, region: state[key][region].clone()

    def _load(self) -> dict[str, Any]:
        _check_there(self.path)
        try:
            # Only torch's zip files can be mapped; a file that torch 1.5 or older wrote is read whole.
            state = torch.load(self.path, map_location="cpu", mmap=zipfile.is_zipfile(self.path), weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{self.path} cannot be read as a state dict with weights_only=True ({_first_line(error)}). Convert it "
                "to safetensors."
            ) from error
        if not isinstance(state, dict):
            raise ValueError(f"{self.path} holds a {type(state).__name__}: a state dict is needed.")
        return state


@dataclass(frozen=True)
class DcpDirectory(Source):
    """Read a directory that torch.distributed.checkpoint (DCP) wrote."""

    def list(self) -> dict[str, Leaf]:
        _check_there(self.path)
        metadata = _read_metadata(self.path)
        try:
            return {
                key: Leaf(self, key, tuple(entry.size), entry.properties.dtype)
                for key, entry in metadata.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            }
        except (AttributeError, TypeError) as error:
            raise _no_metadata(self.path, error) from error

    @contextmanager
    def open(self) -> Iterator[Reader]:
        metadata = _read_metadata(self.path)
        storage = dcp.FileSystemReader(self.path)
        storage.set_up_storage_reader(metadata, is_coordinator=True)

        def read(key: str, region: Region) -> Tensor:
            entry = metadata.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata)
            offsets = torch.Size(part.start for part in region)
            sizes = torch.Size(part.stop - part.start for part in region)
            block = torch.empty(sizes, dtype=entry.properties.dtype)
            items = create_read_items_for_chunk_list(key, entry, [ChunkStorageMetadata(offsets, sizes)])
            try:
                storage.read_data(LoadPlan(items), _IntoBlock(block)).wait()
            except Exception as error:
                raise ValueError(
                    f"{self.path}: {key} cannot be read ({_first_line(error)}): a file of it is missing or damaged. "
                    "Download or copy it again."
                ) from error
            return block

        yield read


class _IntoBlock(DefaultLoadPlanner):
    """Let DCP write the pieces of one read into `block`."""

    def __init__(self, block: Tensor) -> None:
        super().__init__()
        self._block = block

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._block


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickle the metadata of DCP with only the classes that it needs; DCP itself has no weights_only for it."""

    _KNOWN: ClassVar[dict[str, set[str]]] = {
        "torch.distributed.checkpoint.metadata": {
            *"BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta".split(),
            *"TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING".split(),
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
        "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
        "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
        "collections": {"OrderedDict"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self._KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it holds a {module}.{name}, which DCP's metadata has no use for")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Metadata:
    try:
        with open(path / ".metadata", "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"it holds a {type(metadata).__name__}")
        return metadata
    except Exception as error:
        raise _no_metadata(path, error) from error


def _no_metadata(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path / '.metadata'} is no metadata of a torch DCP checkpoint ({_first_line(error)}). Download or copy it "
        "again."
    )


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message: torch adds a page of advice that does not apply here."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def open_checkpoint(path: str | os.PathLike[str], allow_pickle: bool) -> dict[str, Leaf]:
    """List the tensors of a file or folder of safetensors, a DCP directory or a pickle, without their values."""
    file = Path(path).absolute()
    if (folder := file).is_dir():
        if (folder / ".metadata").is_file():
            return DcpDirectory(folder).list()
        if (folder / INDEX).is_file():
            weight_map = read_index(folder / INDEX)
            parts = (SafetensorsFile(folder / name) for name in dict.fromkeys(weight_map.values()))
            return list_sources(parts, weight_map, str(folder / INDEX))
        files = sorted(folder.glob("*.safetensors")) or sorted(f for f in folder.iterdir() if f.suffix in _PICKLES)
        if len(files) > 1:
            raise ValueError(f"{folder} holds {len(files)} files of weights and no {INDEX}: name the one to read.")
        if not files:
            raise FileNotFoundError(f"{folder} holds no checkpoint: no *.safetensors, no torch DCP .metadata.")
        file = files[0]
    if not file.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {file}.")
    if file.suffix not in _PICKLES:
        return SafetensorsFile(file).list()
    if not allow_pickle:
        raise ValueError(refusal(file, "pass allow_pickle=True"))
    return PickleFile(file).list()


def list_sources(sources: Iterable[Source], weight_map: Mapping[str, str], index: str) -> dict[str, Leaf]:
    """Return the tensors of a checkpoint's files by name, each from the file in which the index (or none) places it."""
    leaves: dict[str, Leaf] = {}
    for source in sources:
        name = source.path.name
        leaves |= {key: leaf for key, leaf in source.list().items() if Path(weight_map.get(key, name)).name == name}
    for key, name in weight_map.items():
        if key not in leaves or leaves[key].source.path.name != Path(name).name:
            raise ValueError(
                f"{index} says that {name} holds {key}, and it does not: the checkpoint is incomplete or mixed up. "
                "Download or copy it again."
            )
    return leaves


def fingerprint_of(source: Source) -> str:
    """Return a hash of file names, lengths, their first 64 KiB (safetensors' headers) and 64 bytes at 64 places."""
    files = [source.path] if source.path.is_file() else sorted(file for file in source.path.iterdir() if file.is_file())
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with open(file, "rb") as data:
            digest.update(data.read(2**16))
            for number in range(64):
                data.seek(size * number // 64)
                digest.update(data.read(64))
    return digest.hexdigest()


def refusal(path: Path, how: str) -> str:
    """Return the error message for a pickle that is not read; `how` says how the user can allow it."""
    return (
        f"{path} is a pickle, which can run code when it is read. Convert it to safetensors, or, if you trust it, "
        f"{how}: it is then read with weights_only=True."
    )


def read_index(index: Path) -> dict[str, str]:
    """Return {tensor: file name} of a checkpoint's index."""
    try:
        weight_map = dict(json.loads(index.read_text())["weight_map"])
        if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("weight_map is not {tensor: file name}")
        return weight_map
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{index} is no index of a safetensors checkpoint ({type(error).__name__}: {error})."
        ) from error
