"""A sandbox's files, from a client's side: `sandbox.files`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, cast

from contracts.pb import envd_operations_pb2 as pb
from contracts.pb import envd_operations_pb2_grpc as rpc
from envd.calling import RPC_GRACE_S, Caller
from envd.connection import Metadata

_CHUNK = 1024 * 1024
_DOWNLOAD_S = 600.0


class SandboxFiles:
    """Paths are taken from the workspace, which no path and no link leaves.

    Failures are FileErrors with the system's `errno`.
    """

    def __init__(self, caller: Caller, stub: rpc.FilesStub, sandbox_id: str, metadata: Metadata) -> None:
        self._caller, self._stub = caller, stub
        self._id, self._metadata = sandbox_id, metadata

    async def read(self, path: str, *, offset: int = 0, length: int = 0) -> bytes:
        """A file's bytes, at most 32 MiB; length 0: to its end."""
        request = pb.FileReadRequest(sandbox_id=self._id, path=path, offset=offset, length=length)
        return cast(bytes, (await self._ask(self._stub.Read, request)).data)

    async def write(
        self, path: str, data: bytes, *, mode: int = 0, make_parents: bool = True, must_create: bool = False
    ) -> pb.FileStat:
        """A whole file, all or nothing. mode 0: as it was, else 0644."""
        request = pb.FileWriteRequest(
            sandbox_id=self._id, path=path, data=data, mode=mode, make_parents=make_parents, must_create=must_create
        )
        return cast(pb.FileStat, await self._ask(self._stub.Write, request))

    async def stat(self, path: str) -> pb.FileStat:
        """What is at a path; a link is told as a link."""
        return cast(pb.FileStat, await self._ask(self._stub.Stat, pb.PathRequest(sandbox_id=self._id, path=path)))

    async def list(self, path: str = ".", *, depth: int = 1, limit: int = 10_000) -> tuple[list[pb.FileStat], bool]:
        """What is below a directory, sorted, and whether some was left out."""
        request = pb.FileListRequest(sandbox_id=self._id, path=path, depth=depth, limit=limit)
        reply = await self._ask(self._stub.List, request)
        return list(reply.entries), reply.truncated

    async def move(self, source: str, target: str, *, overwrite: bool = False) -> pb.FileStat:
        """Rename."""
        request = pb.FileMoveRequest(sandbox_id=self._id, source=source, target=target, overwrite=overwrite)
        return cast(pb.FileStat, await self._ask(self._stub.Move, request))

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, an empty directory, or with `recursive` all below it."""
        request = pb.FileRemoveRequest(sandbox_id=self._id, path=path, recursive=recursive)
        await self._ask(self._stub.Remove, request)

    async def make_directory(self, path: str) -> pb.FileStat:
        """A directory, and those above it."""
        return cast(
            pb.FileStat, await self._ask(self._stub.MakeDirectory, pb.PathRequest(sandbox_id=self._id, path=path))
        )

    async def search(
        self, pattern: str, *, path: str = ".", globs: Sequence[str] = (), limit: int = 1000, **options: Any
    ) -> pb.FileSearchReply:
        """Lines that match, as ripgrep finds them. options: ignore_case, fixed_string, hidden, timeout_s."""
        request = pb.FileSearchRequest(
            sandbox_id=self._id, pattern=pattern, path=path, globs=globs, limit=limit, **options
        )
        return cast(pb.FileSearchReply, await self._ask(self._stub.Search, request))

    async def watch(self, path: str = ".", *, recursive: bool = True) -> AsyncGenerator[pb.FileEvent, None]:
        """Changes, as long as it is iterated.

        The first event, of kind watching, says that nothing is missed from now on.
        """
        request = pb.FileWatchRequest(sandbox_id=self._id, path=path, recursive=recursive)
        async with aclosing(self._caller.stream(self._stub.Watch, request, self._metadata)) as events:
            async for event in events:
                yield event

    async def upload(self, path: str, data: bytes, *, mode: int = 0, make_parents: bool = True) -> pb.FileStat:
        """A file too large for one message, all or nothing."""

        def pieces() -> Iterator[pb.UploadChunk]:
            header = pb.FileWriteRequest(sandbox_id=self._id, path=path, mode=mode, make_parents=make_parents)
            yield pb.UploadChunk(header=header)
            for at in range(0, len(data), _CHUNK):
                yield pb.UploadChunk(data=data[at : at + _CHUNK])

        return cast(pb.FileStat, await self._caller.ask(self._stub.Upload, pieces(), _DOWNLOAD_S, self._metadata))

    async def download(self, path: str) -> AsyncGenerator[bytes, None]:
        """A file too large for one message, piece by piece."""
        request = pb.PathRequest(sandbox_id=self._id, path=path)
        async with aclosing(self._caller.stream(self._stub.Download, request, self._metadata)) as chunks:
            async for chunk in chunks:
                yield chunk.data

    async def _ask(self, method: Any, request: Any) -> Any:
        return await self._caller.ask(method, request, RPC_GRACE_S, self._metadata)
