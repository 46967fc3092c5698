"""Measurements of an envd server: each function sends gRPC requests and returns seconds, rates or bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.measure import seconds_awaited
from contracts.pb import envd_operations_pb2 as operations_pb
from contracts.pb import envd_operations_pb2_grpc as operations_rpc
from contracts.pb import envd_pb2 as pb
from contracts.pb import envd_pb2_grpc as rpc
from envd.client import Limits
from envd.operations.client import ManagedSandbox, OperationsClient
from envd.types import ToolCall

FILES = {"app.py": b"def add(a, b):\n    return a + b\n"}
TRUE = ToolCall("exec", {"command": "true"})
READ = ToolCall("read", {"path": "app.py"})
_HIDDEN = {"test_hidden.py": b"from app import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"}
_CONNECTIONS = 4
_BATCH = 16
_AT_ONCE = 16
_SETTLE_S = 3.0
_IDLE = Limits(lifetime_s=3600)
Timings = dict[str, list[float]]


async def burst(client: OperationsClient, count: int) -> Timings:
    """One client creates `count` sandboxes without a pause; each is ready when its first exec has returned."""
    template = await client.put_template(FILES)
    found: Timings = {"create": [], "create_call": [], "first_exec": []}
    made: list[ManagedSandbox] = []
    try:
        for _ in range(count):
            begin = time.perf_counter()
            sandbox = await client.create(template)
            made.append(sandbox)
            created = time.perf_counter()
            _require_ok(await sandbox.call(TRUE))
            end = time.perf_counter()
            for name, seconds in (
                ("create", end - begin),
                ("create_call", created - begin),
                ("first_exec", end - created),
            ):
                found[name].append(seconds)
    finally:
        await destroy_all(client, made)
    return found


async def calls(client: OperationsClient, repeats: int) -> Timings:
    """One client, one sandbox, one call at a time; `info` does nothing and gives the lower bound."""
    sandbox = await client.create(await client.put_template(FILES))
    work: dict[str, Callable[[], Awaitable[object]]] = {
        "info": client.info,
        "exec": lambda: sandbox.call(TRUE),
        "read": lambda: sandbox.call(READ),
        "file_read": lambda: sandbox.files.read("app.py"),
    }
    async with sandbox:
        _require_ok(await sandbox.call(TRUE))
        return {name: await seconds_awaited(each, repeats=repeats, warmups=10) for name, each in work.items()}


async def verifications(client: OperationsClient, repeats: int) -> list[float]:
    """One verdict at a time, on a final state that passes its single hidden test."""
    template = await client.put_template(FILES)

    async def verify() -> None:
        verdict = await client.verify(template, b"", _HIDDEN, ["test_hidden.py::test_add"])
        if [each.status for each in verdict.outcomes] != ["passed"]:
            raise RuntimeError(f"a correct final state was judged {verdict}")

    return await seconds_awaited(verify, repeats=repeats, warmups=3)


async def cycles_per_second(address: str, seconds: float) -> float:
    """Sandboxes created and destroyed per second, over several connections, in batches."""
    done, deadline = 0, time.perf_counter() + seconds

    async def work() -> None:
        nonlocal done
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub = rpc.SandboxesStub(channel)  # type: ignore[no-untyped-call]
            operations = operations_rpc.OperationsStub(channel)  # type: ignore[no-untyped-call]
            template = (await stub.PutTemplate(pb.PutTemplateRequest(files=FILES))).digest
            request = operations_pb.CreateBatchRequest(requests=[pb.CreateRequest(template=template)] * _BATCH)
            while time.perf_counter() < deadline:
                made = [
                    each.created for each in (await operations.CreateBatch(request)).results if each.HasField("created")
                ]
                ids, tokens = [each.sandbox_id for each in made], [each.token for each in made]
                await operations.DeleteBatch(operations_pb.DeleteBatchRequest(sandbox_ids=ids, tokens=tokens))
                done += len(made)

    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(_CONNECTIONS)))
    return done / (time.perf_counter() - begin)


@dataclass(frozen=True)
class Idle:
    """Sandboxes held at once."""

    held: int
    """Number of sandboxes that completed a first exec, and another one after all were created."""
    mb_of_machine: float
    """Decrease of the machine's available memory per sandbox, in MiB: processes, kernel objects and the server's
    share.
    """
    mb_of_groups: float
    """Memory per sandbox by its control group, in MiB."""
    seconds: float
    """Seconds to create all sandboxes."""


async def hold_idle(client: OperationsClient, count: int) -> Idle:
    """Hold `count` sandboxes, each after a first exec."""
    template = await client.put_template(FILES)
    made: list[ManagedSandbox] = []
    slots = asyncio.Semaphore(_AT_ONCE)

    async def start() -> None:
        async with slots:
            sandbox = await client.create(template, limits=_IDLE)
            made.append(sandbox)
            _require_ok(await sandbox.call(TRUE))

    async def answers(sandbox: ManagedSandbox) -> bool:
        async with slots:
            return (await sandbox.call(READ)).ok

    try:
        before, begin = available_bytes(), time.perf_counter()
        await asyncio.gather(*(start() for _ in range(count)))
        seconds = time.perf_counter() - begin
        await asyncio.sleep(_SETTLE_S)
        taken = before - available_bytes()
        counted = sum(each.memory_bytes for each in await client.list())
        held = sum(await asyncio.gather(*map(answers, made)))
        return Idle(held, taken / count / 2**20, counted / count / 2**20, seconds)
    finally:
        await destroy_all(client, made)


async def destroy_all(client: OperationsClient, made: list[ManagedSandbox]) -> None:
    """Destroy sandboxes in batches."""
    for at in range(0, len(made), 200):
        some = made[at : at + 200]
        request = operations_pb.DeleteBatchRequest(
            sandbox_ids=[each.id for each in some], tokens=[each.handle.token for each in some]
        )
        await client.operations.DeleteBatch(request, timeout=120)


def available_bytes() -> int:
    """Available memory by the kernel's estimate, in bytes."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def _require_ok(result: object) -> None:
    if not getattr(result, "ok", False):
        raise RuntimeError(f"a first exec failed: {result}")
