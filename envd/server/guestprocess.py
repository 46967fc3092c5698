"""Programs that the server runs in a sandbox for its tools: found there, bounded in time and output, killed when nobody
waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from envd.errors import EnvdError
from envd.guest.link import GuestLink
from envd.sandbox.python_inside import bin_directory

MAX_OUTPUT = 1024 * 1024
"""Bytes that are kept of each stream; a process that writes more has `cut` set."""
_PROMPT_S = 20.0
"""One long poll."""
_GRACE_S = 5.0
_missing: WeakKeyDictionary[GuestLink, set[str]] = WeakKeyDictionary()
_killing: set[asyncio.Task[None]] = set()


class Finished(NamedTuple):
    """How a program ended."""

    code: int
    """-N: by signal N."""
    stdout: bytes
    stderr: bytes
    cut: bool
    """It wrote more than is here."""
    timed_out: bool


def candidates(name: str) -> list[str]:
    """Where a program may be in a sandbox, best first: beside the Python that runs envd, as sandboxes see it, then the
    system's.
    """
    beside = Path(sys.prefix, "bin", name)
    found = [f"{bin_directory()}/{name}", str(beside)] if beside.exists() else []
    return list(dict.fromkeys([*found, *filter(None, [shutil.which(name, path="/usr/local/bin:/usr/bin:/bin")]), name]))


async def run_in_guest(
    guest: GuestLink, programs: Sequence[str], arguments: Sequence[str], *, timeout_s: float, at_most: int = MAX_OUTPUT
) -> Finished | None:
    """Run the first of `programs` that the sandbox has, in its workspace; None where it has none of them.

    at_most: bytes of each stream that are kept. Raises OSError where it can't be started for another reason (no process
    left, no memory), SandboxGone.
    """
    missing = _missing.setdefault(guest, set())
    for program in programs:
        if program in missing:
            continue
        try:
            process, _ = await guest.start([program, *arguments], timeout_s=timeout_s, ring=at_most)
        except (FileNotFoundError, PermissionError):
            await guest.stat(".")  # else it is the workspace that is not there
            missing.add(program)
            continue
        try:
            return await _finish(guest, process, timeout_s, at_most)
        except BaseException:
            task = asyncio.create_task(_kill(guest, process))
            _killing.add(task)
            task.add_done_callback(_killing.discard)
            raise
    return None


async def _finish(guest: GuestLink, process: int, timeout_s: float, at_most: int) -> Finished:
    async with asyncio.timeout(timeout_s + _GRACE_S):
        stdout, much = await _drained(guest, process, 1, at_most)
        if much:
            await _kill(guest, process)
        stderr, more = await _drained(guest, process, 2, at_most)
        state = await guest.wait(process, wait_s=_PROMPT_S)
        while state.running:
            state = await guest.wait(process, wait_s=_PROMPT_S)
    return Finished(state.code, stdout, stderr, much or more, state.timed_out)


async def _drained(guest: GuestLink, process: int, channel: int, at_most: int) -> tuple[bytes, bool]:
    """All output of a channel, and whether there was more than is kept."""
    pieces: list[bytes] = []
    offset = 0
    while True:
        chunk = await guest.output(process, channel, offset, wait_s=_PROMPT_S)
        if chunk.start != offset:
            return b"".join(pieces), True
        pieces.append(chunk.data)
        if chunk.total > at_most:
            return b"".join(pieces)[:at_most], True
        offset += len(chunk.data)
        if chunk.ended:
            return b"".join(pieces), False


async def _kill(guest: GuestLink, process: int) -> None:
    """What has ended already is fine."""
    with contextlib.suppress(OSError, EnvdError):
        await guest.signal(process, signal.SIGKILL, tree=True)
