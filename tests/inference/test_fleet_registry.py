"""Leases, drains and views: in memory, and in a real Redis server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic import ValidationError

from contracts.errors import ConfigError
from inference.errors import FleetError
from inference.fleet.client import FleetClient
from inference.fleet.registry import Drain, Joined, LocalRegistry, Registry, View
from inference.fleet.shared_registry import SharedRegistry
from tests.inference.test_shared_router import Server
from tests.needs import require

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
A, B = "http://a:8000", "http://b:8000"


@pytest.fixture(params=["memory", "redis"])
async def registry(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Registry]:
    if request.param == "memory":
        yield LocalRegistry()
        return
    require("redis-server")
    server = Server(tmp_path)
    made = SharedRegistry(server.url)
    await made.start()
    yield made
    await made.close()
    server.kill()


def replica(url: str = A, started: float = 1.5, lease_s: float = 60.0, **more: object) -> Joined:
    return Joined.model_validate({"url": url, "started": started, "lease_s": lease_s, **more})


async def joined(registry: Registry) -> set[str]:
    return set((await registry.sync("me", View())).joined)


async def test_a_lease_lapses_unless_it_is_renewed(registry: Registry) -> None:
    renewed = replica(B, lease_s=2, version="v1", capacity=8)
    await registry.join(replica(A, lease_s=2))
    await registry.join(renewed)
    for _ in range(4):
        await asyncio.sleep(0.6)
        await registry.join(renewed)
    assert (await registry.sync("me", View())).joined == {B: renewed}
    await asyncio.sleep(2.1)
    assert await joined(registry) == set()
    await registry.join(replica(A))
    assert await joined(registry) == {A}


async def test_of_two_processes_at_one_url_the_later_one_counts(registry: Registry) -> None:
    await registry.join(replica(started=1.0625))
    await registry.join(replica(started=1764300000.123456, version="v2"))
    with pytest.raises(FleetError, match="a process that started later has joined"):
        await registry.join(replica(started=1.0625))
    await registry.leave(A, 1.0625)
    assert await joined(registry) == {A}, "the earlier process ended after the later one joined"
    await registry.leave(A, 1764300000.123456)
    assert await joined(registry) == set()


async def test_a_drain_counts_down_and_ends_when_it_is_not_held(registry: Registry) -> None:
    await registry.drain(A, Drain(token="one", sessions_s=100, hold_s=3))
    await registry.drain(B, Drain(token="two", sessions_s=0.1))
    await asyncio.sleep(1.6)
    found = (await registry.sync("me", View())).drains
    assert 50 < found[A].sessions_s < 98.5 and found[B].sessions_s == 0.0
    await registry.drain(A, Drain(token="one", sessions_s=98, hold_s=3))
    await asyncio.sleep(1.6)
    assert (await registry.sync("me", View())).drains.keys() == {A, B}
    await asyncio.sleep(1.6)
    assert (await registry.sync("me", View())).drains.keys() == {B}
    await registry.drain(B, None)
    assert (await registry.sync("me", View())).drains == {}


async def test_a_drain_that_replaces_one_drain_leaves_others_as_they_are(registry: Registry) -> None:
    async def token() -> str | None:
        found = (await registry.sync("me", View())).drains.get(A)
        return None if found is None else found.token

    await registry.drain(A, Drain(token="one", sessions_s=9, hold_s=30), replaces="")
    assert await token() == "one", "there was none"
    await registry.drain(A, Drain(token="two", sessions_s=9, hold_s=30), replaces="")
    assert await token() == "one"
    await registry.drain(A, Drain(token="two", sessions_s=9, hold_s=30), replaces="one")
    assert await token() == "two"
    await registry.drain(A, Drain(token="operator's", sessions_s=9))
    await registry.drain(A, Drain(token="two", sessions_s=9, hold_s=30), replaces="two")
    await registry.drain(A, None, replaces="two")
    assert await token() == "operator's"
    await registry.drain(A, None)
    assert await token() is None


async def test_routers_see_each_other_through_redis_and_survive_its_end(tmp_path: Path) -> None:
    require("redis-server")
    server = Server(tmp_path)
    one, two = SharedRegistry(server.url), SharedRegistry(server.url)
    other = SharedRegistry(server.url, "another fleet")
    view = View(requests={A: 3}, seen={A: "token"}, pinned={"v1": 2})
    await one.sync("one", view)
    assert (await two.sync("two", View())).views == {"one": view}
    assert (await one.sync("one", view)).views == {"two": View()}
    assert (await other.sync("three", View())).views == {}
    server.kill()
    with pytest.raises(FleetError, match="Redis can't be reached"):
        await one.sync("one", view)
    server.start()
    await one.join(replica())
    assert await joined(two) == {A}
    for each in (one, two, other):
        await each.close()
    server.kill()


async def test_foreign_entries_in_redis_are_ignored(tmp_path: Path) -> None:
    require("redis-server")
    import redis

    server = Server(tmp_path)
    made = SharedRegistry(server.url)
    await made.join(replica())
    raw = redis.from_url(server.url)
    for number, content in enumerate((b"{", b"[]", b'{"url": 3}', b'"text"')):
        for kind in ("joined", "drains", "views"):
            raw.sadd(f"triplane:fleet:default:{kind}", f"http://x:{number}")
            raw.set(f"triplane:fleet:default:{kind}:http://x:{number}", content)
    found = await made.sync("me", View())
    assert (set(found.joined), found.drains, found.views) == ({A}, {}, {})
    await made.close()
    server.kill()


async def test_a_wrong_password_is_named(tmp_path: Path) -> None:
    require("redis-server")
    server = Server(tmp_path, "--requirepass", "right")
    with pytest.raises(ConfigError, match="refuses the user or the password"):
        await SharedRegistry(server.url).start()
    with pytest.raises(ConfigError, match="no address of a Redis server"):
        SharedRegistry("no url")
    server.kill()


@pytest.mark.parametrize("url", ["a:8000", "dns:a:8000", "http://a:8000/v1", "http://a:1,http://b:1", "ftp://a", ""])
def test_other_addresses_than_one_url_are_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="url"):
        replica(url)
    with suppress(ValidationError):
        assert replica("http://a:8000/").url == A


async def test_a_router_at_a_port_that_is_none_is_named() -> None:
    async with FleetClient("http://127.0.0.1:80800") as client:
        with pytest.raises(FleetError, match=r"127\.0\.0\.1:80800 can't be reached .*port"):
            await client.state()
