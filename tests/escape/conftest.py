"""One arena a backend, for all attacks on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.envd.stand_ins import qemu_image
from tests.escape.arena import Arena
from tests.escape.attack import BACKENDS
from tests.needs import require


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "escape: attacks on sandboxes; `make test-escape`")


@pytest.fixture(scope="session", params=BACKENDS)
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    yield from running(request.param)


@pytest.fixture(scope="session")
def unprotected() -> Iterator[Arena]:
    yield from running("plain")


def running(backend: str) -> Iterator[Arena]:
    """Skips where a program that the backend needs is not installed; where it is, the backend must start."""
    if backend == "gvisor":
        require("runsc")
    if backend == "qemu":
        qemu_image()
    found = Arena(backend)
    found.start()
    try:
        yield found
    finally:
        found.stop()
