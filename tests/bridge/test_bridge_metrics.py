"""Metrics of a bridge tell what its clients did, and a wrong address is one error."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from contracts.errors import ConfigError
from contracts.pb import bridge_pb2 as pb
from inference.bridge.registry import Bounds
from tests.bridge.bridge_harness import builtin_bridge, new_id, refused, start_request
from tests.inference.conftest import write_checkpoint
from tests.ports import free_port

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy") / "p", 0, max_position_embeddings=512)


async def scrape(port: int) -> dict[str, float]:
    """Values by name and labels, as name{label="value"}."""

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(await asyncio.to_thread(read))
        for sample in family.samples
    }


@pytest.mark.slow
async def test_metrics_tell_what_clients_did(policy: Path, tmp_path: Path) -> None:
    port = free_port()
    options = {"journal": tmp_path / "journal", "metrics": f"127.0.0.1:{port}", "bounds": Bounds(lease_s=3.0)}
    async with builtin_bridge(policy, tmp_path, **options) as (client, _, _):
        ended, aborted, left = (new_id() for _ in range(3))
        turns = []
        for name in (ended, aborted, left):
            await client.start(start_request(name))
            turns.append(await client.step(name, 1))
        turns.append(await client.step(ended, 2, [9]))
        await client.end(ended)
        await client.end(aborted, aborted=True)
        async with refused("NOT_FOUND", "UnknownEpisode"):
            await client.state(new_id())
        commands = iter([pb.Command(id=1, end=pb.EndEpisodeRequest(episode_id=new_id()))])
        (event,) = [event async for event in client.stub.Connect(commands) if event.HasField("failure")]
        assert event.failure.error == "UnknownEpisode"
        found = await scrape(port)
        assert found["bridge_episodes open"] == 1 and found["bridge_episodes stepping"] == 0
        assert found["bridge_episodes_closed_total ended"] == found["bridge_episodes_closed_total aborted"] == 1
        assert found["bridge_turns_total LENGTH"] == found["bridge_turn_seconds_count"] == 4
        assert found["bridge_first_token_seconds_count"] == 4
        assert 0 < found["bridge_first_token_seconds_sum"] <= found["bridge_turn_seconds_sum"]
        assert found["bridge_tokens_total"] == sum(len(each.tokens) for each in turns)
        assert found["bridge_refused_total UnknownEpisode"] == 2
        assert found["bridge_journal_bytes_total"] > 8 * found["bridge_tokens_total"]
        for _ in range(100):
            found = await scrape(port)
            if found["bridge_episodes open"] == 0:
                break
            await asyncio.sleep(0.1)
        assert found["bridge_episodes_closed_total expired"] == 1


@pytest.mark.parametrize(
    ("address", "fault"), [("here", "is not an address: write HOST:PORT"), ("127.0.0.1:{taken}", "choose another port")]
)
async def test_an_address_that_can_not_be_used_is_one_error(
    policy: Path, tmp_path: Path, address: str, fault: str
) -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    taken = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(ConfigError, match=fault):
            async with builtin_bridge(policy, tmp_path, metrics=address.format(taken=taken)):
                pass
