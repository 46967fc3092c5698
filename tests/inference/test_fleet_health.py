"""Which replicas are asked: real servers in this process that fail, hang, end, or say another version."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from contracts.addresses import parse_addresses
from contracts.errors import ConfigError, TriplaneError
from inference.fleet import fleet as module
from inference.fleet.client import FleetClient
from inference.fleet.events import Event
from inference.fleet.face import FleetFace
from inference.fleet.fleet import Fleet
from inference.fleet.health import Health, ejected
from inference.fleet.joining import Joining
from inference.fleet.pools import Pools, Wanted
from inference.fleet.probe import REPLY_BYTES, Found
from inference.fleet.registry import Drain, Joined, LocalRegistry
from inference.fleet.update import Rollout, roll
from inference.router import Namespace, Router
from inference.server.replies import explain
from inference.server.route import RouterFace, Routing
from tests.ports import free_port
from tests.vllm.fleet_servers import until

pytestmark = pytest.mark.anyio


class Server:
    """Answers probes, as vLLM does, from a thread."""

    def __init__(self, port: int | None = None) -> None:
        self.port, self.status, self.version = port or free_port(), 200, "v1"
        self.garbage: Response | None = None
        """Reply to all probes; None: as usual."""
        routes = [Route("/health", self.health), Route("/weight_info", self.weight_info)]
        self.server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=self.port, log_level="critical"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def health(self, request: Request) -> Response:
        return self.garbage or Response(status_code=self.status)

    async def weight_info(self, request: Request) -> Response:
        return self.garbage or JSONResponse({"weight_version": self.version})

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """A fleet over real servers, watched step by step."""

    def __init__(self, count: int, client: httpx.AsyncClient, address: str) -> None:
        self.servers = [Server() for _ in range(count)]
        self.clock, self.told = Clock(), list[Event]()
        self.registry = LocalRegistry(self.clock)
        self.prompts = itertools.count()
        given = ",".join(address.format(each.port) for each in self.servers)
        addresses = parse_addresses(given) if given else []
        self.fleet = Fleet(addresses, self.registry, Pools(), client, self.clock)
        self.fleet.tell = self.told.append

    def chosen(self, times: int = 40, **more: Any) -> set[str]:
        """URLs of the replicas that get so many different prompts."""
        found = set()
        for _ in range(times):
            prompt = np.full(64, next(self.prompts), np.int32)
            sent = self.fleet.choose(Wanted(prompt, 16, more.get("session")), pin=more.get("pin"))
            if sent is not None:
                found.add(sent.replica.url)
                self.fleet.finish(sent, seconds=0.1, sampled=4)
        return found

    def kinds(self, url: str) -> list[str]:
        return [each.event for each in self.told if each.url == url]


@asynccontextmanager
async def world(count: int, address: str = "http://127.0.0.1:{}") -> AsyncIterator[World]:
    async with httpx.AsyncClient(trust_env=False) as client:
        made = World(count, client, address)
        await made.fleet.start()
        yield made
        await made.fleet.close()
        for each in made.servers:
            each.end()


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=20))
def test_at_most_half_is_ejected_and_never_the_last(states: list[tuple[bool, float]]) -> None:
    healths = {str(place): Health(fault="x" if faulty else None, since=at) for place, (faulty, at) in enumerate(states)}
    out = ejected(healths.items())
    faulty = {name for name, health in healths.items() if health.fault is not None}
    assert len(out) == min(len(faulty), len(states) // 2) and out <= faulty
    assert all(healths[name].since <= healths[left].since for name in out for left in faulty - out)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_hidden_replicas_are_not_chosen_and_are_as_before_afterwards(data: st.DataObject) -> None:
    """Beside a router that never had them hidden."""
    names = "abcde"
    one, two = Router(Namespace("")), Router(Namespace(""))
    flying = []
    for name in names:
        one.add(name)
        two.add(name)
    for _ in range(data.draw(st.integers(1, 30))):
        prompt = np.full(data.draw(st.integers(1, 100)), data.draw(st.integers(0, 5)), np.int32)
        hidden = data.draw(st.sets(st.sampled_from(names), max_size=4))
        with one.hidden(hidden):
            assert one.choose(prompt, max_tokens=9).replica not in hidden
        decisions = [router.choose(prompt, max_tokens=9) for router in (one, two)]
        assert decisions[0].replica == decisions[1].replica and decisions[0].cost_s == decisions[1].cost_s
        for router, decision in zip((one, two), decisions, strict=True):
            router.begin(decision)
        flying.append(decisions)
        if data.draw(st.booleans()):
            for router, decision in zip((one, two), flying.pop(0), strict=True):
                router.finish(decision)
        assert one.flying() == two.flying()


async def test_half_of_the_faulty_ones_is_ejected_and_the_others_are_still_asked() -> None:
    async with world(4) as found:
        urls = [each.url for each in found.servers]
        assert found.chosen() == set(urls)
        for number, server in enumerate(found.servers):
            server.status = 503
            found.clock.now += 1
            await found.fleet.check()
            assert found.chosen() == (set(urls[number + 1 :]) if number < 2 else set(urls[2:]))
        assert found.fleet.serving == [] and set(found.fleet.faults) == set(urls)
        assert [row["state"] for row in found.fleet.state()["replicas"]] == ["ejected", "ejected", "faulty", "faulty"]
        found.servers[0].status = 200
        await found.fleet.check()
        assert found.chosen() == {urls[0], urls[3]}, "of the three that fail, those that have for longest are ejected"
        assert found.kinds(urls[0]) == ["version", "well", "faulty", "ejected", "well"]


@pytest.mark.parametrize(
    ("garbage", "fault"),
    [
        (Response(b"[" * 100_000), None),
        (Response(b'{"weight_version": "\\ud800"}'), "names no policy version"),
        (Response(json.dumps({"weight_version": "v" * 257})), "names no policy version"),
        (Response(b'{"weight_version": {}}'), "names no policy version"),
        (Response(b" " * (REPLY_BYTES + 1)), "GET /health answered more than 1 MiB"),
        (Response(gzip.compress(b" " * (64 << 20)), headers={"content-encoding": "gzip"}), None),
    ],
)
async def test_a_server_that_answers_garbage_is_at_fault_alone(garbage: Response, fault: str | None) -> None:
    async with world(2) as found:
        odd, well = found.servers
        odd.garbage = garbage
        tracemalloc.start()
        await found.fleet.check()
        (_, peak), _ = tracemalloc.get_traced_memory(), tracemalloc.stop()
        assert peak < 16 << 20, "nothing is decompressed"
        assert well.url not in found.fleet.faults
        assert (fault or "") in found.fleet.faults.get(odd.url, "") and (odd.url in found.fleet.faults) == bool(fault)
        if fault is not None:
            assert found.chosen() == {well.url}


async def test_a_server_that_accepts_no_connection_is_not_asked_however_many_there_are() -> None:
    async with world(3) as found:
        for server in found.servers[:2]:
            server.end()
        assert found.chosen() <= {each.url for each in found.servers}, "not known yet"
        found.fleet.failed(found.servers[0].url, "a request failed (ConnectError)", away=True)
        assert found.servers[0].url not in found.chosen()
        await found.fleet.check()
        assert found.chosen() == {found.servers[2].url}
        found.servers[2].end()
        await found.fleet.check()
        assert found.chosen() == set()


@pytest.mark.parametrize("fault", [socket.EAI_NONAME, socket.EAI_AGAIN])
async def test_servers_of_a_name_without_addresses_stay_only_while_they_accept_connections(
    fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, resolves = socket.getaddrinfo, True

    def lookup(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        if host == "samplers.ns.svc" and not resolves:
            raise socket.gaierror(fault, "no address")
        return usual("127.0.0.1" if host == "samplers.ns.svc" else host, port, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    async with world(2, "dns:samplers.ns.svc:{}") as found:
        gone, well = found.servers
        assert found.chosen() == {gone.url, well.url}
        resolves = False
        await found.fleet.check()
        assert found.chosen() == {gone.url, well.url}
        await asyncio.to_thread(gone.end)
        await found.fleet.check()
        found.servers.append(Server(gone.port))  # of another experiment, on the IP address of the pod that is gone
        for _ in range(2):
            await found.fleet.check()
            assert found.chosen() == {well.url} and found.kinds(gone.url)[-1] == "left"
        resolves = True
        await found.fleet.check()
        assert found.chosen() == {gone.url, well.url}


async def test_faults_of_requests_eject_for_longer_each_time_though_probes_are_well() -> None:
    async with world(2) as found:
        flapping = found.servers[0].url
        pauses = []
        for _ in range(6):
            found.fleet.failed(flapping, "a request was answered 502")
            assert flapping not in found.chosen()
            began = found.clock.now
            while flapping in found.fleet.faults:
                found.clock.now += 0.5
                await found.fleet.check()
            pauses.append(found.clock.now - began)
        assert pauses[0] <= 2 and pauses[-1] > 8
        assert flapping in found.chosen(), "it is asked again, and answers"
        found.fleet.failed(flapping, "a request was answered 502")
        found.clock.now += 2
        await found.fleet.check()
        assert flapping not in found.fleet.faults, "an answer forgives earlier faults"


async def test_a_lapsed_lease_takes_a_replica_out_of_choice() -> None:
    async with world(1) as found:
        leased = Server()
        await found.registry.join(Joined(url=leased.url, started=1, lease_s=10, version="v1", capacity=4))
        await found.fleet.sync()
        assert found.chosen() == {leased.url, found.servers[0].url}
        found.clock.now += 11
        await found.fleet.sync()
        assert found.chosen() == {found.servers[0].url} and leased.url not in found.fleet.replicas
        assert found.kinds(leased.url) == ["joined", "version", "well", "left"]
        leased.end()


async def test_a_drain_keeps_sessions_until_its_deadline_and_takes_no_new_ones() -> None:
    async with world(2) as found:
        (home,) = found.chosen(1, session="talk")
        await found.registry.drain(home, Drain(token="d", sessions_s=60))
        await found.fleet.sync()
        assert home not in found.chosen()
        for _ in range(5):
            found.clock.now += 10
            assert found.chosen(1, session="talk") == {home}
        await found.fleet.sync()
        assert found.fleet.view().sessions[home] == 1
        found.clock.now += 11
        await found.fleet.sync()
        assert home not in found.chosen(1, session="talk")
        assert home not in found.fleet.view().sessions, "the session has moved"
        await found.registry.drain(home, None)
        await found.fleet.sync()
        assert home in found.chosen()


async def test_a_look_at_the_registry_that_waits_for_a_probe_undoes_no_later_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(2) as found:
        home, probing, answers = found.servers[0].url, asyncio.Event(), asyncio.Event()
        await found.registry.drain(home, Drain(token="d", sessions_s=60))
        await found.fleet.sync()

        async def probe(client: httpx.AsyncClient, url: str) -> Found:
            probing.set()
            await answers.wait()
            return Found(None, version="v1")

        monkeypatch.setattr(module, "probe", probe)
        await found.registry.drain(home, None)
        ended = asyncio.create_task(found.fleet.sync())
        await probing.wait()
        await found.registry.drain(home, Drain(token="e", sessions_s=60))
        begun = asyncio.create_task(found.fleet.sync())
        await asyncio.wait([begun], timeout=0.1)
        answers.set()
        await asyncio.gather(ended, begun)
        assert home not in found.chosen()


async def test_pinned_requests_reach_replicas_of_their_version_only() -> None:
    async with world(3) as found:
        found.servers[0].version = "v2"
        found.servers[1].version = "unproven:v2:5f"
        await found.fleet.check()
        urls = [each.url for each in found.servers]
        assert found.chosen(pin="v2") == {urls[0]} and found.chosen(pin="v1") == {urls[2]}
        assert found.chosen(pin="v3") == set()
        waiting = [found.fleet.choose(Wanted(np.full(64, each, np.int32), 16)) for each in range(1000, 1040)]
        assert {each.replica.url for each in waiting if each is not None} == {urls[0], urls[2]}
        for each in found.fleet.replicas.values():
            assert each.requests in ((0,) if each.url == urls[1] else range(15, 26)), "both versions share the load"
        await found.registry.drain(urls[2], Drain(token="d", sessions_s=60))
        await found.fleet.sync()
        assert found.chosen(pin="v1") == set(), "a new session of a version whose last replica drains"


async def test_the_last_replica_of_a_version_keeps_its_open_sessions_and_their_groups() -> None:
    async with world(2) as found:
        one, last = (each.url for each in found.servers)
        fleet = found.fleet

        def asked(session: str, group: str | None = None) -> str | None:
            sent = fleet.choose(Wanted(np.arange(64, dtype=np.int32), 16, session, group), pin="v1")
            if sent is not None:
                fleet.finish(sent, seconds=0.1, sampled=4)
            return None if sent is None else sent.replica.url

        fleet._drained(fleet.replicas[last], Drain(token="x", sessions_s=0))
        assert asked("mine", "group") == one
        fleet._drained(fleet.replicas[last], None)
        found.servers[0].version = "v2"
        await found.registry.drain(last, Drain(token="d", sessions_s=60))
        await fleet.check()
        await fleet.sync()
        assert asked("mine", "group") == last, "it moves to the last replica of its version"
        assert asked("sibling", "group") == last and asked("stranger", "other") is None
        assert fleet.view().pinned == {"v1": 2}
        fleet.end("mine")
        fleet.end("sibling")
        assert fleet.view().pinned == {} and asked("mine", "group") is None


async def test_requests_of_a_version_that_is_gone_are_no_demand_for_replicas() -> None:
    async with world(1) as found:
        prompt = np.arange(64, dtype=np.int32)
        assert found.chosen(1, pin="v0") == set() and found.fleet.choose(Wanted(prompt, 16), version="v0") is None
        assert found.fleet.view().refused == 0
        found.servers[0].end()
        await found.fleet.check()
        assert found.chosen(1) == found.chosen(1, pin="v1") == set()
        assert found.fleet.view().refused == 2


async def test_an_update_loads_into_replicas_that_an_interrupted_one_left_unproven() -> None:
    async with world(3) as found, FleetClient("http://router") as client:
        left, well, other = found.servers
        left.version, other.version = "unproven:v2:5f", "unproven:v3:5f"
        await found.registry.drain(other.url, Drain(token="d", sessions_s=60))
        await found.fleet.check()
        await found.fleet.sync()
        face = Starlette(routes=FleetFace(found.fleet).routes())
        client._http = httpx.AsyncClient(transport=httpx.ASGITransport(face))
        loaded, said = list[str](), list[str]()

        async def load(url: str) -> None:
            (server,) = (each for each in found.servers if each.url == url)
            loaded.append(url)
            server.version = "v2"
            await found.fleet.check()

        await roll(client, "v2", load, Rollout(), said.append)
        assert set(loaded) == {left.url, well.url} and found.chosen() == set(loaded)
        assert f"{other.url} is draining: left as it is" in said, "another update may load it"
        assert f"{left.url} drains" in said and f"{well.url} drains: the last one of v1" in said


async def test_a_body_that_any_web_page_may_send_changes_no_fleet() -> None:
    """A browser asks before it sends another content type to a server of another origin."""
    async with world(1) as found:
        app = Starlette(routes=FleetFace(found.fleet).routes(), exception_handlers={TriplaneError: explain})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            joined = Joined(url="http://203.0.113.9:8000", started=1).model_dump_json()
            for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
                headers = {} if kind is None else {"content-type": kind}
                reply = await client.post("/fleet/join", content=joined, headers=headers)
                assert reply.status_code == 415 and "content-type: application/json" in reply.text
            assert list(found.fleet.replicas) == [found.servers[0].url]
            headers = {"content-type": "Application/JSON; charset=utf-8"}
            assert (await client.post("/fleet/join", content=joined, headers=headers)).is_success
            assert "http://203.0.113.9:8000" in found.fleet.replicas


@asynccontextmanager
async def routing() -> AsyncIterator[tuple[RouterFace, httpx.AsyncClient]]:
    """The face of a router with one server, and a client of it that checks no header."""
    server = Server()
    face = RouterFace(Routing(server.url, "127.0.0.1:0"))
    await face.fleet.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(face.starlette()), base_url="http://router") as client:
        yield face, client
    await face.close()
    server.end()


@pytest.mark.parametrize(("header", "status"), [("blanks at its end \t", 404), ("a\0b", 400)])
async def test_a_header_that_can_not_be_sent_is_no_fault_of_the_servers(header: str, status: int) -> None:
    async with routing() as (face, client):
        reply = await client.post("/v1/completions", json={"prompt": [1]}, headers={"x-mine": header})
        assert reply.status_code == status, "404: the server has no such route"
        assert status == 404 or "a header can't be passed on" in reply.json()["error"]["message"]
        assert face.fleet.serving and not any(each.requests for each in face.fleet.replicas.values())


async def test_a_page_of_another_name_joins_no_replica_without_a_key() -> None:
    async with routing() as (face, client):
        body = {"url": "http://203.0.113.9:8000", "started": 1}
        reply = await client.post("/fleet/join", json=body, headers={"host": "evil.example:8080"})
        assert reply.status_code == 401 and len(face.fleet.replicas) == 1


async def test_a_reply_that_the_router_reads_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.server.route.HELD_BYTES", 4)
    async with routing() as (face, client):
        reply = await client.post("/v1/completions", json={"prompt": [1]}, headers={"x-policy-version": "v1"})
        assert reply.status_code == 409 and "a request failed (InvalidReply)" in str(face.fleet.faults)


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:80800", "hooks.example/x", "http:///x"])
async def test_a_webhook_or_router_that_is_no_url_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--webhook .* is not a URL"):
        RouterFace(Routing("", "127.0.0.1:0", webhook=url))
    with pytest.raises(ConfigError, match="is not the URL of a router"):
        Joining((url,), "http://203.0.113.9:8000")


@pytest.mark.parametrize("header", ["x-session", "x-group"])
async def test_a_long_name_is_refused_before_it_is_kept(header: str) -> None:
    async with routing() as (_, client):
        reply = await client.post("/v1/completions", json={"prompt": [1]}, headers={header: "n" * 257})
        assert reply.status_code == 400 and f"{header} is longer than 256" in reply.json()["error"]["message"]
        assert (
            await client.post("/v1/completions", json={"prompt": [1]}, headers={header: "n" * 256})
        ).status_code == 404


@pytest.mark.parametrize("started", ["NaN", "Infinity"])
async def test_a_process_that_started_at_no_time_joins_no_fleet(started: str) -> None:
    async with routing() as (face, client):
        body = f'{{"url": "http://203.0.113.9:8000", "started": {started}}}'
        reply = await client.post("/fleet/join", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400 and reply.json()["error"]["message"].startswith("started: ")
        assert (await client.get("/fleet")).status_code == 200 and len(face.fleet.replicas) == 1


@pytest.mark.parametrize("loading", [True, False])
async def test_a_drain_of_somebody_else_outlives_an_update(loading: bool) -> None:
    """loading: of the replica that is being loaded, and not of the next one."""
    async with world(2) as found, FleetClient("http://router") as client:
        face = Starlette(routes=FleetFace(found.fleet).routes())
        client._http = httpx.AsyncClient(transport=httpx.ASGITransport(face))
        loaded, said = list[str](), list[str]()

        async def load(url: str) -> None:
            loaded.append(url)
            (server,) = (each for each in found.servers if each.url == url)
            (other,) = (each.url for each in found.servers if each.url != url)
            server.version = "v2"
            await client.drain(url if loading else other, 60)
            await found.fleet.check()

        await roll(client, "v2", load, Rollout(sessions_s=0), said.append)
        drained = {row["url"] for row in (await client.state())["replicas"] if row["state"] == "draining"}
        if loading:
            assert len(loaded) == 2 and drained == set(loaded)
        else:
            assert len(loaded) == 1 and drained == {each.url for each in found.servers} - set(loaded)
            assert {f"{url} is draining: left as it is" for url in drained} <= set(said)
        assert found.chosen() == set(loaded) - drained


async def test_idle_sessions_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(1) as found:
        monkeypatch.setattr(module, "SESSIONS", 3)
        for name in "abcde":
            found.chosen(1, session=name)
        assert sum(found.fleet.view().sessions.values()) == 3
        found.clock.now += module.IDLE_S
        assert found.fleet.view().sessions == {}


async def test_a_restarted_process_is_probed_before_it_is_asked_again() -> None:
    async with world(0) as found:
        server = Server()
        for started in (1.0, 2.0):
            server.version = f"v{started:.0f}"
            await found.registry.join(Joined(url=server.url, started=started, lease_s=10))
            await found.fleet.sync()
            assert found.fleet.versions == [server.version]
        assert found.kinds(server.url).count("joined") == 2
        await asyncio.to_thread(server.end)
