"""One arena a backend, for all attacks on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from envd.errors import BackendUnavailable
from tests.escape.arena import Arena
from tests.escape.attack import BACKENDS


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "escape: attacks on sandboxes; `make test-escape`")


@pytest.fixture(scope="session", params=BACKENDS)
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    yield from _running(request.param)


@pytest.fixture(scope="session")
def unprotected() -> Iterator[Arena]:
    yield from _running("plain")


def _running(backend: str) -> Iterator[Arena]:
    found = Arena(backend)
    try:
        found.start()
    except BackendUnavailable as error:
        if backend.startswith("namespaces"):
            raise
        pytest.skip(f"{backend} does not start here: {error}")
    try:
        yield found
    finally:
        found.stop()
