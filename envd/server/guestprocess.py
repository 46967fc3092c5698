"""Run programs in a sandbox for the server's tools: bounded in time and output, killed if the caller is cancelled."""

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
"""Bytes kept of each output stream; `cut` is set for a process that writes more."""
_PROMPT_S = 20.0
"""Duration of one long poll, in seconds."""
_GRACE_S = 5.0
_missing: WeakKeyDictionary[GuestLink, set[str]] = WeakKeyDictionary()
_killing: set[asyncio.Task[None]] = set()


class Finished(NamedTuple):
    """Result of a program that has ended."""

    code: int
    """Exit code; -N after signal N."""
    stdout: bytes
    stderr: bytes
    cut: bool
    """Whether the program wrote more than is kept."""
    timed_out: bool


def candidates(name: str) -> list[str]:
    """Possible paths of a program in a sandbox, best first: beside the Python that runs envd, as sandboxes see it, then
    in the system's directories.
    """
    beside = Path(sys.prefix, "bin", name)
    found = [f"{bin_directory()}/{name}", str(beside)] if beside.exists() else []
    return list(dict.fromkeys([*found, *filter(None, [shutil.which(name, path="/usr/local/bin:/usr/bin:/bin")]), name]))


async def run_in_guest(
    guest: GuestLink, programs: Sequence[str], arguments: Sequence[str], *, timeout_s: float, at_most: int = MAX_OUTPUT
) -> Finished | None:
    """Run the first of `programs` that the sandbox has, in its workspace; None if it has none of them.

    at_most: bytes kept of each output stream. Raises OSError if the program can't be started for another reason (no
    process left, no memory), SandboxGone, TimeoutError.
    """
    missing = _missing.setdefault(guest, set())
    for program in programs:
        if program in missing:
            continue
        try:
            process, _ = await guest.start([program, *arguments], timeout_s=timeout_s, ring=at_most)
        except (FileNotFoundError, PermissionError):
            await guest.stat(".")  # raises if the workspace, not the program, is missing
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
    """Output of a channel, and whether there was more than is kept."""
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
    """Kill a process and all that it started. Ignores a process that has ended already."""
    with contextlib.suppress(OSError, EnvdError):
        await guest.signal(process, signal.SIGKILL, tree=True)
