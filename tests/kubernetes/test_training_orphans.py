"""Trainers that no run waits for are deleted, others are not."""

from __future__ import annotations

import time
from typing import Any

import dagster as dg
import pytest

from resources.experiment import parse_experiment
from resources.kubernetes.client import connect
from resources.kubernetes.manifests import EXPERIMENT, RUN
from resources.training_launcher import LAUNCHER
from tests.kubernetes.api_server import Cluster
from triplane_dagster.jobs import EXPERIMENT_TAG
from triplane_dagster.orphans import delete_orphans, orphan_sensors

TINY = parse_experiment({"name": "tiny"})


@dg.job
def nothing() -> None:
    """A job whose runs have the states that a test gives them."""


def run_with(instance: dg.DagsterInstance, status: dg.DagsterRunStatus) -> str:
    run = instance.create_run_for_job(nothing, status=status, tags={EXPERIMENT_TAG: TINY.name})
    return run.run_id


def trainer_of(cluster: Cluster, run_id: str) -> dict[str, Any]:
    names = {"app.kubernetes.io/component": "trainer", "app.kubernetes.io/instance": "triplane", EXPERIMENT: "tiny"}
    meta = {"name": f"train-{run_id[:8]}", "labels": names, "annotations": {RUN: run_id}}
    container = {"name": "trainer", "image": "triplane:1", "command": ["sleep", "60"]}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    return cluster.add("jobs", {"metadata": meta, "spec": {"parallelism": 1, "template": template}, "status": {}})


def test_trainer_of_an_ended_run_is_deleted_after_a_while(cluster: Cluster) -> None:
    with dg.instance_for_test() as instance:
        trainer_of(cluster, run_with(instance, dg.DagsterRunStatus.FAILURE))
        now = time.time()
        since, _ = delete_orphans(instance, connect(), [TINY], {}, now)
        assert len(since) == 1 and cluster.jobs()
        since, said = delete_orphans(instance, connect(), [TINY], since, now + 3600)
        assert since == {} and "no run waits for it" in said
    deadline = time.monotonic() + 10
    while cluster.jobs():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_trainer_that_the_next_run_may_adopt_is_kept(cluster: Cluster) -> None:
    with dg.instance_for_test() as instance:
        trainer_of(cluster, run_with(instance, dg.DagsterRunStatus.FAILURE))
        run_with(instance, dg.DagsterRunStatus.STARTED)
        assert delete_orphans(instance, connect(), [TINY], {}, time.time(), limit_s=0)[0] == {}
        assert "deletionTimestamp" not in cluster.jobs()[0]["metadata"]


def test_trainer_of_another_dagster_instance_is_kept(cluster: Cluster) -> None:
    with dg.instance_for_test() as instance:
        trainer_of(cluster, "01234567-0000-0000-0000-000000000000")
        assert delete_orphans(instance, connect(), [TINY], {}, time.time(), limit_s=0)[0] == {}
        assert "deletionTimestamp" not in cluster.jobs()[0]["metadata"]


@pytest.mark.parametrize("typed", [None, "yesterday", "[1]", '{"uid": "soon"}'])
def test_sensor_exists_where_trainers_run_on_kubernetes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, typed: str | None
) -> None:
    assert orphan_sensors([TINY]) == []
    monkeypatch.setenv(LAUNCHER, "kubernetes")
    (sensor,) = orphan_sensors([TINY])
    with dg.instance_for_test() as instance:
        result = sensor(dg.build_sensor_context(instance, cursor=typed))
    assert isinstance(result, dg.SensorResult) and result.cursor == "{}"
