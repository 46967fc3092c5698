"""Malformed and hostile requests, small enough for every run; `python -m benchmarks envd-fuzz` sends 100,000."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.envd_attack import lying_guest, send
from benchmarks.envd_fuzz import Fuzz, FuzzOptions, run
from benchmarks.envd_hostile import METHODS, Hostile, Known, hostile_request
from contracts.pb import envd_pb2 as pb
from envd.client import Limits, ToolCall
from envd.connection import SANDBOX_TOKEN
from envd.errors import EnvdError
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from envd.tools import ALL_TOOLS
from tests.envd.harness import FILES

TRUE = ToolCall("exec", {"command": "true"})
HALF = "a\ud800b"
"""Half of a pair of UTF-16's: JSON can hold it, UTF-8 can't."""


class Target:
    """A server, and the loop on which one attacker's channel lives."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.loop = asyncio.new_event_loop()
        self.channel = self.loop.run_until_complete(self._opened())
        self.known = self.loop.run_until_complete(self.provided(3))

    async def _opened(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address)

    async def provided(self, count: int) -> Known:
        """What an attacker rightly has, with so many sandboxes of its own."""
        async with OperationsClient(self.address) as client:
            template = await client.put_template(FILES)
            made = [await client.create(template, limits=Limits(memory_mb=256)) for _ in range(count)]
            return Known([each.handle for each in made], template)

    def attack(self, request: Hostile, chance: random.Random) -> tuple[str, str]:
        return self.loop.run_until_complete(send(self.channel, request, chance))

    def works(self) -> bool:
        async def check() -> bool:
            async with OperationsClient(self.address) as client:
                async with await client.create(await client.put_template(FILES)) as sandbox:
                    return (await sandbox.call(TRUE)).ok and await sandbox.files.read("calc.py") == FILES["calc.py"]

        return self.loop.run_until_complete(check())


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with LocalEnvd("namespaces", log_level="error") as server:
        found = Target(server.address)
        yield found
        assert server.alive and found.works()
        found.loop.run_until_complete(found.channel.close())
        found.loop.close()


# Those that grade, move or store take long, each by right: the benchmark sends them too.
QUICK = sorted(
    set(METHODS) - {f"/triplane.envd.v1.{name}" for name in ("Verifier/Verify", "Operations/Migrate", "Tools/Batch")}
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(chance=st.randoms(use_true_random=False), path=st.sampled_from(QUICK))
def test_every_request_is_answered_or_refused_by_name(target: Target, chance: random.Random, path: str) -> None:
    code, surprise = target.attack(hostile_request(chance, target.known, path), chance)
    assert not surprise
    assert code != "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("path", sorted(METHODS))
def test_every_method_answers_to_a_seed_of_requests(target: Target, path: str) -> None:
    for seed in range(4):
        chance = random.Random(seed)
        assert target.attack(hostile_request(chance, target.known, path), chance)[1] == ""


HALVES = [
    {"path": HALF},
    {"path": "app.py", HALF: 1},
    {"path": "app.py", "old": HALF, "new": ""},
    {"path": "app.py", "content": HALF},
    {"pattern": "x", "path": HALF},
    {"query": "x", "path": HALF},
    {"query": HALF},
    {"command": HALF},
]


@pytest.mark.parametrize("tool", sorted(ALL_TOOLS))
def test_half_a_character_in_a_call_is_answered(target: Target, tool: str) -> None:
    handle = target.loop.run_until_complete(target.provided(1)).handles[0]  # attacks may have deleted those before
    for arguments in HALVES:
        call = pb.ToolCall(name=tool, arguments_json=json.dumps(arguments))
        batch = pb.BatchRequest(sandbox_id=handle.id, calls=[call], timeout_s=10).SerializeToString()
        request = Hostile("/triplane.envd.v1.Tools/Batch", (batch,), ((SANDBOX_TOKEN, handle.token),))
        assert target.attack(request, random.Random(0)) == ("OK", ""), arguments


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_guest_that_lies_is_a_sandbox_that_has_gone(chance: random.Random) -> None:
    with pytest.raises((EnvdError, OSError)) as ended:
        asyncio.run(lying_guest(chance))
    hung = isinstance(ended.value, TimeoutError) and ended.value.errno is None
    assert not hung, "asks of a guest that has gone were never answered"


@pytest.mark.slow
def test_a_fuzz_leaves_the_server_up_and_right() -> None:
    metrics = run(FuzzOptions.model_validate({"requests": 5000, "seed": 1})).metrics
    found = {
        name: metrics[name]
        for name in ("unhandled_errors", "server_deaths", "control_failures", "requests_hung", "requests_missing")
    }
    assert found == dict.fromkeys(found, 0)
    assert metrics["control_checks"] > 1


@pytest.mark.slow
def test_requests_to_a_server_that_has_died_are_missing() -> None:
    with LocalEnvd("namespaces", log_level="error") as server:
        assert server._process is not None
        pid = server._process.pid
        fuzz = Fuzz(server.address, pid, FuzzOptions(requests=400, at_once=4, sandboxes=1))

        async def kill() -> None:
            while fuzz.sent < 100:
                await asyncio.sleep(0.01)
            os.kill(pid, signal.SIGKILL)

        async def both() -> None:
            await asyncio.gather(fuzz.run(), kill())

        asyncio.run(both())
        metrics = fuzz.result(died=not server.alive).metrics
    assert metrics["requests"] >= 400 and metrics["server_deaths"] == 1
    assert 100 < metrics["requests_missing"] < 400
