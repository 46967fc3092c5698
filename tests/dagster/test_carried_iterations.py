"""Three iterations of the tiny experiment that carry groups over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster_world import World, run_world

from contracts.artifacts import Artifact, find_artifact, open_artifact
from inference.rollouts.carry_over import UNFINISHED
from inference.rollouts.plan import CARRIED_OVER
from ops.inputs import PromptsDrawn
from ops.ledger.index import rebuild, update
from ops.ledger.segments import Ledger
from ops.retention import removable, remove
from ops.state import read_inputs
from resources.experiment import load_experiment
from resources.refs import require_ref
from triplane_dagster.run import open_runner

pytestmark = pytest.mark.slow
TINY = Path(__file__).parent / "tiny.yaml"
MORE = 12
# two episodes at a time, so that many groups have not begun when enough are complete
SWITCHES = [
    "rollouts.profile=throughput",
    f"rollouts.carry_over={MORE}",
    "rollouts.concurrency=2",
    "rollouts.group_size=4",
    "prompts.workers=1",
    "prompts.groups=2",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from run_world(load_experiment(TINY, SWITCHES), 3, tmp_path_factory.mktemp("carried"))


def opened(world: World, asset: str, iteration: str) -> Artifact:
    return open_artifact(world.store, require_ref(world.store, world.experiment.name, asset, iteration))


def groups_of(artifact: Artifact) -> set[str]:
    return set(artifact.table("episodes.parquet", columns=["group_id"])["group_id"].to_pylist())


def test_what_an_iteration_leaves_the_next_one_ends(world: World) -> None:
    assert world.made == ["0000", "0001", "0002"]
    needed = world.experiment.prompts.groups
    before: Artifact | None = None
    for iteration in world.made:
        rollouts = opened(world, "rollouts", iteration)
        pinned = opened(world, "iteration_inputs", iteration)
        assert read_inputs(world.store, pinned.ref).carried_over == ([before.ref] if before else [])
        drawn = PromptsDrawn.model_validate(opened(world, "prompts", iteration).json("prompts.json"))
        assert len(drawn.groups) == needed + MORE
        carried = {group.group_id for group in drawn.groups if group.carried}
        assert carried == (groups_of(before) if before else set())
        for made in (pinned, rollouts):
            assert made.manifest.parents.get(CARRIED_OVER) == (before.ref if before else None)
        assert rollouts.meta["groups"] >= needed
        before = find_artifact(world.store, UNFINISHED, rollouts.ref.key)
        assert before is not None and groups_of(before).isdisjoint(groups_of(rollouts))
        assert carried <= groups_of(rollouts) | groups_of(before)
        planned = {group.group_id for group in (*drawn.groups, *drawn.reserve)}
        assert groups_of(before) | groups_of(rollouts) <= planned
        assert opened(world, "dataset", iteration).table("train.parquet").num_rows > 0


def test_the_ledger_knows_what_was_carried_over(world: World) -> None:
    query = f"SELECT count(*) FROM artifacts WHERE kind = '{UNFINISHED}'"
    for index in (update, rebuild):
        index(world.store)
        with Ledger(world.store).opened() as (db, _):
            (count,) = db.sql(query).fetchall()
        assert count == (3,), index


def test_an_iteration_with_carried_over_groups_materializes_again_after_gc(world: World) -> None:
    iteration = world.made[1]
    before = opened(world, "rollouts", iteration).ref
    for each in removable(world.store, 1, -60.0):
        remove(world.store, each)
    with open_runner(world.experiment, world.instance) as runner:
        runner.assets(iteration, ["rollouts"])
    assert opened(world, "rollouts", iteration).ref == before, "nothing is sampled again"
