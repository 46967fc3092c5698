"""What two iterations of the tiny experiment leave behind, in the store and in the Dagster instance."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import dagster as dg
import pytest
from dagster_world import World
from pinning import pin

from assets.naming import key_of
from contracts.artifacts import find_artifact, list_artifacts, open_artifact
from contracts.store import Store
from ops.graph import ONCE, PER_ITERATION
from ops.inputs import cursor_before, find_inputs
from resources.errors import IterationRefused, RegistryError
from resources.experiment import load_experiment
from resources.refs import require_ref
from resources.registry import Registry
from triplane_dagster.dry_run import plan_of
from triplane_dagster.iterations import decision_of, next_partition
from triplane_dagster.run import open_runner
from triplane_dagster.sequence import run_iterations

TINY = Path(__file__).with_name("tiny.yaml")


def latest(world: World, asset: str, partition: str | None) -> dg.EventLogEntry:
    key = key_of(world.experiment, asset)
    records = world.instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=key, asset_partitions=[partition] if partition else None), limit=1
    ).records
    assert records, f"{asset} was not materialized"
    return records[0].event_log_entry


def artifact_count(store: Store) -> dict[str, int]:
    """Artifacts by kind, without the index of them."""
    counts = Counter(artifact.ref.kind for artifact in list_artifacts(store))
    del counts["ledger"]
    return counts


def test_every_asset_is_materialized_with_its_content_digest_as_data_version(ran: World) -> None:
    assert ran.made == ["0000", "0001"]
    for asset, partition in [*((asset, None) for asset in ONCE), *((a, p) for a in PER_ITERATION for p in ran.made)]:
        entry = latest(ran, asset, partition)
        ref = require_ref(ran.store, ran.experiment.name, asset, partition)
        assert entry.tags["dagster/data_version"] == ref.digest
        materialization = entry.asset_materialization
        assert materialization is not None
        assert materialization.metadata["digest"].value == ref.digest
        assert len(str(materialization)) < 100_000
        open_artifact(ran.store, ref)


def test_each_iteration_starts_from_what_the_last_one_made_live(ran: World) -> None:
    first, second = (find_inputs(ran.store, ran.experiment, iteration) for iteration in ran.made)
    assert first is not None and second is not None
    assert first.policy == first.base
    history = Registry(ran.store, ran.experiment.name).history()
    assert [entry.iteration for entry in history] == ["0000", "0001"]
    assert second.policy == history[0].policy
    assert second.start.trainer_state == history[0].trainer_state
    assert (first.cursor, second.cursor > 0) == (0, True)


def test_iterations_sample_different_prompts(ran: World) -> None:
    drawn = [
        {
            group["task_id"]
            for group in open_artifact(
                ran.store, require_ref(ran.store, ran.experiment.name, "prompts", iteration)
            ).json("prompts.json")["groups"]
        }
        for iteration in ran.made
    ]
    assert not drawn[0] & drawn[1]


def test_prompts_go_on_where_the_last_draw_ended_whatever_is_asked_for_now(ran: World) -> None:
    prompts = ran.experiment.prompts
    drawn = prompts.groups + prompts.reserve
    more = ran.experiment.model_copy(update={"prompts": prompts.model_copy(update={"groups": 3 * prompts.groups})})
    assert cursor_before(ran.store, more, "0001") == cursor_before(ran.store, ran.experiment, "0001") == drawn
    assert cursor_before(ran.store, more, "0000") == 0


def test_rematerialized_iteration_samples_nothing_and_keeps_the_live_policy(ran: World) -> None:
    live = Registry(ran.store, ran.experiment.name).live()
    before = artifact_count(ran.store)
    decision = decision_of(ran.store, ran.experiment, "0000")
    with open_runner(ran.experiment, ran.instance) as runner:
        runner.iteration("0000")
    assert artifact_count(ran.store) == before
    assert Registry(ran.store, ran.experiment.name).live() == live
    assert decision_of(ran.store, ran.experiment, "0000") == decision


@pytest.mark.slow
def test_old_iteration_with_new_trainer_settings_is_stale_without_resampling(ran: World) -> None:
    trainer = ran.experiment.trainer.model_copy(update={"weight_decay": 0.5})
    other = ran.experiment.model_copy(update={"trainer": trainer})
    live = Registry(ran.store, ran.experiment.name).live()
    before = artifact_count(ran.store)
    with open_runner(other, ran.instance) as runner:
        runner.iteration("0000")
    after = artifact_count(ran.store)
    assert after["checkpoint"] == before["checkpoint"] + 1
    assert all(after[kind] == before[kind] for kind in ("group", "rollouts", "rewards", "dataset"))
    decision = decision_of(ran.store, ran.experiment, "0000")
    assert decision is not None and decision.decision == "stale"
    assert Registry(ran.store, ran.experiment.name).live() == live
    with open_runner(ran.experiment, ran.instance) as runner:
        runner.iteration("0000")  # other tests read what the assets refer to


def test_checks_passed_and_the_parent_was_not_evaluated_twice(ran: World) -> None:
    runs = list(list_artifacts(ran.store, "evaluation_run"))
    policies = {run.manifest.parents["policy"].digest for run in runs}
    assert len(runs) == 5 * len(policies)  # the gate, and two splits sampled and greedily
    greedy = [run for run in runs if run.manifest.config["rollouts"]["temperature"] == 0]
    assert len(greedy) == 2 * len(policies)
    for run in greedy:
        assert set(run.table("episodes.parquet", ["temperature"])["temperature"].to_pylist()) == {0.0}
    check = dg.AssetCheckKey(key_of(ran.experiment, "rollouts"), "every_group_committed")
    record = ran.instance.event_log_storage.get_latest_asset_check_execution_by_key([check])[check]
    assert record.event is not None and record.event.dagster_event is not None
    assert record.event.dagster_event.asset_check_evaluation_data.passed


def test_a_dry_run_after_the_runs_finds_the_base(ran: World) -> None:
    rows = {row.step: row for row in plan_of(ran.experiment, ran.store)}
    assert rows["task_suite"].state == rows["base_policy"].state == "found"
    assert rows["rollouts"].partition == next_partition(ran.store, ran.experiment) == "0002"
    base = require_ref(ran.store, ran.experiment.name, "base_policy")
    assert rows["base_policy"].key == base.key
    assert find_artifact(ran.store, "trainer_state", base.key) is not None


def test_an_unknown_policy_is_refused_by_name(ran: World) -> None:
    from ops.inputs import resolve_start

    base = require_ref(ran.store, ran.experiment.name, "base_policy")
    with pytest.raises(RegistryError, match="policy 'ffff' matches no checkpoint"):
        resolve_start(ran.store, ran.experiment.name, base, "ffff")
    assert resolve_start(ran.store, ran.experiment.name, base, base.digest[:10]).checkpoint.digest == base.digest


def test_zero_further_iterations_make_none(ran: World) -> None:
    assert run_iterations(ran.experiment, 0, ran.instance) == []


@pytest.mark.slow
def test_an_iteration_may_start_from_a_named_policy_and_does_not_replace_live(ran: World) -> None:
    live = Registry(ran.store, ran.experiment.name).live()
    with open_runner(ran.experiment, ran.instance) as runner:
        runner.iteration("0002", start_from="base")
    inputs = find_inputs(ran.store, ran.experiment, "0002")
    assert inputs is not None and inputs.policy == inputs.base
    decision = decision_of(ran.store, ran.experiment, "0002")
    assert decision is not None and decision.decision == "stale"
    assert Registry(ran.store, ran.experiment.name).live() == live


def test_what_cannot_continue_the_live_policy_is_refused_before_it_samples(
    ran: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", ran.store.url)
    changed = load_experiment(TINY, ["trainer.precision={kind: fp32}"])
    with dg.DagsterInstance.ephemeral() as instance, pytest.raises(IterationRefused, match=r"tiny/0002 can't be train"):
        pin(changed, instance, "0002")
    assert find_inputs(ran.store, changed, "0002") is None
