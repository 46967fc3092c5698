"""The history and the command line, as fixtures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_history import History, Run, write_history

from contracts.store import open_store


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return write_history(open_store(str(tmp_path_factory.mktemp("store"))))


@pytest.fixture
def triplane(history: History, tmp_path: Path) -> Run:
    """Run the command in a subprocess over the history's store, in an empty working directory."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        program = "from triplane_dagster.cli import main; main()"
        variables = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "TRIPLANE_STORE": history.store.url,
            "COLUMNS": "200",
        }
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True, text=True, cwd=tmp_path, env=variables | (env or {}), check=False, timeout=60,
        )  # fmt: skip

    return run
