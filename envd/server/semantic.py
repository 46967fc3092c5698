"""The `semantic_search` tool: one index per sandbox, made at its first search and kept until the sandbox ends.

A listing shows by size and modification time which files may have changed; only those are read, chunked and embedded
again. A thread does this work, so that one sandbox's content does not delay the calls of others. At most `MAX_INDEXES`
indexes are kept; the least recently used one is dropped.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from envd.errors import EnvdError
from envd.guest.link import Entry, GuestLink
from envd.tools.files import ToolError
from envd.tools.paths import relative

if TYPE_CHECKING:
    from envd.semantic.index import Hit, WorkspaceIndex

T = TypeVar("T")
MAX_INDEXES = 64
MAX_FILES = 2000
MAX_FILE = 256 * 1024
"""Maximum size, in bytes, of an indexed file."""
MAX_TOTAL = 4 * 1024 * 1024
_LIMIT, _MAX_LIMIT = 5, 20
_MISSING = "error: semantic_search needs packages that are not installed on the server: pip install 'triplane[search]'"


class _Kept:
    """Index of one sandbox. The lock lets one search at a time update it."""

    def __init__(self) -> None:
        self.index: WorkspaceIndex | None = None
        self.lock = asyncio.Lock()
        self.stamps: dict[str, tuple[int, int]] = {}


_kept: OrderedDict[int, _Kept] = OrderedDict()
_thread = ThreadPoolExecutor(1, thread_name_prefix="semantic")
"""A single thread bounds the work of many sandboxes, and keeps each index to one thread."""


async def semantic_search(guest: GuestLink, arguments: Mapping[str, Any]) -> str:
    """Find the pieces of code nearest to a query, best first. Raises ToolError, OSError for the path."""
    if find_spec("qdrant_client") is None or find_spec("tree_sitter_python") is None:
        raise ToolError(_MISSING)
    query, path = arguments["query"], relative(arguments.get("path", "."))
    limit = arguments.get("limit", _LIMIT)
    if not query.strip() or not 1 <= limit <= _MAX_LIMIT:
        raise ToolError(f"error: semantic_search: give a query, and a limit from 1 to {_MAX_LIMIT}")
    await guest.stat(path)
    kept = await _kept_of(guest)
    async with kept.lock:
        if kept.index is None:
            kept.index = await _in_thread(_new_index)
        index = kept.index
        notes = await _refresh(guest, kept, index)
        hits = await _in_thread(lambda: index.search(query, "" if path == "." else path, limit))
    return "\n".join([*map(_text, hits), *notes]) or "no matches"


async def _in_thread(work: Callable[[], T]) -> T:
    try:
        return await asyncio.get_running_loop().run_in_executor(_thread, work)
    except EnvdError as error:
        raise ToolError(f"error: semantic_search: {error}") from error


def _new_index() -> WorkspaceIndex:
    from envd.semantic.index import WorkspaceIndex

    return WorkspaceIndex()


async def _kept_of(guest: GuestLink) -> _Kept:
    identity = id(guest)
    kept = _kept.get(identity)
    if kept is None:
        kept = _kept[identity] = _Kept()
        _watch_end(guest, identity, kept)
        while len(_kept) > MAX_INDEXES:
            _, oldest = _kept.popitem(last=False)
            await _close(oldest)
    _kept.move_to_end(identity)
    return kept


async def _close(kept: _Kept) -> None:
    async with kept.lock:
        index, kept.index, kept.stamps = kept.index, None, {}
    if index is not None:
        with suppress(ToolError):
            await _in_thread(index.close)


_watching: set[asyncio.Task[None]] = set()


def _watch_end(guest: GuestLink, identity: int, kept: _Kept) -> None:
    """Drop an index when its sandbox ends."""

    async def wait() -> None:
        await guest.closed()
        if _kept.get(identity) is kept:
            del _kept[identity]
        await _close(kept)

    task = asyncio.create_task(wait())
    _watching.add(task)
    task.add_done_callback(_watching.discard)


async def _refresh(guest: GuestLink, kept: _Kept, index: WorkspaceIndex) -> list[str]:
    """Update an index; return lines for the answer about the files that were not indexed."""
    listed, cut = await guest.list(".", depth=64, limit=50_000, skip_hidden=True, files_only=True)
    wanted = [each for each in listed if each.type == "file" and 0 < each.size <= MAX_FILE]
    now = _within_bounds(wanted)
    gone = kept.stamps.keys() - now.keys()
    changed = [path for path, stamp in now.items() if kept.stamps.get(path) != stamp]
    contents: dict[str, bytes] = {}
    for path in changed:
        try:
            contents[path] = (await guest.read_all(path, MAX_FILE))[1]
        except OSError:
            now.pop(path)  # removed, grown or locked since the listing
    if gone or contents:
        await _in_thread(lambda: index.update(contents, gone))
    kept.stamps = now
    left = len(wanted) - len(now)
    return [f"not indexed: {left} files beyond {MAX_FILES} files or {MAX_TOTAL} bytes"] if left or cut else []


def _within_bounds(wanted: list[Entry]) -> dict[str, tuple[int, int]]:
    now: dict[str, tuple[int, int]] = {}
    total = 0
    for each in wanted:
        if len(now) >= MAX_FILES or total + each.size > MAX_TOTAL:
            continue
        total += each.size
        now[each.path] = (each.size, each.mtime_ns)
    return now


def _text(hit: Hit) -> str:
    lines = hit.text.rstrip("\n").split("\n")
    shown = "\n".join(f"  {number} {line}" for number, line in enumerate(lines[:12], hit.start))
    more = f"\n  ... to line {hit.end}" if len(lines) > 12 else ""
    name = f" {hit.name}" if hit.name else ""
    return f"{hit.path}:{hit.start}-{hit.end}{name}\n{shown}{more}"
