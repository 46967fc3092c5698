"""Two policies, and servers of them: one that speaks vLLM's surface (default suite), the real one (make test-vllm)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.engines import VllmConfig
from tests.inference.conftest import write_checkpoint

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where plain copies go."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("TRIPLANE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("policies")
    return write_checkpoint(folder / "first", 0), write_checkpoint(folder / "second", 1)


def fake_config(**changes: object) -> VllmConfig:
    """A server of stub/, started by our keeper as vLLM is."""
    path = ":".join(str(each) for each in (HERE / "stub", ROOT, ROOT / "kernels"))
    return VllmConfig.model_validate({"python": sys.executable, "env": {"PYTHONPATH": path}, "retries": 1, **changes})


def real_config(**changes: object) -> VllmConfig:
    """The real vLLM. Its absence is a failure: a skipped proof is none."""
    if not VLLM_PYTHON.exists():
        pytest.fail(f"{VLLM_PYTHON} is missing: run `make test-vllm`, which builds it")
    return VllmConfig.model_validate({"python": str(VLLM_PYTHON), **changes})
