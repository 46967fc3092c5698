"""Diff of a sandbox's workspace against its template, over its agent's stream: the same bytes as `workspace_diff` gives
for the two directories.

One listing shows by size and modification time which files may have changed; only those are read. A few small changes
are compared in this process, in some milliseconds at most. Larger diffs run in a separate process
(envd/tools/diffworker.py), one change at a time; at most one such process per core runs at once.
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
from envd.sandbox.diff import LINK, Entry, side_at, tree_entries
from envd.server.exporting import Exporting
from envd.tools.diffworker import packed
from envd.tools.gitdiff import MAX_DIFF_BYTES, OVERSIZED, Change, Effort, Side, TooLarge, patch_of
from envd.tools.searching import HIDDEN

DEADLINE_S = 25.0
"""Maximum duration of one diff, in seconds, without the wait for a free slot."""
MAX_CONTENT = 256 * 1024 * 1024
"""Bytes of all changed files together, beyond which the patch is oversized and no file is read."""
_MAX_ENTRIES = 200_000
_SMALL_FILES = 64
_SMALL_BYTES = 256 * 1024
_SMALL_EFFORT = 100_000
_INLINE_ENTRIES = 1000
_INLINE_NAMES = 64 * 1024
_ROOT = str(Path(envd.__file__).parent.parent)
_WORKER = "import sys; sys.path.insert(0, sys.argv[1]); from envd.tools.diffworker import main; main()"
_MAX_TEMPLATES = 256
_templates: dict[Path, dict[str, Entry]] = {}
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def guest_diff(
    guest: GuestLink, template_dir: Path, *, deadline_s: float = DEADLINE_S, export: Exporting | None = None
) -> bytes:
    """Patch that turns the template into the workspace; empty if they are equal, OVERSIZED beyond the bounds.

    export: selects the files that may be exported and notes those left out. Raises SandboxGone, and EnvdError if the
    diff takes longer than deadline_s or the workspace can't be listed.
    """
    try:
        listed, cut = await guest.list(".", depth=0, limit=_MAX_ENTRIES, skip_hidden=True, files_only=True)
    except OSError as error:  # caused inside the sandbox: locked, moved away, or no descriptor left
        raise EnvdError(f"the workspace can't be listed ({os.strerror(error.errno or 0).lower()})") from error
    if cut:
        return OVERSIZED
    old = await _entries(template_dir)
    new = await asyncio.to_thread(_by_path, listed) if len(listed) > _INLINE_ENTRIES else _by_path(listed)
    paths = [path for path in sorted(old.keys() | new.keys()) if _may_differ(old.get(path), new.get(path))]
    source = _Source(guest, template_dir, old, new, export)
    if export is not None:
        inline = sum(map(len, paths)) <= _INLINE_NAMES
        paths = source.admitted(paths) if inline else await asyncio.to_thread(source.admitted, paths)
    if not paths:
        return b""
    size = sum(source.size(path) for path in paths)
    contents = sum(new[path].entry.stamp[0] for path in paths if path in new)
    if contents > MAX_CONTENT and (export is None or export.room is None):
        return OVERSIZED  # a patch holds a file once for each of its hard links
    if len(paths) <= _SMALL_FILES and size <= _SMALL_BYTES:
        try:
            changes = [change async for change in source.changes(paths, 2 * _SMALL_BYTES)]
            return patch_of(changes, Effort(_SMALL_EFFORT, strict=True))
        except TooLarge:
            pass
    async with _slot():
        try:
            async with asyncio.timeout(deadline_s):
                return await _elsewhere(source.changes(paths, MAX_CONTENT))
        except TooLarge:
            return OVERSIZED
        except TimeoutError as error:
            raise EnvdError(f"the diff of {len(paths)} changed files took over {deadline_s:g} s") from error


class _Source:
    """Reads both sides of a change: the template here, the workspace in the sandbox."""

    def __init__(
        self, guest: GuestLink, template: Path, old: dict[str, Entry], new: dict[str, _Now], export: Exporting | None
    ) -> None:
        self._guest, self._template, self._old, self._new, self._export = guest, template, old, new, export

    def size(self, path: str) -> int:
        """Bytes of both sides of a path together, as listed."""
        sides = (self._old.get(path), self._new[path].entry if path in self._new else None)
        return sum(side.stamp[0] for side in sides if side is not None)

    def admitted(self, paths: Sequence[str]) -> list[str]:
        """Paths that the export admits by name and kind, without unchanged links."""
        assert self._export is not None
        changed = [path for path in paths if not self._is_same_link(path)]
        return [path for path in changed if self._export.admits(path, is_link=self._is_link(path))]

    def _is_link(self, path: str) -> bool:
        return path in self._new and self._new[path].entry.mode == LINK

    def _is_same_link(self, path: str) -> bool:
        return self._is_link(path) and side_at(self._template, path, self._old.get(path)) == Side(
            LINK, self._new[path].target
        )

    async def changes(self, paths: Sequence[str], at_most: int) -> AsyncIterator[Change]:
        """Yield the changes one at a time, so that only one is in memory.

        Raises TooLarge if a file of the sandbox is larger than `at_most` bytes.
        """
        if self._export is None:
            for path in paths:
                yield await self._change(path, at_most)
            return
        self._export.start()
        for path in paths:
            change = await self._exported(self._export, path, at_most)
            if change is not None:
                yield change

    async def _change(self, path: str, at_most: int) -> Change:
        before = self._old.get(path)
        if before is not None and before.stamp[0] > _SMALL_BYTES:
            return path, await asyncio.to_thread(side_at, self._template, path, before), await self._now(path, at_most)
        return path, side_at(self._template, path, before), await self._now(path, at_most)

    async def _exported(self, export: Exporting, path: str, at_most: int) -> Change | None:
        """Change at a path if it fits into the export by the size that was read, not listed; None otherwise."""
        before, now = self._old.get(path), self._new.get(path)
        size = now.entry.stamp[0] if now else 0
        looks_same = before is not None and now is not None and _unstamped(before) == _unstamped(now.entry)
        if not looks_same and not export.fits(path, size):
            return None
        bound = at_most if export.room is None else min(at_most, max(export.room, size))
        try:
            change = await self._change(path, bound)
        except TooLarge:
            if bound == at_most:
                raise
            export.fits(path, bound + 1)  # the file has grown since the listing: note it as left out
            return None
        _, old, new = change
        return change if old != new and export.take(path, len(new.data) if new else 0) else None

    async def _now(self, path: str, at_most: int) -> Side | None:
        now = self._new.get(path)
        if now is None:
            return None
        if now.entry.mode == LINK:
            return Side(LINK, now.target)
        try:
            _, data = await self._guest.read_all(path, at_most)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise TooLarge from error
            return None  # locked by the agent itself, or removed meanwhile: treat as absent
        return Side(now.entry.mode, data)


class _Now:
    """File or link of the workspace, as listed."""

    __slots__ = ("entry", "target")

    def __init__(self, entry: Entry, target: bytes) -> None:
        self.entry = entry
        self.target = target


def _by_path(listed: Sequence[Found]) -> dict[str, _Now]:
    """Files and links by path, without paths that have a part in _EVIL."""
    found: dict[str, _Now] = {}
    for path, kind, mode, size, mtime_ns, target in listed:
        if kind in ("file", "link") and not _EVIL.intersection(path.split("/")):
            git_mode = LINK if kind == "link" else "100755" if mode & 0o100 else "100644"
            found[path] = _Now(Entry(git_mode, (size, mtime_ns)), os.fsencode(target))
    return found


_EVIL = HIDDEN | {"", ".", ".."}


def _unstamped(entry: Entry) -> tuple[str, int]:
    """Mode and size: files that differ in them differ for certain."""
    return entry.mode, entry.stamp[0]


def _may_differ(old: Entry | None, new: _Now | None) -> bool:
    return old is None or new is None or old != new.entry or old.mode == LINK


async def _entries(template_dir: Path) -> dict[str, Entry]:
    """Files of a template, cached since a template never changes."""
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
    """Compute the patch in a separate process that receives one change after another."""
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
            return OVERSIZED  # without reading the remaining changes
        await feeding  # raises if the sandbox ended halfway: there is no patch then
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
            except (BrokenPipeError, ConnectionResetError, RuntimeError):  # uvloop: RuntimeError for a closed pipe
                return  # the process has read enough
    finally:
        writer.close()
