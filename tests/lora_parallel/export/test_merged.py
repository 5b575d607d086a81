"""Merged exports against `merge_and_unload` and `save_pretrained` in one process."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from lora_parallel import export_merged, parallelize
from lora_parallel.export import export_merged as writer_module
from tests.cases import cases
from tests.oracle import causal_lm, fill_adapters, full, lora_config, on_mesh, ranks_of
from tests.oracle.families import FAMILIES
from tests.oracle.rows import rows
from tests.oracle.workers import Failure, attempt

TOKENS = [1, 5, 64, 130]
IDS = torch.arange(24).view(2, 12)
causal_lm = partial(causal_lm, num_hidden_layers=1)


def adapted(base: nn.Module | None = None, **lora: Any) -> nn.Module:
    model = get_peft_model(base or causal_lm(dtype=torch.float32), lora_config(**lora))
    fill_adapters(model)
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name or "trainable_tokens" in name or name.endswith(".bias"):
            parameter.data += 0.25
    return model.eval()


def two_active() -> nn.Module:
    model = adapted()
    model.add_adapter("second", lora_config(r=2, target_modules=["q_proj", "down_proj"]))
    fill_adapters(model, seed=3)
    model.base_model.set_adapter(["default", "second"])
    return model


def with_second(**lora: Any) -> nn.Module:
    """The active adapter has linear layers alone, and the other one more."""
    model = adapted(**lora)
    model.add_adapter("second", lora_config(r=2, target_modules=["q_proj", "down_proj"]))
    fill_adapters(model, seed=3)
    model.set_adapter("second")
    return model.eval()


def tied(**lora: Any) -> nn.Module:
    return adapted(causal_lm("qwen3", torch.float32, tie_word_embeddings=True), **lora)


def family(name: str, **lora: Any) -> nn.Module:
    torch.manual_seed(0)
    made: Any = FAMILIES[name]
    import transformers

    base = made.model_class()(getattr(transformers, made.config)(**made.settings))
    model = get_peft_model(base, LoraConfig(**{"r": 3, "target_modules": made.targets, **lora}))
    fill_adapters(model)
    return model.eval()


def experts(name: str, **lora: Any) -> nn.Module:
    return family(
        name, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"], **lora
    )


KINDS: dict[str, Any] = {
    "seven": adapted,
    "tied": tied,
    "tied, on both": lambda: tied(target_modules=["embed_tokens", "lm_head", "q_proj"]),
    "tied, on the head": lambda: tied(target_modules=["lm_head", "q_proj"]),
    "tied, a saved head": lambda: tied(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "tied, tokens": lambda: tied(trainable_token_indices=TOKENS),
    "tied, other tokens": lambda: tied(trainable_token_indices={"embed_tokens": TOKENS, "lm_head": [5, 6]}),
    "tokens": lambda: adapted(trainable_token_indices=TOKENS),
    "tokens of both": lambda: adapted(trainable_token_indices={"embed_tokens": TOKENS, "lm_head": [5, 6]}),
    "another adapter's tokens": lambda: with_second(trainable_token_indices=TOKENS),
    "rslora, patterns": lambda: adapted(use_rslora=True, rank_pattern={"q_proj": 5}, alpha_pattern={"up_proj": 9}),
    "embeddings": lambda: adapted(target_modules=["embed_tokens", "lm_head", "q_proj"]),
    "a saved head": lambda: adapted(modules_to_save=["lm_head"]),
    "biases": lambda: adapted(causal_lm(dtype=torch.float32, attention_bias=True), bias="lora_only"),
    "two adapters": two_active,
    "another adapter's head": lambda: with_second(modules_to_save=["lm_head"]),
    "bfloat16": lambda: adapted(causal_lm(dtype=torch.bfloat16)),
    "float64": lambda: adapted(causal_lm()),
    "no adapter": lambda: causal_lm(dtype=torch.float32),
    "experts": lambda: experts("mixtral"),
    "experts, the other way round": lambda: experts("gpt-oss"),
    "experts and routers": lambda: family("qwen3-moe", target_modules="all-linear"),
}
APART = {"tied, on both", "tied, on the head", "tied, other tokens"}
"""Kinds whose tied weights differ as soon as adapters are merged. PEFT would merge all adapters into the one weight."""

OTHERS = ["gpt2", "bert", "mixtral", "qwen3-moe", "gpt-neox"]


def build(kind: str) -> nn.Module:
    return KINDS[kind]() if kind in KINDS else family(kind)


def export_all(mesh_text: str, kinds: list[str], folder: Path) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        mesh, config = on_mesh(mesh_text, require_adapters=False)
        model = parallelize(build(kind), mesh, config)
        before = {name: full(p) for name, p in model.named_parameters()}
        found[kind] = attempt(export_merged, model, folder / kind, max_shard_size="20KB")
        after = {name: full(p) for name, p in model.named_parameters()}
        assert all(torch.equal(before[name], after[name]) for name in before), "the model has changed"
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    return found


def merge(kind: str) -> Any:
    """Merge by PEFT in this process."""
    model: Any = build(kind)
    if kind in APART:
        head = model.get_base_model().get_output_embeddings()
        layer = getattr(head, "token_adapter", head).base_layer
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


MORE_OF_THE_SAME = [
    *("rslora, patterns", "float64", "no adapter", "tied, on the head", "tokens of both", "another adapter's tokens"),
]


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    cases(
        ("1x2", [kind for kind in KINDS if kind not in MORE_OF_THE_SAME]),
        matrix=[
            *((mesh, [*KINDS, *OTHERS]) for mesh in ("2x1", "1x1")),
            *((mesh, list(KINDS)) for mesh in ("1x2", "2x2", "4x1", "2x2x1")),
        ],
    ),
)
def test_the_folder_is_that_of_one_process(pool, tmp_path, mesh, kinds):
    for answers in pool.run(ranks_of(mesh), export_all, mesh, kinds, tmp_path / "ours"):
        for kind, answer in answers.items():
            assert answer == tmp_path / "ours" / kind, getattr(answer, "trace", answer)
    for kind in kinds:
        merged = merge(kind)
        with torch.no_grad():  # in bfloat16 a merged weight is rounded once more
            want_out = (merged if kind == "bfloat16" else build(kind))(input_ids=IDS)[0]
        merged.save_pretrained(tmp_path / "peft" / kind, max_shard_size="20KB")
        want, got = tensors(tmp_path / "peft" / kind), tensors(tmp_path / "ours" / kind)
        assert got.keys() == want.keys(), (kind, sorted(got.keys() ^ want.keys())[:4])
        for key, tensor in want.items():
            assert got[key].dtype == tensor.dtype, (kind, key)
            # One product of two factors, computed in other pieces.
            torch.testing.assert_close(got[key], tensor, rtol=1e-2 if kind == "bfloat16" else 1e-6, atol=1e-7)
        for name in ("config.json", "generation_config.json"):
            files = [tmp_path / side / kind / name for side in ("ours", "peft")]
            ours, theirs = (json.loads(file.read_text()) if file.is_file() else None for file in files)
            assert ours == theirs, (kind, name)
        auto = AutoModel if kind == "bert" else AutoModelForCausalLM
        loaded, told = auto.from_pretrained(tmp_path / "ours" / kind, dtype="auto", output_loading_info=True)
        assert not any(told.values()), (kind, told)
        with torch.no_grad():
            got_out = loaded.eval()(input_ids=IDS)[0]
        torch.testing.assert_close(got_out, want_out, rtol=0, atol=2e-2 if kind == "bfloat16" else 2e-5, msg=kind)
    assert {path.name for path in (tmp_path / "ours").iterdir()} == set(kinds)


def from_stock_class(base: Any, folder: Path) -> nn.Module:
    """Load a folder by the model's own class, without a key too many or too few."""
    loaded, told = type(base).from_pretrained(
        folder, dtype="auto", output_loading_info=True, experts_implementation="eager"
    )
    assert not any(told.values()), told
    return loaded


ROWS = [row for row in rows().values() if row.group in ("feature", "experts")]
NOT_MERGED = {
    **{row.name: "cannot be merged part by part" for row in ROWS if "DoRA" in row.name or "lora_bias" in row.name},
    "aLoRA": "cannot be merged part by part",  # nor by PEFT
}
OTHER_CLASSES = "a Linear with"
"""Begin the names of rows whose layers are of classes that from_pretrained does not make.

They are held against PEFT's merge alone, which is not what the adapter computes if a class does more than the product.
"""


def export_row(name: str, mesh_text: str, folder: Path) -> list[Any]:
    row = rows()[name]
    mesh, config = on_mesh(mesh_text, **row.config)
    return [attempt(export_merged, parallelize(row.build().eval(), mesh, config), folder)]


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["1x2", "2x1"])
@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_a_row_is_exported_as_in_one_process(pool, tmp_path, name, mesh):
    row, ours = rows()[name], tmp_path / "ours"
    for (answer,) in pool.run(2, export_row, name, mesh, ours):
        if name in NOT_MERGED:
            assert NOT_MERGED[name] in answer.message
        else:
            assert answer == ours, getattr(answer, "trace", answer)
    if name in NOT_MERGED:
        return
    model: Any = row.build().eval()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.no_grad():
        want_logits = model(**row.batch()).logits
    if base.config.tie_word_embeddings and "tied" in name and "token" not in name:
        base.lm_head.base_layer.weight = nn.Parameter(base.lm_head.base_layer.weight.detach().clone())  # as `APART`
    merged: Any = model.merge_and_unload() if model is not base else model
    merged.save_pretrained(tmp_path / "peft")
    want, got = tensors(tmp_path / "peft"), tensors(ours)
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())[:4]
    for key, tensor in want.items():
        torch.testing.assert_close(got[key], tensor, rtol=1e-12, atol=1e-12)
    if not name.startswith(OTHER_CLASSES):
        with torch.no_grad():
            got_logits = from_stock_class(base, ours).eval()(**row.batch()).logits
        # 2e-5: what Gemma 2 scales embeddings by is float32 in a model that was made so.
        torch.testing.assert_close(got_logits, want_logits, rtol=0, atol=2e-5 if "gemma" in name else 1e-12)


class Application(nn.Module):
    """A module of the user's around an adapted model."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = adapted(modules_to_save=["lm_head"], trainable_token_indices=TOKENS)
        self.scale = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


def export_application(folder: Path) -> None:
    torch.manual_seed(0)
    export_merged(parallelize(Application(), *on_mesh("1x2")), folder)


def test_a_model_inside_of_the_users_module_has_the_keys_of_that_module(pool, tmp_path):
    """Compare the folder with the state dict of the module once `merge_and_unload()` has replaced its model."""
    pool.run(2, export_application, tmp_path / "ours")
    torch.manual_seed(0)
    application = Application()
    application.model = application.model.merge_and_unload()
    got, want = tensors(tmp_path / "ours"), application.state_dict()
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        torch.testing.assert_close(got[key], tensor, rtol=1e-6, atol=1e-7)


def test_files_are_split_and_read_in_pieces(pool, tmp_path, monkeypatch):
    for _ in pool.run(4, in_small_pieces, tmp_path / "ours"):
        pass
    two_layers().merge_and_unload().save_pretrained(tmp_path / "peft")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 3
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    want, got = tensors(tmp_path / "peft"), tensors(tmp_path / "ours")
    assert index["weight_map"].keys() == want.keys()
    for key, tensor in want.items():
        torch.testing.assert_close(got[key], tensor, rtol=1e-6, atol=1e-7)


def two_layers() -> Any:
    return adapted(causal_lm(dtype=torch.float32, num_hidden_layers=2), trainable_token_indices=TOKENS)


def in_small_pieces(folder: Path) -> None:
    mesh, config = on_mesh("2x2")
    own, writer_module._CHUNK_BYTES = writer_module._CHUNK_BYTES, 1000
    try:
        export_merged(parallelize(two_layers(), mesh, config), folder, max_shard_size="30KB")
    finally:
        writer_module._CHUNK_BYTES = own


NO_SIZES = (0, -1, None, 1.5, True, "lots", "0GB", "-5GB")


def refused(folder: Path) -> dict[str, Any]:
    mesh, config = on_mesh("2x1")
    found = {
        "a folder that is there": attempt(export_merged, parallelize(adapted(), mesh, config), folder / "there"),
        "a file that is there": attempt(export_merged, parallelize(adapted(), mesh, config), folder / "file"),
        "not parallelized": attempt(export_merged, adapted(), folder / "new"),
        "dora": attempt(export_merged, parallelize(adapted(use_dora=True), mesh, config), folder / "new"),
        "merged already": attempt(export_merged, merged(parallelize(adapted(), mesh, config)), folder / "new"),
    }
    model = parallelize(adapted(), mesh, config)
    odd = dist.get_rank() == 1
    for size in NO_SIZES:
        found[f"a size of {size!r}"] = attempt(export_merged, model, folder / "new", size)
    found["a bad size on one rank"] = attempt(export_merged, model, folder / "new", "lots" if odd else "5GB")
    found["a URL on one rank"] = attempt(export_merged, model, "s3://bucket/new" if odd else folder / "new")
    found["another size on one rank"] = attempt(export_merged, model, folder / "new", "5KB" if odd else "5GB")
    found["another folder on one rank"] = attempt(export_merged, model, folder / ("other" if odd else "new"))
    own = writer_module.safetensors_header
    if dist.get_rank() == 0:
        writer_module.safetensors_header = no_space  # type: ignore[assignment]
    try:
        found["no space"] = attempt(export_merged, model, folder / "new")
    finally:
        writer_module.safetensors_header = own
    dist.barrier()
    found["left"] = sorted(path.name for path in folder.iterdir())
    return found


def merged(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "merged_adapters"):
            module.merged_adapters.append("default")  # as merge_adapter() does
    return model


def no_space(tensors: Any) -> bytes:
    raise OSError(28, "No space left on device")


REFUSED = {
    **{f"a size of {size!r}": ("ValueError", f"max_shard_size={size!r}: give a positive number") for size in NO_SIZES},
    "a bad size on one rank": ("ValueError", "max_shard_size='lots': give a positive number"),
    "a URL on one rank": ("ValueError", "is a URL"),
    "another size on one rank": ("ValueError", "max_shard_size is '5GB' on rank 0 and '5KB' on rank 1"),
    "another folder on one rank": ("ValueError", "directory is '"),
    "a folder that is there": ("FileExistsError", "is not empty"),
    "a file that is there": ("FileExistsError", "is not empty"),
    "not parallelized": ("ValueError", "was not parallelized"),
    "dora": ("ValueError", "cannot be merged part by part"),
    "merged already": ("ValueError", "is merged into the base of"),
    "no space": ("OSError", "No space left"),
}


def test_what_cannot_be_exported_is_refused(pool, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine too")
    for found in pool.run(2, refused, tmp_path):
        assert found.pop("left") == ["file", "there"]
        for name, (kind, text) in REFUSED.items():
            assert isinstance(found[name], Failure), f"{name} was accepted"
            assert found[name].kind == kind, (name, found[name].trace)
            assert text in found[name].message, (name, found[name].message)
    assert (tmp_path / "there" / "mine").read_text() == "mine"


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Wide(nn.Module):
    """Six layers of 64 MiB, without random values, which would take seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.utils.skip_init(nn.Linear, 4096, 4096, bias=False) for _ in range(6))
        for layer in self.layers:
            nn.init.ones_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


LAYER = 4096 * 4096 * 4


def memory(folder: Path) -> float:
    """How much the export takes beside the shards, in layers."""
    mesh, config = on_mesh("2x1", block_classes=["Linear"])
    model = parallelize(get_peft_model(Wide(), LoraConfig(r=4, target_modules=["0", "1", "5"])), mesh, config)
    start, highest, stop = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not stop.wait(0.001):
            highest = max(highest, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        export_merged(model, folder)
    finally:
        stop.set()
        thread.join()
    return (highest - start) / LAYER


def test_no_rank_holds_more_than_a_tensor(pool, tmp_path):
    """The chunk that is written, what was received for it, and its bytes."""
    for peak in pool.run(2, memory, tmp_path / "wide"):
        assert peak <= 3.5
