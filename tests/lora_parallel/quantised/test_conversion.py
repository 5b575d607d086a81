"""Quantised bases on a mesh, against PEFT on the same quantised base in one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from torch import Tensor, nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

from lora_parallel import (
    ParallelConfig,
    load_adapter,
    load_checkpoint,
    meta_init,
    parallelize,
    save_adapter,
    save_checkpoint,
)
from lora_parallel.distributed.dtensors import local
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.layers.linear_classes import QuantisedLayer
from lora_parallel.planning.plan import resolve_plan
from lora_parallel.quantised.conversion import check_quantised, hold_as_bytes
from tests.cases import cases
from tests.oracle import SEVEN, differing, full, on_mesh, ranks_of, relative_error, trained
from tests.oracle.workers import Failure, attempt

pytestmark = pytest.mark.filterwarnings("ignore")
LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "use_cache": False,
    "tie_word_embeddings": False,
}


def bnb4(double: bool = False, kind: str = "nf4") -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )


KINDS: dict[str, Any] = {
    "nf4": bnb4,
    "nf4, double": lambda: bnb4(double=True),
    "fp4": lambda: bnb4(kind="fp4"),
    "int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao int8": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
    "torchao int8 by group": lambda: TorchAoConfig(Int8WeightOnlyConfig(granularity=PerGroup(32))),
    "torchao float8": lambda: TorchAoConfig(Float8WeightOnlyConfig()),
    "torchao int4 by group": lambda: TorchAoConfig(
        IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    ),
}
FEW = ["nf4, double", "int8", "torchao int8 by group"]
"""Name the kinds that `make test` runs on ranks: one for each way of keeping scales."""

CHECKPOINTING = {"activation_checkpointing": True}
BITS = {"nf4": 4.5, "nf4, double": 4.5, "fp4": 4.5, "int8": 8.125, "torchao float8": 8.125}
"""A weight: scales of float32 for 64 weights, or for a row of 256."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("checkpoint"))
    dense(path)
    return path


def dense(path: str, **sizes: Any) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**LLAMA, **sizes})).save_pretrained(path)


def base(path: str, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    return LlamaForCausalLM.from_pretrained(path, quantization_config=KINDS[kind](), dtype=dtype)


def adapted(path: str, kind: str, prepare: bool = False, dtype: torch.dtype = torch.float32, **lora: Any) -> Any:
    model = base(path, kind, dtype)
    if prepare:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(**{"r": 3, "target_modules": SEVEN, "task_type": "CAUSAL_LM", **lora}))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.05
    return model.train()


def batch() -> Tensor:
    return torch.randint(0, 131, (8, 12), generator=torch.Generator().manual_seed(3))


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


@cache
def alone(path: str, kind: str) -> dict[str, Tensor]:
    """PEFT in this process."""
    return gradients(adapted(path, kind), batch())


def on_ranks(mesh_text: str, path: str, config: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    mesh, settings = on_mesh(mesh_text, **config)
    mine = batch().chunk(dp_size(mesh))[dp_rank(mesh)]
    found: dict[str, Any] = {}
    for kind in kinds:
        model = attempt(parallelize, adapted(path, kind), mesh, settings)
        if isinstance(model, Failure):
            found[kind] = model
            continue
        layers = [layer for layer in model.modules() if isinstance(layer, QuantisedLayer)]
        held = sum(local(p).numel() for layer in layers for p in layer.parameters())
        weights = sum(layer.in_features * layer.out_features for layer in layers)
        found[kind] = (gradients(model, mine), 8 * held / weights, len(layers))
    return found


@pytest.mark.parametrize(
    ("mesh", "config", "kinds"),
    cases(
        ("1x2", {}, [*FEW, "torchao float8"]),
        ("2x2", {}, ["nf4, double"]),
        matrix=[
            ("2x2", {"activation_checkpointing": True}, list(KINDS)),
            *((mesh, {}, list(KINDS)) for mesh in ("1x1", "2x1", "1x2", "2x2", "1x4", "2x2x1")),
        ],
    ),
)
def test_training_equals_peft_on_the_same_quantised_base(pool, checkpoint, mesh, config, kinds):
    """And each rank has its share of the bytes."""
    ranks = ranks_of(mesh) // (2 if mesh == "2x2x1" else 1)
    for found in pool.run(ranks_of(mesh), on_ranks, mesh, checkpoint, config, kinds):
        for kind, answer in found.items():
            assert not isinstance(answer, Failure), f"{kind}: {answer.trace}"
            got, bits, layers = answer
            assert layers == 14
            assert relative_error(got, alone(checkpoint, kind)) <= 1e-5, kind
            if kind in BITS:
                assert bits <= BITS[kind] / ranks * 1.03, kind


def exact(mesh_text: str, path: str) -> dict[str, Tensor]:
    mesh, config = on_mesh(mesh_text)
    model = parallelize(adapted(path, "torchao float8", dtype=torch.float64), mesh, config)
    return gradients(model, batch().chunk(dp_size(mesh))[dp_rank(mesh)])


@pytest.mark.parametrize("mesh", cases("2x2", matrix=["2x1", "1x2", "1x4"]))
def test_a_format_that_computes_in_float64_is_exact(pool, checkpoint, mesh):
    want = gradients(adapted(checkpoint, "torchao float8", dtype=torch.float64), batch())
    for found in pool.run(ranks_of(mesh), exact, mesh, checkpoint):
        assert relative_error(found, want) <= 1e-12


def test_the_layers_stay_the_quantiser_s_and_their_weights_the_same(checkpoint):
    for kind in KINDS:
        model = base(checkpoint, kind).train()
        want = {name: m(torch.eye(m.in_features)) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        hold_as_bytes(model)
        layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantisedLayer)}
        assert len(layers) == 14, kind
        for name, layer in layers.items():
            assert torch.equal(layer(torch.eye(layer.in_features)), want[name]), kind
            torch.testing.assert_close(layer.dense().float().T, want[name], rtol=1e-2, atol=1e-3)
            assert not any(p.requires_grad or p.dtype != torch.uint8 for p in layer.parameters())
            if kind == "int8":
                assert isinstance(layer, bitsandbytes.nn.Linear8bitLt)


def test_torchao_keeps_no_dense_weight_for_backward(checkpoint):
    """By itself it keeps every one that it dequantises."""
    kept = []
    for ours in (False, True):
        model = adapted(checkpoint, "torchao int8")
        if ours:
            hold_as_bytes(model)
        shapes: list[tuple[int, ...]] = []

        def note(x: Tensor, shapes: list[tuple[int, ...]] = shapes) -> Tensor:
            shapes.append((*x.shape, type(x) is Tensor and x.is_floating_point()))
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            model(input_ids=batch()).logits.sum()
        kept.append(sum(shape in ((512, 256, True), (256, 512, True)) for shape in shapes))
    assert kept[0] > 0
    assert kept[1] == 0


def saved(mesh_text: str, path: str, folder: str, other: bool) -> list[str]:
    mesh, config = on_mesh(mesh_text)
    model = parallelize(adapted(path, "nf4"), mesh, config)
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    if not other:
        gradients(model, batch().chunk(dp_size(mesh))[dp_rank(mesh)])
        optimizer.step()
        save_adapter(model, Path(folder) / "adapter")
        save_checkpoint(model, optimizer, Path(folder) / "checkpoint")
    want = {name: full(p) for name, p in trained(model).items()}
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.zero_()
    load_adapter(model, Path(folder) / "adapter")
    first = {name: full(p) for name, p in trained(model).items()}
    load_checkpoint(model, optimizer, Path(folder) / "checkpoint")
    second = {name: full(p) for name, p in trained(model).items()}
    return differing(second, first if other else want)


def test_adapters_and_checkpoints_go_to_any_mesh(pool, checkpoint, tmp_path):
    for mesh, other in (("2x2", False), ("1x2", True)):
        assert not any(pool.run(ranks_of(mesh), saved, mesh, checkpoint, str(tmp_path), other))
    one = adapted(checkpoint, "nf4")
    one.load_adapter(tmp_path / "adapter", "default", is_trainable=True)
    got = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert got.keys() == {name.replace(".default", "") for name in trained(one)}


def bf16(mesh_text: str, path: str) -> list[str]:
    mesh, config = on_mesh(mesh_text, param_dtype=torch.bfloat16)
    ids = batch().chunk(dp_size(mesh))[dp_rank(mesh)]
    found = []
    for _ in range(2):
        model = parallelize(adapted(path, "nf4", prepare=True), mesh, config)
        model(input_ids=ids, labels=ids).loss.backward()
        found.append({name: full(p.grad) for name, p in trained(model).items()})
    return differing(found[1], found[0])


def test_low_precision_compute_leaves_the_bytes_alone(pool, checkpoint):
    assert not any(pool.run(2, bf16, "2x1", checkpoint))


# ---------------------------------------------------------------------- refusals


def test_a_cut_through_a_block_is_refused_with_what_works(tmp_path):
    dense(str(tmp_path), intermediate_size=384)
    model = adapted(str(tmp_path), "nf4")
    hold_as_bytes(model)
    with pytest.raises(
        ValueError, match=r"down_proj' cannot be rowwise: its 384 .* 6 blocks of 64, and tp=4 .* tp can be 1, 2, 3, 6"
    ):
        resolve_plan(model, None, 4)
    assert resolve_plan(model, None, 2)
    dense(str(tmp_path / "narrow"), intermediate_size=64)  # a row is one block
    model = adapted(str(tmp_path / "narrow"), "nf4")
    hold_as_bytes(model)
    with pytest.raises(
        ValueError, match=r"down_proj' cannot be rowwise: its 64 .* 1 blocks of 64, and tp=2 .* can be 1"
    ):
        resolve_plan(model, None, 2)


def unguarded(path: str) -> Any:
    """A step on tp=4 of a layer whose six blocks four ranks cannot share, with the refusal taken out."""
    mesh, config = on_mesh("1x4")
    own = QuantisedLayer.cut_problem
    QuantisedLayer.cut_problem = lambda self, style, tp: None  # type: ignore[method-assign]
    try:
        return [attempt(lambda: gradients(parallelize(adapted(path, "nf4"), mesh, config), batch()))]
    finally:
        QuantisedLayer.cut_problem = own  # type: ignore[method-assign]


def test_a_block_cut_in_two_computes_nothing(pool, tmp_path):
    dense(str(tmp_path), intermediate_size=384)
    for (answer,) in pool.run(4, unguarded, str(tmp_path)):
        assert isinstance(answer, Failure)


def test_float64_is_refused_where_there_is_no_kernel(checkpoint):
    model = LlamaForCausalLM.from_pretrained(checkpoint, quantization_config=bnb4(), dtype=torch.float32)
    hold_as_bytes(model)
    layer: Any = model.model.layers[0].mlp.up_proj
    layer.compute_dtype = torch.float64
    with pytest.raises(TypeError, match="no 4-bit product in float64"):
        layer(torch.ones(2, 256))


def adapters_first(path: str, kind: str) -> nn.Module:
    model: Any = get_peft_model(LlamaForCausalLM.from_pretrained(path), LoraConfig(target_modules=["q_proj"]))
    if kind == "torchao":
        quantize_(model, Int8WeightOnlyConfig())
        return model
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    quantised = bitsandbytes.nn.Linear4bit(256, 256, bias=False, compute_dtype=torch.float32)
    quantised.load_state_dict(layer.base_layer.state_dict())
    layer.base_layer = quantised.to("cpu")
    return model


def test_what_cannot_be_sharded_is_refused_by_name(checkpoint):
    for kind, reason in (("torchao", "is a factor of an adapter, and quantised"), ("bnb", "adapter of a plain linear")):
        with pytest.raises(ValueError, match=reason) as caught:
            check_quantised(adapters_first(checkpoint, kind))
        assert "Quantise first" in str(caught.value)
    with pytest.raises(ValueError, match=r"is a LoRA variant \(Dora.*on a quantised layer"):
        check_quantised(adapted(checkpoint, "nf4", use_dora=True))
    odd = nn.Sequential(bitsandbytes.nn.Linear4bit(96, 8, compute_dtype=torch.float32).to("cpu"))
    with pytest.raises(ValueError, match="its blocks of 64 do not end with its rows of 96 features"):
        check_quantised(odd)
    with pytest.raises(ValueError, match=r"0 \(Linear4bit\) .* its weight is not quantised yet"):
        check_quantised(nn.Sequential(bitsandbytes.nn.Linear4bit(64, 8)))
    integers = nn.Linear(4, 4)
    integers.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"0\.weight is quantised \(Parameter, torch.int8\) in a way"):
        check_quantised(nn.Sequential(integers))


def on_ranks_refused(path: str) -> list[Any]:
    mesh, config = on_mesh("2x1")
    model = parallelize(adapted(path, "nf4"), mesh, config)
    with meta_init():
        made = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 8))
        late = base(path, "torchao int8")
        late.model.layers[0].mlp.up_proj.half()
        dora = base(path, "nf4")
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    return [
        attempt(model.merge_adapter),
        attempt(parallelize, made, mesh, ParallelConfig(dp_shard=2, require_adapters=False)),
        attempt(parallelize, late, mesh, config, lora_config=lora),
        attempt(parallelize, dora, mesh, config, lora_config=LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)),
    ]


def test_what_would_be_lost_is_refused_on_every_rank(pool, checkpoint):
    for merge, made, half, dora in pool.run(2, on_ranks_refused, checkpoint):
        assert "an adapter of a quantised layer cannot be merged on a mesh" in merge.message
        assert made.kind == "ValueError", made.trace
        assert "0.weight is on the meta device, and nothing fills it" in made.message
        assert "mlp.up_proj.weight is quantised, and was cast or changed" in half.message
        assert dora.kind == "ValueError", dora.trace
        assert "LoraConfig(use_dora=True) computes the adapter from the base weights" in dora.message
