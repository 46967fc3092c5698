"""The rollback job as the launchpad runs it, and the iteration that follows."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.events import RunFailureReason
from dagster._core.execution.retries import auto_reexecution_should_retry_run
from dagster._core.storage.tags import PARENT_RUN_ID_TAG, ROOT_RUN_ID_TAG
from dagster_world import World
from pinning import commit, decide, make_base

from assets.naming import key_of
from contracts.artifacts import open_artifact
from contracts.digests import digest_of
from contracts.store import open_store
from ops.inputs import find_inputs, trainer_state_of
from ops.report.facts import restored
from ops.report.sources import find_sources
from ops.rollback import change_live, plan_rollback, roll_back_once
from resources.errors import RegistryError
from resources.experiment import Experiment
from resources.refs import require_ref, write_ref
from resources.registry import Registry
from triplane_dagster.assembly import definitions_for
from triplane_dagster.cli.history import row_of, summaries
from triplane_dagster.iterations import decision_of, next_partition
from triplane_dagster.jobs import base_job_name, rollback_job_name
from triplane_dagster.run import open_runner


@pytest.fixture
def mine(ran: World, blank_dagster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A copy of the store after two iterations, and an instance that knows nothing of them."""
    shutil.copytree(ran.store.url, tmp_path / "store")
    shutil.copytree(blank_dagster, tmp_path / "dagster")
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        yield World(ran.experiment, open_store(), instance, ran.made)


def launch(world: World, tags: dict[str, str] | None = None, **config: str) -> dg.ExecuteInProcessResult:
    """As the launchpad does; with tags of a relaunch, as Dagster does that."""
    job = definitions_for([world.experiment]).resolve_job_def(rollback_job_name(world.experiment))
    run_config = {"ops": {f"{world.experiment.name}_roll_back": {"config": config}}}
    return job.execute_in_process(instance=world.instance, run_config=run_config, tags=tags, raise_on_error=False)


def observed(world: World) -> list[dg.AssetObservation]:
    """What the sampler's page shows, latest first."""
    records = world.instance.fetch_observations(key_of(world.experiment, "sampler"), limit=10).records
    return [record.asset_observation for record in records if record.asset_observation is not None]


def values(metadata: Any) -> dict[str, Any]:
    return {name: value.value for name, value in metadata.items()}


def test_the_job_restores_a_policy_and_shows_it_on_the_samplers_page(mine: World) -> None:
    first = Registry(mine.store, mine.experiment.name).history()[0].policy
    assert launch(mine, reason="it cheats").success
    live = Registry(mine.store, mine.experiment.name).live()
    assert live is not None and live.policy == first and live.rollback is not None
    (shown,) = observed(mine)
    assert shown.partition == "0000"
    said = values(shown.metadata)
    assert said["reason"] == "it cheats" and said["iterations undone"] == "0001" and said["live policy"] == first.digest
    assert launch(mine, to="1", reason="again").success, "it is live already: only servers are brought"
    assert len(observed(mine)) == 1
    assert not launch(mine, to="base", reason=" ").success, "a reason is needed"
    assert launch(mine, to="2", reason="it did not").success
    assert values(observed(mine)[0].metadata)["iterations counting again"] == "0001"
    assert len(Registry(mine.store, mine.experiment.name).history()) == 4


def test_a_run_that_died_before_the_servers_finds_its_own_rollback_when_it_is_made_again(mine: World) -> None:
    name, registry = mine.experiment.name, Registry(mine.store, mine.experiment.name)
    dead = "11111111-1111-1111-1111-111111111111"
    change_live(mine.store, name, plan_rollback(mine.store, name, None), "it cheats", dead)
    before = registry.history()
    again = launch(mine, tags={ROOT_RUN_ID_TAG: dead, PARENT_RUN_ID_TAG: dead}, reason="it cheats")
    assert again.success and registry.history() == before, "one rollback, not two"
    said = values(observed(mine)[0].metadata)
    assert said["iterations undone"] == "0001" and said["live number"] == before[-1].number
    assert launch(mine, reason="and another").success, "a run of its own is another request"
    live = registry.live()
    assert live is not None and live.origin == 0 and len(registry.history()) == len(before) + 1


def test_a_rollback_to_the_previous_policy_that_waited_while_another_one_went_live_is_refused(mine: World) -> None:
    name, registry = mine.experiment.name, Registry(mine.store, mine.experiment.name)
    job = definitions_for([mine.experiment]).resolve_job_def(rollback_job_name(mine.experiment))
    config = {"ops": {f"{name}_roll_back": {"config": {"reason": "it cheats"}}}}
    queued = mine.instance.create_run_for_job(job, run_config=config).run_id
    bad, base = registry.live(), require_ref(mine.store, name, "base_policy")
    assert bad is not None
    new = base.model_copy(update={"digest": "1" * 64})
    assert registry.promote(new, trainer_state_of(mine.store, base), parent=bad.policy.digest, iteration="0002")
    before = registry.history()
    executed = {ROOT_RUN_ID_TAG: queued, PARENT_RUN_ID_TAG: queued}
    for _ in range(2):
        failed = launch(mine, tags=executed, reason="it cheats")
        (event,) = failed.get_step_failure_events()
        assert "went live after this rollback was launched" in str(event.step_failure_data.error_display_string)
        assert "launch it again with `to`, which is 2" in str(event.step_failure_data.error_display_string)
        assert registry.history() == before
        decide(mine.store, mine.experiment, "0002", policy=new.digest)  # its decision follows the promotion
    assert launch(mine, reason="the new one cheats, too").success, "launched after the promotion"
    assert launch(mine, tags=executed, to="1", reason="it cheats").success, "a policy that is named is meant"
    live = registry.live()
    assert live is not None and live.origin == 1


def test_a_queued_rollback_takes_no_decision_about_another_policy_for_that_of_the_live_one(
    tiny: Experiment, tmp_path: Path
) -> None:
    """Of an iteration that is trained again, the second decision is recorded once the servers are swapped."""
    store = open_store(str(tmp_path))
    make_base(store, tiny)
    registry, base = Registry(store, tiny.name), require_ref(store, tiny.name, "base_policy")
    first, second = (base.model_copy(update={"digest": digest * 64}) for digest in "12")
    assert registry.promote(first, trainer_state_of(store, base), parent=base.digest, iteration="0000")
    decide(store, tiny, "0000", policy=first.digest)
    change_live(store, tiny.name, plan_rollback(store, tiny.name, None), "trained on a bad task")
    asked = time.time()
    assert registry.promote(second, trainer_state_of(store, base), parent=base.digest, iteration="0000")
    before = registry.history()
    for _ in range(2):
        with pytest.raises(RegistryError, match="went live after this rollback was launched"):
            roll_back_once(store, tiny, None, "it cheats", "queued", asked)
        assert registry.history() == before
        decide(store, tiny, "0000", "refused", policy=second.digest)  # as with another margin, before it went live
    decide(store, tiny, "0000", policy=second.digest)
    decide(store, tiny, "0000", "stale", policy="3" * 64)
    done = roll_back_once(store, tiny, None, "it cheats", "later", time.time())
    assert done.entry.policy == base, "a later decision about another candidate does not count"


def test_the_previous_policy_of_the_first_promotion_is_the_base_that_acted(tiny: Experiment, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    make_base(store, tiny)
    acted = require_ref(store, tiny.name, "base_policy")
    first = acted.model_copy(update={"digest": "1" * 64})
    state = trainer_state_of(store, acted)
    assert Registry(store, tiny.name).promote(first, state, parent=acted.digest, iteration="0000")
    key = digest_of("made again, with other settings")
    commit(store, "trainer_state", key)
    made = commit(store, "checkpoint", key).ref
    write_ref(store, tiny.name, "base_policy", None, made)
    targets = [plan_rollback(store, tiny.name, to).target for to in (None, "base")]
    assert [each.policy for each in targets] == [acted, made]


def test_dagster_does_not_launch_a_rollback_again_by_itself(tiny: Experiment, tmp_path: Path) -> None:
    jobs, retries = definitions_for([tiny]), {"run_retries": {"enabled": True, "max_retries": 3}}
    with dg.DagsterInstance.local_temp(str(tmp_path), overrides=retries) as instance:

        def is_launched_again(job: str, **run_config: Any) -> bool:
            wanted = jobs.resolve_job_def(job)
            run = instance.create_run_for_job(wanted, run_config=run_config, tags=wanted.run_tags)
            instance.report_run_failed(run)
            failed = instance.get_run_by_id(run.run_id)
            assert failed is not None
            return auto_reexecution_should_retry_run(instance, failed, RunFailureReason.RUN_EXCEPTION)

        assert is_launched_again(base_job_name(tiny))
        ops = {f"{tiny.name}_roll_back": {"config": {"reason": "it cheats"}}}
        assert not is_launched_again(rollback_job_name(tiny), ops=ops)


@pytest.mark.slow
def test_the_next_iteration_acts_with_and_trains_from_the_restored_policy_and_says_so(mine: World) -> None:
    name, store = mine.experiment.name, mine.store
    registry, base = Registry(store, name), require_ref(store, name, "base_policy")
    assert launch(mine, to="base", reason="start over").success
    following = next_partition(store, mine.experiment)
    # rewards are all zero here: trained as before, the same policy would come of the same start, and that one was
    # rolled back
    other = mine.experiment.trainer.model_copy(update={"weight_decay": 0.5})
    with open_runner(mine.experiment.model_copy(update={"trainer": other}), mine.instance) as runner:
        runner.base()
        runner.iteration(following)
        inputs = find_inputs(store, mine.experiment, following)
        assert inputs is not None and inputs.policy == inputs.start.checkpoint == base
        assert inputs.start.trainer_state == trainer_state_of(store, base)
        trained = open_artifact(store, require_ref(store, name, "checkpoint", following)).manifest.parents
        assert trained["checkpoint"] == base and trained["trainer_state"] == inputs.start.trainer_state
        decision = decision_of(store, mine.experiment, following)
        assert decision is not None and (decision.decision, decision.pointer_number) == ("live", 4)
        assert registry.standing() == [4]

    before = registry.history()
    with open_runner(mine.experiment, mine.instance) as runner:
        runner.iteration("0001")
        assert registry.history() == before, "materializing a rolled-back candidate's decision again promotes nothing"
    event = mine.instance.get_latest_materialization_event(key_of(mine.experiment, "sampler"))
    assert event is not None and event.asset_materialization is not None
    assert "start over" in values(event.asset_materialization.metadata)["rolled back since"]
    pinned = mine.instance.fetch_materializations(
        dg.AssetRecordsFilter(key_of(mine.experiment, "iteration_inputs"), asset_partitions=[following]), limit=1
    ).records[0]
    assert pinned.asset_materialization is not None
    assert "start over" in values(pinned.asset_materialization.metadata)["restored by"]
    assert restored(find_sources(store, name, following)) == {
        "rollback": {"number": 3, "to": 0, "reason": "start over"}
    }
    assert restored(find_sources(store, name, "0001")) == {}
    rows = {row["iteration"]: row["decision"] for row in map(row_of, summaries(store, name))}
    assert (rows["0001"], rows[following]) == ("live, rolled back", "live")
