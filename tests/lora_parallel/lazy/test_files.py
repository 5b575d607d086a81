"""Checkpoints on disk: what they hold, region by region, and what is said of a bad one."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import shutil
import subprocess
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lora_parallel.lazy.files import DcpDirectory, PickleFile, SafetensorsFile, list_sources, open_checkpoint
from lora_parallel.lazy.graph import read, whole
from lora_parallel.lazy.lazy_tensor import LazyTensor
from tests.oracle import mesh_of
from tests.oracle.workers import Failure, attempt


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 50).to(dtype)


def tensors():
    return {
        "model.layers.0.weight": draw(7, 5),
        "model.layers.10.weight": draw(6, 4, 3, dtype=torch.bfloat16),
        "half": draw(9, dtype=torch.float16),
        "double": draw(3, 2, dtype=torch.float64),
        "scalar": draw(),
        "scalar.bf16": draw(dtype=torch.bfloat16),
        "nothing": draw(0, 4),
        "nothing.last": draw(4, 0, dtype=torch.bfloat16),
        "steps": torch.tensor(2**40 + 1),
        "bytes": draw(5, 3, dtype=torch.int8),
        "mask": torch.tensor([True, False, True]),
    }


def check(found, want):
    """What a checkpoint lists and reads, against the tensors."""
    assert found.keys() == want.keys()
    choose = random.Random(0)
    for key, tensor in want.items():
        leaf = found[key]
        assert (leaf.key, leaf.shape, leaf.dtype) == (key, tuple(tensor.shape), tensor.dtype)
        for inner in (False, True, True):
            region = whole(leaf.shape)
            if inner:
                ends = [sorted((choose.randint(0, size), choose.randint(0, size))) for size in leaf.shape]
                region = tuple(slice(low, high) for low, high in ends)
            got = read(leaf, region)
            assert got.dtype == tensor.dtype
            assert torch.equal(got, tensor[region]), (key, region)


def save_sharded(directory, state, files=3):
    """Several safetensors files and their index, as save_pretrained writes them."""
    directory.mkdir(exist_ok=True)
    names = [f"model-{at + 1:05}-of-{files:05}.safetensors" for at in range(files)]
    weight_map = {key: names[at % files] for at, key in enumerate(state)}
    for name in names:
        save_file({key: state[key] for key in state if weight_map[key] == name}, directory / name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


# ---------------------------------------------------------------------- safetensors


def test_one_safetensors_file(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    check(open_checkpoint(tmp_path / "model.safetensors", allow_pickle=False), tensors())
    check(open_checkpoint(str(tmp_path), allow_pickle=False), tensors())


def test_a_file_may_have_any_name(tmp_path):
    save_file(tensors(), tmp_path / "weights")
    (tmp_path / "weights").rename(tmp_path / "blob")
    check(open_checkpoint(tmp_path / "blob", allow_pickle=False), tensors())


def test_a_link_is_followed(tmp_path):
    """The hub's cache is made of links to files without a suffix."""
    (tmp_path / "snapshot").mkdir()
    save_file(tensors(), tmp_path / "0123456789abcdef")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../0123456789abcdef")
    check(open_checkpoint(tmp_path / "snapshot", allow_pickle=False), tensors())


@pytest.mark.parametrize("files", [1, 3])
def test_several_safetensors_files(tmp_path, files):
    weight_map = save_sharded(tmp_path, tensors(), files)
    found = open_checkpoint(tmp_path, allow_pickle=False)
    check(found, tensors())
    assert {key: leaf.source.path for key, leaf in found.items()} == {k: tmp_path / v for k, v in weight_map.items()}


def test_an_index_goes_before_other_files(tmp_path):
    save_sharded(tmp_path, tensors())
    save_file({"other": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    check(open_checkpoint(tmp_path, allow_pickle=False), tensors())


def test_the_order_is_that_of_the_file(tmp_path):
    """A safetensors file is sorted by alignment, then by name; reads in this order go forward."""
    save_file(tensors(), tmp_path / "model.safetensors")
    listed = list(SafetensorsFile(tmp_path / "model.safetensors").list())
    data = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    offsets = [header[key]["data_offsets"][0] for key in listed]
    assert offsets == sorted(offsets)


def test_a_dtype_that_is_not_supported(tmp_path):
    save_file({"index": torch.ones(3, dtype=torch.uint16)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: index has dtype U16, which is not supported"):
        open_checkpoint(tmp_path, allow_pickle=False)


def test_float8_is_listed(tmp_path):
    state = {"w": draw(4, 4).to(torch.float8_e4m3fn), "v": draw(4, 4).to(torch.float8_e5m2)}
    save_file(state, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path, allow_pickle=False)
    assert {key: leaf.dtype for key, leaf in found.items()} == {key: tensor.dtype for key, tensor in state.items()}


# ---------------------------------------------------------------------- pickles


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return subprocess.check_call, (["touch", str(self.path)],)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_a_pickle_is_read_only_if_allowed(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    torch.save(tensors(), path)
    for place in (path, tmp_path):
        with pytest.raises(ValueError, match=rf"weights{suffix} is a pickle.*safetensors.*pass allow_pickle=True"):
            open_checkpoint(place, allow_pickle=False)
        check(open_checkpoint(place, allow_pickle=True), tensors())


def test_a_pickle_beside_safetensors_is_not_looked_at(tmp_path):
    torch.save({"other": Bomb(tmp_path / "bombed")}, tmp_path / "pytorch_model.bin")
    save_file(tensors(), tmp_path / "model.safetensors")
    check(open_checkpoint(tmp_path, allow_pickle=True), tensors())
    assert not (tmp_path / "bombed").exists()


def test_a_state_dict_with_other_things_in_it(tmp_path):
    """Parameters, a module's own state dict with its metadata, views of one storage, and what is no tensor."""
    fused = draw(6, 4)
    state = OrderedDict(nn.Linear(3, 2).state_dict())
    state |= {"parameter": nn.Parameter(draw(3)), "view": fused[2:].t(), "fused": fused, "epoch": 3, "name": "x"}
    torch.save(state, tmp_path / "model.pt")
    want = {key: value.detach() for key, value in state.items() if isinstance(value, torch.Tensor)}
    check(open_checkpoint(tmp_path / "model.pt", allow_pickle=True), want)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_is_refused(tmp_path, zipped):
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(2), "x": Bomb(tmp_path / "bombed")}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"model\.pt cannot be read as a state dict with weights_only=True"):
        open_checkpoint(path, allow_pickle=True)
    assert not (tmp_path / "bombed").exists()
    with pytest.raises(ValueError, match="is a pickle"):
        open_checkpoint(path, allow_pickle=False)
    if zipped:
        torch.load(path, weights_only=False)
        assert (tmp_path / "bombed").exists()  # else the test shows nothing


def test_a_pickle_of_a_whole_model_is_refused(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt cannot be read as a state dict"):
        open_checkpoint(tmp_path, allow_pickle=True)


def test_a_pickle_of_something_else_is_refused(tmp_path):
    torch.save([torch.ones(2)], tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt holds a list: a state dict is needed"):
        open_checkpoint(tmp_path, allow_pickle=True)


# ---------------------------------------------------------------------- torch DCP


def test_a_dcp_directory(tmp_path):
    state = tensors()
    nested = {"model": {"a.b": state.pop("double"), "list": [state.pop("half")]}, "epoch": 3, **state}
    dcp.save(nested, checkpoint_id=tmp_path / "step", no_dist=True)
    want = {"model.a.b": tensors()["double"], "model.list.0": tensors()["half"], **state}
    check(open_checkpoint(tmp_path / "step", allow_pickle=False), want)


PLACEMENTS = {
    "rows": [Replicate(), Shard(0), Replicate()],
    "columns": [Replicate(), Replicate(), Shard(1)],
    "both": [Replicate(), Shard(0), Shard(1)],
    "few": [Replicate(), Shard(0), Replicate()],
    "whole": [Replicate(), Replicate(), Replicate()],
}


def sharded_state():
    return {
        "rows": draw(7, 4, dtype=torch.bfloat16),
        "columns": draw(3, 5, 2),
        "both": draw(5, 7, dtype=torch.float64),
        "few": draw(1, 3, dtype=torch.bfloat16),
        "whole": draw(3, 3),
    }


def save_shards(directory):
    mesh = mesh_of("2x2")
    state = {
        key: distribute_tensor(tensor, mesh, PLACEMENTS[key], src_data_rank=None)
        for key, tensor in sharded_state().items()
    }
    dcp.save({"model": state}, checkpoint_id=directory)
    dist.barrier()


@pytest.fixture(scope="module")
def of_four_ranks(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    pool.run(4, save_shards, str(folder))
    return folder


def test_a_dcp_directory_of_several_ranks(of_four_ranks):
    """Regions across the chunks that four ranks wrote, uneven ones too."""
    assert len(list(of_four_ranks.glob("*.distcp"))) > 1
    metadata = dcp.FileSystemReader(of_four_ranks).read_metadata()
    assert len(metadata.state_dict_metadata["model.both"].chunks) == 4
    found = open_checkpoint(of_four_ranks, allow_pickle=False)
    want = {f"model.{key}": tensor for key, tensor in sharded_state().items()}
    check(found, want)
    lazy, both = LazyTensor(found["model.both"]), want["model.both"]
    for low in range(5):
        for high in range(low, 6):
            region = (slice(1, 6), slice(low, high))
            assert torch.equal(read(lazy.t()[:7].node, region), both.t()[region])


def test_a_region_of_a_dcp_directory_reads_its_chunks_only(of_four_ranks, tmp_path):
    shutil.copytree(of_four_ranks, tmp_path, dirs_exist_ok=True)
    found = open_checkpoint(tmp_path, allow_pickle=False)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    kept = {
        info.relative_path
        for index, info in metadata.storage_data.items()
        if index.fqn == "model.rows" and tuple(index.offset) == (0, 0)
    }
    for file in tmp_path.glob("*.distcp"):
        if file.name not in kept:
            file.unlink()
    assert torch.equal(read(found["model.rows"], (slice(1, 3), slice(0, 2))), sharded_state()["rows"][1:3, :2])
    with pytest.raises(ValueError, match=r"model\.rows cannot be read"):
        read(found["model.rows"])


def test_metadata_that_would_run_code_is_refused(tmp_path):
    dcp.save(tensors(), checkpoint_id=tmp_path / "step", no_dist=True)
    payload = pickle.dumps(Bomb(tmp_path / "bombed"))
    (tmp_path / "step" / ".metadata").write_bytes(payload)
    with pytest.raises(ValueError, match=r"step/\.metadata is no metadata of a torch DCP checkpoint.*check_call"):
        open_checkpoint(tmp_path / "step", allow_pickle=True)
    assert not (tmp_path / "bombed").exists()
    pickle.loads(payload)
    assert (tmp_path / "bombed").exists()  # else the test shows nothing


def global_of(module, name):
    """A pickle of protocol 4 that looks `name` up and calls it with one text."""
    file = io.BytesIO()
    pickler = pickle._Pickler(file, protocol=4)
    pickler.write(pickle.PROTO + b"\x04")
    for text in (module, name):
        pickler.save(text)
    pickler.write(pickle.STACK_GLOBAL)
    pickler.save(("touch bombed",))
    pickler.write(pickle.REDUCE + pickle.STOP)
    return file.getvalue()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch.serialization", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("pathlib", "os.system"),
        ("collections", "_sys.exit"),
    ],
)
def test_metadata_that_reaches_for_anything_else_is_refused(tmp_path, monkeypatch, module, name):
    """Dotted names too, which a pickle of protocol 4 may have."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(global_of(module, name))
    with pytest.raises(ValueError, match=re.escape(f"{module}.{name}")):
        open_checkpoint(tmp_path, allow_pickle=True)
    assert not (tmp_path / "bombed").exists()


@pytest.mark.parametrize("data", [b"", b"garbage", pickle.dumps(5), pickle.dumps({"state_dict_metadata": {}}), b"\x80"])
def test_metadata_that_is_none(tmp_path, data):
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(ValueError, match=r"\.metadata is no metadata of a torch DCP checkpoint"):
        open_checkpoint(tmp_path, allow_pickle=False)


def test_metadata_with_a_changed_word_or_cut_short_is_readable_or_refused(tmp_path):
    dcp.save(tensors(), checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    damaged = [data[: len(data) * part // 40] for part in range(40)]
    for word in re.finditer(rb"[A-Za-z_.]{4,}", data):
        damaged += [
            data[: word.start()] + change(word[0]) + data[word.end() :]
            for change in (bytes.swapcase, lambda text: text[::-1])
        ]
    for each in damaged:
        (tmp_path / ".metadata").write_bytes(each)
        listed = attempt(DcpDirectory(tmp_path).list)
        if isinstance(listed, Failure):
            assert listed.kind == "ValueError", listed.trace
            assert str(tmp_path) in listed.message


@pytest.mark.parametrize("kind", ["missing", "truncated", "garbage"])
def test_the_data_of_a_dcp_directory_is_damaged(tmp_path, kind):
    dcp.save({"w": draw(40, 50)}, checkpoint_id=tmp_path, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    if kind == "missing":
        file.unlink()
    elif kind == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.write_bytes(os.urandom(file.stat().st_size))
    leaf = open_checkpoint(tmp_path, allow_pickle=False)["w"]
    with pytest.raises(ValueError, match=rf"(?s){tmp_path}: w cannot be read .*damaged"):
        read(leaf, (slice(3, 5), slice(0, 2)))


# ---------------------------------------------------------------------- what is not there, or not whole


def test_nothing_there(tmp_path):
    for name in ("model.safetensors", "model.pt", "directory"):
        with pytest.raises(FileNotFoundError, match=rf"there is no checkpoint at {tmp_path / name}"):
            open_checkpoint(tmp_path / name, allow_pickle=True)


def test_an_empty_directory(tmp_path):
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} holds no checkpoint: no \*\.safetensors, no torch DCP"):
        open_checkpoint(tmp_path, allow_pickle=True)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_two_files_and_no_index(tmp_path, suffix):
    for name in ("a", "b"):
        (tmp_path / f"{name}{suffix}").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"{tmp_path} holds 2 files of weights and no .*index\.json: name the one"):
        open_checkpoint(tmp_path, allow_pickle=True)


def damage(path, kind):
    size = path.stat().st_size
    if kind == "missing":
        path.unlink()
    elif kind == "empty":
        os.truncate(path, 0)
    elif kind == "half its header":
        os.truncate(path, 20)
    elif kind == "its last byte gone":
        os.truncate(path, size - 1)
    elif kind == "one byte more":
        with open(path, "ab") as file:
            file.write(b"x")
    elif kind == "garbage":
        path.write_bytes(random.Random(0).randbytes(size))
    elif kind == "a text":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    else:
        path.unlink()
        path.mkdir()


KINDS = ["empty", "half its header", "its last byte gone", "garbage", "a text"]


@pytest.mark.parametrize("kind", [*KINDS, "one byte more"])
def test_a_safetensors_file_is_damaged(tmp_path, kind):
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    damage(path, kind)
    for place in (path, tmp_path):
        with pytest.raises(ValueError, match=rf"(?s){path} cannot be read as safetensors .*copy it again"):
            open_checkpoint(place, allow_pickle=False)


@pytest.mark.parametrize("kind", [*KINDS, "missing", "a directory"])
def test_one_of_several_safetensors_files_is_damaged(tmp_path, kind):
    save_sharded(tmp_path, tensors())
    path = tmp_path / "model-00002-of-00003.safetensors"
    damage(path, kind)
    error = FileNotFoundError if kind == "missing" else ValueError
    with pytest.raises(error, match=rf"{path} .*(incomplete|truncated or damaged).*copy it again"):
        open_checkpoint(tmp_path, allow_pickle=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_is_damaged(tmp_path, kind):
    path = tmp_path / "model.pt"
    torch.save({"w": draw(40, 50)}, path)
    damage(path, kind)
    with pytest.raises(ValueError, match=rf"{path} cannot be read as a state dict"):
        open_checkpoint(path, allow_pickle=True)


def test_a_pickle_with_any_byte_changed_is_readable_or_refused(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(tensors(), path)
    data = path.read_bytes()
    choose = random.Random(0)
    for _ in range(150):
        damaged = bytearray(data)
        damaged[choose.randrange(len(data))] = choose.randrange(256)
        path.write_bytes(damaged)
        listed = attempt(PickleFile(path).list)
        if isinstance(listed, Failure):
            assert listed.kind == "ValueError", listed.trace
            assert str(path) in listed.message


def test_a_file_that_goes_away_between_listing_and_reading(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    leaf = open_checkpoint(path, allow_pickle=False)["half"]
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{path} is missing"):
        read(leaf)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "3",
        '{"weight_map": 3}',
        '{"weight_map": [1, 2]}',
        '{"weight_map": {"w": 3}}',
        '{"weight_map": {"w": ["model-00001-of-00003.safetensors"]}}',
        '{"weight_map": {"w": null}}',
    ],
)
def test_an_index_that_is_none(tmp_path, text):
    save_sharded(tmp_path, tensors())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(ValueError, match=rf"{index} is no index of a safetensors checkpoint"):
        open_checkpoint(tmp_path, allow_pickle=False)


def test_an_index_that_is_no_text(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=rf"{index} is no index"):
        open_checkpoint(tmp_path, allow_pickle=False)


def rewrite_index(directory, change):
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))
    return index


def test_an_index_that_names_a_tensor_no_file_holds(tmp_path):
    save_sharded(tmp_path, tensors())
    index = rewrite_index(tmp_path, lambda names: names.update(lost="model-00002-of-00003.safetensors"))
    said = rf"{index} says that model-00002-of-00003\.safetensors holds lost, and it does not.*incomplete or mixed up"
    with pytest.raises(ValueError, match=said):
        open_checkpoint(tmp_path, allow_pickle=False)


def test_an_index_that_names_another_file_than_the_one(tmp_path):
    weight_map = save_sharded(tmp_path, tensors())
    other = next(name for name in weight_map.values() if name != weight_map["half"])
    index = rewrite_index(tmp_path, lambda names: names.update(half=other))
    with pytest.raises(ValueError, match=rf"{index} says that {other} holds half, and it does not"):
        open_checkpoint(tmp_path, allow_pickle=False)


def test_an_index_that_names_a_missing_file(tmp_path):
    save_sharded(tmp_path, tensors())
    rewrite_index(tmp_path, lambda names: names.update(lost="model-00004-of-00003.safetensors"))
    with pytest.raises(
        FileNotFoundError, match=rf"{tmp_path}/model-00004-of-00003\.safetensors is missing.*incomplete"
    ):
        open_checkpoint(tmp_path, allow_pickle=False)


def test_files_in_a_folder_of_the_index(tmp_path):
    (tmp_path / "parts").mkdir()
    save_file({"w": draw(2, 2)}, tmp_path / "parts" / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "parts/one.safetensors"}}))
    check(open_checkpoint(tmp_path, allow_pickle=False), {"w": draw(2, 2)})


def test_listing_opens_but_does_not_read(tmp_path, monkeypatch):
    save_sharded(tmp_path, tensors())
    read_from = []
    monkeypatch.setattr(SafetensorsFile, "open", lambda self: read_from.append(self.path))
    sources = [SafetensorsFile(Path(path)) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert list_sources(sources, {}, "no index").keys() == tensors().keys()
    assert read_from == []
