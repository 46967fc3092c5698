"""Tar streams of directories: a thread reads or writes the files, coroutines send or receive the stream."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from contracts.errors import describe
from envd.errors import EnvdError

_CHUNK = 1024 * 1024
_BLOCK = tarfile.BLOCKSIZE
_MAX_FILES = 100_000


async def pack(directory: Path) -> AsyncGenerator[bytes, None]:
    """Yield a tar stream of a directory's files and directories in chunks. Raises EnvdError."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    writing = _in_a_thread(_write, directory, theirs)
    try:
        while True:
            piece, filled = bytearray(_CHUNK), 0
            while filled < _CHUNK and (count := await loop.sock_recv_into(ours, memoryview(piece)[filled:])):
                filled += count
            if not filled:
                break
            yield bytes(piece[:filled])
    finally:
        ours.close()  # if the stream is abandoned, the thread fails with a broken pipe and ends
        await asyncio.wait({writing})
    writing.result()


async def unpack(pieces: AsyncIterator[bytes], into: Path, room: int) -> None:
    """Write a stream that `pack` yielded below an empty directory, at most `room` bytes. Raises EnvdError.

    Only files and directories are accepted.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    reading = _in_a_thread(_read, theirs, into, room)
    try:
        async for data in pieces:
            await loop.sock_sendall(ours, data)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the thread has failed: its exception is raised below
    finally:
        ours.close()
        await asyncio.wait({reading})
    reading.result()


def _in_a_thread(work: Callable[..., None], *arguments: Any) -> asyncio.Future[None]:
    """Run work in a separate thread, so that a slow peer does not occupy a thread of the shared pool."""
    executor = ThreadPoolExecutor(1, "envd-state")
    working = asyncio.get_running_loop().run_in_executor(executor, work, *arguments)
    executor.shutdown(wait=False)
    working.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks it as retrieved
    return working


def _write(directory: Path, sock: socket.socket) -> None:
    with sock, sock.makefile("wb", buffering=_CHUNK) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, bufsize=_CHUNK) as tar:
                for path in sorted(directory.rglob("*")):
                    about = path.lstat()
                    if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
                        raise EnvdError(f"the state holds {path.name}, which is neither a file nor a directory")
                    tar.add(path, str(path.relative_to(directory)), recursive=False)
        except OSError as error:
            raise EnvdError(f"the state can't be sent: {describe(error)}") from error


def _read(sock: socket.socket, into: Path, room: int) -> None:
    """Unpack a tar stream, parsing each header here: a tar library would follow links and buffer long names."""
    with sock, sock.makefile("rb", buffering=_CHUNK) as stream:
        for _ in range(_MAX_FILES):
            head = stream.read(_BLOCK)
            if len(head) < _BLOCK:
                raise EnvdError("the state is incomplete: send it again")
            if not head.strip(b"\0"):
                break
            room = _read_one(head, cast(BinaryIO, stream), into, room)
        else:
            raise EnvdError(f"the state has more than {_MAX_FILES} files")
        while stream.read(_CHUNK):
            pass  # padding of the last record


def _read_one(head: bytes, stream: BinaryIO, into: Path, room: int) -> int:
    try:
        member = tarfile.TarInfo.frombuf(head, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeError) as error:
        raise EnvdError(f"the state is not a tar stream ({error})") from error
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or not (member.isreg() or member.isdir()) or member.size < 0:
        raise EnvdError(f"the state holds {member.name[:80]!r}, which is neither a plain file nor a directory")
    room -= member.size + _BLOCK
    if room < 0:
        raise EnvdError("the state is larger than the sandbox's limits allow")
    target = into / name
    try:
        if member.isdir():
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
            return room
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, member.mode & 0o700 | 0o600)
        with os.fdopen(fd, "wb") as file:
            _copy(stream, file, member.size)
    except OSError as error:
        raise EnvdError(f"the state can't be kept: {describe(error)}") from error
    return room


def _copy(stream: BinaryIO, file: BinaryIO, size: int) -> None:
    """Copy a member's content, with runs of zeros as holes, and skip the padding of its last block."""
    left = size
    while left:
        data = stream.read(min(left, _CHUNK))
        if not data:
            raise EnvdError("the state is incomplete: send it again")
        if data.count(0) == len(data):
            file.seek(len(data), os.SEEK_CUR)
        else:
            file.write(data)
        left -= len(data)
    file.truncate(size)
    stream.read(-size % _BLOCK)
