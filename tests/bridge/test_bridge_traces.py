"""Steps of a bridge continue the traces of the trainers that ask for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from contracts import tracing
from inference.bridge.client import BridgeClient, Sampling
from tests.bridge.bridge_harness import builtin_bridge, new_id, start_request
from tests.bridge.scripted_bridge import looped
from tests.inference.conftest import write_checkpoint
from tests.otlp import collecting

STEP = "triplane.bridge.v1.Bridge/Step"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy") / "p", 0)


@looped
async def test_each_step_is_in_the_trace_of_who_asks_for_it(policy: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, collecting(patch) as found:
        async with builtin_bridge(policy, tmp_path) as (client, server, _), BridgeClient(server.address) as bridge:
            episode = await bridge.start(np.array([5, 6], np.int32), sampling=Sampling(max_tokens=4, seed=7))
            for number in range(2):
                with tracing.span(f"turn {number}"):
                    await episode.step([1] if number else ())
            await episode.end(reward=0.0)
            name = new_id()
            await client.start(start_request(name))
            parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
            client.metadata = (*client.metadata, ("traceparent", parent))
            await client.step(name, 1)
        tracing.flush()
        paths = [found.path(span) for span in found.named(STEP)]
        assert paths == [["turn 0", STEP], ["turn 1", STEP], [STEP]]
        assert [found.path(span)[-2:] for span in found.named("text_completion")] == [[STEP, "text_completion"]] * 3
        assert [found.attributes(span)["triplane.turn"] for span in found.named(STEP)] == [0, 1, 0]
        last = found.named(STEP)[-1]
        assert (last.trace_id.hex(), last.parent_span_id.hex()) == ("ab" * 16, "cd" * 8)
        sampled = [found.attributes(span)["gen_ai.usage.output_tokens"] for span in found.named("text_completion")]
        assert sampled[:2] == [4, 4] and sampled[2] > 0
