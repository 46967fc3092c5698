"""A bridge serves the policies that a file names, one after the other."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest

from contracts.errors import ConfigError
from contracts.pb import bridge_pb2 as pb
from inference.bridge.policy_file import PolicyFile
from inference.engines.base import SamplingParams
from inference.engines.builtin import BuiltinEngine
from tests.bridge.bridge_harness import PROMPT, Client, new_id, process, start_request
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


def test_policies_that_the_file_names_are_served_in_turn(tmp_path: Path) -> None:
    first, second = write_checkpoint(tmp_path / "a", 1), write_checkpoint(tmp_path / "b c", 2)
    file = tmp_path / "policy"
    name_policy(file, f"{first}\n")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")

    async def run(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            client = Client(channel)
            pinned, followed = new_id(), new_id()
            sampling = pb.Sampling(max_tokens=8, seed=7)
            for name, rule in ((pinned, pb.PINNED), (followed, pb.FOLLOW)):
                await client.start(start_request(name, sampling=sampling, rule=rule))
                turned = await client.step(name, 1)
                assert turned.tokens == await sampled(first, PROMPT) and turned.spans == [("a", 0, 8)]
            name_policy(file, f"{second}\nv2\n")
            await await_version(client, "v2")
            after = await client.step(followed, 2, [5])
            assert after.tokens == await sampled(second, [*PROMPT, *turned.tokens, 5])
            assert after.spans == [("v2", 0, 8)]
            stale = await client.step(pinned, 2, [5])
            assert (stale.tokens, stale.finish) == ([], pb.STALE)
            for text in (f"{broken}\nv3\n", f"{tmp_path}/absent\n", "\n"):
                name_policy(file, text)
                await asyncio.sleep(0.5)
                await await_version(client, "v2")
            name_policy(file, f"{first}\nv4\n")
            await await_version(client, "v4")
            assert (await client.step(followed, 3)).spans == [("v4", 0, 8)]

    with process(file, f"unix:{tmp_path / 'b.sock'}", "--store", str(tmp_path), named="--policy-file") as (_, address):
        asyncio.run(run(address))


@pytest.mark.parametrize(("text", "words"), [(None, "can't be read"), ("\n", "is empty"), ("\udcff", "not UTF-8")])
def test_file_that_names_no_policy_is_one_line(text: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "policy"
    if text is not None:
        file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=words):
        PolicyFile(file, None).read()
