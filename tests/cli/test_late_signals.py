"""Signals at the edges of a command."""

from __future__ import annotations

import subprocess
import sys

import pytest

SEEN_LATE = """
import os, signal, sys, threading, time
from triplane_dagster.cli import interrupts

writers, pipe, close, first = [], os.pipe, os.close, interrupts._first_signal
ended = threading.Event()
os.pipe = lambda: writers.append(pipe()) or writers[-1]
if sys.argv[1] == "after":
    # the watcher looks when the block has closed its end of the pipe
    os.close = lambda descriptor: (close(descriptor), ended.set())
    interrupts._first_signal = lambda reader: (ended.wait(), first(reader))[1]
with interrupts.stoppable() as state:
    # as when Dagster's handler drops the signal
    os.write(writers[0][1], bytes([signal.SIGINT]))
    while sys.argv[1] == "before" and state.number is None:
        time.sleep(0.01)
print("finished")
"""


@pytest.mark.parametrize(("seen", "status"), [("after", 0), ("before", 130)])
def test_signal_at_the_end_of_the_work_keeps_its_result(seen: str, status: int) -> None:
    """seen: whether the watcher looks after the work has ended, or right before."""
    done = subprocess.run([sys.executable, "-c", SEEN_LATE, seen], capture_output=True, text=True, timeout=60)
    assert done.stdout == "finished\n", "the watcher ended the process while it ended by itself"
    assert (done.returncode, done.stderr) == (status, "")


def test_sigterm_lets_a_command_clean_up() -> None:
    program = """
import asyncio, os, signal, typer
from triplane_dagster.cli.guard import GuardedGroup

app = typer.Typer(cls=GuardedGroup)
app.callback()(lambda: None)


@app.command()
def work() -> None:
    async def job() -> None:
        try:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            print("cleaned up")

    asyncio.run(job())


app()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "work"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (143, "cleaned up\n")
    assert "interrupted (SIGTERM)" in done.stderr and "Traceback" not in done.stderr
