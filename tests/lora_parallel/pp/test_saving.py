"""Adapters, checkpoints, merged exports and norms of gradients of models in pipeline stages, against one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lora_parallel import (
    clip_grad_norm_,
    export_merged,
    load_adapter,
    load_checkpoint,
    parallelize,
    save_adapter,
    save_checkpoint,
    wait_for_save,
)
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.export.save_pretrained import write_pretrained
from lora_parallel.runtime.optimizer_params import HeldByName, describe_optimizer
from lora_parallel.state import mesh_of as mesh_in
from tests.cases import cases
from tests.lora_parallel.pp.runs import INTERLEAVED, LAYERS, ids, in_float64, over_stages
from tests.lora_parallel.quantised.test_conversion import LLAMA
from tests.lora_parallel.quantised.test_loading import adapted_again, loaded, merged_alone
from tests.oracle import SEVEN, differing, full, on_mesh, ranks_of, relative_error, trained
from tests.oracle.rows import DECODER, LANGUAGE_LM, build, fill
from tests.oracle.workers import Failure, attempt

LOOPED = "interleaved 1x1pp2"


def config_of(mesh: str) -> tuple[str, dict[str, Any]]:
    """The mesh of a text, and what `parallelize` is told for it."""
    plain = mesh.split()[-1]
    return plain, {**(INTERLEAVED if mesh == LOOPED else {}), "pp_microbatches": 2}


def sharded(model: nn.Module, mesh: str, **more: Any) -> nn.Module:
    plain, config = config_of(mesh)
    return parallelize(model, *on_mesh(plain, **{**config, **more}))


def llama(tied: bool = False, **lora: Any) -> nn.Module:
    settings = {**DECODER, "num_hidden_layers": LAYERS, "tie_word_embeddings": tied}
    model: Any = build("LlamaForCausalLM", settings, **{"target_modules": SEVEN, "task_type": LANGUAGE_LM, **lora})
    model.get_base_model().loss_function = in_float64
    return model


def two() -> nn.Module:
    """The second adapter is on the blocks of one stage alone."""
    model: Any = llama()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[3]))
    fill(model.double())
    return model


def in_16_bits() -> nn.Module:
    """The base is bfloat16, its adapter float32."""
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "lora_" in name else torch.bfloat16)
    return model


MODELS: dict[str, Any] = {
    "seven": llama,
    "embedding, head and norm": lambda: llama(
        target_modules=[*SEVEN, "embed_tokens", "lm_head"], modules_to_save=["norm"]
    ),
    "a saved head": lambda: llama(modules_to_save=["lm_head"]),
    "a saved block": lambda: llama(modules_to_save=["layers.1"]),
    "tied": lambda: llama(True),
    "tied, a saved head": lambda: llama(True, modules_to_save=["lm_head"]),
    "tied, a head": lambda: llama(True, target_modules=[*SEVEN, "lm_head"]),
    "two": two,
    "16 bits": in_16_bits,
}
EMBEDDINGS = ("seven", "tied")
"""Saved with the embeddings too, as after new tokens were added."""


def other_values(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "embed_tokens", "lm_head")):
                parameter.mul_(2)
    return model


# ---------------------------------------------------------------------- adapter folders


def save_all(mesh: str, kinds: list[str], folder: Path) -> None:
    for kind in kinds:
        model = sharded(MODELS[kind](), mesh)
        save_adapter(model, folder / kind)
        if kind == "two":
            save_adapter(model, folder / kind, "second")
        if kind in EMBEDDINGS:
            write_pretrained(model, folder / f"{kind}, embeddings", ["default"], True)


def load_all(mesh: str, kinds: list[str], folder: Path, again: Path) -> None:
    """Load what was saved into other values, and save it again."""
    for kind in kinds:
        model: Any = sharded(other_values(MODELS[kind]()), mesh)
        for name in ("default", "second") if kind == "two" else ("default",):
            load_adapter(model, folder / kind, name)
            save_adapter(model, again / kind, name)
        if kind in EMBEDDINGS:
            load_adapter(model, folder / f"{kind}, embeddings")
            model.save_pretrained(again / f"{kind}, embeddings", save_embedding_layers=True)


def found_in(folder: Path, kinds: list[str], name: str) -> dict[str, Path]:
    """The files of this name in the adapter folders of these kinds."""
    files = {file.relative_to(folder): file for file in folder.rglob(name)}
    return {str(place): file for place, file in files.items() if place.parts[0].removesuffix(", embeddings") in kinds}


def files(folder: Path, kinds: list[str]) -> dict[str, Tensor]:
    """All tensors of all adapter folders."""
    return {
        f"{place} {key} {tensor.dtype}": tensor
        for place, file in found_in(folder, kinds, "adapter_model.safetensors").items()
        for key, tensor in load_file(file).items()
    }


def configs(folder: Path, kinds: list[str]) -> dict[str, Any]:
    return {
        place: json.loads(file.read_text()) for place, file in found_in(folder, kinds, "adapter_config.json").items()
    }


@pytest.fixture(scope="module")
def of_peft(tmp_path_factory: Any) -> Path:
    """The folders that PEFT writes in one process."""
    folder = tmp_path_factory.mktemp("peft")
    for kind, make in MODELS.items():
        make().save_pretrained(folder / kind)
        if kind in EMBEDDINGS:
            make().save_pretrained(folder / f"{kind}, embeddings", save_embedding_layers=True)
    return folder


KINDS = list(MODELS)


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    cases(("1x1pp2", KINDS), ("1x2pp2", ["two"]), matrix=[(mesh, KINDS) for mesh in ("1x2pp2", "2x1pp2", LOOPED)]),
)
def test_an_adapter_folder_is_what_peft_writes(pool, of_peft, tmp_path, mesh, kinds):
    pool.run(ranks_of(mesh.split()[-1]), save_all, mesh, kinds, tmp_path)
    assert not differing(files(tmp_path, kinds), files(of_peft, kinds))
    for place, config in configs(of_peft, kinds).items():
        theirs = configs(tmp_path, kinds)[place]
        assert {**theirs, "target_modules": set(theirs["target_modules"])} == {
            **config,
            "target_modules": set(config["target_modules"]),
        }


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    cases(
        ("1x1pp2", ["embedding, head and norm", "tied", "tied, a saved head", "two"]),
        matrix=[(mesh, KINDS) for mesh in ("1x1pp2", "2x1pp2", "1x1", "2x1", "1x2pp2", LOOPED)],
    ),
)
def test_an_adapter_of_peft_is_loaded(pool, of_peft, tmp_path, mesh, kinds):
    pool.run(ranks_of(mesh.split()[-1]), load_all, mesh, kinds, of_peft, tmp_path)
    assert not differing(files(tmp_path, kinds), files(of_peft, kinds))


def load_without_a_key(mesh: str, folder: Path) -> list[Any]:
    """The key is of the last stage, then of the first; a value of the other stage is broken; nothing is changed."""
    model = sharded(llama(), mesh)
    before = {name: full(p) for name, p in trained(model).items()}
    answers: list[Any] = [attempt(load_adapter, model, folder / kind) for kind in ("last", "first", "broken", "more")]
    after = {name: full(p) for name, p in trained(model).items()}
    return [*answers, differing(before, after)]


def test_what_another_stage_lacks_is_an_error_on_every_rank(pool, of_peft, tmp_path):
    for kind in ("last", "first", "broken", "more"):
        shutil.copytree(of_peft / "seven", tmp_path / kind)
        tensors = load_file(tmp_path / kind / "adapter_model.safetensors")
        key = next(key for key in tensors if f"layers.{0 if kind == 'first' else LAYERS - 1}." in key)
        if kind == "broken":
            tensors[key].view(-1)[0] = float("nan")
        elif kind == "more":
            tensors[key.replace(str(LAYERS - 1), str(LAYERS))] = tensors[key].clone()
        else:
            del tensors[key]
        save_file(tensors, tmp_path / kind / "adapter_model.safetensors")
    for last, first, broken, more, changed in pool.run(2, load_without_a_key, "1x1pp2", tmp_path):
        assert "1 keys are missing (first: ['base_model.model.model.layers.3." in last.message
        assert "1 keys are missing (first: ['base_model.model.model.layers.0." in first.message
        assert "not finite" in broken.message
        assert "1 are unexpected" in more.message
        assert not changed


# ---------------------------------------------------------------------- checkpoints


class Counter(nn.Module):
    """Has a persistent buffer, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))
        self.note = "none"

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


def counting(number: int) -> nn.Module:
    """LoRA, and in a block at each end a norm that trains beside it, and a counter."""
    model: Any = llama()
    inner = model.get_base_model().model
    for index in (0, LAYERS - 1):
        inner.layers[index].counter = Counter()
        inner.layers[index].counter.note = f"{index} {number}"
        inner.layers[index].counter.seen += index + number
        inner.layers[index].input_layernorm.weight.requires_grad_()
    return model


def counters(model: Any) -> dict[str, Any]:
    found = {name: module for name, module in model.named_modules() if isinstance(module, Counter)}
    return {name: (module.note, module.seen.tolist()) for name, module in found.items()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, of which one is of the first block."""
    parameters = trained(model)
    first = [p for name, p in parameters.items() if "layers.0." in name]
    others = [p for name, p in parameters.items() if "layers.0." not in name]
    return torch.optim.AdamW([{"params": first, "lr": 2e-3}, {"params": others}], lr=1e-3)


def trains(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, clip: Any, place: int, of: int
) -> list[float]:
    norms = []
    for seed in steps:
        batch = ids(seed).chunk(of)[place]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        norms.append(clip([p for group in optimizer.param_groups for p in group["params"]], 0.5).item())
        optimizer.step()
    return norms


def resumed(mesh: str, source: Path | None, target: Path | None, asynchronous: bool = False) -> dict[str, Any]:
    """Three steps, from the start or from a checkpoint."""
    model = sharded(counting(0 if source is None else 7), mesh, require_adapters=False)
    optimizer = optimizer_of(model)
    extra = load_checkpoint(model, optimizer, source) if source is not None else {"step": 0}
    steps = range(extra["step"], extra["step"] + 3)
    device_mesh = mesh_in(model)
    norms = trains(model, optimizer, steps, clip_grad_norm_, dp_rank(device_mesh), dp_size(device_mesh))
    if target is not None:
        save_checkpoint(model, optimizer, target, {"step": steps.stop}, async_save=asynchronous)
        with torch.no_grad():
            values = {name: full(p) for name, p in trained(model).items()}
            for parameter in trained(model).values():
                parameter.zero_()
        wait_for_save()
    else:
        values = {name: full(p) for name, p in trained(model).items()}
    return {"values": everywhere(values, mesh), "norms": norms, "counters": everywhere(counters(model), mesh)}


def everywhere(mine: dict[str, Any], mesh: str) -> dict[str, Any]:
    plain = mesh.split()[-1]
    return over_stages(mine, plain) if "pp" in plain else mine


def resumed_from_all(mesh: str, sources: dict[str, Path]) -> dict[str, Any]:
    return {name: attempt(resumed, mesh, source, None) for name, source in sources.items()}


SAVED = ("1x1", "1x1pp2", LOOPED, "1x2pp2", "2x1pp2")


@pytest.fixture(scope="module")
def checkpoints(pool, tmp_path_factory: Any) -> Callable[[str], Path]:
    """That of a mesh, after three steps; that of stages with other axes is written in the background."""

    @cache
    def checkpoint(mesh: str) -> Path:
        path = tmp_path_factory.mktemp("checkpoints") / mesh
        pool.run(ranks_of(mesh.split()[-1]), resumed, mesh, None, path, mesh == "1x2pp2")
        return path

    return checkpoint


@pytest.fixture(scope="module")
def one_process() -> tuple[list[float], dict[str, Tensor]]:
    """Six steps of plain PEFT: the norms of the last three, and what has been trained."""
    model = counting(0)
    norms = trains(model, optimizer_of(model), range(6), torch.nn.utils.clip_grad_norm_, 0, 1)
    assert min(norms) > 0.5, "nothing is clipped"
    return norms[3:], {name: full(p) for name, p in trained(model).items()}


@pytest.mark.parametrize(
    ("mesh", "sources"),
    cases(
        ("1x1", [LOOPED, "1x2pp2"]),
        ("1x1pp2", ["1x1", "1x1pp2"]),
        matrix=[(mesh, SAVED) for mesh in ("1x1", "1x1pp2", "1x2pp2", LOOPED, "2x1pp2")],
    ),
)
def test_a_checkpoint_goes_on_on_any_mesh(pool, checkpoints, one_process, mesh, sources):
    norms, want = one_process
    noted = counters(counting(0))
    paths = {source: checkpoints(source) for source in sources}
    for answers in pool.run(ranks_of(mesh.split()[-1]), resumed_from_all, mesh, paths):
        for source, found in answers.items():
            assert not isinstance(found, Failure), (source, found.trace)
            assert relative_error(found["values"], want) < 1e-10, source
            assert found["norms"] == pytest.approx(norms, rel=1e-10), source
            assert found["counters"] == noted, source


@pytest.mark.parametrize("meshes", cases(("1x1", LOOPED, "1x2pp2"), matrix=[list(SAVED)]))
def test_checkpoints_of_stages_hold_what_those_of_one_process_do(checkpoints, meshes):
    paths = {mesh: checkpoints(mesh) for mesh in meshes}
    contents = {mesh: torch.load(path / "extra.pt", weights_only=True) for mesh, path in paths.items()}
    metas = {mesh: json.loads((path / "meta.json").read_text()) for mesh, path in paths.items()}
    want = contents["1x1"]
    for mesh, found in contents.items():
        assert metas[mesh]["fingerprints"] == metas["1x1"]["fingerprints"]
        assert metas[mesh]["parameters"] == metas["1x1"]["parameters"]
        assert found["buffers"].keys() == want["buffers"].keys()
        assert found["other_state"] == want["other_state"]
        saved, of_one = found["optimizers"]["0"], want["optimizers"]["0"]
        assert saved["values"] == of_one["values"]
        assert saved["tensors"] == of_one["tensors"]
        assert [set(group["parameters"]) for group in saved["groups"]] == [
            set(group["parameters"]) for group in of_one["groups"]
        ]


# ---------------------------------------------------------------------- refused checkpoints


def refused(mesh: str, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Mistakes of which one stage alone knows."""
    found: dict[str, Any] = {}

    def loads(path: Path, change: Any = None, optimizer: Any = optimizer_of) -> Any:
        model: Any = counting(0)
        if change is not None:
            change(model.get_base_model().model)
        model = sharded(model, mesh, require_adapters=False)
        return attempt(load_checkpoint, model, optimizer(model), path)

    def other_base(inner: Any) -> None:
        inner.layers[-1].mlp.up_proj.base_layer.weight.data += 1

    def frozen(inner: Any) -> None:
        inner.layers[-1].input_layernorm.weight.requires_grad_(False)

    def without_counter(inner: Any) -> None:
        del inner.layers[-1].counter

    def without_a_parameter(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = optimizer_of(model)
        group = optimizer.param_groups[1]["params"]
        gone = [p for name, p in trained(model).items() if "layers.3.self_attn.q_proj.lora_A" in name]
        group[:] = [p for p in group if all(p is not each for each in gone)]
        return optimizer

    found["damaged"] = loads(folder / "damaged")
    found["other base"] = loads(checkpoint, other_base)
    found["frozen"] = loads(checkpoint, frozen)
    found["counter"] = loads(checkpoint, without_counter)
    found["parameter"] = loads(checkpoint, optimizer=without_a_parameter)
    model = sharded(counting(0), mesh, require_adapters=False)
    parameters = list(trained(model).values())
    for name, rates in (("groups", [0.1] * (1 + dist.get_rank())), ("settings", [0.1 * (1 + dist.get_rank())])):
        groups = [{"params": parameters[index :: len(rates)], "lr": rate} for index, rate in enumerate(rates)]
        found[name] = attempt(save_checkpoint, model, torch.optim.AdamW(groups), folder / name)
    fresh = optimizer_of(model)
    found["no state"] = attempt(save_checkpoint, model, fresh, folder / "no state")
    if dist.get_rank() == 0:  # a stage alone has states
        for parameter in fresh.param_groups[1]["params"]:
            parameter.grad = torch.ones_like(parameter)
        fresh.step()
    for name, asynchronous in (("some state", False), ("some state, later", True)):
        found[name] = attempt(save_checkpoint, model, fresh, folder / name, async_save=asynchronous)
        wait_for_save()
        found[f"{name}, loaded"] = attempt(load_checkpoint, model, fresh, folder / name)
    found["states"] = len(fresh.state)
    return found


def test_mistakes_of_one_stage_are_errors_on_every_rank(pool, checkpoints, tmp_path):
    shutil.copytree(checkpoints("1x1pp2"), tmp_path / "damaged")
    file = sorted((tmp_path / "damaged" / "state").glob("*.distcp"))[-1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    texts = {
        "damaged": "is damaged",
        "other base": "1 have other values",
        "frozen": "was trained on another base model",
        "counter": "the buffers in",
        "parameter": "lacks 1 of it (first: ['base_model.model.model.layers.3.self_attn.q_proj.lora_A",
        "groups": "with 1 parameter groups, another a AdamW with 2",
        "settings": "or with other settings in them",
    }
    for rank, found in enumerate(pool.run(2, refused, "1x1pp2", checkpoints("1x1pp2"), tmp_path)):
        for name, text in texts.items():
            assert isinstance(found[name], Failure), name
            assert text in found[name].message, (name, found[name].message)
        for name in ("no state", "some state", "some state, later"):
            assert not isinstance(found[name], Failure), found[name].trace
        assert found["states"] == (0 if rank else 14)
    assert not (tmp_path / "groups").exists()


# ---------------------------------------------------------------------- merged exports


EXPORTED = [*MODELS, "packed"]


def packed_qkv() -> nn.Module:
    """A projection whose rows tensor parallelism rearranges."""
    settings = {**DECODER, "num_hidden_layers": LAYERS}
    return build("Phi3ForCausalLM", settings, target_modules=["qkv_proj", "down_proj"], task_type=LANGUAGE_LM)


def export_all(mesh: str, kinds: list[str], folder: Path) -> dict[str, Any]:
    models = {kind: packed_qkv if kind == "packed" else MODELS[kind] for kind in kinds}
    return {kind: attempt(export_merged, sharded(make(), mesh), folder / kind, "40KB") for kind, make in models.items()}


def merged(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    cases(
        ("1x1pp2", ["tied", "tied, a saved head", "tied, a head", "embedding, head and norm", "16 bits"]),
        matrix=[(mesh, EXPORTED) for mesh in ("1x1pp2", "1x2pp2", "2x1pp2", LOOPED)],
    ),
)
def test_a_merged_export_is_that_of_one_process(pool, tmp_path, mesh, kinds):
    for found in pool.run(ranks_of(mesh.split()[-1]), export_all, mesh, kinds, tmp_path / "ours"):
        for kind, answer in found.items():
            assert answer == tmp_path / "ours" / kind, getattr(answer, "trace", answer)
    for kind in kinds:
        model: Any = packed_qkv() if kind == "packed" else MODELS[kind]()
        if kind == "tied, a head":  # PEFT would merge the head's adapter into the embedding too
            head = model.get_base_model().lm_head.base_layer
            head.weight = nn.Parameter(head.weight.detach().clone())
        model.merge_and_unload().save_pretrained(tmp_path / "peft" / kind)
        got, want = merged(tmp_path / "ours" / kind), merged(tmp_path / "peft" / kind)
        assert got.keys() == want.keys(), (kind, sorted(got.keys() ^ want.keys())[:4])
        for key, tensor in want.items():
            assert got[key].dtype == tensor.dtype, (kind, key)
            rtol = 1e-2 if tensor.dtype == torch.bfloat16 else 1e-12
            torch.testing.assert_close(got[key], tensor, rtol=rtol, atol=1e-12, msg=f"{kind} {key}")
        sides = [json.loads((tmp_path / side / kind / "config.json").read_text()) for side in ("ours", "peft")]
        assert sides[0] == sides[1], kind


# ---------------------------------------------------------------------- norms


def norms(mesh: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tied in (False, True):
        model = sharded(llama(tied), mesh)
        device_mesh = mesh_in(model)
        batch = ids().chunk(dp_size(device_mesh))[dp_rank(device_mesh)]
        found[f"{tied} before"] = clip_grad_norm_(model.parameters(), 1.0).item()
        model(input_ids=batch, labels=batch).loss.backward()
        for norm in (2.0, 1.0, 3.0, float("inf")):
            found[f"{tied} {norm}"] = clip_grad_norm_(model.parameters(), 1e9, norm).item()
        for name, parameter in model.named_parameters():
            if not any(f"layers.{index}." in name for index in (0, 1)):
                parameter.grad = None
        found[f"{tied} half"] = clip_grad_norm_(model.parameters(), 0.01).item()
        found[f"{tied} clipped"] = clip_grad_norm_(model.parameters(), 1e9).item()
    return found


def norms_of_one_process() -> dict[str, float]:
    found = {}
    for tied in (False, True):
        model = llama(tied)
        clip = torch.nn.utils.clip_grad_norm_
        found[f"{tied} before"] = 0.0
        model(input_ids=ids(), labels=ids()).loss.backward()
        for norm in (2.0, 1.0, 3.0, float("inf")):
            found[f"{tied} {norm}"] = clip(model.parameters(), 1e9, norm).item()
        for name, parameter in model.named_parameters():
            if not any(f"layers.{index}." in name for index in (0, 1)):
                parameter.grad = None
        found[f"{tied} half"] = clip(model.parameters(), 0.01).item()
        found[f"{tied} clipped"] = clip(model.parameters(), 1e9).item()
    return found


@pytest.mark.parametrize("mesh", cases("1x2pp2", matrix=["1x1pp2", "2x1pp2", LOOPED]))
def test_norms_are_of_all_stages(pool, mesh):
    want = norms_of_one_process()
    assert want["False half"] > 0.01
    for found in pool.run(ranks_of(mesh.split()[-1]), norms, mesh):
        assert found == pytest.approx(want, rel=1e-10)


# ---------------------------------------------------------------------- optimizers made before


def made_before(mesh: str) -> dict[str, Any]:
    model = llama(True)
    optimizer = torch.optim.AdamW([{"params": [p], "lr": 0.1 * i} for i, p in enumerate(model.parameters())])
    held = HeldByName(optimizer, model, (), "")
    names = {p: name for name, p in model.named_parameters()}
    before = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    model = sharded(model, mesh)
    held.restore(model)
    names = {p: name for name, p in model.named_parameters()}
    after = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    described = describe_optimizer(optimizer, model)
    held._entries[0] = ["no such name"]
    return {"before": before, "after": after, "described": described, "wrong": attempt(held.restore, model)}


def test_an_optimizer_of_the_whole_model_keeps_what_is_here(pool):
    first, last = pool.run(2, made_before, "1x1pp2")
    assert first["before"] == [one + other for one, other in zip(first["after"], last["after"], strict=True)]
    assert first["described"] == last["described"]
    for found in (first, last):
        assert found["wrong"].kind == "KeyError"


# ---------------------------------------------------------------------- quantised bases

QUANTISED = ("nf4", "int8")


def export_quantised(mesh: str, path: str, folder: Path) -> dict[str, Any]:
    return {
        kind: attempt(export_merged, sharded(adapted_again(loaded(path, kind, torch.bfloat16)), mesh), folder / kind)
        for kind in QUANTISED
    }


@pytest.mark.parametrize("mesh", cases(matrix=["1x1pp2", "1x2pp2"]))
@pytest.mark.filterwarnings("ignore")
def test_a_quantised_base_is_exported_from_its_stages(pool, tmp_path, mesh):
    LlamaForCausalLM(LlamaConfig(**{**LLAMA, "num_hidden_layers": 2})).save_pretrained(tmp_path / "dense")
    for found in pool.run(ranks_of(mesh), export_quantised, mesh, str(tmp_path / "dense"), tmp_path / "ours"):
        assert not [answer.trace for answer in found.values() if isinstance(answer, Failure)]
    for kind in QUANTISED:
        merged_alone(str(tmp_path / "dense"), kind).save_pretrained(tmp_path / "peft" / kind)
        got, want = merged(tmp_path / "ours" / kind), merged(tmp_path / "peft" / kind)
        assert got.keys() == want.keys()
        for key, tensor in want.items():
            torch.testing.assert_close(got[key], tensor, rtol=1e-2, atol=1e-4, msg=f"{kind} {key}")
