"""What a sharded model refuses, by whichever way it is asked: one error with a way out, and nothing has changed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from lora_parallel import TenantPool, parallelize
from tests.cases import cases
from tests.oracle import SEVEN, Case, causal_lm, full, on_mesh, ranks_of, relative_error, trained
from tests.oracle.workers import Failure, attempt

MESHES = cases("1x2", "2x1", matrix=["2x2"])
IDS = torch.arange(24).view(2, 12)


def other() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)


def sharded(mesh: str) -> Any:
    return parallelize(Case().model(), *on_mesh(mesh))


def refused(mesh: str, folder: str) -> Any:
    """What each attempt ends in, and whether the model is as it was afterwards."""
    model, whole = sharded(mesh), Case().model().state_dict()
    before, logits = {name: full(p) for name, p in model.named_parameters()}, model(input_ids=IDS).logits.detach()
    base = model.get_base_model()
    attempts: dict[str, Any] = {
        "add_adapter": lambda: model.add_adapter("other", other()),
        "add_weighted_adapter": lambda: model.add_weighted_adapter(["default"], [0.5], "half"),
        "get_peft_model": lambda: get_peft_model(base, other(), adapter_name="other"),
        "load_adapter of PEFT": lambda: model.load_adapter(folder, "other"),
        "hotswap_adapter": lambda: hotswap_adapter(model, folder, "default", torch_device="cpu"),
        "prepare_model_for_compiled_hotswap": lambda: prepare_model_for_compiled_hotswap(model, target_rank=8),
        "load_state_dict": lambda: model.load_state_dict(whole),
        "load_state_dict of a layer": lambda: base.lm_head.load_state_dict({"weight": torch.zeros(131, 40)}),
        "load_state_dict that assigns": lambda: model.load_state_dict(model.state_dict(), assign=True),
        "deepcopy": lambda: copy.deepcopy(model),
        "torch.save": lambda: torch.save(model, f"{folder}/model.pt"),
        "pickle of a layer": lambda: pickle.dumps(base.lm_head),
        "resize_token_embeddings": lambda: model.resize_token_embeddings(140),
        "resize_token_embeddings of the base": lambda: base.resize_token_embeddings(140),
        "deepcopy of the base": lambda: copy.deepcopy(base),
    }
    answers = {name: attempt(each) for name, each in attempts.items()}
    after = {name: full(p) for name, p in model.named_parameters()}
    same = before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert same
    assert torch.equal(model(input_ids=IDS).logits, logits)
    assert list(model.peft_config) == ["default"]
    bare = parallelize(causal_lm(), *on_mesh(mesh, require_adapters=False))
    answers["add_adapter of transformers"] = attempt(bare.add_adapter, other())
    answers["get_peft_model of a base"] = attempt(get_peft_model, bare, other())
    assert not bare._hf_peft_config_loaded
    tenants = TenantPool(bare)  # which has PEFT draw its adapters
    tenants.add("one", other(), torch.optim.AdamW, init_seed=0)
    return answers


WORDS: dict[str, tuple[str, list[str]]] = {
    "add_adapter": ("ValueError", ["ForCausalLM that is sharded", "before parallelize", "TenantPool"]),
    "hotswap_adapter": ("ValueError", ["ForCausalLM that is sharded", "lora_parallel.load_adapter(model, folder)"]),
    "load_state_dict": ("ValueError", ["embed_tokens.weight is a plain tensor of shape (131, 40)", "load_adapter("]),
    "load_state_dict of a layer": ("ValueError", ["load_state_dict: weight is a plain tensor", "load_checkpoint("]),
    "load_state_dict that assigns": ("ValueError", ["assign=True", "leave assign out"]),
    "deepcopy": ("TypeError", ["copy.deepcopy", "before parallelize", "save_adapter", "disable_adapter"]),
    "torch.save": ("TypeError", ["cannot be pickled, by torch.save(model)", "save_checkpoint"]),
    "pickle of a layer": ("TypeError", ["cannot be pickled"]),
    "resize_token_embeddings": ("ValueError", ["before parallelize"]),
    "resize_token_embeddings of the base": ("ValueError", ["before parallelize"]),
}
for alike, like in (
    ("add_weighted_adapter", "add_adapter"),
    ("get_peft_model", "add_adapter"),
    ("load_adapter of PEFT", "add_adapter"),
    ("add_adapter of transformers", "add_adapter"),
    ("prepare_model_for_compiled_hotswap", "hotswap_adapter"),
    ("get_peft_model of a base", "add_adapter"),
    ("deepcopy of the base", "deepcopy"),
):
    WORDS[alike] = WORDS[like]


@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_refused_has_changed_nothing(pool, tmp_path, mesh):
    Case().model().save_pretrained(tmp_path)
    for answers in pool.run(ranks_of(mesh), refused, mesh, str(tmp_path)):
        assert answers.keys() == WORDS.keys()
        for name, answer in answers.items():
            kind, words = WORDS[name]
            assert isinstance(answer, Failure), f"{name}: nothing was raised"
            assert answer.kind == kind, f"{name}:\n{answer.trace}"
            for each in words:
                assert each in answer.message, f"{name}: {answer.message}"


def loaded(mesh: str) -> None:
    """What goes on working: state dicts as they are, and full tensors through torch's and PEFT's functions."""
    model = sharded(mesh)
    model.load_state_dict(model.state_dict())
    want = {name: 2 * values for name, values in Case().model().state_dict().items()}
    if mesh != "2x2":  # torch's own does not share tensors out over two axes: an AssertionError of its
        set_model_state_dict(model, dict(want), options=StateDictOptions(full_state_dict=True))
        assert relative_error({name: full(values) for name, values in model.state_dict().items()}, want) == 0
    folder = {name.replace(".default", ""): 2 * values for name, values in want.items() if "lora_" in name}
    set_peft_model_state_dict(model, folder)
    got = {name.replace(".default", ""): full(p) for name, p in trained(model).items()}
    assert relative_error(got, folder) == 0


@pytest.mark.parametrize("mesh", MESHES)
def test_what_fits_a_sharded_model_can_be_loaded(pool, mesh):
    pool.run(ranks_of(mesh), loaded, mesh)


def of_fused_rows() -> list[Any]:
    """Phi 3's fused layer without an adapter: other rows than those of one shard."""
    case = Case(family="phi3", lora={"target_modules": ["o_proj"]})
    model = parallelize(case.model(), *on_mesh("1x2"))
    state = {name: values for name, values in case.model().state_dict().items() if "gate_up_proj" in name}
    logits = model(input_ids=IDS).logits
    model.load_state_dict({name: values.clone() for name, values in model.state_dict().items()})
    shared = attempt(
        set_model_state_dict, model, case.model().state_dict(), options=StateDictOptions(full_state_dict=True)
    )
    assert torch.equal(model(input_ids=IDS).logits, logits)
    return [attempt(model.load_state_dict, state, strict=False), shared]


def test_rows_that_were_selected_cannot_be_loaded_whole(pool):
    """Nor shared out by torch, which would give each rank the rows of a shard."""
    for answer, shared in pool.run(2, of_fused_rows):
        assert isinstance(shared, Failure)
        assert "qkv_proj.weight is stored with other rows" in shared.message
        assert isinstance(answer, Failure)
        assert answer.kind == "ValueError"
        assert "layers.0.mlp.gate_up_proj.weight" in answer.message
        assert "(88, 40)" in answer.message
        assert "load_adapter(" in answer.message


class ReadsHead(nn.Module):
    """A forward that multiplies by the head's weight."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        base = self.model.get_base_model()
        return base.model(ids).last_hidden_state @ base.lm_head.weight.T


def read_by_hand(mesh: str) -> list[Any]:
    return [attempt(parallelize(ReadsHead(Case().model()), *on_mesh(mesh)), IDS)]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_weight_that_a_forward_reads_by_hand(pool, mesh):
    """Within the forward data-parallel ranks have it whole; of tensor-parallel ones each has a part."""
    want = ReadsHead(Case().model())(IDS)
    for [answer] in pool.run(ranks_of(mesh), read_by_hand, mesh):
        if mesh == "2x1":
            assert torch.allclose(answer, want, rtol=1e-12)
            continue
        assert isinstance(answer, Failure)
        assert answer.kind == "RuntimeError"
        assert answer.message.count("call the layer instead (layer(hidden))") == 1
        assert "full_tensor()" in answer.message


def without_one_adapter(mesh: str) -> Any:
    model = Case().model()
    model.add_adapter("other", other())
    model = parallelize(model, *on_mesh(mesh))
    model.delete_adapter("other")
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_an_adapter_that_is_deleted_leaves_the_others(pool, mesh):
    model = Case().model()
    model(input_ids=IDS, labels=IDS).loss.backward()
    want = {name: p.grad for name, p in trained(model).items()}
    assert len(want) == 2 * 2 * len(SEVEN)
    for got in pool.run(ranks_of(mesh), without_one_adapter, mesh):
        assert relative_error(got, want) < 1e-12


def on_one_rank() -> Any:
    model = sharded("1x1")
    twin = copy.deepcopy(model)
    twin.load_state_dict(Case().model().state_dict())
    return torch.equal(twin(input_ids=IDS).logits, model(input_ids=IDS).logits), attempt(
        model.add_adapter, "other", other()
    )


def test_a_mesh_of_one_rank_has_plain_tensors(pool):
    [(same, added)] = pool.run(1, on_one_rank)
    assert same
    assert isinstance(added, Failure)
    assert "TenantPool" in added.message
