"""Runs the command line as a terminal's foreground job, interrupts it at a chosen point, and looks at what it
leaves.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg

from tests.acceptance.laboratory import ROOT, Laboratory

REACH_S = 240.0
PROGRESS = re.compile(r"(task_suite|base_policy|\d{4} [a-z_]+) \S")
"""What a line of progress begins with, where there is no terminal."""
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass
class Job:
    """One run of a command in a session of its own, with a TMPDIR of its own and a mark that its descendants
    inherit.
    """

    laboratory: Laboratory
    arguments: list[str]
    pause_at: str = ""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    servers: list[str] = field(default_factory=list)
    """Names of the envd servers' folders at the signal; their control groups are called after them."""

    def __post_init__(self) -> None:
        self.scratch = self.laboratory.folder / "scratch"
        self.scratch.mkdir(exist_ok=True)
        self.paused = self.laboratory.folder / f"paused-{self.mark}"
        self.log = self.laboratory.folder / f"stderr-{self.mark}"
        self.environment = {
            **self.laboratory.env,
            "TMPDIR": str(self.scratch),
            "TEST_MARK": self.mark,
            "PAUSE_AT": self.pause_at,
            "PAUSED": str(self.paused),
            "PYTHONPATH": f"{Path(__file__).parent / 'pausing'}:{ROOT}:{ROOT / 'kernels'}",
            "OMP_NUM_THREADS": "1",
        }

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.laboratory.command(*self.arguments),
                cwd=self.laboratory.folder,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + REACH_S
        while not reached():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before the point\n{self.said}"
            assert time.monotonic() < deadline, f"the point was not reached\n{self.said}"
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> float:
        """Send it to the whole foreground group, as a terminal does. Returns when."""
        self.servers = [each.name for each in self.scratch.glob("envd-*")]
        sent = time.monotonic()
        os.killpg(self.process.pid, number)
        return sent

    def seconds_to_end(self, sent: float) -> float:
        self.process.wait(timeout=120)
        return time.monotonic() - sent

    def other_lines(self) -> list[str]:
        """What it said beside progress."""
        return [line for line in self.said.splitlines() if line.strip() and not PROGRESS.match(line)]

    def left(self) -> list[str]:
        """Processes, mounts, control groups and temporary files that are still there."""
        found = [f"process {pid}: {line}" for pid, line in processes_with(f"TEST_MARK={self.mark}")]
        found += [
            f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if str(self.scratch) in line
        ]
        names = tuple(self.servers)
        found += [group for group in below(_CGROUPS) if Path(group).name.startswith(names)] if names else []
        return [*found, *below(self.scratch), *below(self.laboratory.folder / ".triplane" / "store" / "tmp")]

    def left_after(self, seconds: float) -> list[str]:
        """What is left when nothing goes any more, or after so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


def below(folder: Path) -> list[str]:
    """Every path below a folder from which others may be removing some."""
    return [str(Path(place, name)) for place, folders, files in os.walk(folder) for name in (*folders, *files)]


def processes_with(variable: str) -> list[tuple[int, str]]:
    """Live processes (pid, command) in whose environment `variable` stands."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append((int(entry.name), line[:120]))
        except OSError:
            continue
    return found


def last_run(laboratory: Laboratory) -> tuple[dg.DagsterRunStatus, list[str]]:
    """How Dagster shows the newest run, and its steps that failed."""
    failed = dg.DagsterEventType.STEP_FAILURE
    with chdir(laboratory.folder), dg.DagsterInstance.from_config(".") as instance:
        (run,) = instance.get_runs(limit=1)
        events = [entry.get_dagster_event() for entry in instance.all_logs(run.run_id, of_type=failed)]
    return run.status, [event.step_key or "" for event in events]
