"""The benchmark of the router at a small size, without its peer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import router
from benchmarks.goals import load_goals
from benchmarks.result import NotHereError

TINY = router.OPTIONS(repeats=1, tokens=8192, replicas=4, blocks=10_000, prompts=8, events=40_000, peers="")


def test_router_is_measured() -> None:
    result = router.run(TINY)
    assert not result.judged
    wanted = {goal.metric for goal in load_goals()["router"]} - {"times_dynamo"}
    assert wanted <= result.metrics.keys() and all(value >= 0 for value in result.metrics.values())
    assert result.metrics["fresh_requests_per_second"] > 0 < result.metrics["continuing_requests_per_second"]
    assert result.metrics["index_blocks"] <= 10_000 < result.metrics["index_evicted"] + 10_000


def test_index_holds_what_both_sides_are_given() -> None:
    load = router.make_load(TINY)
    made, blocks = router._filled(TINY, load)
    assert 8_000 < blocks <= 10_000 and made.residency.counters.orphans == 0
    for chain, holders in zip(load.chains, load.holders, strict=True):
        depth = max(depth for _, depth in holders)
        assert made.choose([*chain, 0], max_tokens=1).cached == depth * router.SIZE


def test_missing_peer_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotHereError, match="make test-peers"):
        router.run(TINY.model_copy(update={"peers": str(tmp_path / "python")}))
