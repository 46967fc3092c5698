"""A fleet chooses by the cache events of its servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.engines import SamplingParams, VllmConfig
from inference.engines.fleet import FleetEngine
from inference.engines.policies import PolicyDirectory
from inference.router import Batch, Stored
from inference.router.publisher import EventPublisher
from tests.inference.test_cache_events import events_port, reached
from tests.vllm.fleet_servers import StubServer

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
VERSION = "a" * 64


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_prompt_goes_where_events_say_that_it_is_cached(policies: tuple[Path, Path]) -> None:
    port, hosts = events_port(), ("127.0.0.1", "127.0.0.2")
    servers = [StubServer(policies[0], host) for host in hosts]
    publishers = [EventPublisher(host, port) for host in hosts]
    for server in servers:
        server.start()
    for server in servers:
        server.wait()
    config = VllmConfig.model_validate({"base_url": [each.url for each in servers], "events_port": port})
    engine = FleetEngine(config, PolicyDirectory(policies[0], VERSION))
    assert await engine.version() == VERSION
    prompts = [[number, *range(10, 57)] for number in range(6)]
    for number, prompt in enumerate(prompts):
        publishers[number % 2](
            Batch(number // 2, [Stored([f"{number}-{block}" for block in range(3)], None, prompt, 16)])
        )
    await reached(lambda: engine._router.residency.counters.applied == len(prompts))
    for number, prompt in enumerate(prompts):
        decision = engine._router.choose([*prompt, 1], max_tokens=2)
        assert (decision.replica, decision.cached) == (servers[number % 2].url, 48)
    before = [len(each.asked()) for each in servers]
    await engine.generate([*prompts[1], 1], SamplingParams(1.0, 2, 1))
    assert [len(each.asked()) - count for each, count in zip(servers, before, strict=True)] == [0, 1]
    await engine.close()
    for publisher in publishers:
        publisher.close()
    for server in servers:
        server.stop()
