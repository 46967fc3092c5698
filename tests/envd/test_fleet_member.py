"""What a client of several servers makes of one that does not answer its health check."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc  # type: ignore[import-untyped, unused-ignore]

from envd.fleet import member as members
from envd.fleet.member import Member
from envd.types import Handle


class Hanging(health_pb2_grpc.HealthServicer):  # type: ignore[misc, unused-ignore]
    async def Check(self, request: Any, context: Any) -> Any:
        await asyncio.Event().wait()


def test_a_slow_health_check_forgets_no_sandboxes_and_a_refused_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "PROBE_S", 0.5)
    address = f"unix:{tmp_path}/socket"

    async def job() -> None:
        server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(Hanging(), server)
        server.add_insecure_port(address)
        await server.start()
        async with Member(address, lambda member: None) as member:
            member.adopted(Handle("i" * 22, "t" * 32))
            await member.look()
            assert member.is_out and member.has("i" * 22)
            await server.stop(None)
            await member.look()
            assert member.is_out and not member.has("i" * 22)

    asyncio.run(job())
