"""A bridge serves the policies that a file names, one after the other."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import grpc
import pytest

from contracts.errors import ConfigError
from contracts.pb import bridge_pb2 as pb
from inference.bridge import policy_file
from inference.bridge.policy_file import PolicyFile
from inference.bridge.serve import limits_of
from inference.engines import BuiltinConfig, RoutedConfig, open_engine
from inference.engines.base import SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.engines.delegating import DelegatingEngine
from inference.errors import EngineUnreachable
from tests.bridge.bridge_harness import PROMPT, Client, bridged, new_id, process, start_request
from tests.inference.conftest import write_checkpoint


def name_policy(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


async def await_version(client: Client, version: str) -> None:
    deadline = time.monotonic() + 30
    while list((await client.stub.Info(pb.InfoRequest())).versions) != [version]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def sampled(policy: Path, prompt: list[int]) -> list[int]:
    engine = BuiltinEngine(policy, "v", threads=1)
    completion = await engine.generate(prompt, SamplingParams(1.0, 8, 7))
    await engine.close()
    return completion.token_ids


@pytest.mark.parametrize("kind", [pytest.param("builtin", marks=pytest.mark.slow), "routed"])
def test_policies_that_the_file_names_are_served_in_turn(tmp_path: Path, kind: str) -> None:
    first, second = write_checkpoint(tmp_path / "a", 1), write_checkpoint(tmp_path / "b c", 2)
    file = tmp_path / "policy"
    name_policy(file, f"{first}\n")
    policies = PolicyFile(file, str(tmp_path))
    _, begun = policies.read()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")

    async def play(client: Client) -> None:
        pinned, followed = new_id(), new_id()
        sampling = pb.Sampling(max_tokens=8, seed=7)
        for name, rule in ((pinned, pb.PINNED), (followed, pb.FOLLOW)):
            await client.start(start_request(name, sampling=sampling, rule=rule))
            turned = await client.step(name, 1)
            assert turned.tokens == await sampled(first, PROMPT) and turned.spans == [(begun, 0, 8)]
        name_policy(file, f"{second}\nv2\n")
        await await_version(client, "v2")
        after = await client.step(followed, 2, [5])
        assert after.tokens == await sampled(second, [*PROMPT, *turned.tokens, 5])
        assert after.spans == [("v2", 0, 8)]
        stale = await client.step(pinned, 2, [5])
        assert (stale.tokens, stale.finish) == ([], pb.STALE)
        for step, text in enumerate((f"{broken}\nv3\n", f"{tmp_path}/absent\n", "\n"), 3):
            name_policy(file, text)
            await asyncio.sleep(0.5)
            await await_version(client, "v2")
            assert (await client.step(followed, step)).spans == [("v2", 0, 8)]
        name_policy(file, f"{first}\nv4\n")
        await await_version(client, "v4")
        assert (await client.step(followed, 6)).spans == [("v4", 0, 8)]

    async def in_process(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            await play(Client(channel))

    async def routed() -> None:
        config = RoutedConfig(kind="routed", replicas=(BuiltinConfig(threads=1),) * 2)
        engine = open_engine(config, first, begun)
        async with bridged(engine, limits_of(first), tmp_path, policies=policies) as (client, _):
            await play(client)
        await engine.close()

    if kind == "routed":
        asyncio.run(routed())
        return
    with process(file, f"unix:{tmp_path / 'b.sock'}", "--store", str(tmp_path), named="--policy-file") as (_, address):
        asyncio.run(in_process(address))


class Away(DelegatingEngine):
    """An engine whose server does not answer the first load."""

    loads = 0

    async def load_weights(self, directory: Path, version: str) -> None:
        self.loads += 1
        if self.loads == 1:
            raise EngineUnreachable("it does not answer")
        await super().load_weights(directory, version)


@pytest.mark.anyio
async def test_policy_is_loaded_once_its_server_answers_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_file, "RETRY_S", 0.01)
    first, file = write_checkpoint(tmp_path / "a", 1), tmp_path / "policy"
    name_policy(file, f"{write_checkpoint(tmp_path / 'b', 2)}\nb\n")
    engine = Away(BuiltinEngine(first, "a", threads=1))
    following = asyncio.create_task(PolicyFile(file, None).follow(engine))
    async with asyncio.timeout(30):
        while await engine.version() != "b":
            await asyncio.sleep(0.01)
    following.cancel()
    assert engine.loads == 2
    await engine.close()


@pytest.mark.anyio
async def test_other_weights_in_a_folder_of_the_same_name_are_another_version(tmp_path: Path) -> None:
    first, second = (write_checkpoint(tmp_path / name / "checkpoint", seed) for name, seed in (("a", 1), ("b", 2)))
    file = tmp_path / "policy"
    name_policy(file, f"{first}\n")
    policies = PolicyFile(file, None)
    directory, begun = policies.read()
    name_policy(file, f"{second}\n")  # while the engine opens
    engine = BuiltinEngine(directory, begun, threads=1)
    following = asyncio.create_task(policies.follow(engine))

    async def served_after(version: str, policy: Path) -> str:
        async with asyncio.timeout(30):
            while (found := await engine.version()) == version:
                await asyncio.sleep(0.01)
        completion = await engine.generate(PROMPT, SamplingParams(1.0, 8, 7))
        assert completion.token_ids == await sampled(policy, PROMPT)
        assert PolicyFile(file, None).read()[1] == found, "a bridge that is started now gives the same version"
        return found

    other = await served_after(begun, second)
    name_policy(file, f"{first}\n")
    assert await served_after(other, first) == begun
    write_checkpoint(first, 3)
    name_policy(file, f"{first}\n")
    rewritten = await served_after(begun, first)
    assert len({begun, other, rewritten}) == 3
    assert all(re.fullmatch("checkpoint-[0-9a-f]{8}", each) for each in (begun, other, rewritten))
    following.cancel()
    await engine.close()


@pytest.mark.anyio
async def test_other_weights_are_not_served_under_a_given_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, file = write_checkpoint(tmp_path / "a", 1), write_checkpoint(tmp_path / "b", 2), tmp_path / "policy"
    name_policy(file, f"{first}\nv1\n")
    policies = PolicyFile(file, None)
    directory, version = policies.read()
    name_policy(file, f"{second}\nv1\n")  # while the engine opens
    engine = BuiltinEngine(directory, version, threads=1)
    following = asyncio.create_task(policies.follow(engine))
    async with asyncio.timeout(30):
        while "v1 is served already, other weights need another version" not in caplog.text:
            await asyncio.sleep(0.01)
    name_policy(file, f"{second}\nv2\n")
    async with asyncio.timeout(30):
        while await engine.version() != "v2":
            await asyncio.sleep(0.01)
    following.cancel()
    await engine.close()


@pytest.mark.parametrize(("text", "words"), [(None, "can't be read"), ("\n", "is empty"), ("\udcff", "not UTF-8")])
def test_file_that_names_no_policy_is_one_line(text: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "policy"
    if text is not None:
        file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=words):
        PolicyFile(file, None).read()
