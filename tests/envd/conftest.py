"""A real server a backend, shared by the tests of this folder; where a backend without a server keeps its things; an
agent without a sandbox.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.owned import owned_name
from envd.local import LocalEnvd
from envd.sandbox.cgroups import OWNED, remove_groups
from tests.envd.guests import Guest, alive
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


@pytest.fixture
def run_dir() -> Iterator[Path]:
    directory = Path("/tmp", f"{OWNED}{owned_name()}")
    (directory / "templates").mkdir(parents=True)
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
    remove_groups(directory.name)


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Guest]:
    started = Guest(tmp_path)
    yield started
    started.stop()


@pytest.fixture
def mark() -> Iterator[str]:
    """A number of seconds that no other sleep on this machine has."""
    name = f"9{time.time_ns() % 10**9}"
    yield name
    assert alive(name) == []
