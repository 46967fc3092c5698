"""Calls beside the stream, again and again until the bridge answers. All of them only read."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc

from contracts.retries import backoff_s
from inference.bridge.client.errors import raise_final, unreachable
from inference.bridge.client.link import FIRST_PAUSE_S, LONGEST_PAUSE_S


async def ask(method: Any, request: Any, address: str, give_up_after_s: float) -> Any:
    """The reply of a unary method. Raises the server's error, and BridgeUnreachable after `give_up_after_s`."""
    deadline, failures = time.monotonic() + give_up_after_s, 0
    while True:
        try:
            return await method(request, timeout=max(0.0, deadline - time.monotonic()))
        except grpc.aio.AioRpcError as error:
            raise_final(error, address)
            failures += 1
            pause_s = backoff_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
            if time.monotonic() + pause_s >= deadline:
                reason = f"{error.code().name}: {error.details()}"
                raise unreachable(address, give_up_after_s, reason) from error
        await asyncio.sleep(pause_s)
