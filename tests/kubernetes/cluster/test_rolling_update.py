"""The live policy is served without a failed request while its pods are replaced."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.acceptance.laboratory import Laboratory
from tests.dagster.serving import Load
from tests.kubernetes.cluster.conftest import TINY
from tests.kubernetes.cluster.support import SMALL
from tests.kubernetes.cluster.world import RELEASE, World

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1800)]
PER_SECOND = 50
NAME = f"{RELEASE}-sampler-tiny"


def test_a_rolling_update_under_load_fails_no_request(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.values["samplers"] = [{"experiment": "tiny", "replicas": 2, "resources": SMALL}]
    world.apply(world.objects())
    if not world.made("tiny"):
        world.iterate("tiny", 1)
    world.roll_out(f"deployment/{NAME}")
    for variable, value in world.store.items():
        monkeypatch.setenv(variable, value)
    lab = Laboratory(tmp_path, TINY, environment=world.store)
    made = lab.digests("checkpoint", "base_policy")
    load = Load(f"{world.address(NAME, 8000)}/v1", PER_SECOND)

    async def update() -> None:
        async with load.running():
            await asyncio.sleep(5)
            await asyncio.to_thread(world.kubectl, "rollout", "restart", f"deployment/{NAME}")
            await asyncio.to_thread(world.roll_out, f"deployment/{NAME}")
            await asyncio.sleep(15)

    asyncio.run(update())
    assert not load.failures, Counter(load.failures).most_common(5)
    assert len(load.replies) > 20 * PER_SECOND
    policies = {policy for reply in load.replies for policy, _, _ in reply["policy_spans"]}
    assert policies <= {*made["checkpoint"], *made["base_policy"]}
