"""A fused LoRA layer computes what PEFT computes, in PEFT's precision, or leaves the call to PEFT."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.pytorch_utils import Conv1D

from lora_parallel import parallelize
from lora_parallel.adapters import fused_lora
from lora_parallel.adapters.fused_lora import count_fused, fuse_lora
from lora_parallel.adapters.injection import adapt_dropout
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.layers.linear_classes import QuantisedLayer
from lora_parallel.state import ForwardCount
from tests.cases import cases
from tests.oracle import Case, full, on_mesh, ranks_of, relative_error, trained

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
WIDTH, OUT, R, ROWS, TOKENS = 96, 80, 8, 3, 40


class OneLayer(nn.Module):
    def __init__(self, bias: bool = True, transposed: bool = False) -> None:
        super().__init__()
        self.layer: Any = Conv1D(OUT, WIDTH) if transposed else nn.Linear(WIDTH, OUT, bias=bias)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.layer(x, **kwargs)


def adapted(base: torch.dtype = F64, adapters: torch.dtype = F64, transposed: bool = False, **lora: Any) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=R, lora_alpha=12, target_modules=["layer"], init_lora_weights=False, **lora)
    model = get_peft_model(OneLayer(transposed=transposed).to(base), config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapters)
    return model.train()


def fused(model: Any, is_fused: bool = True) -> Any:
    """A copy of the model whose layers are fused, with the same masks of dropout as without."""
    model = copy.deepcopy(model)
    adapt_dropout(model, 0, ForwardCount(running=True), 0)
    fuse(model, is_fused)
    return model


def fuse(model: Any, is_fused: bool = True) -> None:
    mesh, config = SimpleNamespace(device_type="cpu"), SimpleNamespace(fused=is_fused)
    fuse_lora(SimpleNamespace(model=model, mesh=mesh, config=config))  # type: ignore[arg-type]


def layer_of(model: Any) -> Any:
    return next(module for module in model.modules() if isinstance(module, LoraLayer))


@pytest.fixture
def calls(monkeypatch) -> list[Any]:
    """The calls that were fused."""
    found: list[Any] = []
    forward = fused_lora._forward

    def noted(*args: Any) -> Any:
        found.append(args)
        return forward(*args)

    monkeypatch.setattr(fused_lora, "_forward", noted)
    return found


def inputs(dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, TOKENS, WIDTH, generator=generator, dtype=F64).to(BF16).to(dtype).requires_grad_()


def gradient_of(y: Tensor) -> Tensor:
    """The gradient of an output, the same for each output of a shape."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(y.shape, generator=generator, dtype=F64).to(BF16).to(y.dtype)


def step(model: Any, x: Tensor, autocast: bool = False, spoilt: float | None = None) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of what trains."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    with torch.autocast("cpu", dtype=BF16, enabled=autocast):
        y = model(x)
    gradient = gradient_of(y)
    if spoilt is not None:
        gradient[1, 2, 3] = spoilt
    y.backward(gradient)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **gradients}


def errors(found: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    return {name: ((found[name].double() - want[name]).norm() / want[name].norm()).item() for name in want}


PRECISIONS = {
    "float32": (F32, F32, F32, False),
    "float64": (F64, F64, F64, False),
    "bfloat16": (BF16, BF16, BF16, False),
    "adapters in float32": (BF16, F32, BF16, False),
    "autocast": (F32, F32, F32, True),
    "autocast, base in bfloat16": (BF16, F32, BF16, True),
    "autocast, input in float32": (BF16, F32, F32, True),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_errors_are_those_of_peft(calls, precision, bias):
    """Against float64: of y and dx no larger than PEFT's, but for chance; of A and B less than twice as large."""
    base, adapters, dtype, autocast = PRECISIONS[precision]
    model = adapted(base, adapters, lora_bias=bias)
    want = step(copy.deepcopy(model).double(), inputs())
    plain, found = step(model, inputs(dtype), autocast), step(fused(model), inputs(dtype), autocast)
    assert len(calls) == 1
    assert [(v.dtype, v.shape) for v in found.values()] == [(v.dtype, v.shape) for v in plain.values()]
    of_peft, ours = errors(plain, want), errors(found, want)
    for name in want:
        at_least = 1e-15 if dtype is F64 else 1e-7  # the last digit of one sum or another
        assert ours[name] <= of_peft[name] * (1.05 if name in "xy" else 2) + at_least, name
    if precision == "adapters in float32":
        assert max(ours[name] for name in want if name not in "xy") < 2e-7
        assert (found["y"] == plain["y"]).float().mean() > 0.999


def test_parts_are_exact():
    matrix = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) * 10
    assert torch.equal(sum(part.double() for part in fused_lora._parts(matrix)), matrix.double())
    orders = (fused_lora._OF_FACTORS, fused_lora._middle), (fused_lora._OF_ACTIVATIONS, fused_lora._first)
    for order, select in orders:
        assert torch.equal(fused_lora._sum_parts(select(fused_lora._split(matrix, order)).double()), matrix.double())


@pytest.mark.parametrize("part", [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0)])
def test_six_products_are_there(part):
    left, right = fused_lora._OF_ACTIVATIONS, fused_lora._OF_FACTORS
    assert [*zip(left, right, strict=True)].count(part) == 1


LAYERS: dict[str, Any] = {
    "dropout": {"lora_dropout": 0.3},
    "all is dropped": {"lora_dropout": 1.0},
    "Conv1D": {"transposed": True, "fan_in_fan_out": True},
    "a bias of B": {"lora_bias": True},
    "a bias of B, dropout": {"lora_bias": True, "lora_dropout": 0.3},
    "a bias that trains": {"bias": "lora_only"},
    "Conv1D with a bias that trains": {"transposed": True, "fan_in_fan_out": True, "bias": "all"},
    "rsLoRA": {"use_rslora": True},
}


@pytest.mark.parametrize("dtypes", [(F64, F64), (BF16, F32)])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_every_kind(calls, kind, dtypes):
    if dtypes == (BF16, F32) and kind.startswith("Conv1D"):
        pytest.skip("as the others")
    model = adapted(*dtypes, **LAYERS[kind])
    want = step(fused(model, is_fused=False), inputs(dtypes[0]))
    assert not calls
    found = step(fused(model), inputs(dtypes[0]))
    assert len(calls) == (kind != "all is dropped")
    bounds = dict.fromkeys(want, 1e-12) if dtypes[0] is F64 else dict.fromkeys(want, 1e-06) | {"x": 4e-3, "y": 4e-3}
    if dtypes[0] is BF16 and "bias" in LAYERS[kind]:
        bounds |= {name: 4e-3 for name in want if "base_layer.bias" in name}
    found_errors = {n: e for n, e in errors(found, {n: v.double() for n, v in want.items()}).items() if e == e}
    assert {name: error for name, error in found_errors.items() if error > bounds[name]} == {}


@pytest.mark.parametrize("frozen", ["x", "lora_A", "lora_B"])
def test_only_what_trains_gets_a_gradient(calls, frozen):
    model = adapted()
    for name, parameter in model.named_parameters():
        if frozen in name:
            parameter.requires_grad_(False)
    ours = fused(model)
    x = inputs().detach() if frozen == "x" else inputs()
    found, want = ({}, {})
    for each, into in ((ours, found), (model, want)):
        each(x).square().sum().backward()
        into |= {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
    assert len(calls) == 1
    assert relative_error(found, want) < 1e-12
    assert len(found) == (2 if frozen == "x" else 1)


def disabled(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def merged(model: Any) -> None:
    model.merge_adapter()


def second(model: Any) -> None:
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["layer"], init_lora_weights=False)
    model.add_adapter("second", config)
    model.base_model.set_adapter(["default", "second"])


def other_alone(model: Any) -> None:
    second(model)
    model.set_adapter("second")


def a_variant(model: Any) -> None:
    torch.manual_seed(3)
    model.add_adapter("second", LoraConfig(r=4, target_modules=["layer"], init_lora_weights=False, use_dora=True))
    model.set_adapter("second")


def scaled(model: Any) -> None:
    layer_of(model).scale_layer(3)


def scaled_by_a_tensor(model: Any) -> None:
    layer_of(model).scaling["default"] = torch.tensor(2.0, dtype=F64)


def doubled(*args: Any) -> Any:
    return args[-1] * 2


def hooked(name: str) -> Any:
    def change(model: Any) -> None:
        module = getattr(layer_of(model), name)
        (module["default"] if isinstance(module, nn.ModuleDict) else module).register_forward_hook(doubled)

    return change


def fed_hook(model: Any) -> None:
    layer_of(model).lora_B["default"].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def backward_hook(model: Any) -> None:
    layer_of(model).lora_A["default"].register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] * 2,))


def replaced_forward(name: str) -> Any:
    def change(model: Any) -> None:
        module = getattr(layer_of(model), name)
        module = module["default"] if isinstance(module, nn.ModuleDict) else module
        forward = module.forward
        module.forward = lambda x: forward(x) * 2

    return change


def own_forward(model: Any) -> None:
    layer = layer_of(model)
    layer.forward = lambda x, **kwargs: layer.base_layer(x) * 2


def patched_class(model: Any) -> None:
    """Give the layer a class whose forward somebody has replaced, as for all layers of it."""
    layer = layer_of(model)
    layer.__class__ = type("Linear", (type(layer),), {"forward": lambda self, x: self.base_layer(x) * 2})


def base_trains(model: Any) -> None:
    layer_of(model).base_layer.weight.requires_grad_()


class Doubled(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value * 2


def computed(name: str, key: str) -> Any:
    """Let a property compute a parameter: a module has it neither in its dictionary nor among its parameters."""

    def change(model: Any) -> None:
        module = getattr(layer_of(model), name)
        module = module["default"] if isinstance(module, nn.ModuleDict) else module
        register_parametrization(module, key, Doubled())

    return change


def bias_is_a_buffer(model: Any) -> None:
    base = layer_of(model).base_layer
    value = base.bias.detach()
    del base.bias
    base.register_buffer("bias", value)


CHANGES: dict[str, tuple[Any, int]] = {
    "disabled": (disabled, 0),
    "merged": (merged, 0),
    "two active": (second, 0),
    "another one active": (other_alone, 1),
    "a variant active": (a_variant, 0),
    "scaling": (scaled, 1),
    "scaling is a tensor": (scaled_by_a_tensor, 0),
    **{f"hook on {name}": (hooked(name), 0) for name in ("lora_A", "lora_B", "lora_dropout", "base_layer")},
    "hook before lora_B": (fed_hook, 0),
    "hook of backward": (backward_hook, 0),
    **{
        f"forward of {name}": (replaced_forward(name), 0) for name in ("lora_A", "lora_B", "lora_dropout", "base_layer")
    },
    "forward of the layer": (own_forward, 0),
    "forward of the layer's class": (patched_class, 0),
    "the base trains": (base_trains, 0),
    "a computed bias": (computed("base_layer", "bias"), 1),
    "a computed weight": (computed("base_layer", "weight"), 1),
    "a computed weight of lora_A": (computed("lora_A", "weight"), 1),
    "the bias is a buffer": (bias_is_a_buffer, 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_the_first_step_is_asked_in_each(calls, change):
    alter, expected = CHANGES[change]
    plain, ours = adapted(), fused(adapted())
    assert relative_error(step(ours, inputs()), step(plain, inputs())) < 1e-12
    calls.clear()
    for model in (plain, ours):
        alter(model)
    found, want = step(ours, inputs()), step(plain, inputs())
    assert len(calls) == expected
    assert relative_error(found, want) < 1e-12


def test_factors_of_two_dtypes_are_cast_by_autocast(calls):
    plain = adapted(F32, F32)
    layer_of(plain).lora_A["default"].to(BF16)
    found, want = step(fused(plain), inputs(F32), autocast=True), step(plain, inputs(F32), autocast=True)
    assert len(calls) == 1
    assert relative_error(found, want) < 2e-2


def test_adapters_named_by_row_are_left_to_peft(calls):
    names = ["default", "second", "__base__"]
    plain, ours = adapted(), fused(adapted())
    for model in (plain, ours):
        second(model)
        model.eval()
    found, want = (layer_of(model)(inputs(), adapter_names=names) for model in (ours, plain))
    assert not calls
    assert torch.equal(found, want)


@pytest.mark.parametrize("dtypes", [(F64, F64), (BF16, F32)])
@pytest.mark.parametrize("where", ["x", "A", "B", "gradient"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_so_at_the_same_places(calls, where, value, dtypes):
    model, x = adapted(*dtypes), inputs(dtypes[0]).detach()
    layer = layer_of(model)
    if where == "x":
        x[1, 2, 3] = value
    elif where in "AB":
        getattr(layer, f"lora_{where}")["default"].weight.data[1, 2] = value
    spoilt = value if where == "gradient" else None
    found, want = step(fused(model), x, spoilt=spoilt), step(model, x, spoilt=spoilt)
    assert len(calls) == 1
    assert not all(each.isfinite().all() for each in want.values())
    for name in want:
        assert torch.equal(found[name].isfinite(), want[name].isfinite()), name


def test_derivatives_of_gradients_are_refused():
    model, x = fused(adapted()), inputs()
    loss = model(x).square().sum()
    with pytest.raises(RuntimeError, match=r"create_graph=True .* fused=False"):
        torch.autograd.grad(loss, x, create_graph=True)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"forward-mode .* fused=False"):
        model(forward_ad.make_dual(inputs().detach(), inputs().detach()))
    (grad,) = torch.autograd.grad(fused(adapted(), is_fused=False)(x).square().sum(), x, create_graph=True)
    assert grad.requires_grad


def test_an_output_may_be_changed_in_place(calls):
    """Change an output as `nn.ReLU(inplace=True)` does, which autograd forbids on views that a function has made."""
    want = adapted()(inputs()).relu()
    x = inputs()
    found = fused(adapted())(x).relu_()
    found.sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


class QuantisedProduct(torch.autograd.Function):
    """Return a view of its product, as the functions of quantised layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return (x.flatten(0, 1) @ weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ ctx.saved_tensors[0], None


class Quantised(QuantisedLayer):
    def forward(self, x: Tensor) -> Tensor:
        return QuantisedProduct.apply(x, self.weight)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_quantised_base_may_return_a_view(compiled):
    plain = adapted()
    layer_of(plain).base_layer.__class__ = Quantised
    ours = fused(plain)
    if compiled:
        torch.compiler.reset()
        ours.forward = torch.compile(ours.forward, backend="aot_eager", fullgraph=True)
    assert count_fused(ours)[0] == 1
    assert relative_error(step(ours, inputs()), step(plain, inputs())) < 1e-12


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed(calls, reentrant):
    model = fused(adapted(lora_dropout=0.3))
    want = step(model, inputs())
    x = inputs()
    model.zero_grad()
    y = checkpoint(model, x, use_reentrant=reentrant)
    y.backward(gradient_of(y))
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad} | {"x": x.grad, "y": y.detach()}
    assert len(calls) == 3
    assert relative_error(found, want) == 0


@pytest.mark.parametrize("dtypes", [(F64, F64), (BF16, F32)])
def test_selective_recomputation_gives_back_a_product_without_its_branch(calls, dtypes):
    """The policy keeps each product of matrices, which must be what the product has returned."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = partial(create_selective_checkpoint_contexts, kept, allow_cache_entry_mutation=True)
    plain, ours = adapted(*dtypes), fused(adapted(*dtypes))
    found = []
    for model in (plain, ours):
        x = inputs(dtypes[0])
        checkpoint(lambda x, m=model: m(x).sigmoid(), x, use_reentrant=False, context_fn=contexts).sum().backward()
        found.append({"x": x.grad, **{name: p.grad for name, p in model.named_parameters() if p.requires_grad}})
    assert len(calls) == 2
    assert relative_error(found[1], found[0]) < (1e-12 if dtypes[0] is F64 else 1e-2)


def test_hooks_of_all_modules_are_called(calls):
    model = fused(adapted())
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        model(inputs())
    finally:
        handle.remove()
    assert not calls
    assert seen.count(nn.Linear) == 3  # the base, lora_A and lora_B
    model(inputs())
    assert len(calls) == 1


def test_a_hook_of_a_quantised_base_keeps_what_the_base_computes(calls):
    plain = adapted()
    layer_of(plain).base_layer.__class__ = Quantised
    ours = fused(plain)
    kept = []
    for model in (plain, ours):
        layer_of(model).base_layer.register_forward_hook(lambda module, args, output: kept.append(output))
        model(inputs())
    assert not calls
    assert torch.equal(*kept)


def test_transforms_of_functions_are_left_to_peft(calls):
    plain, ours = adapted(), fused(adapted())
    x = inputs().detach()
    for transform in (lambda m: torch.func.grad(lambda x: m(x).square().sum())(x), lambda m: torch.vmap(m)(x)):
        torch.testing.assert_close(transform(ours), transform(plain), rtol=1e-12, atol=1e-12)
    name = "base_model.model.layer.lora_B.default.weight"
    weight = dict(plain.named_parameters())[name].detach()
    tangents = []
    for model in (plain, ours):
        with torch.no_grad():
            called = partial(torch.func.functional_call, model)
            tangents.append(torch.func.jvp(lambda w, f=called: f({name: w}, (x,)), (weight,), (weight,))[1])
    assert not calls
    assert tangents[0].norm() > 0
    torch.testing.assert_close(tangents[1], tangents[0], rtol=1e-12, atol=1e-12)


def test_gradients_in_a_batch(calls):
    for dtypes in ((F64, F64), (BF16, F32)):
        found = []
        for model in (adapted(*dtypes), fused(adapted(*dtypes))):
            x = inputs(dtypes[0])
            y = model(x)
            batch = torch.stack([torch.ones_like(y), 2 * torch.ones_like(y)])
            found.append({"x": torch.autograd.grad(y, x, batch, is_grads_batched=True)[0]})
        assert relative_error(found[1], found[0]) < (1e-12 if dtypes[0] is F64 else 1e-2)
    assert len(calls) == 2


def test_backward_in_autocast_computes_in_the_dtypes_of_the_forward(calls):
    model = fused(adapted(F32, F32))
    want = step(model, inputs(F32))
    model.zero_grad()
    x = inputs(F32)
    y = model(x)
    with torch.autocast("cpu", dtype=BF16):
        y.backward(gradient_of(y))
    assert torch.equal(x.grad, want["x"])
    assert len(calls) == 2


def test_an_input_is_kept_only_for_the_gradient_of_A(calls):
    model = fused(adapted()).requires_grad_(False)
    x = inputs()
    changed = x * 1
    y = model(changed)
    changed.mul_(2)
    y.sum().backward()
    assert x.grad is not None
    with torch.inference_mode():
        encoded = inputs(BF16) * 1
    model = fused(adapted(BF16, F32))
    model(encoded).sum().backward()  # PEFT keeps a copy in float32
    assert len(calls) == 1


def test_one_token_splits_no_factors(calls):
    model = fused(adapted(BF16, F32))
    with torch.no_grad():
        one, many = model(inputs(BF16)[:, :1]), model(inputs(BF16))
    assert len(calls) == 1  # the one of many tokens
    assert torch.equal(one, adapted(BF16, F32)(inputs(BF16)[:, :1]))
    assert (many == adapted(BF16, F32)(inputs(BF16))).float().mean() > 0.999


def test_no_tokens_and_one_row(calls):
    """An expert may get no token; a layer may be called with features alone."""
    for model in (fused(adapted()), fused(adapted(BF16, F32))):
        x = torch.zeros(0, WIDTH, dtype=layer_of(model).base_layer.weight.dtype, requires_grad=True)
        model(x).sum().backward()
        assert x.grad.shape == (0, WIDTH)
        assert all(p.grad.count_nonzero() == 0 for p in model.parameters() if p.requires_grad)
        assert model(torch.zeros(WIDTH, dtype=x.dtype)).shape == (OUT,)
    assert len(calls) == 4


@pytest.mark.parametrize("precision", ["float64", "adapters in float32", "autocast"])
def test_compiled(precision):
    """In one graph: neither the questions about a call nor the splits break it."""
    base, adapters, dtype, autocast = PRECISIONS[precision]
    model = fused(adapted(base, adapters, lora_bias=True))
    want = step(model, inputs(dtype), autocast)
    torch.compiler.reset()
    layer = layer_of(model)
    layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    found = step(model, inputs(dtype), autocast)
    assert relative_error(found, want) < (1e-12 if base is F64 else 1e-2)


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class OwnWeight(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_set_up_says_what_is_not_fused():
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("plain", "variant", "narrow", "placed", "weighted")})
    model["own"], model["words"] = OwnLinear(8, 8), nn.Embedding(8, 8)
    model["narrow"].half()
    names = [*model]
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=names), autocast_adapter_dtype=False)
    peft_model.add_adapter("dora", LoraConfig(r=2, target_modules=["variant"], use_dora=True))
    placed = peft_model.base_model.model["placed"]
    placed.forward = placed.forward
    base = peft_model.base_model.model["weighted"].base_layer
    base.weight = nn.Parameter(base.weight.data.as_subclass(OwnWeight), requires_grad=False)
    fuse(peft_model)
    number, reasons = count_fused(peft_model)
    assert number == 1
    assert reasons == {
        "DoRA": 1,
        "float16": 1,
        "a forward of its own": 1,
        "a base of class OwnLinear, with a forward of its own": 1,
        "a layer of class Embedding": 1,
        "a weight of class OwnWeight": 1,
    }


MIXED = Case(dtype=BF16, sizes={"attention_bias": True})


def in_mixed_precision(mesh_text: str | None, **config: Any) -> tuple[dict[str, Tensor], Any]:
    """Gradients with a base in bfloat16 and adapters in float32; None: of PEFT's model in this process."""
    model: Any = MIXED.model()
    for parameter in trained(model).values():
        parameter.data = parameter.data.float()
    ids, counted = MIXED.batches()[0], None
    if mesh_text is not None:
        mesh, settings = on_mesh(mesh_text, **config)
        model = parallelize(model, mesh, settings)
        ids, counted = ids.chunk(dp_size(mesh))[dp_rank(mesh)], count_fused(model)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}, counted


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["1x1", "2x1", "2x2", "1x4"]))
def test_a_base_in_bfloat16_on_meshes(pool, mesh):
    """Its activations are rounded in other places on each mesh: with PEFT's forward on a mesh in nearly the same."""
    want = pool.run(ranks_of(mesh), partial(in_mixed_precision, fused=False), mesh)
    for (peft, (_, all_peft)), (got, (number, others)) in zip(
        want, pool.run(ranks_of(mesh), in_mixed_precision, mesh), strict=True
    ):
        assert (all_peft, number, others.total()) == ({"fused=False": number}, len(got) // 2, 0)
        assert relative_error(got, peft) < 0.04  # two meshes differ by 0.06, with PEFT's forward
