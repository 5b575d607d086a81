"""What a plan predicts is what ranks measure; what it recommends is a configuration that works."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BertConfig, Gemma3TextConfig, LlamaConfig, PretrainedConfig

from lora_parallel import MeshCost, ParallelConfig, plan_memory
from lora_parallel.cost.described_model import DescribedModel, Stack, find_stack, shorten
from lora_parallel.cost.mesh_cost import (
    GPUS,
    Hardware,
    fits,
    possible_meshes,
    predicted_seconds,
    preference,
    with_cost,
)
from lora_parallel.cost.simulated_step import PHASES, StepCost, cost_of_a_step
from lora_parallel.cost.simulations import Simulations
from lora_parallel.loading.meta_init import meta_init
from lora_parallel.sizes import AXES
from tests.cases import cases
from tests.oracle.cost_rows import KINDS, LLAMA, LORA, MESHES, RANKS, ROWS, TOKENS, measure

BOUND = 0.05


def checkpoint(run, folder):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(run.config, dtype=getattr(torch, run.dtype)).save_pretrained(folder)
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("kind", cases("experts", matrix=["LoRA", "LoRA, recomputed", "full", "QLoRA"]))
def test_prediction_is_what_one_process_measures(pool, simulated_here, tmp_path, kind):
    run = KINDS[kind]
    (found,) = pool.run(1, measure, run, checkpoint(run, tmp_path), {})
    assert run.predicted({}, 1).total == pytest.approx(found["held"] + found["step"], rel=BOUND)


# A pipeline refuses to train all parameters. One mesh a test: processors without AVX-512 take minutes for bfloat16.
MEASURED = [(kind, mesh) for kind, run in KINDS.items() for mesh in MESHES if run.lora or "pp" not in MESHES[mesh]]


@pytest.mark.matrix  # on a busy machine threads of gloo hold what they sent for longer, and more is measured
@pytest.mark.processes
@pytest.mark.parametrize(("kind", "mesh"), MEASURED)
def test_prediction_is_within_5_percent_of_what_ranks_measure(pool, simulated_here, tmp_path, kind, mesh):
    run = KINDS[kind]
    found = pool.run(RANKS, measure, run, checkpoint(run, tmp_path), MESHES[mesh])
    measured = max(each["held"] + each["step"] for each in found)
    assert run.predicted(MESHES[mesh]).total == pytest.approx(measured, rel=BOUND)


@pytest.mark.matrix
@pytest.mark.processes
def test_every_mesh_of_a_plan_is_within_5_percent(pool, simulated_here, tmp_path):
    """Meshes that a plan looks at share runs: those with more shards are computed from those with two."""
    run = KINDS["LoRA"]
    plan = plan_memory(
        LLAMA, gpus=RANKS, sequence_length=TOKENS, batch_size=4 * ROWS, rows=ROWS, lora_config=LORA, progress=False
    )
    folder = checkpoint(run, tmp_path)
    sizes = {tuple(each.sizes.values()) for each in plan.meshes}
    assert sizes >= {(1, 1, 4, 1, 1), (1, 1, 2, 1, 2), (1, 1, 1, 1, 4), (2, 1, 1, 1, 2), (2, 1, 2, 1, 1)}
    for each in plan.meshes:
        if each.sizes["pp"] == 1 and each.sizes["dp_replicate"] == 1 and each.sizes["tp"] != 2:
            mesh = {"tp": each.sizes["tp"], **each.options}
            found = pool.run(RANKS, measure, run, folder, mesh)
            assert each.total == pytest.approx(max(one["held"] + one["step"] for one in found), rel=BOUND), mesh
    assert plan.recommended is plan.meshes[0]
    assert [each for each in plan.meshes if each.fits] == sorted((m for m in plan.meshes if m.fits), key=preference)
    more = plan.more_rows
    assert more is not None
    best = plan.recommended
    assert (more.sizes, more.rows, more.microbatches) == (best.sizes, 2 * ROWS, best.microbatches)
    assert more.activations > best.activations
    json.dumps(plan.to_json())


@pytest.mark.processes
@pytest.mark.matrix
def test_no_pipeline_is_planned_for_all_parameters():
    few = plan_memory(LLAMA, gpus=2, sequence_length=TOKENS, batch_size=4, full=True, progress=False)
    assert {each.sizes["pp"] for each in few.meshes} == {1}
    assert not any(each.refused for each in few.meshes)


@pytest.mark.processes
@pytest.mark.matrix
def test_a_small_gpu_gets_more_options_and_then_no_mesh():
    few = plan_memory(
        LLAMA, gpus=2, gpu_memory=0.01, sequence_length=TOKENS, batch_size=2, lora_config=LORA, progress=False
    )
    assert few.recommended is None
    assert {"loss_parallel": True, "sequence_parallel": True, "activation_checkpointing": True} in [
        each.options for each in few.meshes
    ]
    assert few.meshes[0].total == min(each.total for each in few.meshes if not each.refused)


@pytest.mark.matrix  # the command's test has the same refusal
def test_a_mesh_that_parallelize_refuses_has_its_error():
    odd = LlamaConfig(hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=3, vocab_size=64)
    plan = plan_memory(odd, ParallelConfig(tp=2), gpus=2, sequence_length=16, progress=False)
    assert plan.recommended is None
    assert "heads" in plan.meshes[0].refused


@pytest.mark.usefixtures("simulated_here")
@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"gpus": 0}, ValueError, "gpus=0: give a positive int"),
        ({"sequence_length": "8k"}, TypeError, "sequence_length='8k': give a positive int"),
        ({"hardware": "H1000"}, ValueError, "hardware='H1000': give one of A100-40, A100, H100"),
        ({"gpu_memory": -1}, ValueError, "gpu_memory=-1: give the GiB"),
        ({"optimizer": "Adamw"}, ValueError, "optimizer='Adamw': give the name of a class of torch.optim"),
        ({"optimizer": "lr_scheduler"}, ValueError, "optimizer='lr_scheduler': give the name of a class"),
        ({"optimizer": "Optimizer"}, ValueError, "optimizer='Optimizer': give the name of a class"),
        ({"optimizer": "LBFGS"}, ValueError, "optimizer='LBFGS' runs the model several times in a step"),
        ({"gpus": 12}, ValueError, "gpus=12 is no whole number of machines of 8 GPUs: give up to 8, or a multiple"),
        ({"gpus": 16, "batch_size": 1}, ValueError, "gpus=16, batch_size=1, rows=1: no mesh divides such a batch"),
        ({"batch_size": 4, "rows": 3}, ValueError, "batch_size=4 is no multiple of rows=3"),
        ({"lora_config": LoraConfig(r=0)}, ValueError, "r=0: give a positive int"),
        ({"lora_config": LoraConfig(target_modules=["nosuch"])}, ValueError, "Target modules {'nosuch'} not found"),
        ({"quantization_config": {"quant_method": "gptq"}}, ValueError, "is quantised by gptq, .* --quantization none"),
        ({"full": True, "lora_config": LoraConfig()}, ValueError, "full=True trains all parameters"),
        ({"full": True, "quantization_config": {"quant_method": "bitsandbytes"}}, ValueError, "which a quantised base"),
        ({"config": ParallelConfig(pp=2, require_adapters=False), "full": True}, ValueError, "pp=2 without adapters"),
        ({"model": "/nowhere/at/all"}, FileNotFoundError, "There is no folder /nowhere/at/all"),
        ({"config": ParallelConfig(pp=2, pp_schedule="gpipe")}, ValueError, 'pp_schedule="gpipe" has no prediction'),
        (
            {"config": ParallelConfig(pp=2), "batch_size": 4},
            ValueError,
            "pp_microbatches=1, and batch_size with rows make 4",
        ),
        ({"model": BertConfig(architectures=["BertForMaskedLM"])}, ValueError, "causal language models"),
    ],
)
def test_bad_arguments_are_refused_by_name(changes, error, text):
    given = {"model": LLAMA, "gpus": 2, "sequence_length": 16, "progress": False, **changes}
    with pytest.raises(error, match=text):
        plan_memory(given.pop("model"), **given)


def test_a_name_that_is_no_folder_is_said_to_be_none(monkeypatch):
    def unreachable(name, **_):
        raise OSError("We couldn't connect\nCheck your connection")

    monkeypatch.setattr(PretrainedConfig, "get_config_dict", unreachable)
    with pytest.raises(
        FileNotFoundError, match=r"There is no folder nosuch here, and the model hub .* couldn't connect$"
    ):
        plan_memory("nosuch", gpus=2, sequence_length=16)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model_type": "mine", "auto_map": {"AutoConfig": "c.C"}}, "has code of its own"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "is quantised by mxfp4, .* bfloat16 copy"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised by fp8, .* bfloat16 copy"),
    ],
)
def test_configs_that_no_plan_can_be_made_for(changes, error, tmp_path, capsys):
    LLAMA.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=error):
        plan_memory(tmp_path, gpus=2, sequence_length=16)
    assert not capsys.readouterr().out  # transformers asks there


@pytest.mark.usefixtures("simulated_here")
def test_a_quantised_config_is_planned_as_dense_if_asked():
    config = LlamaConfig(**LLAMA.to_diff_dict(), quantization_config={"quant_method": "mxfp4"})
    plan = plan_memory(config, ParallelConfig(), gpus=1, sequence_length=16, quantization_config={}, progress=False)
    assert plan.training == "LoRA r=16"
    assert not plan.meshes[0].refused


@pytest.mark.processes
def test_a_worker_leaves_nothing_behind_and_says_why_it_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # for one process
    with Simulations() as held:
        assert held.ask({"kind": "stack", "model": {}})["refused"]
        (folder,) = tmp_path.iterdir()
        tempfile.mkdtemp(dir=folder)
        assert (
            len(list(Path(f"/proc/{held._group}/task").iterdir())) == 1
        )  # a fork has none of the threads that torch has
        children = Path(f"/proc/{held._group}/task/{held._group}/children").read_text()
        os.kill(int(children), signal.SIGKILL)
        (folder / "stderr").write_text("Traceback\nMemoryError\n\n")
        with pytest.raises(ChildProcessError, match="has ended: MemoryError"):
            held.ask({"kind": "stack", "model": {}})
        (folder / "stderr").write_text(
            "terminate called\n  what():  Invalid thread pool!\nframe #8: <unknown function>\n"
        )
        with pytest.raises(ChildProcessError, match=r"has ended: what\(\):  Invalid thread pool!"):
            held.ask({"kind": "stack", "model": {}})
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("simulated_here")
def test_what_a_model_s_code_raises_is_an_answer():
    with Simulations() as held:
        answer = held.ask({"kind": "stack", "model": {}})
    assert "DescribedModel.__init__() missing" in answer["refused"]


def test_blocks_of_one_kind_share_a_run_and_settings_follow():
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 4
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Gemma3TextConfig(num_hidden_layers=12, layer_types=kinds, vocab_size=64, head_dim=16, **sizes)
    with meta_init():
        model = AutoModelForCausalLM.from_config(config)
    stack = find_stack(model)
    assert stack.kinds == (0, 0, 1) * 4
    assert stack.few == (0, 2, 9, 10, 11)
    assert stack.pairs() == {0: (stack.few, (2, 9, 10, 11)), 1: (stack.few, (0, 9, 10, 11))}
    assert Stack("layers", (0,) * 12).pairs() == {0: ((0, 1, 9, 10, 11), (0, 9, 10, 11))}  # four blocks at least
    shorten(model, stack, stack.few)
    assert len(model.model.layers) == 5
    assert model.config.layer_types == [kinds[index] for index in stack.few]


def test_meshes_are_those_that_can_be():
    found = [tuple(each.values()) for each in possible_meshes(16, 8, blocks=4, tokens=8192, batch=16)]
    assert len(found) == len(set(found))
    for pp, copies, shards, cp, tp in found:
        assert pp * copies * shards * cp * tp == 16
        assert pp <= 4
        assert cp <= 2
        assert tp <= 8
        assert copies == 1 or shards * cp * tp == 8
        assert copies == 1 or shards > 1  # which Accelerate refuses under tp and cp
        assert pp == 1 or 16 // (copies * shards) >= pp


def test_a_gpu_leaves_room_for_each_communicator():
    few, many = dict.fromkeys(AXES, 1) | {"dp_shard": 8}, dict.fromkeys(AXES, 1) | {"dp_shard": 2, "cp": 2, "tp": 2}
    large, small = Hardware(80, 1, 1), Hardware(24, 1, 1)
    for sizes, hardware, free in [(few, large, 6.4), (many, large, 6.4), (few, small, 1.92), (many, small, 6 * 0.7)]:
        assert fits((hardware.gpu_memory - free - 0.01) * 2**30, sizes, hardware)
        assert not fits((hardware.gpu_memory - free + 0.01) * 2**30, sizes, hardware)


def test_seconds_follow_from_the_hardware():
    h100 = GPUS["H100"]
    sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": 8, "cp": 1, "tp": 1}
    compute = h100.tflops * 1e12 * h100.efficiency
    assert predicted_seconds(h100, sizes, compute, {}, {}, 1) == pytest.approx(1)
    # what dp sends is hidden as long as compute lasts, and then is not
    assert predicted_seconds(h100, sizes, compute, {"dp_shard": 450e9}, {}, 1) == pytest.approx(1)
    assert predicted_seconds(h100, sizes, compute, {"dp_shard": 900e9}, {}, 1) == pytest.approx(2)
    # tp is waited for; over two machines dp takes the network
    assert predicted_seconds(h100, {**sizes, "tp": 8, "dp_shard": 1}, compute, {"tp": 450e9}, {}, 1) == pytest.approx(2)
    assert predicted_seconds(h100, {**sizes, "dp_shard": 16}, 0, {"dp_shard": 50e9}, {}, 1) == pytest.approx(1)
    # a pipeline of 4 with 4 micro-batches has 3 slots of waiting
    assert predicted_seconds(h100, {**sizes, "pp": 4, "dp_shard": 1}, compute, {}, {}, 4) == pytest.approx(7 / 4)
    assert isinstance(h100, Hardware)


def test_equally_fast_meshes_go_by_the_bytes_between_machines():
    def cost(seconds, between, **more):
        return MeshCost({}, {}, 1, 1, seconds=seconds, between_machines=between, **{"fits": True, **more})

    ordered = [cost(0.312, 5), cost(0.308, 9), cost(0.309, 9), cost(0.34, 0), cost(1, 0)]
    ordered += [cost(0, 0, fits=False, total=1), cost(0, 0, fits=False, total=2)]
    ordered += [cost(0, 0, fits=False, refused="why")]
    mixed = [ordered[index] for index in (7, 2, 5, 0, 3, 6, 4, 1)]
    assert sorted(mixed, key=preference) == ordered


def test_bytes_that_an_axis_sends_between_machines_are_counted():
    numbers = dict.fromkeys(("base", "trained", "states", "buffers", "flops", "embedding", "head"), 1.0)
    numbers |= {f"peak {phase}": 1.0 for phase in PHASES} | {"sent dp_shard": 8.0, "sent tp": 4.0}
    step = StepCost(numbers, [])
    sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 4}
    assert with_cost(MeshCost(sizes, {}, 1, 1), step, 4, [(0, 0)], 0, 0, GPUS["H100"]).between_machines == 8


def test_recomputation_leaves_nothing_behind_after_backward(tmp_path):
    """What is alive as the optimizer steps are gradients: no block's activations, which a tensor may keep alive."""
    LLAMA.save_pretrained(tmp_path)
    LORA.save_pretrained(str(tmp_path / "lora"))
    model = DescribedModel(str(tmp_path), str(tmp_path / "lora"), "bfloat16")
    left = [
        cost_of_a_step(model, ParallelConfig(tp=2, activation_checkpointing=recompute), 2, 1, 64, "SGD").total()
        for recompute in (False, True)
    ]
    assert left[1]["peak head"] < left[0]["peak head"]
    assert left[1]["peak optimizer"] == pytest.approx(left[0]["peak optimizer"], abs=1024)


def test_a_plan_is_used_again_on_meshes_of_its_tp_alone(tmp_path):
    """One key-value head makes other plans at tp 2 and 4: its rows are shared by two ranks, or by four."""
    LlamaConfig(**{**LLAMA.to_diff_dict(), "num_key_value_heads": 1}).save_pretrained(tmp_path)
    LORA.save_pretrained(str(tmp_path / "lora"))
    model, other = (DescribedModel(str(tmp_path), str(tmp_path / "lora"), "bfloat16") for _ in range(2))

    def cost(each, tp):
        return cost_of_a_step(each, ParallelConfig(tp=tp), tp, 1, 64, "SGD").total()

    cost(model, 2)
    assert cost(model, 4) == cost(other, 4)
    assert len(model._proven) == 2 * len(other._proven)
