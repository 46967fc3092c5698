"""Rewards composed from components, through the asset graph: kept, plotted, and asked for once whatever the weights."""

from __future__ import annotations

from typing import Any

import pytest
from dagster_world import World

from assets.naming import key_of
from contracts.artifacts import Artifact, open_artifact
from curation.rewards import flips
from resources.experiment import Experiment
from resources.refs import require_ref
from tests.curation.judge_server import JudgeServer, judge_server, scored
from triplane_dagster.assembly import definitions_for
from triplane_dagster.jobs import iteration_job_name

pytestmark = pytest.mark.slow

ITERATION = "0000"


def composed(experiment: Experiment, server: JudgeServer, weight: float) -> Experiment:
    review = {
        "kind": "judge",
        "name": "review",
        "weight": weight,
        "model": "judge-1",
        "endpoint": {"url": f"{server.url}/v1"},
    }
    values: dict[str, Any] = experiment.model_dump(mode="json")
    values["rewards"]["components"] = [
        {"kind": "length", "name": "length", "weight": 0.5, "budget": 60, "cushion": 60},
        {"kind": "trace", "name": "failing", "weight": -1.0, "rule": "failed_calls"},
        review,
    ]
    return Experiment.model_validate(values)


def materialize_flips(world: World) -> tuple[Artifact, dict[str, Any]]:
    """Materialize `reward_flips` of the latest rewards."""
    job = definitions_for([world.experiment]).resolve_job_def(iteration_job_name(world.experiment))
    key = key_of(world.experiment, "reward_flips")
    done = job.execute_in_process(instance=world.instance, partition_key=ITERATION, asset_selection=[key])
    (event,) = done.asset_materializations_for_node(key.to_python_identifier())
    ref = require_ref(world.store, world.experiment.name, "reward_flips", ITERATION)
    return open_artifact(world.store, ref), {name: value.value for name, value in event.metadata.items()}


def materialize_rewards(world: World, experiment: Experiment) -> tuple[Artifact, dict[str, Any]]:
    """The artifact that the rewards asset alone makes of the iteration's rollouts, and what its page shows."""
    job = definitions_for([experiment]).resolve_job_def(iteration_job_name(experiment))
    key = key_of(experiment, "rewards")
    done = job.execute_in_process(instance=world.instance, partition_key=ITERATION, asset_selection=[key])
    assert done.success
    (event,) = done.asset_materializations_for_node(key.to_python_identifier())
    ref = require_ref(world.store, experiment.name, "rewards", ITERATION)
    return open_artifact(world.store, ref), {name: value.value for name, value in event.metadata.items()}


def test_components_are_kept_plotted_and_graded_again_with_other_weights_without_asking(ran: World) -> None:
    before = require_ref(ran.store, ran.experiment.name, "rewards", ITERATION)
    with judge_server(lambda path, body: scored(len(body["messages"][1]["content"]) % 11)) as server:
        light, shown = materialize_rewards(ran, composed(ran.experiment, server, 0.25))
        asked = len(server.asked)
        first, _ = materialize_flips(ran)
        heavy, told = materialize_rewards(ran, composed(ran.experiment, server, 4.0))
        second, page = materialize_flips(ran)
        assert 0 < asked == len(server.asked) == len(ran.store.list("judgements/"))
    rows = light.table("rewards.parquet").to_pylist()
    for row in rows:
        parts = {part["name"]: part["value"] for part in row["components"]}
        assert set(parts) == {"solved", "valid", "length", "failing", "review"}
        assert abs(row["reward"] - sum(parts.values())) < 1e-5
    assert light.table("evidence.parquet").num_rows == 3 * len(rows)
    for name in ("solved", "valid", "length", "failing", "review"):
        assert {f"component/{name}/{what}" for what in ("mean", "std", "nonzero")} <= set(shown)
    assert shown["component/review/nonzero"] > 0 > shown["component/length/mean"]
    assert shown["recomputation"].startswith("equivalent: what review (model judge-1)")
    assert server.url not in light.manifest.model_dump_json()
    changed = flips(light.table("rewards.parquet"), heavy.table("rewards.parquet"))
    name = f"flips against {light.ref.short}"
    assert told[name] == changed.num_rows > 0
    assert told[f"{name} no longer solved"] == told[f"{name} newly solved"] == 0
    assert [row.data["episode_id"] for row in told[f"{name} rows"].records] == changed["episode_id"].to_pylist()[:50]
    rows = second.table("flips.parquet").to_pylist()
    assert [row["episode_id"] for row in rows] == changed["episode_id"].to_pylist()
    assert all(row["from_version"] != row["to_version"] and not row["checkpoints"] for row in rows)
    assert second.manifest.parents["previous"] == light.ref and page["compared with"] == light.ref.digest
    assert [row.data["episode_id"] for row in page["changed rewards"].records] == changed["episode_id"].to_pylist()[:50]
    trained = require_ref(ran.store, ran.experiment.name, "checkpoint", ITERATION).digest
    kept = open_artifact(ran.store, require_ref(ran.store, ran.experiment.name, "dataset", ITERATION))
    members = {row["episode_id"] for row in kept.table("members.parquet").to_pylist() if row["kept"]}
    assert first.manifest.parents["previous"] == before and first.meta["checkpoints"] == 1
    for row in first.table("flips.parquet").to_pylist():
        assert row["checkpoints"] == ([trained] if row["episode_id"] in members else [])
    again, usual = materialize_rewards(ran, ran.experiment)
    assert again.ref == before and "judge-1" not in str(usual.get("recomputation"))
    assert light.ref != before
    restored, _ = materialize_flips(ran)
    assert restored.manifest.parents["previous"] == heavy.ref


def test_rewards_that_were_graded_once_have_no_flips(ran: World) -> None:
    partition = ran.made[-1]
    made = open_artifact(ran.store, require_ref(ran.store, ran.experiment.name, "reward_flips", partition))
    assert made.table("flips.parquet").num_rows == 0 and made.meta == {"flips": 0, "checkpoints": 0, "previous": None}
