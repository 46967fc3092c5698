"""Folder in which `triplane iterate` runs as for a user; all places that it writes to are below this folder.

s store   t TMPDIR   c cache   l ledger   d dagster   run.log   kills.log

Names are short: a socket's path must fit 108 bytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from contracts.failpoints import FAIL_VARIABLE, KILL_VARIABLE
from contracts.store import Store, open_store
from inference.rollouts.ledger import VARIABLE as LEDGER_VARIABLE

EXPERIMENT = Path(__file__).with_name("chaos.yaml")
NAME = "chaos"
_ROOT = Path(__file__).parents[1]
_OURS = ("TRIPLANE_", "DAGSTER_")


@dataclass
class Lab:
    """One store of the experiment, and the command that uses it."""

    folder: Path
    url: str = ""
    """URL of the store; empty: a directory in the lab."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for access to the store."""
    seed: int = 3

    def __post_init__(self) -> None:
        for name in ("t", "c", "l", "d"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "d" / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")

    @property
    def store_url(self) -> str:
        """Value of TRIPLANE_STORE for the command."""
        return self.url or str(self.folder / "s")

    @property
    def ledger(self) -> Path:
        """Folder of the token ledger."""
        return self.folder / "l"

    @property
    def log(self) -> Path:
        """Output of the runs."""
        return self.folder / "run.log"

    def store(self) -> Store:
        """The store, opened in this process. The environment must name the lab's S3 server."""
        return open_store(self.store_url)

    def environment(self, kill_at: str = "", fail_at: str = "") -> dict[str, str]:
        """Environment variables of a run."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        orders = {KILL_VARIABLE: kill_at, FAIL_VARIABLE: fail_at}
        return {
            **kept,
            **self.extra,
            **{name: value for name, value in orders.items() if value},
            "TRIPLANE_STORE": self.store_url,
            "TRIPLANE_CACHE": str(self.folder / "c"),
            "TMPDIR": str(self.folder / "t"),
            LEDGER_VARIABLE: str(self.ledger),
            "DAGSTER_HOME": str(self.folder / "d"),
            "DAGSTER_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path[1:]]),
        }

    def start(self, iterations: int, kill_at: str = "", fail_at: str = "") -> subprocess.Popen[bytes]:
        """Start `triplane iterate -n iterations` as the leader of a new process group."""
        command = [
            sys.executable,
            "-m",
            "triplane_dagster.cli",
            "iterate",
            "-e",
            str(EXPERIMENT),
            "-n",
            str(iterations),
        ]
        command += ["--set", f"seed={self.seed}", "--json"]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                env=self.environment(kill_at, fail_at),
            )

    def iterate(self, iterations: int, timeout_s: float) -> tuple[int, float]:
        """(exit status, seconds) of an undisturbed run."""
        began = time.monotonic()
        process = self.start(iterations)
        try:
            return process.wait(timeout_s), time.monotonic() - began
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def note(self, line: str) -> None:
        """Add a line to kills.log."""
        with (self.folder / "kills.log").open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def said(self, since: int) -> str:
        """Output after the first `since` bytes of the log."""
        with self.log.open("rb") as file:
            file.seek(since)
            return file.read().decode(errors="replace")
