"""Two real vLLM servers behind the router: predictions of their caches, and pinned requests while they are updated."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference.engines import SamplingParams, VllmConfig, open_engine
from inference.engines.guarded import GuardedServer
from inference.engines.vllm import VllmEngine
from inference.engines.vllm_plain import plain_checkpoint
from inference.engines.vllm_server import server_command, server_environment
from inference.router import Decision, Namespace, Router, RouterConfig
from inference.router.subscriber import Subscriptions
from tests.inference.conftest import write_checkpoint
from tests.inference.test_cache_events import events_port, reached
from tests.inference.test_fleet_routing import Load, end_and_check, fleet, state
from tests.inference.test_route_command import metric, routed
from tests.ports import free_port
from tests.vllm.conftest import real_config
from tests.vllm.fleet_servers import is_healthy, until

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(1800)]
FIRST, SECOND = "a" * 64, "b" * 64
BLOCK, BLOCKS = 32, 28
"""Tokens of a block, and blocks of each server's cache: less than what is asked for, so that it drops some."""
REQUESTS, LIVE, LONGEST = 500, 12, 220
"""Requests, open conversations, and tokens after which one ends."""
UPDATES, PAUSE_S = 20, 0.2
"""Updates of both servers, and seconds between two requests of a session meanwhile."""


class RealServer:
    """A vLLM that publishes its cache events. It keeps its ports when it is restarted."""

    def __init__(self, directory: Path, core: int) -> None:
        """core: CPU of its worker. By default vLLM binds the workers of both servers to the first, where they spin."""
        self.port, self.events_port = free_port(), events_port()
        self.url = f"http://127.0.0.1:{self.port}"
        endpoints = {
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.events_port + 1}",
        }
        events = {"enable_kv_cache_events": True, "publisher": "zmq", **endpoints}
        flags = ["--block-size", BLOCK, "--num-gpu-blocks-override", BLOCKS, "--kv-events-config", json.dumps(events)]
        env = {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
        config = real_config(flags=[str(each) for each in flags], env=env)
        self._command = server_command(config, "cpu", directory, self.port)
        self._environment = lambda scratch: server_environment(config, "cpu", directory, scratch)
        self._server = self._started()

    def _started(self) -> GuardedServer:
        return GuardedServer(self._command, self._environment)

    def restart(self) -> None:
        self._server.stop()
        self._server = self._started()
        self.wait()

    def wait(self) -> None:
        def answers() -> bool:
            assert self._server.alive, self._server.last_words()
            return is_healthy(self.url)

        until(answers, 300)

    def hits(self) -> float:
        """Prompt tokens that it has found in its cache so far."""
        return metric(self.url, "vllm:prefix_cache_hits_total")

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module")
def servers(policies: tuple[Path, Path]) -> Iterator[list[RealServer]]:
    cores = sorted(os.sched_getaffinity(0))
    made = [RealServer(plain_checkpoint(policies[0], FIRST), cores[number % len(cores)]) for number in range(2)]
    for each in made:
        each.wait()
    yield made
    for each in made:
        each.stop()


@dataclass(frozen=True)
class Asked:
    """One request: what was predicted, and what the servers counted."""

    decision: Decision
    hits: dict[str, float]
    versions: set[str]
    tokens: list[int]

    @property
    def is_as_predicted(self) -> bool:
        return self.hits[self.decision.replica] == self.decision.cached == sum(self.hits.values())


class Asking:
    """A router that follows the servers' events, and an engine for each."""

    def __init__(self, servers: Sequence[RealServer], directory: Path, version: str) -> None:
        self.servers = {each.url: each for each in servers}
        self.router = Router(Namespace(version), RouterConfig(block_tokens=BLOCK))
        self.events = Subscriptions(self.router, None)
        self.engines: dict[str, VllmEngine] = {}
        for url, server in self.servers.items():
            self.router.add(url)
            self.events.follow(url, url, server.events_port)
            engine = open_engine(VllmConfig(base_url=url), directory, version)
            assert isinstance(engine, VllmEngine)
            self.engines[url] = engine

    async def ask(self, prompt: Sequence[int], session: str | None = None, but: Sequence[str] = ()) -> Asked:
        """Send a request to the server that the router chooses. but: servers that it may not choose."""
        before = {url: each.hits() for url, each in self.servers.items()}
        with self.router.hidden(but):
            decision = self.router.choose(prompt, max_tokens=6, session=session)
        self.router.begin(decision)
        found = await self.engines[decision.replica].generate(prompt, SamplingParams(1.0, 6, seed=len(prompt)))
        self.router.finish(decision, seconds=0.1, sampled=len(found.token_ids))
        await self.settled()
        hits = {url: each.hits() - before[url] for url, each in self.servers.items()}
        return Asked(decision, hits, {version for version, _, _ in found.spans}, found.token_ids)

    async def settled(self) -> None:
        """Wait until no more events come."""
        counters, before = self.router.residency.counters, -1
        while before != counters.applied:
            before = counters.applied
            await asyncio.sleep(0.08)

    async def close(self) -> None:
        await self.events.close()
        for each in self.engines.values():
            await each.close()


@pytest.fixture
async def asking(servers: list[RealServer], policies: tuple[Path, Path]) -> AsyncIterator[Asking]:
    made = Asking(servers, policies[0], FIRST)
    for engine in made.engines.values():
        await engine.version()
    yield made
    await made.close()


def conversation(drawn: random.Random, families: list[list[int]]) -> list[int]:
    """The first prompt of a conversation; conversations of one family begin alike."""
    family = drawn.choice(families)
    return [*family[: drawn.choice([len(family), 2 * BLOCK, 2 * BLOCK + 5])], drawn.randrange(90)]


async def test_cached_tokens_are_as_predicted_also_after_an_update_and_a_restart(
    asking: Asking, policies: tuple[Path, Path]
) -> None:
    drawn = random.Random(0)
    families = [[drawn.randrange(90) for _ in range(drawn.randrange(65, 120))] for _ in range(8)]
    talks: dict[str, list[int]] = {}
    done: list[Asked] = []
    sent: dict[str, list[list[int]]] = {url: [] for url in asking.servers}
    dropped = 0
    for number in range(REQUESTS):
        name = drawn.choice(list(talks)) if len(talks) >= LIVE else str(number)
        prompt = talks.setdefault(name, conversation(drawn, families))
        done.append(await asking.ask(prompt, name))
        replica = done[-1].decision.replica
        dropped += done[-1].decision.cached < max((_shared(prompt, each) for each in sent[replica]), default=0)
        sent[replica].append(prompt)
        talks[name] = [*prompt, *done[-1].tokens, *(drawn.randrange(90) for _ in range(drawn.randrange(20)))]
        if len(talks[name]) > LONGEST:
            asking.router.end(name)
            del talks[name]
    right = sum(each.is_as_predicted for each in done)
    some, most = sum(each.decision.cached > 0 for each in done), max(each.decision.cached for each in done)
    print(f"{right} of {REQUESTS} as predicted; {some} had up to {most} tokens cached; {dropped} had lost some")
    assert right >= 0.99 * REQUESTS and some > REQUESTS / 4 and dropped > REQUESTS / 20
    assert {each.decision.replica for each in done} == set(asking.servers)

    asking.router.serve(Namespace(SECOND))
    for engine in asking.engines.values():
        await engine.load_weights(policies[1], SECOND)
    await asking.settled()
    await _nothing_old(asking, families)

    (url, server), (other, _) = asking.servers.items()
    server.restart()
    asking.engines[url].doubt()
    assert await asking.engines[url].version() == SECOND  # loads the policy again, whose probes make events
    await reached(lambda: asking.router.residency.awaited(url) < REQUESTS)
    await asking.settled()
    await _nothing_old(asking, families, but=[other])


async def _nothing_old(asking: Asking, families: list[list[int]], but: Sequence[str] = ()) -> None:
    """Prompts that were cached before are neither predicted nor hit, and then they are as predicted."""
    for family in families:
        old = await asking.ask(family, but=but)
        assert old.decision.cached == 0 == sum(old.hits.values()) and old.versions == {SECOND}
        again = await asking.ask(family, but=but)
        assert again.is_as_predicted and again.decision.cached == (len(family) - 1) // BLOCK * BLOCK


def _shared(prompt: Sequence[int], other: Sequence[int]) -> int:
    """Tokens of whole blocks with which both begin, and which a cache may have before the last token."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, other, strict=False)))
    return min(same, len(prompt) - 1) // BLOCK * BLOCK


class VllmLoad(Load):
    """Sessions that ask vLLM for tokens."""

    def ask(self, prompt: list[int], turn: int, headers: dict[str, str]) -> httpx.Response:
        sampling = {"max_tokens": 4, "temperature": 1.0, "seed": turn, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": prompt, "sampling_params": sampling}
        time.sleep(PAUSE_S)  # updates need the processors, too
        return self.face.post("/inference/v1/generate", body, **headers)

    def versions_of(self, choice: dict[str, Any]) -> set[str]:
        return {mark["version"] for mark in choice["weight_versions"]}


def test_no_pinned_reply_has_a_token_of_another_version_over_twenty_updates(
    servers: list[RealServer], tmp_path: Path
) -> None:
    """With --deadline 0 an update does not wait for sessions, so the version that they are pinned to goes away."""
    named = [write_checkpoint(tmp_path / name, seed) for seed, name in enumerate(("first", "second"))]
    with ExitStack() as stack:
        face = stack.enter_context(routed([each.url for each in servers]))
        fleet("update", "--policy", str(named[0]), "--router", face.url, "--deadline", "0")
        assert {row["version"] for row in state(face).values()} == {"first"}
        loads = [VllmLoad(face, name, 2, name) for name in ("first", "second")]
        free = VllmLoad(face, "free", 1)
        for number in range(UPDATES):
            fleet("update", "--policy", str(named[(number + 1) % 2]), "--router", face.url, "--deadline", "0")
        end_and_check(loads, free)
        assert free.versions() == {"first", "second"}
        told = [sum(reply.is_success for reply in load.replies) for load in (*loads, free)]
        print(f"{told} replies of sessions pinned to the first, to the second, and free, over {UPDATES} updates")
