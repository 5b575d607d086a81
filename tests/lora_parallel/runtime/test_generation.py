"""`generate` on a sharded model gives the one-process text, whenever ranks finish, and leaves the model trainable."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.cases import cases
from tests.oracle import Case, on_mesh, parse_mesh, ranks_of

MESHES = cases("2x1", "1x2", matrix=["2x2"])
SETTINGS = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}


def generate(mesh_text: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What this rank generates, what one process would, and how many adapter tensors then get a gradient."""
    from lora_parallel import ParallelConfig, build_mesh, parallelize
    from lora_parallel.distributed.mesh import dp_rank, dp_size

    case = Case(sizes={"use_cache": True})
    config = ParallelConfig(**parse_mesh(mesh_text))
    mesh = build_mesh(config, "cpu")
    prompts = case.batches()[0][: dp_size(mesh)]  # one row a data-parallel rank
    plain = case.model().eval()
    # The first row stops at its third token, the others later or not at all.
    stop = int(plain.generate(input_ids=prompts, **SETTINGS)[0, prompts.shape[1] + 2])
    want = plain.generate(input_ids=prompts, eos_token_id=stop, **SETTINGS)
    model = parallelize(case.model(), mesh, config).eval()
    mine = slice(dp_rank(mesh), dp_rank(mesh) + 1)
    got = model.generate(input_ids=prompts[mine], eos_token_id=stop, **SETTINGS)
    model.train()
    model(input_ids=prompts[mine], labels=prompts[mine]).loss.backward()
    return got, want[mine], sum(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("mesh", MESHES)
def test_generate_equals_one_process(pool, mesh):
    for got, want, gradients in pool.run(ranks_of(mesh), generate, mesh):
        length = min(got.shape[1], want.shape[1])  # padding after the last stop may differ in length
        assert torch.equal(got[:, :length], want[:, :length])
        assert not got[:, length:].any()
        assert not want[:, length:].any()
        assert gradients == 28


def sample(mesh_text: str) -> tuple[list[int], list[int]]:
    """Return what this rank samples, and what one process samples with the seed of the first rank of its batch."""
    from lora_parallel import parallelize
    from lora_parallel.distributed.mesh import dp_rank

    case, settings = (
        Case(sizes={"use_cache": True, "num_hidden_layers": 1}),
        {"max_new_tokens": 9, "do_sample": True, "pad_token_id": 0},
    )
    prompt = case.batches()[0][:1]
    mesh, config = on_mesh(mesh_text)
    plain, model = case.model().eval(), parallelize(case.model(), mesh, config).eval()
    torch.manual_seed(dist.get_rank())
    got = model.generate(input_ids=prompt, **settings)
    torch.manual_seed(dp_rank(mesh) * mesh["tp"].size())
    return got[0].tolist(), plain.generate(input_ids=prompt, **settings)[0].tolist()


def test_ranks_of_one_batch_sample_the_same_tokens(pool):
    for got, want in pool.run(4, sample, "2x2"):
        assert got == want
