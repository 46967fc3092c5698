"""The template store without a server: what callers that give up leave behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from envd.server.templates import Templates
from tests.envd.harness import FILES

SLOW_GIT = """#!/bin/sh
echo "$1" >> {log}
sleep 0.15
exec {git} "$@"
"""


@pytest.fixture
def git_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Git takes a while, and writes down what it was asked."""
    git = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    log, shim = tmp_path / "log", tmp_path / "bin" / "git"
    shim.parent.mkdir()
    shim.write_text(SLOW_GIT.format(log=log, git=git))
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
    return log


def test_a_caller_that_gives_up_leaves_its_work_to_the_next_one(tmp_path: Path, git_log: Path) -> None:
    async def scenario(templates: Templates) -> str:
        impatient = asyncio.create_task(templates.put(FILES))
        while not git_log.exists():
            await asyncio.sleep(0.01)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        return await templates.put(FILES)

    directory = tmp_path / "templates"
    directory.mkdir()
    digest = asyncio.run(scenario(Templates(directory, os.geteuid())))
    assert git_log.read_text().split() == ["init", "add", "commit"]
    assert [path.name for path in directory.iterdir()] == [digest]
    assert {path: (directory / digest / path).read_bytes() for path in FILES} == FILES
    command = ["git", "-C", str(directory / digest), "status", "--porcelain"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b""


def test_whoever_stores_second_finds_it_done(tmp_path: Path, git_log: Path) -> None:
    async def scenario() -> list[str]:
        stores = [Templates(tmp_path / "templates", os.geteuid()) for _ in range(2)]
        return await asyncio.gather(*(store.put(FILES) for store in stores))

    (tmp_path / "templates").mkdir()
    one, two = asyncio.run(scenario())
    assert one == two and [path.name for path in (tmp_path / "templates").iterdir()] == [one]
