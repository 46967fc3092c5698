"""The ways a kernel test runs, as the fixture `way`: the torch reference, the Triton kernel under Triton's interpreter on this CPU, and on a GPU.

Triton decides for good at its import whether its own library is interpreted, so it is imported here first. TRITON_INTERPRET is then set only while
a test of that way runs: no other test and no process started by one sees it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import pytest
import torch

T = TypeVar("T")
Name = Literal["reference", "interpreter", "gpu"]


@dataclass(frozen=True)
class Way:
    """How the kernels of one test are computed."""

    name: Name
    device: torch.device

    def pick(self, small: T, real: T) -> T:
        """`real` on a GPU, else `small`: the interpreter runs a program of a grid in milliseconds."""
        return real if self.name == "gpu" else small


def pytest_configure(config: pytest.Config) -> None:
    if _compiles(config) or importlib.util.find_spec("triton") is None:
        return
    if "triton" in sys.modules:
        raise pytest.UsageError(
            "triton was imported before tests/kernels/conftest.py could switch its interpreter on: import it later"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton.language")


def _compiles(config: pytest.Config) -> bool:
    """Whether `make test-gpu` runs: then Triton's own library is compiled, and nothing is interpreted in this process."""
    return config.getoption("markexpr") == "gpu" and torch.cuda.is_available()


@pytest.fixture(params=["reference", "interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """Run the test once a way; tensors belong on `way.device`, sizes come from `way.pick`."""
    name: Name = request.param
    if name == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if name == "interpreter":
        if importlib.util.find_spec("triton") is None:
            pytest.skip("needs triton: pip install triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRIPLANE_KERNELS", "reference" if name == "reference" else "triton")
    assert name != "gpu" or os.environ.get("TRITON_INTERPRET") is None, "unset TRITON_INTERPRET to test on a GPU"
    yield Way(name, torch.device("cuda" if name == "gpu" else "cpu"))
