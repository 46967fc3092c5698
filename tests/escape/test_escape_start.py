"""A backend whose programs are installed must start: an attack that was not tried is not blocked."""

from __future__ import annotations

import pytest

from envd.errors import BackendUnavailable
from tests import needs
from tests.escape import conftest
from tests.escape.arena import Arena


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that end while they start, on a machine with every program."""

    def start(self: Arena) -> None:
        raise BackendUnavailable("envd did not start: it ended with code -11")

    monkeypatch.setattr(Arena, "start", start)
    monkeypatch.setattr(needs, "lacks", lambda *names: [])
    monkeypatch.setattr(conftest, "qemu_image", lambda: None)


@pytest.mark.parametrize("backend", ["namespaces", "gvisor", "qemu", "plain"])
def test_server_that_crashes_at_its_start_fails_its_attacks(crashing: None, backend: str) -> None:
    with pytest.raises(BackendUnavailable, match="code -11"):
        next(conftest.running(backend))


def test_backend_whose_program_is_missing_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs.Need, "present", lambda self: False)
    for backend, program in (("gvisor", "runsc"), ("qemu", "qemu-system-x86_64")):
        with pytest.raises(pytest.skip.Exception, match=f"needs {program} "):
            next(conftest.running(backend))
