"""A sandbox's processes, from a client's side: `sandbox.processes`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

from contracts.pb import envd_operations_pb2 as pb
from contracts.pb import envd_operations_pb2_grpc as rpc
from envd.calling import RPC_GRACE_S, Caller
from envd.connection import Metadata


class SandboxProcesses:
    """Programs in a sandbox.

    Their output is kept in bounded rings and numbered by bytes, so that a reader may come back.
    """

    def __init__(self, caller: Caller, stub: rpc.ProcessesStub, sandbox_id: str, metadata: Metadata) -> None:
        self._caller, self._stub = caller, stub
        self._id, self._metadata = sandbox_id, metadata

    async def start(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        directory: str = "",
        pty: tuple[int, int] | None = None,
        stdin: bool = False,
        timeout_s: float = 0,
        ring_bytes: int = 0,
    ) -> pb.ProcessState:
        """Start a program; no shell unless you name one. pty: (rows, columns). timeout_s 0: as long as the sandbox."""
        request = pb.ProcessStartRequest(
            sandbox_id=self._id,
            arguments=arguments,
            env=dict(env or {}),
            directory=directory,
            pty=None if pty is None else pb.PtySize(rows=pty[0], columns=pty[1]),
            stdin=stdin,
            timeout_s=timeout_s,
            ring_bytes=ring_bytes,
        )
        return cast(pb.ProcessState, await self._ask(self._stub.Start, request))

    async def list(self) -> list[pb.ProcessState]:
        """What was started."""
        reply = await self._ask(self._stub.List, pb.ProcessListRequest(sandbox_id=self._id))
        return list(reply.processes)

    async def connect(
        self, process: int, *, stdout_offset: int = 0, stderr_offset: int = 0
    ) -> AsyncGenerator[pb.ProcessEvent, None]:
        """Output from the offsets on, as it comes; the last event, once it has ended, has its state as `ended`."""
        request = pb.ProcessConnectRequest(
            sandbox_id=self._id, process=process, stdout_offset=stdout_offset, stderr_offset=stderr_offset
        )
        async with aclosing(self._caller.stream(self._stub.Connect, request, self._metadata)) as events:
            async for event in events:
                yield event

    async def run(self, arguments: Sequence[str], **options: Any) -> tuple[pb.ProcessState, bytes, bytes]:
        """Start a program and wait for its end: (state, standard output, standard error), as far as the rings held
        them.
        """
        started = await self.start(arguments, **options)
        output: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        async with aclosing(self.connect(started.process)) as events:
            async for event in events:
                if event.HasField("ended"):
                    return event.ended, b"".join(output["stdout"]), b"".join(output["stderr"])
                output[event.channel].append(event.data)
        raise AssertionError("a stream of output ends with the process's state")

    async def stdin(self, process: int, data: bytes) -> int:
        """Write to its standard input; returns how many bytes it took, fewer while its pipe is full."""
        request = pb.ProcessStdinRequest(sandbox_id=self._id, process=process, data=data)
        return int((await self._ask(self._stub.Stdin, request)).accepted)

    async def close_stdin(self, process: int) -> None:
        """End its standard input."""
        await self._ask(self._stub.CloseStdin, pb.ProcessRequest(sandbox_id=self._id, process=process))

    async def signal(self, process: int, number: int, *, tree: bool = False) -> pb.ProcessState:
        """Signal it, with `tree` also all that it started."""
        request = pb.ProcessSignalRequest(sandbox_id=self._id, process=process, signal=number, tree=tree)
        return cast(pb.ProcessState, await self._ask(self._stub.Signal, request))

    async def resize(self, process: int, rows: int, columns: int) -> None:
        """Tell its terminal its size."""
        size = pb.PtySize(rows=rows, columns=columns)
        await self._ask(self._stub.Resize, pb.ProcessResizeRequest(sandbox_id=self._id, process=process, size=size))

    async def _ask(self, method: Any, request: Any) -> Any:
        return await self._caller.ask(method, request, RPC_GRACE_S, self._metadata)
