"""Keys that no iteration has are refused before anything is written; pinned inputs can be taken back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import dagster as dg
import pytest
from moto.server import ThreadedMotoServer
from pinning import commit, counting_store, decide, make_base, pin

from contracts.artifacts import ArtifactWriter, discard_artifact, find_artifact
from contracts.digests import digest_of
from contracts.store import Store, open_store
from contracts.upkeep import check_store
from inference.rollouts.groups import GROUP, group_key
from inference.rollouts.plan import GroupPlan, RolloutPlan
from ops.inputs import find_inputs
from ops.iteration_keys import next_iteration
from ops.ledger.index import update
from ops.ledger.segments import segments_of
from ops.unpin import unpin
from resources.errors import IterationRefused
from resources.experiment import Experiment
from resources.refs import read_ref, write_ref
from triplane_dagster.run import open_runner

EXPERIMENTS = Path(__file__).parent


@pytest.fixture(params=["local", "s3"])
def store(
    request: pytest.FixtureRequest, tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """The store of the environment, with a base and one decided iteration."""
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    server = ThreadedMotoServer(port=0) if request.param == "s3" else None
    if server is not None:
        server.start()
        host, port = server.get_host_and_port()
        place = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        place |= {"AWS_DEFAULT_REGION": "us-east-1", "TRIPLANE_CACHE": str(tmp_path / "cache")}
        for name, value in {**place, "TRIPLANE_STORE": "s3://keys/some/prefix"}.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="keys")
    opened = open_store()
    make_base(opened, tiny)
    decide(opened, tiny, "0000")
    yield opened
    if server is not None:
        server.stop()


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral(str(tmp_path)) as opened:
        yield opened


@pytest.mark.parametrize("key", ["1", "00001", "nightone", "0002", "0020", "-001", "0001 ", "１２３４"])
@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_a_wrong_key_is_refused_before_anything_is_written(
    key: str, store: Store, tiny: Experiment, instance: dg.DagsterInstance
) -> None:
    before = store.list("")
    with pytest.raises(IterationRefused) as refused:
        pin(tiny, instance, key)
    said = str(refused.value)
    assert f"partition {key!r} of tiny" in said and "materialize 0001 instead" in said and "Delete partitions" in said
    assert store.list("") == before
    with open_runner(tiny, instance) as runner, pytest.raises(IterationRefused, match="materialize 0001 instead"):
        runner.iteration(key)


@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_a_run_without_a_partition_is_refused(store: Store, tiny: Experiment, instance: dg.DagsterInstance) -> None:
    with pytest.raises(IterationRefused, match=r"tiny/iteration_inputs was launched without a partition.* 0001$"):
        pin(tiny, instance, None)


@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_a_decided_iteration_and_the_next_may_run(store: Store, tiny: Experiment, instance: dg.DagsterInstance) -> None:
    for key in ("0001", "0000", "0001"):
        pin(tiny, instance, key)
        assert find_inputs(store, tiny, key) is not None


def test_unpinned_inputs_are_gone_and_the_iteration_can_begin_again(
    store: Store, tiny: Experiment, instance: dg.DagsterInstance
) -> None:
    pin(tiny, instance, "0001")
    write_ref(store, tiny.name, "prompts", "0001", commit(store, "prompts", digest_of("prompts")).ref)
    empty = plan_on(store, tiny)
    pinned = read_ref(store, tiny.name, "iteration_inputs", "0001")
    update(store)
    assert pinned is not None and unpin(store, tiny, "0001") == pinned
    assert not segments_of(store), "the ledger would keep rows of the old inputs"
    assert find_inputs(store, tiny, "0001") is None and find_artifact(store, "rollout_plan", empty.key) is None
    assert store.list(f"{pinned.uri}/") == [] and not check_store(store).faults
    assert read_ref(store, tiny.name, "iteration_inputs", "0001") is read_ref(store, tiny.name, "prompts", "0001")
    assert find_artifact(store, "prompts", digest_of("prompts")) is not None, "other experiments may use it"
    with pytest.raises(IterationRefused, match="tiny/0001 has no pinned inputs"):
        unpin(store, tiny, "0001")
    pin(tiny, instance, "0001")
    assert find_inputs(store, tiny, "0001") is not None


@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_inputs_whose_folder_is_gone_are_not_pinned_again(
    store: Store, tiny: Experiment, instance: dg.DagsterInstance
) -> None:
    pin(tiny, instance, "0001")
    pinned = read_ref(store, tiny.name, "iteration_inputs", "0001")
    assert pinned is not None
    discard_artifact(store, pinned)
    with pytest.raises(IterationRefused, match=r"inputs of tiny/0001 are gone .*: restore the folder from a backup"):
        pin(tiny, instance, "0001")


@pytest.mark.parametrize("store", ["local"], indirect=True)
@pytest.mark.parametrize("work", ["group", "rollouts", "reference"])
def test_an_iteration_with_committed_work_is_not_unpinned(
    work: str, store: Store, tiny: Experiment, instance: dg.DagsterInstance
) -> None:
    pin(tiny, instance, "0001")
    plan = plan_on(store, tiny)
    if work == "group":
        commit(store, GROUP, group_key(plan, plan.groups[0]))
    elif work == "rollouts":
        commit(store, "rollouts", plan.key)
    else:
        write_ref(store, tiny.name, "dataset", "0001", commit(store, "dataset", digest_of("dataset")).ref)
    before = store.list("")
    said = {"group": "1 group", "rollouts": "rollouts", "reference": "dataset"}[work]
    with pytest.raises(IterationRefused, match=rf"lineage of its committed work would be lost \({said}\)"):
        unpin(store, tiny, "0001")
    assert store.list("") == before


@pytest.mark.slow
@pytest.mark.parametrize("point", ["references-removed", "manifest-removed"])
@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_an_unpin_that_is_killed_is_finished_by_the_next(
    point: str, store: Store, tiny: Experiment, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    pin(tiny, instance, "0001")
    (tmp_path / "home").mkdir()
    place = {**os.environ, "TRIPLANE_EXPERIMENTS": str(EXPERIMENTS), "DAGSTER_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "triplane_dagster.cli", "unpin", f"{tiny.name}/0001"]
    run = lambda **more: subprocess.run(command, env={**place, **more}, capture_output=True, text=True, timeout=120)  # noqa: E731
    assert run(TRIPLANE_KILL_AT=point).returncode == -9
    assert not check_store(store).faults
    again = run()
    if point == "references-removed":
        assert again.returncode == 0 and "tiny/0001 is no longer pinned" in again.stdout, again.stderr
    else:
        assert again.returncode == 1 and "tiny/0001 has no pinned inputs" in again.stderr
    pin(tiny, instance, "0001")
    inputs = find_inputs(store, tiny, "0001")
    assert inputs is not None and read_ref(store, tiny.name, "iteration_inputs", "0001") is not None


def test_the_next_of_2000_iterations_takes_few_requests(tiny: Experiment, tmp_path: Path) -> None:
    store = counting_store(tmp_path, tiny, 2000)
    assert next_iteration(store, tiny.name) == 2000
    assert store.requests < 20
    store.requests = 0
    assert next_iteration(store, tiny.name) == 2000 and store.requests <= 2
    decide(store, tiny, "2000")
    decide(store, tiny, "2002")
    assert next_iteration(store, tiny.name) == 2001, "an iteration that was skipped is made first"


def plan_on(store: Store, experiment: Experiment) -> RolloutPlan:
    """Commit a rollout plan of iteration 0001, of which nothing is sampled."""
    inputs = read_ref(store, experiment.name, "iteration_inputs", "0001")
    policy = read_ref(store, experiment.name, "base_policy")
    assert inputs is not None and policy is not None
    plan = RolloutPlan(
        experiment=experiment.name,
        iteration="0001",
        seed=0,
        key=digest_of("plan"),
        policy=policy,
        groups=[GroupPlan(index=0, group_id="g0", task_id="t0")],
        reserve=[],
        workers=1,
        config=experiment.rollouts,
        inputs={"iteration_inputs": inputs},
    )
    with ArtifactWriter(
        store, "rollout_plan", plan.key, parents={"iteration_inputs": inputs}, config={}, code_version="1"
    ) as out:
        out.add_json("plan.json", plan.model_dump(mode="json"))
        out.commit(meta={})
    return plan
