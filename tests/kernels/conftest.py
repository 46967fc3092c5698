"""The ways a kernel test runs, as the fixture `way`: the torch reference, the Triton kernel under Triton's interpreter
on this CPU, and on a GPU.

tests/conftest.py has Triton imported for the interpreter; here TRITON_INTERPRET is set while a test of that way runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from kernel_inputs import Way, WayName, first_that_fits
from triplane_kernels import tuning

GPU_SECONDS = 240
"""A test on a GPU compiles what it runs; one that takes longer hangs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A kernel that hangs keeps the main thread inside CUDA, where no signal interrupts it: a thread ends the process
    then.
    """
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.timeout(GPU_SECONDS, method="thread"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """After an illegal access every later call of the process fails: this process ends, pytest-xdist starts another for
    the tests that are left.
    """
    if item.get_closest_marker("gpu") is None or not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as lost:
        print(f"{item.nodeid}: the CUDA context is lost: {lost}", file=sys.__stderr__, flush=True)
        os._exit(1)


@pytest.fixture(params=["reference", "interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """Run the test once a way; tensors belong on `way.device`, sizes come from `way.pick`."""
    name: WayName = request.param
    if name == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if name == "interpreter":
        if importlib.util.find_spec("triton") is None:
            pytest.skip("needs triton: pip install triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        library = importlib.import_module("triton.language.standard")
        assert type(library.sum).__name__ == "InterpretedFunction", "triton was imported before tests/conftest.py"
    monkeypatch.setenv("TRIPLANE_KERNELS", "reference" if name == "reference" else "triton")
    if name == "gpu":
        _first_configurations(monkeypatch)
    yield Way(name, torch.device("cuda" if name == "gpu" else "cpu"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CUDA device, for tests that run nowhere else."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    _first_configurations(monkeypatch)
    return torch.device("cuda")


def _first_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Property tests draw many shapes: a search at each would take minutes, and fill the user's cache.

    What is kept is not taken either.
    """
    assert os.environ.get("TRITON_INTERPRET") is None, "unset TRITON_INTERPRET to test on a GPU"
    monkeypatch.setattr(tuning, "search", first_that_fits)
    monkeypatch.setattr(tuning, "_keep", lambda op, name, found: None)
    monkeypatch.setattr(tuning, "_packaged", lambda device: {})
    monkeypatch.setattr(tuning, "read_table", lambda path: {})
    tuning._remembered.clear()
