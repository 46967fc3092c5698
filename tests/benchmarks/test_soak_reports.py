"""What the soak's clients report: only a kill of the server or its spawner excuses an error."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any, Self

import pytest

from benchmarks.envd_soak_client import work
from benchmarks.envd_soak_reports import Reports, report_error
from envd.errors import EnvdError, SandboxGone, ServerUnavailable

CREATES = 100


class OverError(Exception):
    """The fake has created as many sandboxes as a test asks for."""


class RefusesEverySecond:
    """A client whose server answers every second create with an error of its own."""

    creates = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def put_template(self, files: dict[str, bytes]) -> str:
        return "t"

    async def create(self, template: str, limits: Any, env: dict[str, str]) -> Any:
        type(self).creates += 1
        if self.creates > CREATES:
            raise OverError
        if self.creates % 2 == 0:
            raise EnvdError("UNKNOWN: KeyError('pool')")

        async def call(call: Any) -> Any:
            return SimpleNamespace(text="on\nexit 0" if "setsid" in str(call) else f"{env['NUMBER']}\nexit 0")

        async def nothing(*arguments: Any) -> None:
            pass

        async def read(path: str) -> bytes:
            return env["NUMBER"].encode()

        files, processes = SimpleNamespace(write=nothing, read=read), SimpleNamespace(start=nothing)
        return SimpleNamespace(call=call, files=files, processes=processes, close=nothing)


def test_refused_creates_are_wrong_without_a_kill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RefusesEverySecond, "creates", 0)
    monkeypatch.setattr("benchmarks.envd_soak_client.RETRY_S", 0)
    before, after = Reports(), Reports()
    before.kill()
    before.serve()
    with pytest.raises(OverError):
        client: Any = RefusesEverySecond
        asyncio.run(work(client, random.Random(0), 0))
    after.kill()
    lines = capsys.readouterr().out.splitlines()
    for reports in (Reports(), before, after):
        for line in lines:
            reports.hear(line)
        assert reports.said == {"done": CREATES / 2, "wrong": CREATES / 2}
        assert "KeyError('pool')" in reports.wrong[0]


def test_losses_around_a_kill_are_no_errors() -> None:
    reports, since = Reports(), time.monotonic()
    reports.kill()
    reports.hear(report_error("lost", since, ServerUnavailable("gone"), 15))
    reports.hear(report_error("away", time.monotonic(), ServerUnavailable("no server"), 15))
    before_it_served = time.monotonic()
    reports.serve()
    reports.hear(report_error("lost", before_it_served, SandboxGone("of the killed server"), 15))
    assert reports.said == {"lost": 2, "away": 1} and not reports.wrong and not reports.killed
    reports.hear(report_error("lost", time.monotonic(), SandboxGone("of this server"), 15))
    assert reports.said["wrong"] == 1 and "of this server" in reports.wrong[0]


def test_only_a_sandbox_that_is_gone_after_its_lifetime_is_late() -> None:
    long_ago = time.monotonic() - 20
    assert report_error("lost", long_ago, SandboxGone("past its lifetime"), 15) == "late"
    for error, since in ((EnvdError("other"), long_ago), (SandboxGone("early"), time.monotonic())):
        assert report_error("lost", since, error, 15).startswith("lost ")


def test_clients_that_end_by_themselves_are_wrong() -> None:
    reports = Reports()
    for code in ("print('done'); raise RuntimeError('no room')", "import os; print('done'); os.kill(os.getpid(), 9)"):
        command = [sys.executable, "-uc", code]
        reports.listen(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    assert reports.said == {"done": 2, "wrong": 1}
    assert reports.wrong == ["a client ended by itself with code 1; it said last: RuntimeError: no room"]
