"""Signals at the edges of a command."""

from __future__ import annotations

import subprocess
import sys

LATE = """
import os, signal
from triplane_dagster.cli import interrupts
writers = []
pipe = os.pipe
os.pipe = lambda: writers.append(pipe()) or writers[-1]
with interrupts.stoppable():
    # as when Dagster's handler drops the signal and the watcher has not looked yet
    os.write(writers[0][1], bytes([signal.SIGINT]))
print("finished")
"""


def test_signal_after_the_end_of_the_work_keeps_its_result() -> None:
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60)
        assert done.returncode in (0, 130), done.stderr
        assert done.stdout == "finished\n", "the watcher ended the process while it ended by itself"
