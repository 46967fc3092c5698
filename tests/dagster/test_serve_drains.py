"""`triplane serve --follow` as pods of a Deployment use it: start before the first policy, readiness, drain."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from dagster_world import World
from serving import Balancer, Load, Server

from contracts.artifacts import Artifact, open_artifact
from inference.engines.builtin import BuiltinEngine
from ops.inputs import trainer_state_of
from resources.refs import require_ref, write_ref
from resources.registry import Registry

pytestmark = pytest.mark.anyio
PER_SECOND = 50


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def policies(ran: World) -> list[Artifact]:
    """The base policy and the one trained from it."""
    refs = [
        require_ref(ran.store, ran.experiment.name, "base_policy"),
        require_ref(ran.store, ran.experiment.name, "checkpoint", "0000"),
    ]
    return [open_artifact(ran.store, ref) for ref in refs]


@pytest.fixture
def start(ran: World) -> Iterator[Callable[..., Server]]:
    """Starts servers, which end with the test."""
    servers: list[Server] = []

    def started(name: str, *options: str) -> Server:
        servers.append(Server(ran.store.url, name, *options))
        return servers[-1]

    yield started
    for server in servers:
        server.end()


@pytest.mark.slow
async def test_a_server_started_before_the_first_policy_becomes_ready_with_it(
    ran: World, policies: list[Artifact], start: Callable[..., Server]
) -> None:
    server = start("unborn")
    waiting = await server.ready(503)
    assert waiting["policy"] is None and waiting["live"] is None and "'unborn'" in waiting["reason"]
    root = f"http://{await server.address()}"
    async with httpx.AsyncClient(timeout=30) as http:
        assert (await http.get(f"{root}/health")).status_code == 200
        refused = await http.post(f"{root}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_policy_yet"
        assert (await http.get(f"{root}/v1/models")).status_code == 503
        write_ref(ran.store, "unborn", "base_policy", None, policies[0].ref)
        digest = policies[0].ref.digest
        assert await server.ready(200) == {"policy": digest, "live": digest}
        answer = await http.post(f"{root}/v1/completions", json={"prompt": [1, 2], "max_tokens": 2})
        assert answer.status_code == 200
    assert server.printed.count("waiting for the first policy") == 1 and "no policy yet at http" in server.printed
    server.process.send_signal(signal.SIGTERM)
    assert server.ended(30) == 0 and "Traceback" not in server.printed


@pytest.mark.slow
def test_the_wait_for_the_first_policy_is_bounded_and_its_error_names_the_fix(start: Callable[..., Server]) -> None:
    server = start("never", "--wait", "0.5")
    assert server.ended(60) == 1
    assert "no policy to serve after 0.5 s" in server.printed and "--wait" in server.printed
    assert "Traceback" not in server.printed


@pytest.mark.slow
async def test_sigterm_of_one_of_two_servers_and_a_swap_under_load_fail_no_request(
    ran: World, policies: list[Artifact], start: Callable[..., Server]
) -> None:
    base, first = (policy.ref for policy in policies)
    write_ref(ran.store, "rolled", "base_policy", None, base)
    leaving, staying = start("rolled", "--drain", "3"), start("rolled", "--drain", "3")
    for server in (leaving, staying):
        await server.ready(200)
    balancer = Balancer([await leaving.address(), await staying.address()])
    async with balancer.listening() as address:
        while len(balancer.endpoints) < 2:
            await asyncio.sleep(0.05)
        load = Load(f"http://{address}/v1", PER_SECOND)
        async with load.running():
            await asyncio.sleep(1)
            state = trainer_state_of(ran.store, first)
            assert Registry(ran.store, "rolled").promote(first, state, parent=base.digest, iteration="0000")
            began = time.monotonic()
            leaving.process.send_signal(signal.SIGTERM)
            refused = await leaving.ready(503)
            assert "draining" in refused["reason"] and time.monotonic() - began < 2
            async with httpx.AsyncClient(timeout=30) as http:
                late = await http.get(f"http://{await leaving.address()}/health")
            assert (late.status_code, late.headers["connection"]) == (200, "close")
            code = await asyncio.to_thread(leaving.ended, 60)
            took = time.monotonic() - began
            await asyncio.sleep(1)
    assert code == 0 and took > 3 and "Traceback" not in leaving.printed, leaving.printed
    assert not load.failures, load.failures[:3]
    assert len(load.replies) > PER_SECOND * 3
    assert balancer.endpoints == [await staying.address()]
    made = {version for reply in load.replies for version, _, _ in reply["policy_spans"]}
    assert made == {base.digest, first.digest}
    for policy in policies:
        await _check_spans(policy, load.replies)


async def _check_spans(policy: Artifact, replies: list[dict[str, object]]) -> None:
    """Every token of a span has the log probability that its policy gives it, to the bit."""
    engine = BuiltinEngine(policy.directory(), policy.ref.digest, threads=1)
    for reply in replies:
        ids, logprobs = reply["token_ids"], reply["logprobs"]
        assert isinstance(ids, list) and isinstance(logprobs, dict)
        for version, start, end in reply["policy_spans"]:  # type: ignore[attr-defined]
            if version == policy.ref.digest:
                scores = (await engine.score([5, 6, 7, 8, *ids]))[4:]
                assert logprobs["token_logprobs"][start:end] == scores[start:end]
    await engine.close()
