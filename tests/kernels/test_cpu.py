"""The first parallel call of a function gives the bits of every later one."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIRST_CALLS = """
import torch
from triplane_kernels.cpu import _UNARY, resolve_kernels

torch.set_num_threads(4)
resolve_kernels()
values = torch.linspace(0.01, 0.99, 100_000)
for function in _UNARY:
    first = function(values)
    assert all(torch.equal(first, function(values)) for _ in range(3)), function
    exact = function(values.double())
    assert torch.allclose(first.double(), exact, rtol=2e-6, atol=2e-7), (function, (first - exact).abs().max())
"""


@pytest.mark.slow
def test_first_parallel_calls_of_fresh_processes_have_full_precision() -> None:
    for process in [subprocess.Popen([sys.executable, "-c", FIRST_CALLS]) for _ in range(4)]:
        assert process.wait(timeout=120) == 0
