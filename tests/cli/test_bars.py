"""Progress on a real terminal and in a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

PROGRAM = """
import os
from resources.progress import Progress
from triplane_dagster.cli.bars import Bars
with Bars() as bars:
    saved = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what Dagster does while a step runs
    for done in range(0, 101, 50):
        bars(Progress("rollouts", "0003", "sampling", done, 100, {"tokens_per_second": 6100.0}))
    bars(Progress("rewards", "0003", "grading", 7, None))
    os.dup2(saved, 2)
"""


def test_progress_in_a_pipe_is_plain_and_rate_limited() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [
        "0003 rollouts sampling  0/100  tokens per second 6100",
        "0003 rollouts sampling  100/100  tokens per second 6100",
        "0003 rewards grading  7",
    ]


def test_a_terminal_gets_bars_even_while_a_step_captures_stderr() -> None:
    main, terminal = pty.openpty()
    subprocess.run([sys.executable, "-c", PROGRAM], stderr=terminal, env={**os.environ, "TERM": "xterm"}, check=True)
    os.close(terminal)
    shown = os.read(main, 65536).decode()
    os.close(main)
    assert "100/100" in shown and "━" in shown


def test_a_finished_phase_says_so_once() -> None:
    program = """
from resources.progress import Progress
from triplane_dagster.cli.bars import Bars
with Bars() as bars:
    for _ in range(3):
        bars(Progress("rollouts", "0003", "sampling", 100, 100))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["0003 rollouts sampling  100/100"]


def test_work_goes_on_when_its_terminal_is_gone_or_nobody_reads() -> None:
    program = PROGRAM + "print('done')"
    main, terminal = pty.openpty()
    os.close(main)
    unread, pipe = os.pipe()
    os.close(unread)
    environment = {**os.environ, "TERM": "xterm"}
    for stderr in (terminal, pipe):
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=stderr, env=environment, check=False
        )
        os.close(stderr)
        assert (done.returncode, done.stdout) == (0, b"done\n")


def test_a_command_runs_with_closed_standard_streams() -> None:
    program = (
        "import os; from triplane_dagster.cli import app, main;"
        " app.app = lambda **_: print([os.readlink(f'/proc/self/fd/{each}') for each in (0, 2)]); main()"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == "['/dev/null', '/dev/null']"
