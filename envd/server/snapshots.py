"""Snapshots on disk: a sandbox's specification and state, stored atomically.

    <directory>/<snapshot id>/header      a ReceiveHeader: backend, template with its files, limits, environment,
                                          labels, rules
    <directory>/<snapshot id>/state/      what `Box.snapshot` wrote
    <directory>/<snapshot id>/key         name of the key whose quota it is charged to
    <directory>/.draft-<owner>            a snapshot that is being written; swept when its server is gone
    <directory>/.held-<owner>             hibernated sandboxes of a live server

A snapshot outlives its server if the directory does. Only the server's user may enter it.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from google.protobuf.message import DecodeError

from contracts.errors import describe
from contracts.owned import owned_name, sweep_abandoned
from contracts.pb import envd_operations_pb2 as pb
from contracts.rpc import caller
from envd.errors import EnvdError
from envd.server.quotas import Quotas

_HEADER, _STATE, _KEY = "header", "state", "key"
_LEAST_CHARGE = 1 << 20
"""Minimum bytes charged for a snapshot, so that the number of snapshots is bounded, too."""
_DRAFT, _HELD = ".draft-", ".held-"
SUBFOLDER = "triplane-snapshots"
_IDENTITY = re.compile(r"[A-Za-z0-9_-]{16,64}")


class Snapshots:
    """Snapshots in one directory, which servers of one machine may share."""

    def __init__(self, directory: Path, quotas: Quotas) -> None:
        """directory: made if it does not exist; one that others may enter gets a folder for snapshots, SUBFOLDER.

        Raises EnvdError.
        """
        self._quotas = quotas
        self._charging = asyncio.Lock()
        try:
            self._directory = directory = _private(directory)
            self._held = directory / f"{_HELD}{owned_name()}"
            for prefix in (_DRAFT, _HELD):
                sweep_abandoned(directory, prefix)
            self._held.mkdir(mode=0o700)
        except OSError as error:
            raise EnvdError(f"snapshots can't be kept: {describe(error)}") from error

    async def keep(self, header: pb.ReceiveHeader, write: Callable[[Path], Awaitable[None]]) -> tuple[str, int]:
        """Store a snapshot whose state `write` puts into a directory; return (id, bytes).

        Raises QuotaExceeded.
        """
        identity = secrets.token_urlsafe(18)
        draft = self._directory / f"{_DRAFT}{owned_name()}"
        try:
            (draft / _STATE).mkdir(parents=True, mode=0o700)
            await write(draft / _STATE)
            (draft / _KEY).write_text(caller.key())
            async with self._charging:
                size = await asyncio.to_thread(self._charge, draft)
                await asyncio.to_thread(_finish, draft, header.SerializeToString(), self._directory / identity)
        except OSError as error:
            raise EnvdError(f"the snapshot can't be kept: {describe(error)}") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, draft, True)
        return identity, size

    def _charge(self, draft: Path) -> int:
        """Bytes of a written snapshot. Raises QuotaExceeded if it and the key's other snapshots exceed the quota."""
        owner, size = caller.key(), size_of(draft)
        kept = sum(_charged_to(owner, path) for path in self._directory.glob("[!.]*"))
        charge = max(size, _LEAST_CHARGE)
        if kept + charge > self._quotas.rules.snapshot_mb << 20:
            have = f"{kept >> 20} MiB of snapshots, and this one has {charge >> 20}"
            self._quotas.refuse("snapshot_mb", have, "delete some")
        return size

    def find(self, identity: str) -> tuple[pb.ReceiveHeader, Path]:
        """Header and state directory of a snapshot. Raises EnvdError if it does not exist or is damaged."""
        where = self._directory / identity
        if not _IDENTITY.fullmatch(identity) or not (where / _STATE).is_dir():
            raise EnvdError(f"no snapshot {identity[:40]!r} on this server: deleted, or of another server")
        try:
            header = pb.ReceiveHeader.FromString((where / _HEADER).read_bytes())
        except (OSError, DecodeError) as error:
            raise EnvdError(f"snapshot {identity} is damaged ({error}): delete it") from error
        return header, where / _STATE

    async def delete(self, identity: str) -> None:
        """Remove a snapshot. Idempotent."""
        if _IDENTITY.fullmatch(identity):
            await asyncio.to_thread(_discard, self._directory / identity, self._directory / f"{_DRAFT}{owned_name()}")

    def hold(self) -> Path:
        """Make and return an empty directory for a state; it is removed when this server stops."""
        where = self._held / secrets.token_hex(8)
        where.mkdir(mode=0o700)
        return where

    async def stop(self) -> None:
        """Remove the directories that `hold` made."""
        await asyncio.to_thread(shutil.rmtree, self._held, True)


def _private(directory: Path) -> Path:
    """The directory if only this user may enter it, else SUBFOLDER in it; makes both. Snapshots hold the environment
    variables and the memory of sandboxes. SUBFOLDER is closed again, since Kubernetes opens it to a volume's group.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    for place in (directory, directory / SUBFOLDER):
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        about = place.stat(follow_symlinks=place == directory)
        private = not about.st_mode & 0o077
        if about.st_uid == os.geteuid() and stat.S_ISDIR(about.st_mode) and (private or place != directory):
            if not private:
                place.chmod(0o700)
            return place
    raise EnvdError(f"snapshots can't be kept: {place} is not a folder of this user: remove it")


def _charged_to(owner: str, snapshot: Path) -> int:
    """Bytes that a snapshot takes of this key's quota; 0 if it is another key's, or deleted meanwhile."""
    try:
        return max(size_of(snapshot), _LEAST_CHARGE) if (snapshot / _KEY).read_text() == owner else 0
    except OSError:
        return 0


def size_of(directory: Path) -> int:
    """Bytes on disk of the files below a directory, without the holes of sparse files."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


async def link_tree(source: Path, target: Path) -> None:
    """Hard-link all files below a directory into another one. Nobody may write to them any more."""
    await asyncio.to_thread(shutil.copytree, source, target, copy_function=os.link, dirs_exist_ok=True)


async def remove_tree(directory: Path) -> None:
    """Remove a directory tree in a thread, ignoring errors."""
    await asyncio.to_thread(shutil.rmtree, directory, True)


def _finish(draft: Path, header: bytes, target: Path) -> None:
    """Sync a draft to disk, then rename it, so that a named snapshot is complete, also after a power cut."""
    (draft / _HEADER).write_bytes(header)
    for path in [*draft.rglob("*"), draft]:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    draft.rename(target)


def _discard(directory: Path, aside: Path) -> None:
    """Rename first, then delete, so that no reader finds a partial snapshot."""
    try:
        directory.rename(aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)
