"""Server side of the `bridge` benchmark: `python -m benchmarks.bridge_server FOLDER CORE [journal]`.

A bridge with an engine that answers at once, at FOLDER/bridge.sock, and beside it a bare grpc.aio server of bytes, at
FOLDER/echo.sock, that answers a command with the bytes of a step's events. Answers `rss` on its input with its resident
bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.measure import resident
from contracts.rpc.connecting import prefer_short_round_trips
from contracts.rpc.listening import Listening
from inference.bridge.checks import Limits
from inference.bridge.registry import Bounds
from inference.bridge.serve import Options, serving
from inference.engines.base import Completion, Piece, SamplingParams

ECHO = "bench.Echo"
"""Service of the bare server. A request is how many bytes the first answer has, and the bytes of both answers of a
step. `One` answers them in one message, `Many` for each message of a stream in two.
"""
SIZE = struct.Struct("<I")
_MOST = 4096
_IDS = np.arange(_MOST, dtype=np.int32)
_LOGPROBS = np.full(_MOST, -0.5, np.float32)


class EchoEngine:
    """Gives as many tokens as are asked for, at once."""

    def streams(self, params: SamplingParams) -> bool:
        """See Engine."""
        return True

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        """See Engine."""
        count = params.max_tokens
        yield Piece(_IDS[:count], _LOGPROBS[:count], [("echo", 0, count)], "length")

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See Engine."""
        count = params.max_tokens
        return Completion(_IDS[:count].tolist(), _LOGPROBS[:count].tolist(), [("echo", 0, count)], "length")

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """See Engine."""
        return [0.0] * len(token_ids)

    async def load_weights(self, directory: Path, version: str) -> None:
        """There are none."""

    async def version(self) -> str:
        """See Engine."""
        return "echo"

    async def close(self) -> None:
        """See Engine."""


class _Bare:
    """Answers with the bytes that the first request has brought, so that later ones are as short as a command."""

    def __init__(self) -> None:
        self._first, self._second = b"", b""

    async def one(self, request: bytes, context: Any) -> bytes:
        (size,) = SIZE.unpack_from(request)
        if size:
            self._first, self._second = request[SIZE.size :][:size], request[SIZE.size + size :]
        return self._first + self._second

    async def many(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield self._first
            yield self._second


async def _serve(folder: Path, journal: Path | None) -> None:
    echo, bare = grpc.aio.server(), _Bare()
    methods: dict[str, Any] = {
        "One": grpc.unary_unary_rpc_method_handler(bare.one),
        "Many": grpc.stream_stream_rpc_method_handler(bare.many),
    }
    echo.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ECHO, methods),))
    echo.add_insecure_port(f"unix:{folder / 'echo.sock'}")
    await echo.start()
    listening = Listening(f"unix:{folder / 'bridge.sock'}")
    options = Options(listening, Bounds(max_episodes=100_000), journal)
    async with serving(EchoEngine(), Limits(0, 0), options) as bridge:
        print(json.dumps({"ready": True}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            assert line.strip() == "tell", line
            told = {"rss": resident("VmRSS"), "cpu_s": time.process_time(), "open": bridge.sessions.open}
            print(json.dumps(told), flush=True)
    await echo.stop(None)


def main() -> None:
    """Serve on one core until the input ends."""
    folder, core = Path(sys.argv[1]), int(sys.argv[2])
    os.sched_setaffinity(0, {core})
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    prefer_short_round_trips()
    work = _serve(folder, folder / "journal" if sys.argv[3:] == ["journal"] else None)
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


if __name__ == "__main__":
    main()
