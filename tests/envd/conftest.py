"""A real server a backend, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from envd.local import LocalEnvd
from tests.envd.harness import Harness


@pytest.fixture(scope="session")
def namespaces() -> Iterator[Harness]:
    with LocalEnvd("namespaces") as server:
        yield Harness(server.address)


@pytest.fixture(scope="session")
def plain() -> Iterator[Harness]:
    with LocalEnvd("plain") as server:
        yield Harness(server.address)


@pytest.fixture(params=["namespaces", "plain"])
def anywhere(request: pytest.FixtureRequest) -> Harness:
    harness: Harness = request.getfixturevalue(request.param)
    return harness
