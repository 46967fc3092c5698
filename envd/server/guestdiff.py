"""A sandbox's workspace against its template, over its agent's stream: the bytes that `workspace_diff` gives for the two directories.

One listing tells by stamps what may have changed; only that is read. A few small changes are compared here, in some milliseconds
at most; everything else in a process of its own (envd/tools/diffworker.py), a change at a time, as many such at once as there are cores.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import envd
from envd.errors import EnvdError
from envd.guest.link import Entry as Found
from envd.guest.link import GuestLink
from envd.sandbox.diff import Entry, side_at, tree_entries
from envd.tools.diffworker import packed
from envd.tools.gitdiff import MAX_DIFF_BYTES, OVERSIZED, Change, Effort, Side, TooLarge, patch_of
from envd.tools.searching import HIDDEN

DEADLINE_S = 25.0
"""How long one diff may take, without its wait for others."""
MAX_CONTENT = 256 * 1024 * 1024
"""Size of a changed file beyond which the patch counts as oversized."""
_MAX_ENTRIES = 200_000
_SMALL_FILES = 64
_SMALL_BYTES = 256 * 1024
_SMALL_EFFORT = 100_000
_INLINE_ENTRIES = 1000
_ROOT = str(Path(envd.__file__).parent.parent)
_WORKER = "import sys; sys.path.insert(0, sys.argv[1]); from envd.tools.diffworker import main; main()"
_MAX_TEMPLATES = 256
_templates: dict[Path, dict[str, Entry]] = {}
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def guest_diff(guest: GuestLink, template_dir: Path, *, deadline_s: float = DEADLINE_S) -> bytes:
    """The patch that turns the template into the workspace; empty when they are equal, OVERSIZED beyond the bounds.

    Raises SandboxGone, and EnvdError where it takes longer than deadline_s.
    """
    listed, cut = await guest.list(".", depth=0, limit=_MAX_ENTRIES, skip_hidden=True, files_only=True)
    if cut:
        return OVERSIZED
    old = await _entries(template_dir)
    new = await asyncio.to_thread(_by_path, listed) if len(listed) > _INLINE_ENTRIES else _by_path(listed)
    paths = [path for path in sorted(old.keys() | new.keys()) if _may_differ(old.get(path), new.get(path))]
    if not paths:
        return b""
    source = _Source(guest, template_dir, old, new)
    size = sum(source.size(path) for path in paths)
    if len(paths) <= _SMALL_FILES and size <= _SMALL_BYTES:
        try:
            changes = [await source.change(path, 2 * _SMALL_BYTES) for path in paths]
            return patch_of(changes, Effort(_SMALL_EFFORT, strict=True))
        except TooLarge:
            pass
    async with _slot():
        try:
            async with asyncio.timeout(deadline_s):
                return await _elsewhere(source.changes(paths))
        except TooLarge:
            return OVERSIZED
        except TimeoutError as error:
            raise EnvdError(f"the diff of {len(paths)} changed files took over {deadline_s:g} s") from error


class _Source:
    """Reads both sides of a change: the template here, the workspace in the sandbox."""

    def __init__(self, guest: GuestLink, template: Path, old: dict[str, Entry], new: dict[str, _Now]) -> None:
        self._guest, self._template, self._old, self._new = guest, template, old, new

    def size(self, path: str) -> int:
        """Of both sides together, as listed."""
        sides = (self._old.get(path), self._new[path].entry if path in self._new else None)
        return sum(side.stamp[0] for side in sides if side is not None)

    async def change(self, path: str, at_most: int) -> Change:
        """Raises TooLarge where the sandbox's side is larger than `at_most`."""
        before = self._old.get(path)
        if before is not None and before.stamp[0] > _SMALL_BYTES:
            return path, await asyncio.to_thread(side_at, self._template, path, before), await self._now(path, at_most)
        return path, side_at(self._template, path, before), await self._now(path, at_most)

    async def changes(self, paths: Sequence[str]) -> AsyncIterator[Change]:
        """One after another, so that memory is needed for one."""
        for path in paths:
            yield await self.change(path, MAX_CONTENT)

    async def _now(self, path: str, at_most: int) -> Side | None:
        now = self._new.get(path)
        if now is None:
            return None
        if now.entry.mode == _LINK:
            return Side(_LINK, now.target)
        try:
            _, data = await self._guest.read_all(path, at_most)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise TooLarge from error
            return None  # locked by the agent itself, or gone meanwhile: its content can't count
        return Side(now.entry.mode, data)


_LINK = "120000"


class _Now:
    """A file or a link of the workspace, as listed."""

    __slots__ = ("entry", "target")

    def __init__(self, entry: Entry, target: bytes) -> None:
        self.entry = entry
        self.target = target


def _by_path(listed: Sequence[Found]) -> dict[str, _Now]:
    """Files and links by path, without names that no listing of a workspace can hold."""
    found: dict[str, _Now] = {}
    for path, kind, mode, size, mtime_ns, target in listed:
        if kind in ("file", "link") and not _EVIL.intersection(path.split("/")):
            git_mode = _LINK if kind == "link" else "100755" if mode & 0o100 else "100644"
            found[path] = _Now(Entry(git_mode, (size, mtime_ns)), os.fsencode(target))
    return found


_EVIL = HIDDEN | {"", ".", ".."}


def _may_differ(old: Entry | None, new: _Now | None) -> bool:
    return old is None or new is None or old != new.entry or old.mode == _LINK


async def _entries(template_dir: Path) -> dict[str, Entry]:
    """A template's files; it never changes, so they are looked at once."""
    entries = _templates.get(template_dir)
    if entries is None:
        entries = await asyncio.to_thread(tree_entries, template_dir)
        while len(_templates) >= _MAX_TEMPLATES:
            _templates.pop(next(iter(_templates)))
        _templates[template_dir] = entries
    return entries


def _slot() -> asyncio.Semaphore:
    return _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))


async def _elsewhere(changes: AsyncIterator[Change]) -> bytes:
    """The patch, from a process that gets one change after another."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-X", "utf8", "-c", _WORKER, _ROOT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=1024 * 1024,
    )
    assert process.stdin is not None and process.stdout is not None
    feeding = asyncio.create_task(_feed(process.stdin, changes))
    try:
        patch = bytearray()
        while piece := await process.stdout.read(1024 * 1024):
            patch += piece
            if len(patch) > MAX_DIFF_BYTES:
                break
        if len(patch) > MAX_DIFF_BYTES or patch == OVERSIZED:
            return OVERSIZED  # it does not wait for the rest
        await feeding  # a sandbox that ended half way has no patch
        if await process.wait():
            raise EnvdError(f"the process that compares a workspace ended with code {process.returncode}")
        return bytes(patch)
    finally:
        feeding.cancel()
        if process.returncode is None:
            process.kill()
        await asyncio.gather(feeding, process.wait(), return_exceptions=True)


async def _feed(writer: asyncio.StreamWriter, changes: AsyncIterator[Change]) -> None:
    try:
        async for change in changes:
            try:
                writer.write(packed(change))
                await writer.drain()
            except (BrokenPipeError, ConnectionResetError, RuntimeError):  # uvloop's word for a closed pipe
                return  # it has seen enough
    finally:
        writer.close()
