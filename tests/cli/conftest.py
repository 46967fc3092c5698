"""The history and the command line, as fixtures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_history import History, Run, write_history
from typer.testing import CliRunner

from contracts.store import open_store
from triplane_dagster.cli.app import app


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return write_history(open_store(str(tmp_path_factory.mktemp("store"))))


@pytest.fixture
def triplane(history: History, tmp_path: Path) -> Run:
    """Run the command in a process of its own over the history's store, in an empty working directory."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        program = "from triplane_dagster.cli import main; main()"
        place = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TRIPLANE_STORE": history.store.url, "COLUMNS": "200"}
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=place | (env or {}), check=False, timeout=120
        )

    return run


@pytest.fixture
def here(history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Like `triplane`, in this process: quicker where the process itself does not matter."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        place = {"TRIPLANE_STORE": history.store.url, "COLUMNS": "200", "TRIPLANE_DEBUG": ""}
        done = CliRunner().invoke(app, arguments, env=place)
        return subprocess.CompletedProcess(list(arguments), done.exit_code, done.stdout, done.stderr)

    return run
