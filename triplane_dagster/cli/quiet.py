"""Hide Dagster's event log on the terminal: the UI shows it, and bars show progress. TRIPLANE_DEBUG=1 prints it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def quiet_dagster() -> Iterator[None]:
    """Silence Dagster in this block. Exceptions and what steps write to stderr are still shown."""
    if os.environ.get("TRIPLANE_DEBUG"):
        yield
        return
    from dagster import BetaWarning, PreviewWarning

    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), _mirror_stderr_alone():
            warnings.simplefilter("ignore", BetaWarning)
            warnings.simplefilter("ignore", PreviewWarning)
            yield
    finally:
        logging.disable(before)


@contextmanager
def _mirror_stderr_alone() -> Iterator[None]:
    """Replace Dagster's mirroring of step output, for which it has no setting.

    Dagster's four helper processes per step are in the terminal's process group and print tracebacks on Ctrl-C. Output
    of steps on stdout would mix with a command's results. Log files still contain everything.
    """
    from triplane_dagster.private_dagster import compute_logs

    before = compute_logs.tail_to_stream
    compute_logs.tail_to_stream = _show
    try:
        yield
    finally:
        compute_logs.tail_to_stream = before


@contextmanager
def _show(path: str, stream: Any) -> Iterator[None]:
    """Copy output from the file at `path` to `stream`, if that is stderr."""
    with ExitStack() as ending:
        if stream is sys.stderr:
            command = ["tail", "--quiet", f"--pid={os.getpid()}", "-F", "-c", "+0", path]
            tail = subprocess.Popen(command, stdout=2, stderr=subprocess.DEVNULL, start_new_session=True)
            ending.callback(tail.wait)
            ending.callback(tail.terminate)
        yield
