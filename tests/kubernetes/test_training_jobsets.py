"""Trainings as JobSets: one for each action key, its pods explained, restarted and removed as those of a Job."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from contracts.digests import digest_of
from contracts.store import open_store
from resources.errors import LaunchFailed
from resources.kubernetes.client import connect
from resources.kubernetes.jobs import all_trainings
from resources.kubernetes.manifests import selector
from resources.launch import Launch
from resources.placement import TrainerPlacement
from tests.kubernetes.api_server import NAMESPACE, Cluster
from tests.kubernetes.conftest import messages_left
from tests.kubernetes.driver import start_driver
from tests.kubernetes.objects import Object
from tests.kubernetes.test_training_drivers import await_words, steps_of, talk
from tests.kubernetes.test_training_faults import SECOND, await_empty, created, fails_once, meanwhile, script
from tests.kubernetes.trainings import launch_as_job

pytestmark = pytest.mark.slow


@pytest.fixture
def jobsets(cluster: Cluster) -> Cluster:
    """A cluster with the JobSet controller."""
    cluster.has_jobsets = True
    return cluster


def set_of(tmp_path: Path, text: str, **options: Any) -> Launch:
    """A launch of a shell script as a JobSet."""
    return script(tmp_path, text, placement={"workload": "jobset", **options.pop("placement", {})}, **options)


def await_jobset(cluster: Cluster) -> Object:
    deadline = time.monotonic() + 30
    while not (found := cluster.objects.all("jobsets")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found[0]


def test_the_ranks_of_a_jobset_find_the_first_one_and_leave_nothing(jobsets: Cluster, tmp_path: Path) -> None:
    # the stand-in resolves POD.SERVICE, by the Service that the controller made
    launch_as_job(set_of(tmp_path, '[ "$MASTER_ADDR" = localhost ] && [ "$TRIPLANE_NODES" = 2 ]', nodes=2))
    posted = [path.rsplit("/", 1)[1] for method, path in jobsets.requests if method == "POST"]
    assert posted == ["jobsets"] and messages_left() == []
    await_empty(jobsets)


def test_a_jobset_whose_training_diverged_is_not_restarted(jobsets: Cluster, tmp_path: Path) -> None:
    launch = set_of(tmp_path, f"{SECOND} echo 'trainer: the loss is not finite'; exit 4; fi; exec sleep 60", nodes=2)
    with pytest.raises(LaunchFailed, match=r"training diverged: trainer: the loss is not finite; logs: .*/logs/"):
        launch_as_job(launch)
    assert created(jobsets) == 1 and messages_left() == []
    await_empty(jobsets)


def test_a_lost_rank_restarts_the_whole_jobset(jobsets: Cluster, tmp_path: Path) -> None:
    thread = meanwhile(jobsets, jobsets.kubelet.kill, 2)
    launch_as_job(set_of(tmp_path, f"{SECOND} {fails_once(tmp_path)}; fi; sleep 1", nodes=2))
    thread.join()
    assert created(jobsets) == 2


def test_a_jobset_is_restarted_three_times_at_most(jobsets: Cluster, tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match=r"after 3 restart\(s\): pod .* was killed \(SIGKILL\)"):
        launch_as_job(set_of(tmp_path, "sleep 0.2; kill -9 $$"))
    assert created(jobsets) == 4


def test_a_pod_of_a_jobset_on_a_lost_node_is_removed_by_force(
    jobsets: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resources.kubernetes.jobs._FORCE_S", 1.0)
    thread = meanwhile(jobsets, jobsets.kubelet.lose)
    launch_as_job(set_of(tmp_path, fails_once(tmp_path)))
    thread.join()
    assert created(jobsets) == 2


ALSO = [pytest.param(*each, marks=pytest.mark.slow) for each in (("jobset", "job"), ("job", "jobset"))]


@pytest.mark.parametrize(("first", "then"), [("jobset", "jobset"), *ALSO])
def test_training_of_a_killed_driver_is_adopted_whatever_holds_it(
    jobsets: Cluster, tmp_path: Path, first: str, then: str
) -> None:
    key, store = digest_of(["adopted", first, then]), str(tmp_path / "store")
    driver = start_driver(key, store, talk(40), first)
    await_words(jobsets, "step 5")
    driver.kill()
    driver.communicate()
    placement = TrainerPlacement.model_validate({"workload": then})
    launch = Launch(talk(40), key=key, experiment="tiny", store=open_store(store), placement=placement)
    assert steps_of(launch_as_job(launch)) == list(range(40))  # type: ignore[arg-type]
    assert created(jobsets) == 1
    await_empty(jobsets)


def test_a_jobset_waits_for_its_queue_and_is_restarted_if_the_queue_takes_its_place_back(
    jobsets: Cluster, tmp_path: Path
) -> None:
    def operate() -> None:
        waiting = await_jobset(jobsets)
        time.sleep(0.5)
        assert not jobsets.pods()
        waiting["spec"]["suspend"] = False
        jobsets.await_pods(2)
        time.sleep(0.4)
        waiting["spec"]["suspend"] = True  # preempted
        while (again := await_jobset(jobsets))["metadata"]["uid"] == waiting["metadata"]["uid"]:
            time.sleep(0.02)
        assert again["spec"]["suspend"] and again["metadata"]["annotations"]["triplane/restarts"] == "1"
        again["spec"]["suspend"] = False

    thread = threading.Thread(target=operate)
    thread.start()
    launch_as_job(set_of(tmp_path, fails_once(tmp_path), nodes=2, placement={"queue": "night"}))
    thread.join()
    assert created(jobsets) == 2


@pytest.mark.parametrize("workload", ["job", "jobset"])
def test_a_training_that_no_queue_admits_is_explained_in_the_words_of_kueue(
    jobsets: Cluster, tmp_path: Path, workload: str
) -> None:
    said = "couldn't assign flavors to pod set trainer: insufficient quota for nvidia.com/gpu in flavor default-flavor"
    placement = {"queue": "night", "workload": workload, "start_timeout_s": 1}
    launch = script(tmp_path, "exec sleep 60", placement=placement)
    for name, words in (
        (f"{workload}-train-{launch.key[:20]}-a1b2c", said),
        ("job-train-another-a1b2c", "other words"),
    ):
        workload_of = jobsets.add("workloads", {"metadata": {"name": name}})
        jobsets.objects.event(workload_of, "Workload", "Pending", words)
    with pytest.raises(LaunchFailed, match=rf"queue night has not admitted it: Suspended: {said}"):
        launch_as_job(launch)
    await_empty(jobsets)


def test_pods_of_a_jobset_that_do_not_start_are_explained(jobsets: Cluster, tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match=r"Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu"):
        launch_as_job(set_of(tmp_path, "exec sleep 60", gpus=16, placement={"start_timeout_s": 1}))
    jobsets.controllers.pod_quota = 1
    with pytest.raises(LaunchFailed, match=r"FailedCreate: Error creating: pods .* exceeded quota"):
        launch_as_job(set_of(tmp_path, "exec sleep 61", nodes=2, placement={"start_timeout_s": 1}))


def test_a_jobset_whose_job_is_not_made_says_why(jobsets: Cluster, tmp_path: Path) -> None:
    launch = set_of(tmp_path, "true", placement={"start_timeout_s": 1})
    name = f"train-{launch.key[:20]}"
    jobsets.add("jobs", {"metadata": {"name": f"{name}-trainer-0"}, "spec": {"suspend": True}, "status": {}})
    said = rf'Job {name}-trainer-0 has not been created: jobs "{name}-trainer-0" already exists'
    with pytest.raises(LaunchFailed, match=said):
        launch_as_job(launch)


def test_a_jobset_that_ended_by_its_deadline_without_a_driver_is_not_restarted(
    jobsets: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # no driver looks while it runs: only the deadline of its Job ends it
    monkeypatch.setattr("resources.kubernetes.launcher._Training._look", slow_look(5))
    launch = set_of(tmp_path, "exec sleep 60", placement={"start_timeout_s": 1}, timeout_s=1)
    with pytest.raises(LaunchFailed, match=r"took longer than 1 s: raise trainer\.launcher\.timeout_s"):
        launch_as_job(launch)
    assert created(jobsets) == 1


def slow_look(seconds: float) -> Any:
    from resources.kubernetes.launcher import _Training

    inner = _Training._look

    def look(self: Any) -> bool:
        time.sleep(seconds)
        return inner(self)

    return look


def test_a_cluster_without_jobsets_and_missing_rights_are_named(cluster: Cluster, tmp_path: Path) -> None:
    missing = r"does not know jobset.x-k8s.io/v1alpha2 .*: install the JobSet controller, or set placement.trainer.work"
    with pytest.raises(LaunchFailed, match=missing):
        launch_as_job(set_of(tmp_path, "true"))
    launch_as_job(script(tmp_path, "exit 0"))  # Jobs need none
    cluster.has_jobsets = True
    cluster.forbidden |= {("get", "jobsets"), ("create", "jobsets"), ("list", "jobsets")}
    with pytest.raises(LaunchFailed, match=r'cannot get resource "jobsets".*grant the verb get on jobsets in the'):
        launch_as_job(set_of(tmp_path, "true"))
    launch_as_job(script(tmp_path, "exit 0 "))
    cluster.forbidden.remove(("get", "jobsets"))
    with pytest.raises(LaunchFailed, match="grant the verb create on jobsets in the"):
        launch_as_job(set_of(tmp_path, "true"))
    assert all_trainings(connect(), selector("triplane"), 1, sets=False) == []
    with pytest.raises(LaunchFailed, match="grant the verb list on jobsets in the"):
        all_trainings(connect(), selector("triplane"), 1, sets=True)
    assert messages_left() == [] and connect().namespace == NAMESPACE
