"""`triplane serve --follow` as a process: the registry changes under load, the server swaps, and every token says who
made it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from dagster_world import World

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, open_artifact
from inference.engines.base import Completion, SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.engines.openai import OpenAIEngine
from ops.inputs import trainer_state_of
from resources.refs import require_ref, write_ref
from resources.registry import Registry, Restorable

PROMPT = [5, 6, 7, 8]
IN_FLIGHT = 16


def params(seed: int) -> SamplingParams:
    """Of different lengths, so that requests never all end at once and leave a gap for a swap."""
    return SamplingParams(1.0, 40 + 53 * seed % 160, seed)


@pytest.fixture
def policies(ran: World) -> list[Artifact]:
    """The base policy and the two trained from it, one after the other."""
    refs = [require_ref(ran.store, ran.experiment.name, "base_policy")]
    refs += [require_ref(ran.store, ran.experiment.name, "checkpoint", iteration) for iteration in ("0000", "0001")]
    return [open_artifact(ran.store, ref) for ref in refs]


@contextmanager
def following(ran: World, name: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """(base URL, all it printed so far) of a server that follows experiment `name` of the store."""
    command = [sys.executable, "-m", "triplane_dagster.cli", "serve", "-e", name, "--follow", "--poll", "0.05"]
    child = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TRIPLANE_STORE": ran.store.url, "OMP_NUM_THREADS": "1"},
    )
    assert child.stdout is not None
    lines: list[str] = []
    found = None
    while found is None:
        line = child.stdout.readline()
        assert line, "".join(lines)
        lines.append(line)
        found = re.search(r"policy \w+ at (http://\S+/v1)", line)
    reader = threading.Thread(target=lambda: lines.extend(child.stdout or ()), daemon=True)
    reader.start()
    try:
        yield found[1], lambda: "".join(lines)
    finally:
        child.send_signal(signal.SIGINT)
        code = child.wait(60)
        reader.join(10)
        child.stdout.close()
    assert code == 0 and "Traceback" not in "".join(lines), "".join(lines)


async def until(condition: Callable[[], object]) -> None:
    """Wait; the test's own time-out is the deadline."""
    while not condition():
        await asyncio.sleep(0.05)


async def under_load(url: str, changes: list[Callable[[], str]]) -> list[tuple[int, Completion]]:
    """(seed, completion) of all requests answered while each change (which returns the digest it made live) took
    effect.
    """
    engine, done = OpenAIEngine(url, "policy"), asyncio.Event()
    answered: list[tuple[int, Completion]] = []

    async def client(number: int) -> None:
        seed = number
        while not done.is_set():
            answered.append((seed, await engine.generate(PROMPT, params(seed))))
            seed += IN_FLIGHT

    clients = [asyncio.create_task(client(number)) for number in range(IN_FLIGHT)]
    await until(lambda: len(answered) >= IN_FLIGHT)
    for change in changes:
        wanted, before = await asyncio.to_thread(change), len(answered)
        while await engine.version() != wanted or len(answered) < before + 2 * IN_FLIGHT:
            await asyncio.sleep(0.02)
    done.set()
    await asyncio.gather(*clients)
    await engine.close()
    return answered


async def check_spans(policy: Artifact, answered: list[tuple[int, Completion]]) -> int:
    """Compare every span of this policy with its own score, to the bit. Returns how many tokens these were."""
    engine, tokens = BuiltinEngine(policy.directory(), policy.ref.digest, threads=1), 0
    for _, completion in answered:
        own = [span for span in completion.spans if span[0] == policy.ref.digest]
        if own:
            scores = (await engine.score([*PROMPT, *completion.token_ids]))[len(PROMPT) :]
        for _, start, end in own:
            assert completion.logprobs[start:end] == scores[start:end]
            tokens += end - start
    await engine.close()
    return tokens


@pytest.mark.slow
def test_requests_in_flight_during_swaps_say_which_policy_made_each_token(ran: World, policies: list[Artifact]) -> None:
    base, first, second = (policy.ref for policy in policies)
    name, registry = "followed", Registry(ran.store, "followed")
    write_ref(ran.store, name, "base_policy", None, base)

    def promote(candidate: ArtifactRef, parent: ArtifactRef, iteration: str) -> str:
        state = trainer_state_of(ran.store, candidate)
        assert registry.promote(candidate, state, parent=parent.digest, iteration=iteration)
        return candidate.digest

    def roll_back() -> str:
        target = Restorable(number=0, policy=base, trainer_state=trainer_state_of(ran.store, base), iteration="base")
        return registry.rollback(target, "a drill", expected=2).policy.digest

    with following(ran, name) as (url, printed):
        changes = [lambda: promote(first, base, "0000"), lambda: promote(second, first, "0001"), roll_back]
        answered = asyncio.run(under_load(url, changes))
        assert printed().count("in place of") == 3
    for _, completion in answered:
        ends = [0, *(end for _, _, end in completion.spans)]
        assert [start for _, start, _ in completion.spans] == ends[:-1] and ends[-1] == len(completion.token_ids)
    crossed = {tuple(version for version, _, _ in completion.spans) for _, completion in answered}
    pairs = {(base.digest, first.digest), (first.digest, second.digest), (second.digest, base.digest)}
    assert pairs <= crossed, "each swap found requests in flight"
    tokens = sum(asyncio.run(check_spans(policy, answered)) for policy in policies)
    assert tokens == sum(len(completion.token_ids) for _, completion in answered) > 0


def test_a_live_policy_that_can_not_be_loaded_withdraws_the_server_until_another_is_live(
    ran: World, policies: list[Artifact]
) -> None:
    base, first = policies[0].ref, policies[1].ref
    name, registry = "withdrawn", Registry(ran.store, "withdrawn")
    write_ref(ran.store, name, "base_policy", None, base)
    with ArtifactWriter(ran.store, "checkpoint", "e" * 64, parents={}, config={}, code_version="1") as out:
        out.add_bytes("config.json", json.dumps({"model_type": "qwen3_moe"}).encode())
        broken = out.commit().ref
    state = trainer_state_of(ran.store, base)

    async def look() -> None:
        async with httpx.AsyncClient(timeout=60) as http:

            async def health() -> httpx.Response:
                return await http.get(url.replace("/v1", "/health"))

            async def status(code: int) -> httpx.Response:
                while (answer := await health()).status_code != code:
                    await asyncio.sleep(0.05)
                return answer

            ask = {"prompt": PROMPT, "max_tokens": 4}
            assert (await status(200)).json() == {"status": "ok"}
            registry.promote(broken, state, parent=base.digest, iteration="0000")
            assert broken.short in (await status(503)).json()["reason"]
            told = await http.get(url.replace("/v1", "/ready"))
            assert (told.status_code, told.json()["live"]) == (503, broken.digest) and "withdrawn" in told.text
            refused = await http.post(f"{url}/completions", json=ask)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "withdrawn"
            registry.promote(first, state, parent=broken.digest, iteration="0001")
            await status(200)
            assert (await http.post(f"{url}/completions", json=ask)).status_code == 200

    with following(ran, name) as (url, printed):
        asyncio.run(look())
        assert printed().count("trying again") == 1
