"""The kernel that drops elements on a GPU: held against torch's operators in Triton's interpreter, on a CPU.

Triton takes a gigabyte, and torch for CPUs comes without it, so that it is installed for this test alone.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lora_parallel.adapters import dropout

TRITON = "triton==3.6.0"  # that of torch 2.11, the oldest that is supported

PROGRAM = """
import contextlib, json, torch
from lora_parallel.adapters import dropout, dropout_kernel
from lora_parallel.state import ForwardCount

torch.cuda.device_of = lambda x: contextlib.nullcontext()
dropout.kernel = lambda device: dropout_kernel

def computed(module, in_one_kernel, x, grad, row, token):
    dropout.TopologyInvariantDropout._in_one_kernel = lambda *_: in_one_kernel
    y = module(x)
    return [y, *torch.autograd.grad(y, x, grad), module.drop_at(x, row, token, module.keys())]

def twice(module, in_one_kernel, x, grad):
    dropout.TopologyInvariantDropout._in_one_kernel = lambda *_: in_one_kernel
    first, = torch.autograd.grad(module(x), x, grad, create_graph=True)
    return torch.autograd.grad((first * first).sum(), grad)

wrong = []
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    # The interpreter cuts numbers in bfloat16 where GPUs round them: with 1 / (1 - p) = 2 there is nothing to round.
    for p in (0.5,) if dtype is torch.bfloat16 else (0.05, 0.5):
        for shape in ((3, 7, 40), (2, 300), (1, 33, 2, 257), (0, 4, 8)):
            count = ForwardCount(current=3, running=True)
            module = dropout.TopologyInvariantDropout(p, "layer", 5, count, dp_rank=3, feature_offset=7).train()
            x, grad = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(2))
            at = [torch.randint(1000, shape[:-1], dtype=torch.int32) for _ in range(2)]
            pairs = zip(*(computed(module, way, x, grad, *at) for way in (True, False)))
            if not all(torch.equal(a, b) for a, b in pairs):
                wrong.append([str(dtype), p, shape])
    x, grad = (torch.randn(2, 3, 40).to(dtype).requires_grad_() for _ in range(2))
    if not torch.equal(twice(module, True, x, grad)[0], twice(module, False, x, grad)[0]):
        wrong.append([str(dtype), "second derivative"])
print(json.dumps(wrong))
"""


@pytest.mark.matrix
@pytest.mark.processes
def test_the_kernel_drops_what_torchs_operators_drop(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), TRITON]
    subprocess.run(install, check=True)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{tmp_path}:{root}"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == []


def test_without_triton_torchs_operators_drop_and_a_warning_says_so(caplog):
    dropout.kernel.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert dropout.kernel(torch.device("cpu")) is None  # no Triton, or none for a CPU
    assert "LoRA dropout runs in many kernels" in caplog.text
    dropout.kernel.cache_clear()
