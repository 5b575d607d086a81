"""A script's own loop on Accelerate: the same training as plain PEFT in one process, on every mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.accelerate_plugin.harness import Rows, environment, launched, plugin, trains
from tests.cases import cases
from tests.oracle import (
    SEVEN,
    Case,
    Run,
    causal_lm,
    differing,
    fill_adapters,
    full,
    lora_config,
    ranks_of,
    reference,
    relative_error,
)
from tests.oracle.workers import Failure, attempt

ENDS = [*SEVEN, "embed_tokens", "lm_head"]
CASES = {
    "plain": Case(),
    "accumulated and clipped": Case(accumulate=2, clip=0.3),
    "qwen3": Case(family="qwen3"),
    "tied": Case(sizes={"tie_word_embeddings": True}),
    "embedding and head": Case(lora={"target_modules": ENDS, "r": 4}),
    "head saved": Case(lora={"modules_to_save": ["lm_head"]}),
    "rslora": Case(lora={"use_rslora": True}),
    "float32": Case(dtype=torch.float32),
}
MESHES = {
    "2x1": list(CASES),
    "4x1": ["plain", "accumulated and clipped"],
    "2x2x1": ["plain", "accumulated and clipped"],
    "1x2": list(CASES),
    "1x1cp2": list(CASES),
    "2x1cp2": ["plain", "accumulated and clipped"],
    "2x2": list(CASES),
}
KEPT = {"2x2": ["accumulated and clipped"], "1x2": ["tied", "embedding and head", "head saved"]}


class Mine(Accelerator):
    """A user's own class, which looks at what passes."""

    def __init__(self, **kwargs: Any) -> None:
        self.seen: list[str] = []
        super().__init__(**kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append("prepare")
        return super().prepare(*args, **kwargs)

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append("clip_grad_norm_")
        return super().clip_grad_norm_(*args, **kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append("gather")
        return super().gather(*args, **kwargs)


def in_a_class_of_ones_own(mesh: str) -> tuple[set[str], Run]:
    case = CASES["accumulated and clipped"]
    with launched():
        accelerator = Mine(gradient_accumulation_steps=case.accumulate, fsdp_plugin=plugin(mesh))
        run = trains(case, accelerator)
        accelerator.gather(torch.ones(1))
        return set(accelerator.seen), run


def loops(mesh: str, cases: list[str], by_environment: bool) -> dict[str, Run]:
    found = {}
    for name in cases:
        case = CASES[name]
        with launched(**(environment(mesh) if by_environment else {})):
            given = {} if by_environment else {"fsdp_plugin": plugin(mesh)}
            found[name] = trains(case, Accelerator(gradient_accumulation_steps=case.accumulate, **given))
    return found


@pytest.mark.parametrize(("mesh", "names"), cases(*KEPT.items(), matrix=MESHES.items()))
def test_a_loop_trains_as_one_process_does(pool, mesh, names):
    wanted = {name: reference(CASES[name]) for name in names}
    for runs in pool.run(ranks_of(mesh), loops, mesh, names, mesh in ("1x2", "4x1")):
        for name, run in runs.items():
            want = wanted[name]
            assert run.losses == pytest.approx(want.losses, abs=1e-5 if name == "float32" else 1e-6), name
            assert run.norms == pytest.approx(want.norms, rel=1e-9), name
            assert relative_error(run.gradients, want.gradients) < (1e-5 if name == "float32" else 1e-12), name
            assert relative_error(run.adapters, want.adapters) < (1e-3 if name == "float32" else 1e-10), name


def test_a_users_own_class_comes_before_ours(pool):
    want = reference(CASES["accumulated and clipped"])
    for seen, run in pool.run(2, in_a_class_of_ones_own, "1x2"):
        assert seen == {"prepare", "clip_grad_norm_", "gather"}
        assert run.norms == pytest.approx(want.norms, rel=1e-9)
        assert relative_error(run.adapters, want.adapters) < 1e-10


def test_one_process_is_a_mesh_too():
    with launched():
        run = trains(CASES["plain"], Accelerator(fsdp_plugin=plugin("1x1")))
    assert relative_error(run.adapters, reference(CASES["plain"]).adapters) < 1e-12


BF16 = Case(dtype=torch.float32, steps=3)


def in_bf16(mesh: str, checkpointing: bool) -> Run:
    with launched(**environment(mesh, "bf16", FSDP_ACTIVATION_CHECKPOINTING=str(checkpointing).lower())):
        accelerator = Accelerator()
        run = trains(BF16, accelerator)
        assert accelerator.mixed_precision == "bf16"
        return run


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x1", "2x2"]))
def test_bf16_against_one_process_under_the_same_policy(pool, mesh):
    """Gradients are reduced in float32 (Accelerate's own policy reduces them, and returns losses, in bfloat16)."""
    [want] = pool.run(1, in_bf16, "1x1", False)
    for run in pool.run(ranks_of(mesh), in_bf16, mesh, True):
        assert run.losses == pytest.approx(want.losses, abs=1e-2)
        assert any(loss != torch.tensor(loss).bfloat16().item() for loss in run.losses)
        assert all(gradient.dtype == torch.float32 for gradient in run.gradients.values())


def from_disk(mesh: str, base: str) -> Run:
    """The base is left on the disk until it is prepared; stock Accelerate updates one parameter of 28 then."""
    with launched(**environment(mesh)):
        model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float64)
        assert model.lm_head.weight.is_meta
        model = get_peft_model(model, lora_config(), autocast_adapter_dtype=False)
        fill_adapters(model)
        return trains(CASES["plain"], Accelerator(), model.train())


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2"]))
def test_a_model_that_each_process_reads_its_own_slices_of(pool, tmp_path, mesh):
    causal_lm().save_pretrained(tmp_path)
    for run in pool.run(ranks_of(mesh), from_disk, mesh, str(tmp_path)):
        assert relative_error(run.adapters, reference(CASES["plain"]).adapters) < 1e-10


# ---------------------------------------------------------------------- layer kinds


def mixtral() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=131, num_local_experts=4)
    model = MixtralForCausalLM(config)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts))
    fill_adapters(model)
    return model.train()  # in float32: torch multiplies no groups in float64


def dora() -> Any:
    model = get_peft_model(causal_lm(), lora_config(use_dora=True))
    fill_adapters(model)
    return model.double().train()


KINDS = {"DoRA": dora, "target_parameters": mixtral}


def of_kinds(mesh: str) -> dict[str, Any]:
    found = {}
    for name, make in KINDS.items():
        with launched():
            accelerator = Accelerator(fsdp_plugin=plugin(mesh))
            found[name] = attempt(trains, Case(steps=2), accelerator, make())
    return found


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x1"]))
def test_other_kinds_of_adapters_train_as_in_one_process(pool, mesh):
    answers = pool.run(2, of_kinds, mesh)
    for name, make in KINDS.items():
        with launched():
            want = trains(Case(steps=2), Accelerator(cpu=True), make())
        for answer in answers:
            assert not isinstance(answer[name], Failure), answer[name].trace
            assert answer[name].losses == pytest.approx(want.losses, abs=1e-5), name
            assert relative_error(answer[name].adapters, want.adapters) < (1e-10 if name == "DoRA" else 1e-3), name


# ---------------------------------------------------------------------- models and optimizers


def unseeded(mesh: str) -> dict[str, torch.Tensor]:
    """Each process draws an adapter of its own."""
    with launched():
        accelerator = Accelerator(fsdp_plugin=plugin(mesh))
        base = causal_lm()
        torch.manual_seed(100 + dist.get_rank())
        model = get_peft_model(base, lora_config())
        return trains(Case(steps=1), accelerator, model).adapters


def test_replicas_start_from_rank_zeros_adapter(pool):
    first, *others = pool.run(4, unseeded, "2x2x1")
    for other in others:
        assert not differing(other, first)


def injected(mesh: str) -> list[Any]:
    """The adapter is the plugin's; the script makes its optimizer from a bare model."""
    case = Case(steps=2)
    with launched():
        accelerator = Accelerator(fsdp_plugin=plugin(mesh, lora_config=lora_config(), seed=3))
        model = causal_lm().train()
        layers, rest = model.model.layers.parameters(), [*model.lm_head.parameters(), *model.model.norm.parameters()]
        optimizer = torch.optim.AdamW([{"params": list(layers), "lr": 1e-2}, {"params": rest, "lr": 1.0}])
        run = trains(case, accelerator, model, optimizer)
        sizes = [len(group["params"]) for group in optimizer.param_groups]

        partial = attempt(
            trains, case, accelerator, causal_lm(), torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
        )
    return [run, sizes, partial]


def test_an_adapter_of_the_plugin(pool):
    base = causal_lm()
    torch.manual_seed(3)
    model = get_peft_model(base, lora_config()).train()
    with launched():
        want = trains(Case(steps=2), Accelerator(cpu=True), model)
    names = {name.removeprefix("base_model.model."): tensor for name, tensor in want.adapters.items()}
    for run, sizes, partial in pool.run(2, injected, "2x1"):
        assert relative_error(run.adapters, names) < 1e-10
        assert sizes == [28, 0]
        assert partial.kind == "ValueError"


def one_after_the_other(mesh: str) -> Run:
    with launched():
        accelerator = Accelerator(fsdp_plugin=plugin(mesh))
        model = accelerator.prepare(CASES["plain"].model())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        return trains(CASES["plain"], accelerator, model, optimizer)


def test_a_model_and_then_its_optimizer(pool):
    want = reference(CASES["plain"]).adapters
    for run in pool.run(2, one_after_the_other, "1x2"):
        assert relative_error(run.adapters, want) < 1e-10


def with_a_teacher(mesh: str) -> list[Any]:
    """A frozen model beside the one that trains, and one that is prepared for evaluation."""
    with launched():
        accelerator = Accelerator(fsdp_plugin=plugin(mesh))
        student, teacher = Case().model(), causal_lm(seed=9).requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=1e-2)
        student, teacher, optimizer = accelerator.prepare(student, teacher, optimizer)
        judge = accelerator.prepare_model(causal_lm(seed=8), evaluation_mode=True)
        tokens = Case().batches()[0]
        with torch.no_grad():
            return [full(model(input_ids=tokens).logits) for model in (teacher, judge)]


def test_models_without_adapters_that_do_not_train(pool):
    tokens = Case().batches()[0]
    with torch.no_grad():
        want = [causal_lm(seed=seed)(input_ids=tokens).logits for seed in (9, 8)]
    for got in pool.run(4, with_a_teacher, "2x2"):
        for mine, theirs in zip(got, want, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)


def two_adapters(mesh: str) -> list[Any]:
    """A forward with adapters and one without; a second adapter that never trains."""
    case = Case(steps=3)
    with launched():
        accelerator = Accelerator(fsdp_plugin=plugin(mesh))
        model = case.model()
        model.add_adapter("second", lora_config())
        model.set_adapter("default")
        second = {n: p.detach().clone() for n, p in model.named_parameters() if ".second." in n}
        base = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" not in n}
        tokens = case.batches()[0]

        def without(prepared: Any) -> None:
            with torch.no_grad(), prepared.disable_adapter():
                seen.append(full(prepared(input_ids=tokens).logits))

        seen: list[torch.Tensor] = []
        run = trains(case, accelerator, model, between=without)
        after = {name: full(p) for name, p in model.named_parameters()}
        same = [name for name, value in {**base, **second}.items() if not torch.equal(after[name], value)]
        with torch.no_grad():
            plain = causal_lm()(input_ids=tokens).logits
    return [run, same, [torch.allclose(each, plain, atol=1e-6) for each in seen]]


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["1x2", "2x2"]))
def test_the_base_and_an_adapter_that_does_not_train_stay_as_they_are(pool, mesh):
    want = reference(Case(steps=3))
    for run, changed, disabled in pool.run(ranks_of(mesh), two_adapters, mesh):
        assert changed == []
        assert disabled == [True] * 3
        assert relative_error(run.adapters, want.adapters) < 1e-10


# ---------------------------------------------------------------------- uneven labels


def uneven(mesh: str) -> list[float]:
    """As in scripts that count tokens: sums over processes, not means of means."""
    with launched():
        accelerator = Accelerator(fsdp_plugin=plugin(mesh)) if mesh else Accelerator(cpu=True)
        model = Case().model()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        rows = Rows(torch.cat(Case().batches()), uneven=True)
        loader: Any = torch.utils.data.DataLoader(rows, batch_size=8 // accelerator.num_processes)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for batch in loader:
            count = (batch["labels"][:, 1:] != -100).sum()
            total = accelerator.reduce(count, "sum")
            loss = model(**batch).loss * count / total * accelerator.num_processes
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return losses


def test_sums_over_processes_count_tensor_parallel_peers_once(pool):
    want = uneven("")
    for mesh in ("2x1", "1x2", "2x2"):
        for losses in pool.run(ranks_of(mesh), uneven, mesh):
            assert losses == pytest.approx(want, abs=1e-6), mesh


def test_cases_differ():
    """Else the table above would say less than it seems to."""
    runs = [reference(replace(case, steps=1)).losses[0] for name, case in CASES.items() if name != "float32"]
    assert len(set(runs)) >= 5
