"""What must happen although a caller leaves, or while a box is paused or being started; without a real box."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from contracts.pb import envd_operations_pb2 as operations_pb
from contracts.pb import envd_pb2 as pb
from envd.backends.base import BoxSpec, Features, IsolationLevel, Usage
from envd.backends.firecracker.backend import _BaseMachine
from envd.backends.gvisor.boxes import GVisorBox
from envd.backends.pool import Pool
from envd.errors import EnvdError, QuotaExceeded
from envd.server.admission import Wanted
from envd.server.audit import AuditLog
from envd.server.live import Live
from envd.server.operations.service_operations import OperationsService
from envd.server.operations.states import States
from envd.server.rules import load_rules
from envd.server.runtimes import Runtimes
from envd.server.sandboxes import Sandboxes
from envd.server.templates import Templates
from envd.types import Limits


class StandIn:
    """A box that takes a while to be destroyed, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.alive, self.guest, self._fails = True, SimpleNamespace(gone=None), fails

    async def usage(self) -> Usage:
        return Usage()

    async def destroy(self) -> None:
        await asyncio.sleep(0.02)
        self.alive = False
        if self._fails:
            raise EnvdError("a process hangs in the kernel")


CONTEXT: Any = SimpleNamespace(invocation_metadata=lambda: ())
"""Of a call without metadata."""


class Gated:
    """A backend whose boxes start one by one, as the test lets them through the gate."""

    name = "gated"
    features = Features(IsolationLevel.PROCESS, ("memory",), False, frozenset({"snapshot", "migrate"}), "x")

    def __init__(self) -> None:
        self.gate, self.boxes = asyncio.Semaphore(0), list[StandIn]()
        self.fails = 0
        """Number of starts that fail."""

    async def create(self, spec: BoxSpec) -> StandIn:
        await self.gate.acquire()
        if self.fails > 0:
            self.fails -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.boxes.append(StandIn())
        return self.boxes[-1]

    async def restore(self, state: Path, spec: BoxSpec) -> StandIn:
        return await self.create(spec)


async def with_gated(tmp_path: Path, rules: str = "") -> tuple[Sandboxes, Gated, Wanted]:
    """Sandboxes on such a backend, and a request for one."""
    unused: Any = None
    backend: Any = Gated()
    (tmp_path / "templates").mkdir()
    templates, runtimes = Templates(tmp_path / "templates", os.getuid()), Runtimes(tmp_path / "runtimes")
    sandboxes = Sandboxes({"gated": backend}, templates, unused, runtimes, rules=load_rules(rules), audit=AuditLog())
    return sandboxes, backend, Wanted(await templates.put({"a": b"1"}))


def test_a_repeated_move_to_a_server_does_not_lose_the_sandbox(tmp_path: Path) -> None:
    async def job() -> None:
        sandboxes, backend, wanted = await with_gated(tmp_path)
        states = States(sandboxes)
        like = ("i" * 22, "t" * 32)

        async def receive() -> Live:
            restoring = sandboxes.restore(wanted, tmp_path, host_name="h", like=like)
            return await states.handed_over(restoring, sandboxes.end)

        first = asyncio.create_task(receive())
        while not sandboxes._starting:
            await asyncio.sleep(0)
        first.cancel()  # its sender's deadline is over
        with pytest.raises(EnvdError, match="exists on this server"):
            async with asyncio.timeout(5):
                await receive()
        backend.gate.release()
        while not backend.boxes or backend.boxes[0].alive:
            await asyncio.sleep(0.001)
        backend.gate.release()
        moved = await receive()
        assert sandboxes.find(*like) is moved and backend.boxes[1].alive
        await sandboxes.stop()

    asyncio.run(job())


def test_the_end_of_a_sandbox_leaves_another_one_of_its_id(tmp_path: Path) -> None:
    async def job() -> None:
        unused: Any = None
        sandboxes, _, _ = await with_gated(tmp_path)
        box: Any = StandIn()
        spec = BoxSpec("box-1", "t", tmp_path, Limits())
        old, new = (Live("i" * 22, "t" * 32, unused, spec, box, unused) for _ in range(2))
        sandboxes.admit(new)
        sandboxes.forget(old, "it was moved")
        assert sandboxes.find("i" * 22, "t" * 32) is new

    asyncio.run(job())


def test_a_creation_whose_caller_left_counts_until_its_box_is_gone(tmp_path: Path) -> None:
    async def job() -> None:
        sandboxes, backend, wanted = await with_gated(tmp_path, "quotas: {sandboxes: 1}")
        creating = asyncio.create_task(sandboxes.create(wanted))
        while not sandboxes._starting:
            await asyncio.sleep(0)
        creating.cancel()
        await asyncio.wait([creating])
        with pytest.raises(QuotaExceeded):
            async with asyncio.timeout(5):
                await sandboxes.create(wanted)
        assert not sandboxes.idle
        backend.gate.release()
        async with asyncio.timeout(5):
            while not sandboxes.idle:
                await asyncio.sleep(0)
        assert not backend.boxes[0].alive
        backend.fails = 1
        backend.gate.release()
        with pytest.raises(OSError):
            await sandboxes.create(wanted)
        backend.gate.release()
        assert (await sandboxes.create(wanted)).box is backend.boxes[1]
        await sandboxes.stop()

    asyncio.run(job())


def test_a_batch_outlives_a_creation_that_fails_on_the_machine(tmp_path: Path) -> None:
    async def job() -> None:
        sandboxes, backend, wanted = await with_gated(tmp_path)
        backend.fails, unused = 1, cast(Any, None)
        for _ in range(3):
            backend.gate.release()
        service = OperationsService(sandboxes, unused, unused)
        batch = operations_pb.CreateBatchRequest(requests=[pb.CreateRequest(template=wanted.template)] * 3)
        reply = await service.CreateBatch(batch, CONTEXT)
        assert [each.HasField("created") for each in reply.results].count(True) == len(sandboxes) == 2
        (error,) = [each.error for each in reply.results if each.error]
        assert "Too many open files" in error
        await sandboxes.stop()

    asyncio.run(job())


def test_a_batch_whose_caller_leaves_is_ended_although_one_of_its_sandboxes_died(tmp_path: Path) -> None:
    async def job() -> None:
        sandboxes, backend, wanted = await with_gated(tmp_path)
        unused: Any = None
        service = OperationsService(sandboxes, unused, unused)
        batch = operations_pb.CreateBatchRequest(requests=[pb.CreateRequest(template=wanted.template)] * 3)
        creating = asyncio.ensure_future(service.CreateBatch(batch, CONTEXT))
        backend.gate.release()
        while not len(sandboxes):
            await asyncio.sleep(0)
        backend.boxes[0].guest.gone = "it crashed"
        creating.cancel()
        await asyncio.wait([creating])
        backend.gate.release()
        backend.gate.release()
        async with asyncio.timeout(5):
            while len(backend.boxes) < 3 or any(box.alive for box in backend.boxes):
                await asyncio.sleep(0.001)
        assert not len(sandboxes)

    asyncio.run(job())


@pytest.mark.parametrize("case", ["destroying", "waiting for a state change", "failing"])
def test_a_sandbox_whose_caller_leaves_is_destroyed_and_charged_no_more(tmp_path: Path, case: str) -> None:
    async def job() -> None:
        unused: Any = None
        templates, runtimes = Templates(tmp_path / "templates", 0), Runtimes(tmp_path / "runtimes")
        sandboxes = Sandboxes(
            {}, templates, unused, runtimes, rules=load_rules("quotas: {sandboxes: 1}"), audit=AuditLog()
        )
        box: Any = StandIn(fails=case == "failing")
        spec = BoxSpec("box-1", "t", tmp_path, Limits())
        claim = sandboxes.quotas.claim(64)
        live = sandboxes.admit(Live("i" * 22, "t" * 32, unused, spec, box, unused, claim=claim))
        sandboxes._hold(spec)
        changing = case == "waiting for a state change"
        if changing:
            await live.alone().acquire()
        ending = asyncio.create_task(sandboxes.end(live))
        await asyncio.sleep(0.01)
        ending.cancel()
        await asyncio.wait([ending])
        if changing:
            live.alone().release()
        await sandboxes.stop()
        assert not box.alive and live.box is None
        sandboxes.quotas.claim(64)  # the only one that its quota allows

    asyncio.run(job())


def test_a_pool_gives_nobody_a_box_that_it_has_destroyed(tmp_path: Path) -> None:
    async def job() -> None:
        gate = asyncio.Event()

        async def start(spec: BoxSpec) -> StandIn:
            await gate.wait()
            return StandIn()

        pool = Pool(start, 1)
        spec = BoxSpec("box-1", "t", tmp_path, Limits())
        assert pool.take(spec) is None  # a refill begins
        await asyncio.sleep(0)
        await pool.forget("t")
        assert pool.take(spec) is None  # the template is back
        waiting = asyncio.create_task(pool.under_way(spec))
        await asyncio.sleep(0)
        gate.set()
        box = await waiting
        assert box is None or box.alive
        await pool.stop()

    asyncio.run(job())


@pytest.mark.parametrize("size", [0, 1])
def test_a_pool_remembers_nothing_of_specs_that_come_once(tmp_path: Path, size: int) -> None:
    async def job() -> None:
        async def start(spec: BoxSpec) -> StandIn:
            await asyncio.sleep(0)
            return StandIn()

        pool = Pool(start, size)
        for number in range(20):
            spec = BoxSpec("box-1", f"t{number}", tmp_path, Limits(), env={"N": str(number)} if number % 2 else {})
            if pool.take(spec) is None:
                await pool.under_way(spec)
        await pool.stop()
        assert not pool._waiters and not pool._starting

    asyncio.run(job())


def test_a_gvisor_box_is_waited_for_while_it_is_paused_or_written_to_a_snapshot(tmp_path: Path) -> None:
    async def job() -> None:
        asked: list[str] = []
        held: list[bool] = []

        class Backend:
            manifest: ClassVar[dict[str, str]] = {}

            async def runsc(self, box: str, arguments: Sequence[str], *, image: int | None = None) -> None:
                asked.append(arguments[0])
                assert held[-1] or arguments[0] == "resume"
                if arguments[0] == "pause" and len(asked) == 1:
                    raise EnvdError("runsc pause failed")

        guest: Any = SimpleNamespace(gone=None, hold=lambda: held.append(True), release=lambda: held.append(False))
        backend: Any = Backend()
        spec: Any = SimpleNamespace(name="box-1")
        box = GVisorBox(backend, spec, guest)
        with pytest.raises(EnvdError):
            await box.pause()
        assert held[-1] is False, "it runs"
        await box.snapshot(tmp_path)
        assert held[-1] is False
        await box.pause()
        await box.snapshot(tmp_path)
        assert held[-1] is True, "it is still paused"
        await box.resume()
        assert held[-1] is False and asked == ["pause", "checkpoint", "pause", "checkpoint", "resume"]

    asyncio.run(job())


def test_a_base_machine_keeps_its_files_while_a_machine_starts_from_them(tmp_path: Path) -> None:
    base = _BaseMachine(tmp_path / "base")
    base.directory.mkdir()
    with base.held():
        base.close()
        assert base.directory.exists()
    assert not base.directory.exists()
