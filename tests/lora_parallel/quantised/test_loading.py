"""Quantised bases built on meta: each rank quantises, or reads, its own slices, and has what a load in memory gives."""

from __future__ import annotations

import gc
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchao.quantization import FqnToConfig, Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, PerGroup
from torchao.utils import TorchAOBaseTensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Phi3Config,
    Phi3ForCausalLM,
    TorchAoConfig,
)

from lora_parallel import export_merged, meta_init, parallelize, read_plan
from lora_parallel.distributed.dtensors import local
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.layers.linear_classes import QuantisedLayer
from lora_parallel.lazy.materialize import read_weights
from lora_parallel.lazy.tracking import check_checkpoints, settle
from lora_parallel.loading.quantisers import check_loaded
from lora_parallel.planning.plan import resolve_plan
from lora_parallel.quantised import packed_weight
from lora_parallel.quantised.conversion import check_quantised, hold_as_bytes
from tests.cases import cases
from tests.lora_parallel.quantised.test_conversion import FEW, KINDS, LLAMA, base, batch, dense, gradients
from tests.oracle import differing, fill_adapters, on_mesh, ranks_of
from tests.oracle.workers import Failure, attempt

pytestmark = pytest.mark.filterwarnings("ignore")
FUSED = ("nf4", "nf4, double", "int8", "torchao int8 by group")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Checkpoints: dense ones of three families, and a Llama as each quantiser saves it."""
    root = tmp_path_factory.mktemp("folders")
    found = {name: str(root / name) for name in ("llama", "phi3", "gpt2", *KINDS)}
    dense(found["llama"])
    torch.manual_seed(0)
    small = {**LLAMA, "pad_token_id": 0, "num_hidden_layers": 1}
    Phi3ForCausalLM(Phi3Config(**small)).save_pretrained(found["phi3"])
    GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=1, n_head=4, vocab_size=131, n_positions=64)).save_pretrained(
        found["gpt2"]
    )
    for kind in KINDS:
        base(found["llama"], kind).save_pretrained(found[kind])
    return found


def loaded(path: str, kind: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    settings = {} if kind is None else {"quantization_config": KINDS[kind]()}
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **settings)


def deferred(path: str, kind: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    with meta_init():
        return loaded(path, kind, dtype)


def differences(model: nn.Module, want: nn.Module) -> list[str]:
    """Names of what differs by a bit, or is not there."""
    got, wanted = dict(model.named_parameters()), dict(want.named_parameters())
    layers = {name for name, m in want.named_modules() if isinstance(m, QuantisedLayer)}
    assert layers == {name for name, m in model.named_modules() if isinstance(m, QuantisedLayer)}
    return [
        name
        for name in {**got, **wanted}
        if name not in got
        or name not in wanted
        or got[name].dtype != wanted[name].dtype
        or not torch.equal(local(got[name]), local(wanted[name]))
    ] + [n for n in layers if not torch.equal(model.get_submodule(n).dense(), want.get_submodule(n).dense())]


@pytest.mark.parametrize("dtype", cases(torch.bfloat16, matrix=[torch.float32]))
@pytest.mark.parametrize(
    ("family", "kind"),
    cases(
        *((family, kind) for family in ("llama", "saved") for kind in KINDS if kind not in ("nf4", "fp4")),
        *(("gpt2", "nf4"), ("gpt2", "int8")),
        matrix=[(family, kind) for family in ("llama", "saved") for kind in ("nf4", "fp4")],
    ),
)
def test_what_is_read_is_what_a_load_in_memory_gives(folders, monkeypatch, family, kind, dtype):
    """Bit for bit, a few rows at a time; and adapters are drawn alike."""
    monkeypatch.setattr(packed_weight, "_CHUNK", 5000)
    path, settings = (folders[kind], None) if family == "saved" else (folders[family], kind)
    want, got = loaded(path, settings, dtype), deferred(path, settings, dtype)
    check_checkpoints(got, materialize=False)
    adapters = []
    for model in (want, got):
        torch.manual_seed(1)
        adapters.append(get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")))
    for one, other in zip(*(m.named_parameters() for m in adapters), strict=True):
        if "lora_" in one[0]:
            assert one[0] == other[0]
            assert one[1].dtype == other[1].dtype
            assert torch.equal(one[1], other[1])
    for model in (want, got):
        check_loaded(model)
        check_quantised(model)
        hold_as_bytes(model)
    settle(got)
    read_weights(got, "cpu")
    assert differences(got, want) == []
    assert any(isinstance(module, QuantisedLayer) for module in got.modules())


def on_ranks(mesh_text: str, folders: dict[str, str], kinds: list[str]) -> dict[str, Any]:
    mesh, config = on_mesh(mesh_text)
    sources = [(folders["phi3" if kind in FUSED else "llama"], kind) for kind in kinds]
    sources += [*((folders[kind], None) for kind in kinds), (folders["gpt2"], "nf4")]
    packed_weight._CHUNK = 5000
    found = {}
    for path, kind in sources:
        models = [attempt(sharded, make(path, kind), mesh, config) for make in (deferred, loaded)]
        failed = [model.trace for model in models if isinstance(model, Failure)]
        found[f"{Path(path).name} {kind}"] = failed or shards(*models)
    got, want = (sharded(make(folders["llama"], "nf4"), mesh, config) for make in (deferred, loaded))
    ids = batch().chunk(dp_size(mesh))[dp_rank(mesh)]
    return {**found, "changed": differing(gradients(got, ids), gradients(want, ids))}


def sharded(model: nn.Module, mesh: Any, config: Any) -> nn.Module:
    return parallelize(model, mesh, config, lora_config=LoraConfig(r=2, target_modules="all-linear"))


def shards(got: nn.Module, want: nn.Module) -> list[str]:
    wanted = dict(want.named_parameters())
    return [name for name, p in got.named_parameters() if not torch.equal(local(p), local(wanted[name]))]


@pytest.mark.parametrize(
    ("mesh", "kinds"), cases(("1x2", FEW), matrix=[("2x2", list(KINDS)), ("1x4", ["nf4", "int8"])])
)
def test_each_rank_has_its_shard_of_what_a_load_in_memory_gives(pool, folders, mesh, kinds):
    for found in pool.run(ranks_of(mesh), on_ranks, mesh, folders, kinds):
        assert not found.pop("changed")
        assert found == {name: [] for name in found}
        assert len(found) == 2 * len(kinds) + 1


# ---------------------------------------------------------------------- what it costs


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and how many there were at once; mapped files are no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.sizes: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for group, counted in (((args, kwargs), 0), (result, 1)):  # what no operation has made is a mapped file
            for each in tree_leaves(group):
                if type(each) in (Tensor, nn.Parameter) and not each.is_meta:
                    storage = each.untyped_storage()
                    self.sizes.setdefault(storage._cdata, (StorageWeakRef(storage), counted * storage.nbytes()))
        self.sizes = {key: held for key, held in self.sizes.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.sizes.values()))
        return result


WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 1, "vocab_size": 64}


def peaks(mesh_text: str, path: str, saved: dict[str, str], whole: bool) -> dict[str, tuple[float, float]]:
    """Of each kind: what reading takes beside the shards, in the largest dense slice of this rank; and reads of it."""
    mesh, config = on_mesh(mesh_text)
    packed_weight._CHUNK = 2**40 if whole else 2**14
    found = {}
    for name, (source, kind) in {
        **{f"dense {kind}": (path, kind) for kind in saved},
        **{f"saved {kind}": (saved[kind], None) for kind in saved},
    }.items():
        model = parallelize(
            deferred(source, kind),
            mesh,
            config,
            lora_config=LoraConfig(r=2, target_modules=["q_proj"]),
            materialize=False,
        )
        held = {n: p for n, p in model.named_parameters() if p.is_meta}
        read = {(r.file, r.key, r.region): r.bytes for r in read_plan(model) if "lora_" not in r.parameter}
        gc.disable()  # what refers to itself counts: on a GPU, too, it would stay
        with Live() as live:
            read_weights(model, "cpu")
        gc.enable()
        shards = sum(local(model.get_parameter(n)).nbytes for n in held)
        found[name] = (live.peak - shards) / (WIDE["hidden_size"] * WIDE["intermediate_size"] * 4), sum(read.values())
    return found


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> tuple[str, dict[str, str]]:
    root = tmp_path_factory.mktemp("wide")
    dense(str(root / "dense"), **WIDE)
    saved = {kind: str(root / kind) for kind in FEW}
    for kind, folder in saved.items():
        loaded(str(root / "dense"), kind).save_pretrained(folder)
    return str(root / "dense"), saved


def weight_bytes(folder: str) -> int:
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


@pytest.mark.parametrize(
    ("mesh", "kinds"), cases(("2x1", FEW[::2]), ("1x2", FEW[:2]), matrix=[(mesh, FEW) for mesh in ("2x2", "4x1")])
)
def test_no_rank_holds_more_than_a_slice_while_reading(pool, wide, mesh, kinds):
    """Beside its shards: less than its share of the largest weight, dense; and it reads its share of the files."""
    path, saved = wide[0], {kind: wide[1][kind] for kind in kinds}
    whole_rows, part = mesh.endswith("x1"), 1 / ranks_of(mesh)
    for found in pool.run(ranks_of(mesh), peaks, mesh, path, saved, False):
        assert len(found) == 2 * len(saved)
        for name, (peak, read) in found.items():
            assert peak < part, name
            # The statistics of double quantisation are of the whole, those of a row of the whole row, and a file of
            # four bits in one column is read by rows.
            if "saved" not in name and (whole_rows or ("int8" not in name and "float8" not in name)):
                share = 1 + part if "double" in name else part
                assert read == pytest.approx(share * weight_bytes(path), rel=0.02), name
            if whole_rows and "saved" in name and "double" not in name:
                assert read == pytest.approx(part * weight_bytes(saved[name.removeprefix("saved ")]), rel=0.02), name


def test_a_slice_in_one_piece_would_be_seen(pool, wide):
    for found in pool.run(2, peaks, "2x1", *wide, True):
        assert min(peak for name, (peak, _) in found.items() if "dense" in name) > 0.5


# ---------------------------------------------------------------------- a config and tensors that disagree


def without(folder: str, target: Path, **changes: Any) -> str:
    """A copy of a checkpoint with another config.json; None takes a key out."""
    shutil.copytree(folder, target)
    config = {**json.loads((target / "config.json").read_text()), **changes}
    (target / "config.json").write_text(json.dumps({key: v for key, v in config.items() if v is not None}))
    return str(target)


def settings_of(folder: str) -> Any:
    return json.loads((Path(folder) / "config.json").read_text())["quantization_config"]


def problem_of(make: Any) -> str:
    """What is wrong with a model, where it is loaded or when it is to be sharded."""
    try:
        model = make()
        check_checkpoints(model, materialize=False)
        check_loaded(model)
        check_quantised(model)
    except (OSError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao int8", "torchao float8"])
def test_a_checkpoint_whose_config_says_otherwise_is_refused(folders, tmp_path, kind):
    """Under meta_init, by one error that names the checkpoint and the tensor; and in memory where nobody else would."""
    plain = without(folders[kind], tmp_path / "plain", quantization_config=None)
    assert "model.layers.0" in problem_of(lambda: deferred(plain))
    assert "model.safetensors holds" in problem_of(lambda: loaded(plain)) or kind == "nf4"  # transformers' own there
    assert problem_of(lambda: loaded(plain))

    unquantised = without(folders["llama"], tmp_path / "dense", quantization_config=settings_of(folders[kind]))
    said = problem_of(lambda: deferred(unquantised))
    assert "config" in said
    assert "checkpoint's" in said
    assert unquantised in said
    assert problem_of(lambda: loaded(unquantised))

    wide = without(folders[kind], tmp_path / "wide", intermediate_size=768)
    assert "and the layer has (256, 768)" in problem_of(lambda: deferred(wide))
    assert re.search(r"and the layer \(768, 256\)", problem_of(lambda: loaded(wide)))

    for other in ("fp4", "int8", "torchao int8 by group", "torchao float8"):
        if other != kind:
            mixed = without(folders[kind], tmp_path / other, quantization_config=settings_of(folders[other]))
            said = problem_of(lambda path=mixed: deferred(path))
            assert mixed in said
            assert "the config is not the checkpoint's" in said
            assert problem_of(lambda path=mixed: loaded(path))


def damaged(folder: str, target: Path, key: str, length: int | None) -> str:
    """A copy of a checkpoint with a tensor cut short, or left out."""
    shutil.copytree(folder, target)
    with safe_open(target / "model.safetensors", "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    (whole,) = (name for name in tensors if name.endswith(f"layers.1.mlp.up_proj.{key}"))
    kept = tensors.pop(whole)
    if length is not None:
        tensors[whole] = kept[:length].clone()
    save_file(tensors, target / "model.safetensors", metadata)
    return str(target)


@pytest.mark.parametrize(
    ("kind", "key", "length", "reason"),
    [
        ("nf4, double", "weight.nested_absmax", None, "2048 scales in torch.uint8, and no scales of these"),
        ("nf4, double", "weight.nested_absmax", 4, "2048 scales have 4 of their own"),
        ("nf4", "weight.absmax", 2044, "2048 blocks have 2044 scales"),
        ("int8", "SCB", 508, "508 scales"),
        ("torchao int8", "_weight_scale", 508, "no format whose tensors are rows of the weight"),
    ],
)
def test_a_checkpoint_without_all_of_its_scales_is_refused(folders, tmp_path, kind, key, length, reason):
    path = damaged(folders[kind], tmp_path / "damaged", key, length)
    assert reason in problem_of(lambda: deferred(path))
    assert reason in problem_of(lambda: loaded(path))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_config_that_skips_what_was_quantised_is_refused(folders, tmp_path, kind):
    skips = {**settings_of(folders[kind]), "llm_int8_skip_modules": ["o_proj", "lm_head"]}
    path = without(folders[kind], tmp_path / "skips", quantization_config=skips)
    said = problem_of(lambda: deferred(path))
    assert "config.json leaves model.layers.0.self_attn.o_proj as it is, and the files hold" in said
    assert problem_of(lambda: loaded(path))


def by_name(**layers: Any) -> TorchAoConfig:
    names = {name.replace("__", "."): config for name, config in layers.items()}
    return TorchAoConfig(FqnToConfig({"_default": Int8WeightOnlyConfig(), **names}))


HEALTHY: dict[str, Any] = {
    "one layer otherwise": lambda: by_name(
        model__layers__1__mlp__up_proj=Int8WeightOnlyConfig(granularity=PerGroup(64))
    ),
    "one layer not": lambda: by_name(model__layers__1__mlp__up_proj=None),
    "all but one": lambda: TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=["model.layers.0", "lm_head"]),
    "a head that is tied": lambda: TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=[]),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_a_config_leaves_is_left(folders, tmp_path, name):
    path = folders["llama"]
    if "tied" in name:
        path = str(tmp_path / "tied")
        dense(path, tie_word_embeddings=True)
    with meta_init():
        late = AutoModelForCausalLM.from_pretrained(path, quantization_config=HEALTHY[name]())
    now = AutoModelForCausalLM.from_pretrained(path, quantization_config=HEALTHY[name]())
    for model in (late, now):
        assert problem_of(lambda model=model: model) == ""
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
        assert problem_of(lambda adapted=adapted: adapted) == ""
        hold_as_bytes(adapted)
    settle(late)
    read_weights(late, "cpu")
    assert differences(late, now) == [name for name, _ in late.named_parameters() if "lora_A" in name]  # drawn anew


def test_rows_that_are_quantised_as_they_come_are_not_cut(folders):
    config = TorchAoConfig(Int8DynamicActivationInt8WeightConfig())
    model = AutoModelForCausalLM.from_pretrained(folders["llama"], quantization_config=config)
    hold_as_bytes(model)
    with pytest.raises(ValueError, match="it quantises the rows of its input, of which a tp rank would have a slice"):
        resolve_plan(get_peft_model(model, LoraConfig(target_modules=["down_proj"])), None, 2)


def refused(mesh_text: str, path: str, other: str) -> list[Any]:
    mesh, config = on_mesh(mesh_text)
    found = [attempt(sharded, deferred(path), mesh, config)]
    if dp_rank(mesh) == 0:  # on one rank only
        found.append(attempt(sharded, deferred(other), mesh, config))
    else:
        found.append(attempt(sharded, deferred(path.replace("mixed", "right")), mesh, config))
    return found


def test_it_is_refused_on_every_rank(pool, folders, tmp_path):
    path = without(folders["nf4"], tmp_path / "mixed", quantization_config=settings_of(folders["int8"]))
    shutil.copytree(folders["nf4"], tmp_path / "right")
    for both, one in pool.run(2, refused, "2x1", path, path):
        assert both.kind == one.kind == "ValueError"
        assert "quantised by bitsandbytes to int8, and the files hold weight (uint8)" in both.message
        assert "quantised by bitsandbytes to int8, and the files hold weight (uint8)" in one.message


# ---------------------------------------------------------------------- merged exports


def merged_alone(path: str, kind: str | None) -> Any:
    """The base dequantised by its own quantiser, and the adapter merged by PEFT."""
    model: Any = adapted_again(loaded(path, kind, torch.bfloat16))
    folder = f"{path} {kind} adapter"
    model.save_pretrained(folder)
    base: Any = loaded(path, kind, torch.bfloat16)
    if getattr(base, "quantization_method", None) == "bitsandbytes":
        base = base.dequantize()
    else:
        for layer in base.modules():
            if isinstance(layer, nn.Linear) and isinstance(layer.weight, TorchAOBaseTensor):
                layer.weight = nn.Parameter(layer.weight.dequantize().to(torch.bfloat16), requires_grad=False)
        base.config.__dict__.pop("quantization_config")
        del base.hf_quantizer
    base._weight_conversions = None  # transformers cannot revert a quantiser's, and saves nothing
    return PeftModel.from_pretrained(base, folder).merge_and_unload()


def adapted_again(base: nn.Module) -> Any:
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
    fill_adapters(model)
    return model


def exported(mesh_text: str, sources: dict[str, tuple[str, str | None]], root: str) -> dict[str, Any]:
    mesh, config = on_mesh(mesh_text)
    found = {}
    for index, (name, (path, kind)) in enumerate(sources.items()):
        made = (deferred if index % 2 else loaded)(path, kind, torch.bfloat16)
        model = parallelize(adapted_again(made), mesh, config)
        found[name] = attempt(export_merged, model, Path(root) / name)
    return found


@pytest.mark.parametrize(
    ("mesh", "kinds"), cases(("1x2", FEW[2:]), matrix=[("2x2", list(KINDS)), ("4x1", list(KINDS))])
)
def test_an_export_is_dequantised_and_merged(pool, folders, tmp_path, mesh, kinds):
    sources: dict[str, tuple[str, str | None]] = {kind: (folders["llama"], kind) for kind in kinds}
    sources |= {"saved nf4, double": (folders["nf4, double"], None), "phi3": (folders["phi3"], "nf4")}
    sources |= {"gpt2": (folders["gpt2"], "int8"), "saved torchao float8": (folders["torchao float8"], None)}
    for name, source in sources.items():
        merged_alone(*source).save_pretrained(tmp_path / "alone" / name)
    for found in pool.run(ranks_of(mesh), exported, mesh, sources, str(tmp_path / mesh)):
        assert not [answer.trace for answer in found.values() if isinstance(answer, Failure)]
    for name in sources:
        got, want = (tmp_path / side / name for side in (mesh, "alone"))
        assert (got / "config.json").read_text() == (want / "config.json").read_text()
        wanted = load_file(want / "model.safetensors")
        for key, tensor in load_file(got / "model.safetensors").items():
            want_it = wanted.pop(key)
            if name == "gpt2" and tensor.dim() == 2 and ".h." in key:
                want_it = want_it.T  # transformers dequantises a Conv1D into a linear layer
            # Sums in bfloat16, of products of factors in other pieces.
            torch.testing.assert_close(tensor, want_it, rtol=1e-2, atol=1e-4, msg=f"{name} {key}")
        assert not wanted
        AutoModelForCausalLM.from_pretrained(got)
