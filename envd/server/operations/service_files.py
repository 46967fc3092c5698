"""The Files service: read, write, list, search and watch the files of a sandbox."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any, cast

from contracts.pb import envd_operations_pb2 as pb
from contracts.pb import envd_operations_pb2_grpc as rpc
from contracts.rpc import caller
from envd.errors import EnvdError, FileError
from envd.guest.link import ChangeKind, Entry, GuestLink
from envd.guest.protocol import CHUNK
from envd.server.audit import leaves_root
from envd.server.calls import Context, Service, streaming, unary
from envd.server.escapes import MISSED
from envd.server.live import Live
from envd.server.operations.filesearch import search_files
from envd.server.resolving import is_hidden
from envd.server.rules import hides
from envd.server.sandboxes import Sandboxes

MAX_READ = 32 * 1024 * 1024
MAX_UPLOADING = 256 * 1024 * 1024
"""Bytes of all uploads of one key in progress together; the server buffers a file until it is complete."""
_IDLE_S = 60.0
_REFUSING_S = 10.0
_ENTRIES, _MAX_ENTRIES = 10_000, 100_000
_MAX_DEPTH = 256
_MAX_SIZE = (1 << 63) - 1
_KINDS = {kind: kind.name.lower() for kind in ChangeKind}


class FilesService(Service, rpc.FilesServicer):
    """Servicer for files of sandboxes. Paths are relative to the workspace; no path and no link can leave it."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        super().__init__(sandboxes)
        self._uploading = Counter[str]()

    @unary
    async def Read(self, request: pb.FileReadRequest, context: Context) -> pb.FileReadReply:
        """Read a file or a part of it."""
        if request.offset < 0 or request.length < 0:
            raise EnvdError(f"offset {request.offset} and length {request.length} must be 0 or more")
        async with self._guest(request, context, request.path) as guest:
            left = min(request.length or MAX_READ, MAX_READ)
            entry, data = await guest.read(request.path, offset=request.offset, at_most=min(left, CHUNK))
            if len(data) < min(left, CHUNK):
                return pb.FileReadReply(data=data, stat=_stat(entry))
            pieces, left = [data], left - len(data)
            while left and pieces[-1]:
                at = request.offset + sum(map(len, pieces))
                entry, data = await guest.read(request.path, offset=at, at_most=min(left, CHUNK))
                pieces.append(data)
                left -= len(data)
            return pb.FileReadReply(data=b"".join(pieces), stat=_stat(entry))

    @unary
    async def Write(self, request: pb.FileWriteRequest, context: Context) -> pb.FileStat:
        """Write a whole file atomically."""
        async with self._guest(request, context, request.path) as guest:
            return _stat(await _write(guest, request, request.data))

    @unary
    async def Stat(self, request: pb.PathRequest, context: Context) -> pb.FileStat:
        """Metadata of the entry at a path. Links are not followed."""
        async with self._guest(request, context, request.path) as guest:
            return _stat(await guest.stat(request.path, follow=False))

    @unary
    async def List(self, request: pb.FileListRequest, context: Context) -> pb.FileListReply:
        """List the entries below a directory."""
        async with self._guest(request, context, request.path) as guest:
            hidden = self.live(request, context).decisions.hidden
            limit = min(request.limit or _ENTRIES, _MAX_ENTRIES)
            most = _MAX_ENTRIES if hidden else limit  # hidden entries do not count
            found, cut = await guest.list(request.path or ".", depth=min(request.depth or 1, _MAX_DEPTH), limit=most)
        shown = [entry for entry in found if not hides(hidden, entry.path)] if hidden else found
        shown, cut = shown[:limit], cut or len(shown) > limit
        if len(shown) > 1000:
            stats = await asyncio.to_thread(lambda: [_stat(entry) for entry in shown])
        else:
            stats = [_stat(entry) for entry in shown]
        return pb.FileListReply(entries=stats, truncated=cut)

    @unary
    async def Move(self, request: pb.FileMoveRequest, context: Context) -> pb.FileStat:
        """Rename a file or directory."""
        async with self._guest(request, context, request.source, request.target) as guest:
            return _stat(await guest.move(request.source, request.target, overwrite=request.overwrite))

    @unary
    async def Remove(self, request: pb.FileRemoveRequest, context: Context) -> pb.FileRemoveReply:
        """Remove a file or directory."""
        async with self._guest(request, context, request.path) as guest:
            await guest.remove(request.path, recursive=request.recursive)
        return pb.FileRemoveReply()

    @unary
    async def MakeDirectory(self, request: pb.PathRequest, context: Context) -> pb.FileStat:
        """Make a directory and its missing parents."""
        async with self._guest(request, context, request.path) as guest:
            return _stat(await guest.mkdir(request.path, parents=True))

    @unary
    async def Search(self, request: pb.FileSearchRequest, context: Context) -> pb.FileSearchReply:
        """Find the lines that match a pattern, as ripgrep does."""
        async with self._guest(request, context, request.path) as guest:
            return await search_files(guest, request, self.live(request, context).decisions.hidden)

    @streaming
    async def Watch(self, request: pb.FileWatchRequest, context: Context) -> AsyncIterator[pb.FileEvent]:
        """Stream the changes below a path until the caller disconnects.

        After a change of the sandbox's state the first event is an overflow.
        """
        live = self.live(request, context)
        first = True
        while True:
            guest = await live.guest_soon()
            with self._told(live, request.path):
                await self._refuse_hidden(live, guest, request.path)
                watching = cast(
                    AsyncGenerator[Any, None], guest.watch(request.path or ".", recursive=request.recursive)
                )
                async with aclosing(watching) as watch:
                    while (changes := await live.poll(anext(watch))) is not None:
                        if not changes and not first:
                            yield pb.FileEvent(kind="overflow")
                        if not changes and first:
                            yield pb.FileEvent(kind="watching")
                        first = False
                        for change in changes:
                            if not hides(live.decisions.hidden, change.path):
                                yield pb.FileEvent(path=plain(change.path), kind=_KINDS[change.kind])

    @unary
    async def Upload(self, request: AsyncIterator[pb.UploadChunk], context: Context) -> pb.FileStat:
        """Write a whole file from a stream of chunks, atomically."""
        first = await anext(request, pb.UploadChunk())
        if not first.HasField("header"):
            raise EnvdError("the first message of Upload holds no header: send one")
        header, disk = first.header, self.live(first.header, context).spec.limits.disk_mb << 20
        pieces, size, key = [header.data], len(header.data), caller.key()
        try:
            self._uploading[key] += size
            chunk: pb.UploadChunk | None = first
            while chunk is not None:
                pieces.append(chunk.data)
                size += len(chunk.data)
                self._uploading[key] += len(chunk.data)
                if size > disk or self._uploading[key] > MAX_UPLOADING:
                    pieces.clear()
                    if size <= disk:
                        reason = f"uploads of {self._uploading[key]} bytes are under way"
                        self.sandboxes.audit.record(
                            "request.refused", header.sandbox_id, method="Upload", reason=reason
                        )
                    await _let_pass(request)
                    raise FileError.of(errno.EFBIG if size > disk else errno.EAGAIN, header.path)
                async with asyncio.timeout(_IDLE_S):
                    chunk = await anext(request, None)
            async with self._guest(header, context, header.path) as guest:
                return _stat(await _write(guest, header, b"".join(pieces)))
        except TimeoutError as error:
            raise FileError.of(errno.ETIMEDOUT, header.path) from error
        finally:
            pieces.clear()  # otherwise an exception's traceback keeps them in memory until the next collection
            self._uploading[key] -= size

    @streaming
    async def Download(self, request: pb.PathRequest, context: Context) -> AsyncIterator[pb.DownloadChunk]:
        """Stream a whole file in chunks."""
        at = 0
        while True:
            async with self._guest(request, context, request.path) as guest:
                entry, data = await guest.read(request.path, offset=at)
            if not at:
                yield pb.DownloadChunk(data=data, stat=_stat(entry))
            elif data:
                yield pb.DownloadChunk(data=data)
            at += len(data)
            if len(data) < CHUNK:
                return

    @asynccontextmanager
    async def _guest(self, request: Any, context: Context, *paths: str) -> AsyncIterator[GuestLink]:
        """Agent of the sandbox that a request names. Raises FileError (ENOENT) for a path that the rules hide."""
        live = self.live(request, context)
        with self._told(live, *paths):
            async with live.using() as guest:
                await self._refuse_hidden(live, guest, *paths)
                yield guest

    async def _refuse_hidden(self, live: Live, guest: GuestLink, *paths: str) -> None:
        for path in paths:
            if await is_hidden(guest, live.decisions.hidden, path):
                self.sandboxes.audit.record("path.escape", live.identity, path=path, hidden=True)
                raise FileError.of(errno.ENOENT, path)

    @contextmanager
    def _told(self, live: Live, *paths: str) -> Iterator[None]:
        """Turn the guest's OSError into a FileError, and record paths that would leave the workspace."""
        if any(map(leaves_root, paths)):
            self.sandboxes.audit.record("path.escape", live.identity, paths=paths)
        try:
            yield
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.ELOOP):
                self.sandboxes.audit.record("path.escape", live.identity, paths=paths, refused=error.errno)
            if error.errno in MISSED:
                self.sandboxes.sign_of_escape(live, *paths)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN):
                self.sandboxes.sign_of_limit(live)
            raise FileError.of(error.errno or errno.EIO, " to ".join(paths) or ".") from error


async def _write(guest: GuestLink, request: pb.FileWriteRequest, data: bytes) -> Entry:
    return await guest.write(
        request.path, data, parents=request.make_parents, exclusive=request.must_create, mode=request.mode & 0o7777
    )


async def _let_pass(request: AsyncIterator[pb.UploadChunk]) -> None:
    """Read the rest of a refused upload for at most _REFUSING_S: a gRPC client that is writing loses the refusal."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_REFUSING_S):
            async for _ in request:
                pass


def plain(text: str) -> str:
    """Text from a sandbox as valid UTF-8 for a message; other bytes are replaced."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _stat(entry: Entry) -> pb.FileStat:
    return pb.FileStat(
        path=plain(entry.path),
        type=entry.type,
        size=min(entry.size, _MAX_SIZE),
        mode=entry.mode,
        mtime_ns=entry.mtime_ns,
        link_target=plain(entry.target),
    )
