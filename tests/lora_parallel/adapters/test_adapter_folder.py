"""Adapter folders are PEFT's, from any mesh and into any; what does not fit is refused and changes nothing."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from lora_parallel import load_adapter, load_checkpoint, parallelize, save_adapter, save_checkpoint
from lora_parallel.adapters import adapter_folder as adapter_writer
from lora_parallel.adapters import inspection
from lora_parallel.adapters.inspection import adapter_parameters
from lora_parallel.distributed.dtensors import region_of
from tests.cases import cases
from tests.oracle import causal_lm, differing, fill_adapters, full, lora_config, on_mesh, ranks_of
from tests.oracle.workers import Failure, attempt

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
IDS = torch.arange(24).view(2, 12)
causal_lm = partial(causal_lm, num_hidden_layers=1)


class Tiny(nn.Module):
    """A base of the user's own: PEFT writes its class into the config where there is no task type."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def peft_model(name="default", base=None, **changes):
    model = get_peft_model(base or causal_lm(dtype=torch.float32), lora_config(**changes), adapter_name=name)
    fill_adapters(model)
    return model


def named_base():
    model = causal_lm(dtype=torch.float32)
    model.name_or_path = "some/base"
    return model


def two_adapters():
    model = peft_model()
    model.add_adapter("second", lora_config(r=2, target_modules=["q_proj"]))
    fill_adapters(model, seed=7)
    return model


EMBEDDING_SAVED = {"modules_to_save": ["embed_tokens"]}
# What PEFT saves in one process: (model, adapter to save).
KINDS = {
    "task type": (peft_model, "default"),
    "no task type": (lambda: peft_model(task_type=None), "default"),
    "named base": (lambda: peft_model(base=named_base()), "default"),
    "rslora": (lambda: peft_model(use_rslora=True, r=4), "default"),
    "patterns": (lambda: peft_model(rank_pattern={"q_proj": 5}, alpha_pattern={"down_proj": 3}), "default"),
    "other name": (lambda: peft_model("other"), "other"),
    "second of two": (two_adapters, "second"),
    "first of two": (two_adapters, "default"),
    "bfloat16": (lambda: peft_model().to(torch.bfloat16), "default"),
    "bfloat16 base": (lambda: peft_model(base=causal_lm(dtype=torch.bfloat16)), "default"),
    "head saved": (lambda: peft_model(modules_to_save=["lm_head"]), "default"),
    "tied embedding saved": (
        lambda: peft_model(base=causal_lm(dtype=torch.float32, tie_word_embeddings=True), **EMBEDDING_SAVED),
        "default",
    ),
    "tied embedding and head saved": (
        lambda: peft_model(
            base=causal_lm(dtype=torch.float32, tie_word_embeddings=True), **EMBEDDING_SAVED, ensure_weight_tying=True
        ),
        "default",
    ),
    "biases": (
        lambda: peft_model(base=causal_lm(dtype=torch.float32, attention_bias=True), bias="lora_only"),
        "default",
    ),
    "own base": (
        lambda: get_peft_model(Tiny(), LoraConfig(r=3, target_modules=["up", "down"])),
        "default",
    ),
    "embeddings": (lambda: peft_model(target_modules=["embed_tokens", "lm_head", "q_proj"]), "default"),
}
PLANS = {"own base": {"up": "colwise", "down": "rowwise"}}


def built(kind):
    torch.manual_seed(0)
    return KINDS[kind][0]()


def save_kinds(mesh_text, kinds, root):
    mesh, _ = on_mesh(mesh_text)
    folders = {}
    for kind in kinds:
        _, config = on_mesh(mesh_text, tp_plan=PLANS.get(kind, "auto"))
        model = parallelize(built(kind), mesh, config)
        folders[kind] = attempt(save_adapter, model, Path(root) / kind, KINDS[kind][1])
    return folders


def contents(folder):
    """Tensors (with their order in the file), metadata, config and whatever else PEFT or we put there."""
    with open(folder / WEIGHTS, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    others = {path.name: path.read_text() for path in folder.iterdir() if path.is_file() and path.name != WEIGHTS}
    del others[CONFIG]
    config = json.loads((folder / CONFIG).read_text())
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()  # a set in memory, written in the order of its hashes
    return load_file(folder / WEIGHTS), header, json.dumps(config), others


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x2", "1x1", "1x4", "4x1", "2x2x2"]))
def test_a_saved_folder_is_what_peft_saves_in_one_process(pool, tmp_path, mesh):
    kinds = [kind for kind in KINDS if kind != "embeddings"] if mesh == "1x2" else ["task type", "patterns"]
    check_folders(pool, tmp_path, mesh, kinds)


def test_adapters_of_embeddings_are_saved_and_loaded_as_peft_does(pool, tmp_path):
    """PEFT writes the frozen weights of adapted embeddings and heads too; such folders must load here."""
    check_folders(pool, tmp_path, "2x2", ["embeddings"])
    for folder in (tmp_path / "peft" / "embeddings", tmp_path / "ours" / "embeddings"):
        check_loaded(pool, "2x2", {"embeddings": folder})


def check_folders(pool, tmp_path, mesh, kinds):
    for kind in kinds:
        model, name = built(kind), KINDS[kind][1]
        model.save_pretrained(tmp_path / "peft" / kind, selected_adapters=[name])
    for folders in pool.run(ranks_of(mesh), save_kinds, mesh, kinds, tmp_path / "ours"):
        for kind, folder in folders.items():
            assert not isinstance(folder, Failure), f"{kind}:\n{folder.trace}"
            name = KINDS[kind][1]
            assert folder == tmp_path / "ours" / kind / ("" if name == "default" else name)
    for kind in kinds:
        name = KINDS[kind][1]
        part = Path(kind) / ("" if name == "default" else name)
        want, want_header, want_config, want_others = contents(tmp_path / "peft" / part)
        got, header, config, others = contents(tmp_path / "ours" / part)
        assert got.keys() == want.keys(), kind
        for key in want:
            assert got[key].dtype == want[key].dtype, (kind, key)
            assert torch.equal(got[key], want[key]), (kind, key)
        assert header == want_header, kind
        assert config == want_config, kind
        assert others == want_others, kind
    assert {path.name for path in (tmp_path / "ours").iterdir()} == set(kinds)  # nothing is left beside


def save_injected(mesh_text, root):
    """Adapters that `parallelize` injected: with a task type, and without."""
    mesh, config = on_mesh(mesh_text, seed=3)
    for name, changes in (("task", {}), ("none", {"task_type": None})):
        model = parallelize(causal_lm(dtype=torch.float32), mesh, config, lora_config=lora_config(**changes))
        fill_adapters_as_peft(model)
        save_adapter(model, Path(root) / name)


def fill_adapters_as_peft(model):
    """`fill_adapters` on shards: the full values, this rank's part of them."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
            region = region_of(parameter)
            parameter.to_local().data.copy_(values[region].reshape(parameter.to_local().shape))


def test_injected_adapters_are_saved_as_peft_would(pool, tmp_path):
    pool.run(4, save_injected, "2x2", tmp_path / "ours")
    for name, changes in (("task", {}), ("none", {"task_type": None})):
        peft_model(**changes).save_pretrained(tmp_path / "peft" / name)
        want, _, want_config, _ = contents(tmp_path / "peft" / name)
        got, _, config, _ = contents(tmp_path / "ours" / name)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want)
        assert config == want_config


def saved_and_computed(mesh_text, root):
    mesh, config = on_mesh(mesh_text)
    model = parallelize(peft_model(base=causal_lm()).double(), mesh, config).eval()
    save_adapter(model, root)
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_plain_peft_loads_the_folder_with_the_same_logits(pool, tmp_path):
    answers = pool.run(4, saved_and_computed, "2x2", tmp_path / "adapter")
    model = PeftModel.from_pretrained(causal_lm(), tmp_path / "adapter").eval()
    with torch.no_grad():
        want = model(input_ids=IDS).logits
        base = causal_lm().eval()(input_ids=IDS).logits
    assert (want - base).abs().max() > 1e-3  # else the adapter does nothing
    for logits in answers:
        torch.testing.assert_close(logits, want, rtol=1e-12, atol=1e-12)


def own_value(parameter):
    """A number for each shard of a parameter; copies of one shard have the same."""
    if not isinstance(parameter, DTensor):
        return 1.0
    value = 1.0
    for axis, (coordinate, placement) in enumerate(
        zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
    ):
        value += 0 if placement.is_replicate() else coordinate * 10**axis
    return value


def local(parameter):
    data = parameter.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def round_trip(mesh_text, root):
    """Rank-specific values, saved, zeroed, loaded."""
    mesh, config = on_mesh(mesh_text)
    model = parallelize(built("task type"), mesh, config)
    parameters = adapter_parameters(model)
    base = {name: local(p).clone() for name, p in model.named_parameters() if name not in parameters}
    for parameter in parameters.values():
        local(parameter).fill_(own_value(parameter))
    kept = {name: local(p).clone() for name, p in parameters.items()}
    save_adapter(model, root)
    for parameter in parameters.values():
        local(parameter).zero_()
    load_adapter(model, root)
    return {
        "same": all(torch.equal(local(p), kept[name]) for name, p in parameters.items()),
        "values": {float(v) for t in kept.values() for v in t.unique()},
        "requires_grad": all(p.requires_grad for p in parameters.values()),
        "base": all(torch.equal(local(p), base[n]) for n, p in model.named_parameters() if n in base),
    }


@pytest.mark.parametrize("mesh", ["1x1", "2x2", "1x4", "4x1", "2x2x2"])
def test_rank_specific_values_survive_saving_and_loading(pool, tmp_path, mesh):
    answers = pool.run(ranks_of(mesh), round_trip, mesh, tmp_path / "adapter")
    for answer in answers:
        assert answer["same"]
        assert answer["requires_grad"]
        assert answer["base"]
    seen = set().union(*(answer["values"] for answer in answers))
    assert (len(seen) > 1) == (mesh != "1x1")
    stored = {float(v) for t in load_file(tmp_path / "adapter" / WEIGHTS).values() for v in t.unique()}
    assert stored == seen  # each rank's values are in the file


def load_elsewhere(mesh_text, folders):
    """The adapters, in full, of models whose adapters were zero and then loaded."""
    mesh, config = on_mesh(mesh_text)
    found = {}
    for kind, folder in folders.items():
        model = built(kind)
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.data.zero_()
        model = parallelize(model, mesh, config)
        name = KINDS[kind][1]
        load_adapter(model, folder, name)
        found[kind] = {n: full(p) for n, p in adapter_parameters(model, name).items()}
    return found


CUT_TWICE, NAMED = ["patterns", "head saved", "biases"], ["rslora", "other name", "second of two", "bfloat16"]


@pytest.mark.parametrize(
    ("mesh", "kinds"), cases(("2x2", CUT_TWICE), ("1x2", NAMED), matrix=[("4x1", ["task type", *CUT_TWICE, *NAMED])])
)
def test_peft_folders_load_into_any_mesh(pool, tmp_path, mesh, kinds):
    """Written by PEFT in one process; a non-default adapter from the folder above it, as PEFT writes it."""
    for kind in kinds:
        built(kind).save_pretrained(tmp_path / kind, selected_adapters=[KINDS[kind][1]])
    check_loaded(pool, mesh, {kind: tmp_path / kind for kind in kinds})


def check_loaded(pool, mesh, folders):
    for found in pool.run(ranks_of(mesh), load_elsewhere, mesh, folders):
        for kind in folders:
            want = {n: full(p) for n, p in adapter_parameters(built(kind), KINDS[kind][1]).items()}
            assert found[kind].keys() == want.keys()
            assert any(t.abs().sum() > 0 for t in want.values())
            for name in want:
                assert found[kind][name].dtype == want[name].dtype, (kind, name)
                assert torch.equal(found[kind][name], want[name]), (kind, name)


EMBEDDED = {"with embeddings": {}, "without": {"target_modules": ["q_proj", "embed_tokens"]}}
EMBEDDING = "base_model.model.model.embed_tokens"


def other_embeddings(folder):
    """Fill models from folders of whose embeddings their writer decided; then a resume on what came of it."""
    mesh, config = on_mesh("2x1")
    found = {}
    for name, lora in EMBEDDED.items():
        model = parallelize(peft_model(**lora), mesh, config)
        for parameter in adapter_parameters(model).values():
            local(parameter).zero_()
        load_adapter(model, folder / name)
        found[name] = {n: full(p) for n, p in model.named_parameters()}
        if name == "with embeddings":
            save_checkpoint(model, None, folder / "checkpoint")
            fresh = parallelize(peft_model(**lora), mesh, config)
            found["another base"] = attempt(load_checkpoint, fresh, None, folder / "checkpoint")
            load_adapter(fresh, folder / name)
            load_checkpoint(fresh, None, folder / "checkpoint")
    return found


def test_whoever_wrote_a_folder_decides_about_embeddings(pool, tmp_path):
    want = {}
    for name, lora in EMBEDDED.items():
        model = peft_model(**lora)
        if name == "with embeddings":
            model.get_parameter(f"{EMBEDDING}.weight").data += 1
        model.save_pretrained(tmp_path / name, save_embedding_layers=name == "with embeddings")
        keys = load_file(tmp_path / name / WEIGHTS).keys()
        assert any("embed_tokens" in key and "lora" not in key for key in keys) == (name == "with embeddings")
        want[name] = {n: full(p) for n, p in model.named_parameters()}
    for found in pool.run(2, other_embeddings, tmp_path):
        failure = found.pop("another base")
        assert "1 have other values, shapes or dtypes (first: ['model.embed_tokens.weight'])" in failure.message
        for name, tensors in want.items():
            for key, tensor in tensors.items():
                assert torch.equal(found[name][key], tensor), (name, key)


def resized(base):
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(137)
    return peft_model(base=model)


def base_moved(folder):
    """PEFT asks the base's folder whether the vocabulary was resized; by the time of a resume it may be gone."""
    mesh, config = on_mesh("2x1")
    model = parallelize(resized(folder / "base"), mesh, config)
    embedding = model.get_parameter(f"{EMBEDDING}.weight")
    save_checkpoint(model, None, folder / "checkpoint")
    fresh = resized(folder / "base")
    fresh.get_parameter(f"{EMBEDDING}.weight").data[131:] = 5  # new rows are drawn anew
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "base").rename(folder / "moved")
    dist.barrier()
    fresh = parallelize(fresh, mesh, config)
    filled = fresh.get_parameter(f"{EMBEDDING}.weight")
    same = [torch.equal(full(filled), full(embedding))]
    load_checkpoint(fresh, None, folder / "checkpoint")
    load_adapter(fresh, folder / "checkpoint" / "adapter")
    return [*same, torch.equal(full(filled), full(embedding))]


def test_a_resume_does_not_ask_for_the_bases_folder(pool, tmp_path):
    causal_lm(dtype=torch.float32).save_pretrained(tmp_path / "base")
    assert pool.run(2, base_moved, tmp_path) == [[False, True]] * 2


BOTH_ENDS = {"modules_to_save": ["embed_tokens", "lm_head"]}
ROWS = torch.arange(104, 140).view(4, 9)


def with_new_tokens(base, seed):
    """The base with a vocabulary of 140 tokens, 131 of which were trained."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(140, mean_resizing=False)
    return model


def on_and_off(model):
    with torch.no_grad():
        on = model.eval()(input_ids=ROWS).logits
        with model.disable_adapter():
            return on, model(input_ids=ROWS).logits


def resized_folders(mesh_text, root):
    """Ours, and what a model with other new rows computes after it loads each of the two folders."""
    mesh, config = on_mesh(mesh_text)
    model = parallelize(peft_model(base=with_new_tokens(root / "base", 5), **BOTH_ENDS), mesh, config)
    save_adapter(model, root / "ours")
    found = {}
    for name in ("ours", "peft"):
        fresh = parallelize(peft_model(base=with_new_tokens(root / "base", 6), **BOTH_ENDS), mesh, config)
        load_adapter(fresh, root / name)
        found[name] = on_and_off(fresh)
    return found


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x1"]))
def test_a_resized_vocabulary_that_is_saved_whole_keeps_its_base(pool, tmp_path, mesh):
    """PEFT writes the frozen weights under the trained ones as well: the adapter can be turned off after a reload."""
    causal_lm(dtype=torch.float32).save_pretrained(tmp_path / "base")
    one = peft_model(base=with_new_tokens(tmp_path / "base", 5), **BOTH_ENDS)
    one.save_pretrained(tmp_path / "peft")
    answers = pool.run(2, resized_folders, mesh, tmp_path)
    got, want = load_file(tmp_path / "ours" / WEIGHTS), load_file(tmp_path / "peft" / WEIGHTS)
    assert f"{EMBEDDING}.original_module.weight" in want
    assert got.keys() == want.keys()
    assert all(got[key].equal(want[key]) for key in want)
    for found in answers:
        for name, computed in found.items():
            for ours, theirs in zip(computed, on_and_off(one), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=name)
    back = PeftModel.from_pretrained(with_new_tokens(tmp_path / "base", 6), tmp_path / "ours")
    for ours, theirs in zip(on_and_off(back), on_and_off(one), strict=True):
        assert ours.equal(theirs)


# What does not fit: each refused on every rank, nothing changed.


def spoil(good, root):
    """Folders that should not load, by what is wrong with them."""
    folders = {}

    def copy(what):
        folders[what] = root / what.replace(" ", "_")
        shutil.copytree(good, folders[what])
        return folders[what]

    def rewrite(what, change):
        folder = copy(what)
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    def configure(what, **changes):
        folder = copy(what)
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**config, **changes}))

    first = sorted(load_file(good / WEIGHTS))[0]
    last = sorted(load_file(good / WEIGHTS))[-1]
    rewrite("missing key", lambda t: t.pop(last))
    rewrite("unexpected key", lambda t: t.update({"base_model.model.extra": torch.ones(1)}))
    rewrite("renamed key", lambda t: t.update({"base_model.model.other": t.pop(first)}))
    rewrite("wrong shape", lambda t: t.update({last: torch.ones(2, 3)}))
    rewrite("transposed", lambda t: t.update({last: t[last].t().contiguous()}))
    (copy("truncated") / WEIGHTS).write_bytes((good / WEIGHTS).read_bytes()[:-100])
    (copy("cut in the header") / WEIGHTS).write_bytes((good / WEIGHTS).read_bytes()[:50])
    (copy("garbage") / WEIGHTS).write_bytes(b"no tensors at all" * 50)
    (copy("empty file") / WEIGHTS).write_bytes(b"")
    (copy("no weights") / WEIGHTS).unlink()
    (copy("no config") / CONFIG).unlink()
    (copy("config is no json") / CONFIG).write_text("r = 3")
    (copy("config is a list") / CONFIG).write_text("[]")
    (copy("config has no type") / CONFIG).write_text("{}")
    configure("other r", r=4)
    configure("other alpha", lora_alpha=7)
    configure("other scaling", use_rslora=True)
    configure("other pattern", rank_pattern={"q_proj": 5})
    get_peft_model(causal_lm(), IA3Config(target_modules=["k_proj"], feedforward_modules=[])).save_pretrained(
        root / "ia3"
    )
    folders["foreign type"] = root / "ia3"
    rewrite("other values", lambda t: [tensor.add_(1) for tensor in t.values()])
    folders["no such folder"] = root / "nowhere"
    folders["a file"] = good / CONFIG
    return folders


SPOILT = {
    "missing key": ("ValueError", "1 keys are missing"),
    "unexpected key": ("ValueError", "1 are unexpected (first: ['base_model.model.extra'])"),
    "renamed key": ("ValueError", "1 keys are missing"),
    "wrong shape": ("ValueError", "has shape (2, 3), the model's has "),
    "transposed": ("ValueError", "has shape "),
    "truncated": ("ValueError", "cannot be read as safetensors"),
    "cut in the header": ("ValueError", "cannot be read as safetensors"),
    "garbage": ("ValueError", "cannot be read as safetensors"),
    "empty file": ("ValueError", "cannot be read as safetensors"),
    "no weights": ("FileNotFoundError", f"it has no {WEIGHTS}"),
    "no config": ("FileNotFoundError", f"it has no {CONFIG}"),
    "config is no json": ("ValueError", "is no PEFT config"),
    "config is a list": ("ValueError", "is no PEFT config"),
    "config has no type": ("ValueError", "is no PEFT config"),
    "other r": ("ValueError", "r=4, the model's adapter has r=3"),
    "other alpha": ("ValueError", "lora_alpha=7, the model's adapter has lora_alpha=6"),
    "other scaling": ("ValueError", "use_rslora=True"),
    "other pattern": ("ValueError", "rank_pattern={'q_proj': 5}"),
    "foreign type": ("ValueError", "PEFT type 'IA3'; only LORA"),
    "no such folder": ("FileNotFoundError", "is no PEFT adapter folder"),
    "a file": ("FileNotFoundError", "is no PEFT adapter folder"),
    "no such adapter": ("ValueError", "no adapter 'other' in the model; it has: default"),
    "only on rank 1": ("FileNotFoundError", "is no PEFT adapter folder"),
    "other values on rank 1": ("ValueError", "directory is 'a folder with digest "),
    "other name on rank 1": ("ValueError", "adapter_name is 'default' on rank 0 and 'other' on rank 1"),
}


def load_spoilt(mesh_text, good, folders):
    mesh, config = on_mesh(mesh_text)
    model = parallelize(built("task type"), mesh, config)
    before = {name: local(p).clone() for name, p in model.named_parameters()}
    found = {}
    odd = dist.get_rank() == 1
    calls = {what: (folder, "default") for what, folder in folders.items() if what != "other values"}
    calls["no such adapter"] = (good, "other")
    calls["only on rank 1"] = (folders["no such folder"] if odd else good, "default")
    calls["other values on rank 1"] = (folders["other values"] if odd else good, "default")
    calls["other name on rank 1"] = (good, "other" if odd else "default")
    for what, (folder, name) in calls.items():
        error = attempt(load_adapter, model, folder, name)
        same = all(torch.equal(local(p), before[n]) for n, p in model.named_parameters())
        found[what] = error, same
    for parameter in adapter_parameters(model).values():
        local(parameter).zero_()
    # No rank is out of step, and the good one loads, wherever it is mounted.
    load_adapter(model, folders["no such folder"].with_name("copy") if odd else good)
    return found, all(torch.equal(local(p), before[n]) for n, p in model.named_parameters())


def test_a_folder_that_does_not_fit_is_refused_on_every_rank(pool, tmp_path):
    built("task type").save_pretrained(tmp_path / "good")
    folders = spoil(tmp_path / "good", tmp_path)
    shutil.copytree(tmp_path / "good", tmp_path / "copy")
    for rank, (found, loaded) in enumerate(pool.run(4, load_spoilt, "2x2", tmp_path / "good", folders)):
        assert found.keys() == SPOILT.keys()
        assert loaded
        for what, (error, same) in found.items():
            kind, message = SPOILT[what]
            assert isinstance(error, Failure), what
            assert error.kind == kind, (what, error)
            assert message in error.message, (what, error.message)
            assert same, what
            assert error.message.startswith("on rank 1: ") == (what == "only on rank 1" and rank != 1)


class WriteError(OSError):
    """The disk is full, say."""


def failing_saves(root):
    """Saves into a folder that holds another adapter, which fail in turn; then one that does not."""
    mesh, config = on_mesh("2x2")
    model = parallelize(built("task type"), mesh, config)
    target = Path(root) / "adapter"

    def no_space(*args, **kwargs):
        raise WriteError("no space left")

    def half(tensors, file, **kwargs):
        save_file(tensors, file, **kwargs)
        data = Path(file).read_bytes()
        Path(file).write_bytes(data[: len(data) // 2])
        raise WriteError("no space left")

    def drop(tensors, file, **kwargs):
        save_file(dict(list(tensors.items())[1:]), file, **kwargs)

    def flip(tensors, file, **kwargs):
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        next(iter(changed.values())).view(-1)[0] += 1
        save_file(changed, file, **kwargs)

    def narrow(tensors, file, **kwargs):
        save_file({key: tensor.bfloat16() for key, tensor in tensors.items()}, file, **kwargs)

    found = {}
    for what, replacement in {
        "raises": no_space,
        "half": half,
        "drops": drop,
        "flips": flip,
        "narrows": narrow,
    }.items():
        adapter_writer.save_file = replacement
        try:
            found[what] = attempt(save_adapter, model, target)
        finally:
            adapter_writer.save_file = save_file
    found["parent is a file"] = attempt(save_adapter, model, Path(root) / "file" / "adapter")
    found["target is a file"] = attempt(save_adapter, model, Path(root) / "file")
    found["no such adapter"] = attempt(save_adapter, model, target, "other")
    found["a card in Latin-1"] = attempt(save_adapter, model, Path(root) / "card")
    old = {path.name: path.read_bytes() for path in target.iterdir()}
    left = sorted(path.name for path in Path(root).iterdir())
    dist.barrier()
    save_adapter(model, target)
    return found, old, left


FAILED = {
    "raises": ("OSError", "no space left"),
    "half": ("OSError", "no space left"),
    "drops": ("RuntimeError", "does not hold what was saved (missing: ['base_model"),
    "flips": ("RuntimeError", "does not hold what was saved (missing: [], different: ['base_model"),
    "narrows": ("RuntimeError", "does not hold what was saved (missing: [], different: ['base_model"),
    "parent is a file": ("OSError", "file"),
    "target is a file": ("NotADirectoryError", "is a file: give a folder"),
    "no such adapter": ("ValueError", "no adapter 'other' in the model"),
    "a card in Latin-1": ("ValueError", "card/README.md is no model card that PEFT can add to ('utf-8' codec can't"),
}


def test_a_failed_save_raises_on_every_rank_and_leaves_the_old_folder(pool, tmp_path):
    target = tmp_path / "adapter"
    target.mkdir()
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "README.md").write_bytes("café".encode("latin-1"))
    before = {WEIGHTS: b"old weights", CONFIG: b"old config", "README.md": b"kept", "optimizer.bin": b"kept too"}
    for name, data in before.items():
        (target / name).write_bytes(data)
    (target / "second").mkdir()
    (target / "second" / WEIGHTS).write_bytes(b"a sibling")
    shutil.move(target / "second", tmp_path / "second")  # files only, below: a folder is put back after
    for rank, (found, old, left) in enumerate(pool.run(4, failing_saves, tmp_path)):
        assert found.keys() == FAILED.keys()
        for what, (kind, message) in FAILED.items():
            error = found[what]
            assert isinstance(error, Failure), what
            assert message in error.message, (what, error.message)
            if what in ("raises", "half"):
                assert error.kind == ("WriteError" if rank == 0 else "RuntimeError"), (what, error)
            elif what == "parent is a file":
                assert error.kind in ("NotADirectoryError", "FileExistsError")
            else:
                assert error.kind == kind, (what, error)
        assert old == before
        assert left == ["adapter", "card", "file", "second"]  # nothing half written is left beside
    assert "kept" in (target / "README.md").read_text().splitlines()  # PEFT adds its tags to a card that is there
    assert (target / "optimizer.bin").read_bytes() == b"kept too"
    want = {key.replace(".default", ""): full(p) for key, p in adapter_parameters(built("task type")).items()}
    got = load_file(target / WEIGHTS)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert json.loads((target / CONFIG).read_text())["peft_type"] == "LORA"


def save_two(root):
    mesh, config = on_mesh("1x2")
    model = parallelize(built("second of two"), mesh, config)
    return save_adapter(model, root), save_adapter(model, root, "second"), save_adapter(model, root)


def test_adapters_of_one_model_share_a_folder(pool, tmp_path):
    """As PEFT: the default one in it, others below; saving one again leaves the other."""
    for first, second, again in pool.run(2, save_two, tmp_path / "both"):
        assert first == again == tmp_path / "both"
        assert second == tmp_path / "both" / "second"
    assert sorted(p.name for p in (tmp_path / "both").iterdir()) == ["README.md", CONFIG, WEIGHTS, "second"]
    sizes = [len(load_file(tmp_path / "both" / part / WEIGHTS)) for part in ("", "second")]
    assert sizes == [14, 2]


def save_broken(root):
    """Save two adapters, of which one is broken on one rank."""
    mesh, config = on_mesh("1x2")
    model = parallelize(built("second of two"), mesh, config)
    if mesh.get_local_rank("tp") == 1:
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if "lora_B.second" in n).to_local()[0, 0] = float("nan")
    return [
        attempt(save_adapter, model, root / "new", "second"),
        attempt(model.save_pretrained, str(root / "both")),
        attempt(save_adapter, model, "gs://bucket/new"),
    ]


def test_a_broken_adapter_is_not_saved(pool, tmp_path):
    for broken, both, url in pool.run(2, save_broken, tmp_path):
        for each in (broken, both):
            assert "lora_B.second.weight holds values that are not finite" in each.message
            assert "detect_anomaly" in each.message
        assert "is a URL" in url.message
    assert not any(tmp_path.iterdir())


class Masked(torch.nn.Linear):
    """A head that leaves out some of its classes, by a mask that it saves."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.load_state_dict(linear.state_dict())
        self.register_buffer("mask", torch.zeros(linear.out_features))
        self.mask[::2] = -torch.inf

    def forward(self, x):
        return super().forward(x) + self.mask


def masked():
    base = causal_lm()
    base.lm_head = Masked(base.lm_head)
    return get_peft_model(base, lora_config(modules_to_save=["lm_head"]))


def save_masked(root):
    mesh, config = on_mesh("2x1")
    model = parallelize(masked(), mesh, config)
    save_adapter(model, root / "ours")
    load_adapter(model, root / "peft")


def test_a_buffer_may_be_infinite(pool, tmp_path):
    masked().save_pretrained(tmp_path / "peft")
    pool.run(2, save_masked, tmp_path)
    ours, theirs = (load_file(tmp_path / each / WEIGHTS) for each in ("ours", "peft"))
    assert ours.keys() == theirs.keys()
    (mask,) = (key for key in ours if key.endswith("mask"))
    assert torch.equal(ours[mask], theirs[mask])


def save_after_forwards(root):
    """After an evaluation forward FSDP2 has whole weights in place; in training the adapters are never merged."""
    mesh, config = on_mesh("2x1")
    model = parallelize(built("embeddings"), mesh, config)
    model(input_ids=IDS, labels=IDS)  # a training forward that no backward follows
    save_adapter(model, root)
    kinds = {type(p.data) for p in model.parameters()}
    for parameter in adapter_parameters(model).values():
        local(parameter).zero_()
    model(input_ids=IDS, labels=IDS)
    load_adapter(model, root)
    model(input_ids=IDS, labels=IDS).loss.backward()
    return kinds == {DTensor}, {name: full(p) for name, p in adapter_parameters(model).items()}


def test_saving_and_loading_in_the_middle_of_a_step(pool, tmp_path):
    want = {name: full(p) for name, p in adapter_parameters(built("embeddings")).items()}
    for sharded, loaded in pool.run(2, save_after_forwards, tmp_path / "a"):
        assert sharded
        assert not differing(loaded, want)
    got = load_file(tmp_path / "a" / WEIGHTS)
    assert all(torch.equal(got[name.replace(".default", "")], tensor) for name, tensor in want.items())


def test_without_a_process_group(tmp_path):
    """An unsharded model in one process: the same functions."""
    model = built("task type")
    want = {name: full(p) for name, p in adapter_parameters(model).items()}
    assert save_adapter(model, tmp_path / "a") == tmp_path / "a"
    for parameter in adapter_parameters(model).values():
        parameter.data.zero_()
    load_adapter(model, str(tmp_path / "a"))
    assert all(torch.equal(p, want[name]) for name, p in adapter_parameters(model).items())
    with pytest.raises(ValueError, match="it has: none"):
        save_adapter(causal_lm(), tmp_path / "b")


def test_a_tensor_that_peft_has_no_key_for_is_an_error(tmp_path, monkeypatch):
    own = inspection.get_peft_model_state_dict

    def all_but_one(*args, **kwargs):
        return dict(list(own(*args, **kwargs).items())[1:])

    monkeypatch.setattr(inspection, "get_peft_model_state_dict", all_but_one)
    with pytest.raises(RuntimeError, match="PEFT does not name 1 tensors of 'default'"):
        save_adapter(built("task type"), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_adapter_parameters_are_told_from_the_base():
    model = built("second of two")
    assert len(adapter_parameters(model, "default")) == 14
    assert {name.split(".")[-2] for name in adapter_parameters(model, "second")} == {"second"}
    assert len(adapter_parameters(model)) == 14 + 2
    assert adapter_parameters(causal_lm()) == {}
    head = adapter_parameters(built("head saved"))
    assert sorted(n for n in head if "lm_head" in n) == ["base_model.model.lm_head.modules_to_save.default.weight"]
    biases = [n for n in adapter_parameters(built("biases")) if n.endswith(".bias")]
    assert len(biases) == 4
    assert all(".base_layer." in n for n in biases)
