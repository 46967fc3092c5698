"""The ways a kernel test runs, as the fixture `way`: the torch reference, the Triton kernel under Triton's interpreter on this CPU, and on a GPU.

tests/conftest.py has Triton imported for the interpreter; here TRITON_INTERPRET is set while a test of that way runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch
from kernel_inputs import Way, WayName
from triplane_kernels import tuning


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
        assert os.environ.get("TRITON_INTERPRET") is None, "unset TRITON_INTERPRET to test on a GPU"
        # property tests draw many shapes: a search at each would take minutes, and fill the user's cache
        monkeypatch.setattr(tuning, "search", lambda op, candidates, run: dict(candidates[0]))
        monkeypatch.setattr(tuning, "_keep", lambda op, name, found: None)
    yield Way(name, torch.device("cuda" if name == "gpu" else "cpu"))
