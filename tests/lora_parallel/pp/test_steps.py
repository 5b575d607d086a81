"""Steps of training in pipeline stages: dropout, lengths that vary, evaluation, hooks, and what each rank does."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from lora_parallel import clip_grad_norm_, meta_init, no_sync, parallelize, read_plan
from lora_parallel.adapters.dropout import TopologyInvariantDropout
from lora_parallel.lazy import materialize
from lora_parallel.pp import links
from lora_parallel.pp.links import Links
from lora_parallel.pp.pipeline import ScheduleRun
from lora_parallel.pp.stage_model import LastStageTensor
from tests.cases import cases
from tests.lora_parallel.cp.runs import ids, language
from tests.lora_parallel.pp.runs import GPIPE, INTERLEAVED, PP, Run, actions, in_float64, most_alive
from tests.lora_parallel.traffic import Traffic
from tests.oracle import full, lora_config, on_mesh, over_stages, ranks_of, relative_error, trained
from tests.oracle.rows import DECODER, base_model


def model_on(mesh: str, run: Run | None = None, **config: Any) -> Any:
    device_mesh, settings = on_mesh(mesh, **{**PP, **config})
    return parallelize((run or Run()).model(), device_mesh, settings)


# ---------------------------------------------------------------------- training


def lengths_vary(mesh: str, config: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Eight steps of AdamW with LoRA dropout and clipping, of batches of 14, 13, 9 and 5 tokens in turn.

    Every other batch is given with labels, the rest without.
    """
    run = Run(lora={"lora_dropout": 0.3}, own_loss_function=in_float64)
    model = model_on(mesh, run, **config) if "pp" in mesh else parallelize(run.model(), *on_mesh(mesh))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(8):
        batch = ids(seed=step, tokens=(14, 13, 9, 5)[step % 4])
        if step % 3:
            loss = model(input_ids=batch, labels=batch).loss
        else:
            loss = F.cross_entropy(model(input_ids=batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    adapters = {name: full(p) for name, p in trained(model).items()}
    return losses, over_stages(adapters, mesh) if "pp" in mesh else adapters


@pytest.mark.parametrize(
    ("mesh", "config"),
    cases(
        ("1x1pp2", {}),
        matrix=[
            ("1x2pp2", {}),
            ("1x1pp4", {}),
            ("1x1pp2", GPIPE),
            ("1x1pp2", INTERLEAVED),
            ("1x1cp2pp2", {}),
            ("1x1pp2", {"activation_checkpointing": True}),
        ],
    ),
)
def test_steps_with_dropout_equal_one_rank(pool, mesh, config):
    """A mesh of one rank drops what any other mesh drops; its own dropout is held against a formula elsewhere."""
    ((want_losses, want),) = pool.run(1, lengths_vary, "1x1", {})
    for losses, adapters in pool.run(ranks_of(mesh), lengths_vary, mesh, config):
        assert losses == pytest.approx(want_losses, rel=1e-10)
        assert relative_error(adapters, want) < 1e-10


def dropped(mesh: str, recompute: bool) -> dict[str, Tensor]:
    """The elements that each dropout drops in a step, by layer, rows of micro-batches in order; twice if recomputed."""
    run = Run(lora={"lora_dropout": 0.5})
    model = (
        model_on(mesh, run, activation_checkpointing=recompute)
        if "pp" in mesh
        else parallelize(run.model(), *on_mesh(mesh))
    )
    found: dict[str, list[Tensor]] = {}
    own = TopologyInvariantDropout.dropped

    def note(self: Any, shape: Any, device: Any, keys: Any = None) -> Any:
        mask = own(self, shape, device, keys)
        found.setdefault(self.name, []).append(mask)
        return mask

    with patch.object(TopologyInvariantDropout, "dropped", note):
        model(input_ids=ids(), labels=ids()).loss.backward()
    masks = {name: torch.cat(masks) for name, masks in found.items()}
    return over_stages(masks, mesh) if "pp" in mesh else masks


def test_micro_batches_drop_what_the_batch_drops(pool):
    (want,) = pool.run(1, dropped, "1x1", False)
    for answer in pool.run(2, dropped, "1x1pp2", False):
        assert answer.keys() == want.keys()
        for name, whole in want.items():
            assert torch.equal(answer[name], whole), name
    for answer in pool.run(2, dropped, "1x1pp2", True):
        for name, whole in want.items():  # each micro-batch's mask again in its backward, in whatever order
            assert answer[name].sum() == 2 * whole.sum(), name


# ---------------------------------------------------------------------- what a forward returns


def returned(mesh: str) -> dict[str, Any]:
    """What the model returns on each rank: in training and evaluation, with labels and without, of uneven batches."""
    model = model_on(mesh)
    batch = language()
    found: dict[str, Any] = {}
    output = model(**batch)
    assert isinstance(output.logits, LastStageTensor)
    found["shape"] = tuple(output.logits.shape)
    found["training"] = output.loss.item(), output.logits.detach().clone()
    gc.disable()  # a cycle of references would hold the logits of all micro-batches until Python looks for cycles
    output = model(**batch)
    held = weakref.ref(output.logits.held)
    output.loss.backward()
    del output
    found["logits outlive the step"] = held() is not None
    gc.enable()
    model.eval()
    with torch.no_grad():
        for rows in (4, 3, 1):
            some = {name: each[:rows] for name, each in batch.items()}
            output = model(**some)
            found[f"{rows} rows"] = output.loss.item(), torch.as_tensor(output.logits.float().numpy())
            found[f"{rows} rows without labels"] = model(input_ids=some["input_ids"]).logits.clone()
        found["tuple"] = model(**batch, return_dict=False)[1].clone()
    return found


def test_every_rank_has_what_the_model_returns(pool):
    model, batch = Run().model(), language()
    loss, logits = (each.detach() for each in model(**batch, return_dict=False))
    for found in pool.run(2, returned, "1x1pp2"):
        assert found["shape"] == tuple(logits.shape)
        assert not found["logits outlive the step"]
        got_loss, got = found["training"]
        assert got_loss == pytest.approx(loss.item(), rel=1e-6)
        torch.testing.assert_close(got, logits, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found["tuple"], logits, rtol=1e-12, atol=1e-12)
        for rows in (4, 3, 1):
            want = model(**{name: each[:rows] for name, each in batch.items()}, return_dict=False)[0].item()
            got_loss, got = found[f"{rows} rows"]
            assert got_loss == pytest.approx(want, rel=1e-6)
            torch.testing.assert_close(got, logits[:rows].float())
            torch.testing.assert_close(found[f"{rows} rows without labels"], logits[:rows], rtol=1e-12, atol=1e-12)


def hooks_and_grads(mesh: str, config: dict[str, Any]) -> dict[str, Any]:
    """What post-accumulate hooks see, and gradients that were there before a forward."""
    model = model_on(mesh, **config)
    parameter = next(iter(trained(model).values()))
    calls: list[Tensor] = []
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append(full(p.grad)))
    loss = model(**language()).loss
    before = len(calls), parameter.grad is None
    loss.backward()
    first = full(parameter.grad)
    with no_sync(model):
        model(**language()).loss.backward()
    model(**language()).loss.backward()
    return {
        "before": before,
        "calls": len(calls),
        "first": torch.equal(calls[0], first),
        "third": full(parameter.grad) / first,
    }


@pytest.mark.parametrize(
    ("mesh", "config"),
    cases(
        ("1x1pp2", {}),
        ("1x1pp2", GPIPE),
        ("1x2pp2", {}),
        matrix=[("2x1pp2", {"pp_microbatches": 2}), ("2x1pp2", {**GPIPE, "pp_microbatches": 2})],
    ),
)
def test_a_hook_is_called_once_with_the_finished_gradient(pool, mesh, config):
    for found in pool.run(ranks_of(mesh), hooks_and_grads, mesh, config):
        assert found["before"] == (0, True)
        assert found["calls"] == 3
        assert found["first"]
        torch.testing.assert_close(found["third"], torch.full_like(found["third"], 3.0), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------- messages and memory


@contextmanager
def messages() -> Iterator[list[tuple[bool, int]]]:
    """Note the messages to neighbours: True for hidden states, and bytes."""
    sent: list[tuple[bool, int]] = []
    own = Links.send

    def send(self: Any, tensor: Tensor, is_hidden: bool, key: str) -> None:
        sent.append((is_hidden, tensor.numel() * tensor.element_size()))
        own(self, tensor, is_hidden, key)

    with patch.object(Links, "send", send):
        yield sent


def traffic(mesh: str, config: dict[str, Any]) -> dict[str, Any]:
    model = model_on(mesh, **config)
    model(**language()).loss.backward()
    with messages() as sent, Traffic() as collectives, actions() as begun:
        loss = model(**language()).loss
        inside = len(sent)
        loss.backward()
    stage_group = [each for each in collectives.calls if len(each[1]) > 1]
    return {"sent": sent, "inside": inside, "alive": most_alive(begun), "collectives": stage_group}


@pytest.mark.parametrize(
    ("mesh", "config"),
    cases(
        ("1x1pp2", PP),
        ("1x1pp2", INTERLEAVED),
        ("1x2pp2", {**PP, "sequence_parallel": True}),
        matrix=[("1x1pp4", PP), ("1x1pp2", GPIPE), ("1x1cp2pp2", PP), ("2x1pp2", {"pp_microbatches": 2})],
    ),
)
def test_messages_and_micro_batches_alive(pool, mesh, config):
    """Two messages a boundary and micro-batch, of the hidden states that a rank has between blocks."""
    answers = pool.run(ranks_of(mesh), traffic, mesh, config)
    sizes = {"cp": 2 if "cp" in mesh else 1, "tp": 2 if "sequence_parallel" in config else 1}
    pp, micro, stages = int(mesh[-1]), config["pp_microbatches"], config.get("pp_stages_per_rank", 1)
    each = 4 // micro * 14 * 40 * 8 // sizes["cp"] // sizes["tp"]
    peers = len(answers) // pp
    for rank, found in enumerate(answers):
        place = rank // peers
        mine = range(place, pp * stages, pp)
        hidden = sum(stage < pp * stages - 1 for stage in mine) * micro
        gradients = sum(stage > 0 for stage in mine) * micro
        assert sum(is_hidden for is_hidden, _ in found["sent"]) == hidden
        assert sum(not is_hidden for is_hidden, _ in found["sent"]) == gradients
        assert {size for _, size in found["sent"]} == {each}
        if config.get("pp_schedule") == "gpipe":
            assert found["inside"] == hidden
            assert found["alive"] == micro
        else:
            assert found["inside"] == hidden + gradients  # backwards run inside of the forward
        if stages == 1 and "pp_schedule" not in config:
            assert found["alive"] <= min(micro, pp - place)


def gathers(reshard: bool) -> tuple[int, int]:
    """All-gathers over dp_shard of a step, and the FSDP units of this rank."""
    short = Run(settings={"num_hidden_layers": 2})
    model = model_on("2x1pp2", short, pp_microbatches=2, reshard_after_forward=reshard)
    model(**{name: each[:2] for name, each in language().items()}).loss.backward()
    with Traffic() as traffic:
        model(**{name: each[:2] for name, each in language().items()}).loss.backward()
    group = on_mesh("2x1pp2")[0].get_group("dp_shard")
    return traffic.count("all_gather", group), sum(isinstance(each, FSDPModule) for each in model.modules())


def test_weights_are_gathered_once_a_step_if_asked(pool):
    """The root's weights are gathered once anyway; those of blocks for each forward and each backward, or once."""
    for found, units in pool.run(4, gathers, False):
        assert found == units
    for found, units in pool.run(4, gathers, True):
        assert found == 1 + 2 * 2 * (units - 1)


def read(mesh: str, config: dict[str, Any], folder: str) -> tuple[int, int, int, int]:
    """Bytes that this rank plans to read, reads and holds, and the bytes of the whole model's base."""
    with meta_init():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    whole = sum(each.bytes for each in read_plan(model))
    device_mesh, settings = on_mesh(mesh, **config)
    model = parallelize(model, device_mesh, settings, lora_config=lora_config(), materialize=False)
    plan = sum(each.bytes for each in read_plan(model))
    with meta_init():
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with patch.object(materialize, "bytes_bar", wraps=materialize.bytes_bar) as bar:
        model = parallelize(again, device_mesh, settings, lora_config=lora_config())
    held = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "lora_" not in name)
    loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()
    return plan, bar.call_args.args[1], held, whole


@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_reads_and_holds_its_own(pool, tmp_path, tied):
    base_model("LlamaForCausalLM", {**DECODER, "num_hidden_layers": 4, "tie_word_embeddings": tied}).save_pretrained(
        tmp_path, max_shard_size="30KB"
    )
    answers = pool.run(2, read, "1x1pp2", PP, str(tmp_path))
    embedding = 131 * 40 * 4  # float32 on the disk
    plans = [plan for plan, *_ in answers]
    assert sum(plans) == answers[0][-1] + (embedding if tied else 0)
    for plan, bytes_read, held, _ in answers:
        assert plan == bytes_read == held / 2
    assert max(plans) <= 1.15 * min(plans)


def slow_stage() -> float:
    """A step in which each action takes longer than a rank waits before it asks if another has failed."""
    model = model_on("1x1pp2")
    own = ScheduleRun._forward

    def slow(self: Any, *args: Any) -> None:
        time.sleep(0.2)
        own(self, *args)

    with patch.object(ScheduleRun, "_forward", slow), patch.object(links, "PATIENCE", 0.02):
        loss = model(**language()).loss
        loss.backward()
    return loss.item()


def test_a_slow_stage_is_waited_for(pool):
    want = Run().model()(**language()).loss.item()
    assert pool.run(2, slow_stage) == [pytest.approx(want, rel=1e-6)] * 2
