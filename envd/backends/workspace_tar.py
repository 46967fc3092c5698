"""Snapshots of files only: the workspace as a tar file that the sandbox writes and reads.

    snapshot: tar in the sandbox --OUTPUT--> <into>/workspace.tar          restore: workspace.tar --STDIN--> tar in the
                                                                           sandbox

The server never parses the tar, whose content hostile code may control, and bounds its size.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from envd.errors import EnvdError
from envd.guest.link import GuestLink
from envd.guest.protocol import CHUNK

NAME = "workspace.tar"
LOST = ("processes",)
"""Kinds of state that such a snapshot does not keep."""
_MIB = 1024 * 1024
_SLACK = 64 * _MIB
"""Bytes allowed for names and padding, beyond the multiple of the disk limit that covers files and template."""
_DEADLINE_S = 600.0
_FULL_S = 0.005
_RING = 16 * _MIB
_RECORDS, _RECORD = 400, 20 * 512
"""Number of records that tar writes between two waits for a line on its standard input, and the bytes of each record.
The waits keep tar from filling the ring.
"""
_WAIT = [f"--checkpoint={_RECORDS}", "--checkpoint-action=exec=read go"]
_WRITE = ["/usr/bin/tar", "--create", "--format=posix", "--numeric-owner", "--sparse", *_WAIT, "--file=-", "."]
_EMPTY_AND_READ = (
    "find . -mindepth 1 -delete && exec /usr/bin/tar --extract --preserve-permissions --numeric-owner --no-same-owner"
    " --file=-"
)


async def save_workspace(guest: GuestLink, into: Path, disk_mb: int) -> tuple[str, ...]:
    """Write `into`/workspace.tar and return the kinds of state not kept. Raises EnvdError, SandboxGone."""
    bound = 4 * disk_mb * _MIB + _SLACK
    process = await _start(guest, _WRITE, stdin=True)
    draft = into / f".{NAME}"
    written = allowed = 0
    try:
        with draft.open("xb") as file:
            while True:
                while allowed * _RECORDS * _RECORD <= written:
                    allowed += await _let_on(guest, process)
                chunk = await guest.output(process, 1, written, wait_s=30.0)
                if chunk.start != written:
                    raise EnvdError("the workspace can't be saved: its archive is truncated; take the snapshot again")
                await asyncio.to_thread(file.write, chunk.data)
                written += len(chunk.data)
                if written > bound:
                    raise EnvdError(f"the workspace can't be saved: its tar is larger than {bound} bytes")
                if chunk.ended:
                    break
            await asyncio.to_thread(_settle, file.fileno())
        await _finish(guest, process, "saved", allowed=(0, 1))  # 1: a file changed while it was read
        draft.rename(into / NAME)
    except BaseException:
        draft.unlink(missing_ok=True)
        await _kill(guest, process)
        raise
    return LOST


async def load_workspace(guest: GuestLink, snapshot: Path) -> None:
    """Replace a fresh sandbox's workspace by the tar of `save_workspace`. Raises EnvdError, SandboxGone."""
    await _unpack(guest, snapshot, ["/bin/sh", "-c", _EMPTY_AND_READ])


async def load_packages(guest: GuestLink, packed: Path, into: str) -> None:
    """Unpack the tar of a runtime into an empty directory of a fresh sandbox. Raises EnvdError, SandboxGone."""
    await _unpack(guest, packed, ["/usr/bin/tar", "--extract", "--no-same-owner", f"--directory={into}", "--file=-"])


async def _unpack(guest: GuestLink, snapshot: Path, command: list[str]) -> None:
    process = await _start(guest, command, stdin=True)
    try:
        with (snapshot / NAME).open("rb") as file:
            while data := await asyncio.to_thread(file.read, CHUNK // 4):
                while data:
                    taken = await guest.stdin(process, data)
                    data = data[taken:]
                    if not taken:
                        if not (await guest.wait(process)).running:
                            break
                        await asyncio.sleep(_FULL_S)
        await guest.close_stdin(process)
        await _finish(guest, process, "restored", allowed=(0,))
    except BrokenPipeError:
        await _finish(guest, process, "restored", allowed=())
    except FileNotFoundError as error:
        raise EnvdError(f"snapshot {snapshot.name} holds no {NAME}: it was written by another backend") from error
    finally:
        await _kill(guest, process)


async def _start(guest: GuestLink, argv: list[str], *, stdin: bool) -> int:
    try:
        process, _ = await guest.start(argv, stdin=stdin, timeout_s=_DEADLINE_S, ring=_RING)
    except OSError as error:
        raise EnvdError(f"tar does not start in the sandbox ({error}): end some of its processes") from error
    return process


async def _let_on(guest: GuestLink, process: int) -> int:
    """Send tar a line to end one wait. Returns the number of lines taken, 1 if tar has ended."""
    try:
        return await guest.stdin(process, b"\n")
    except OSError:
        return 1  # it has ended


async def _finish(guest: GuestLink, process: int, what: str, *, allowed: tuple[int, ...]) -> None:
    state = await guest.wait(process, wait_s=_DEADLINE_S)
    if state.running or state.code not in allowed:
        said = (await guest.output(process, 2, 0, at_most=2000)).data.decode(errors="replace").strip().splitlines()
        words = " ".join(said[-1:]) or f"tar ended with {state.code}"
        raise EnvdError(f"the workspace can't be {what}: {words[:300]!r}")


async def _kill(guest: GuestLink, process: int) -> None:
    try:
        await guest.signal(process, 9, tree=True)
    except (OSError, EnvdError):
        pass  # it has ended


def _settle(fd: int) -> None:
    os.fsync(fd)
