"""Drivers that die, are ended, or meet: one training has one Job."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from contracts.digests import digest_of
from contracts.store import open_store
from resources.launch import Launch
from resources.training_logs import kept_logs
from tests.kubernetes.api_server import Cluster
from tests.kubernetes.conftest import messages_left
from tests.kubernetes.driver import start_driver
from tests.kubernetes.test_training_faults import await_empty, created
from tests.kubernetes.trainings import launch_as_job

pytestmark = pytest.mark.slow

TALK = """
import sys, time
from trainer.pipes import open_pipes
with open_pipes() as pipes:
    for step in range(int(sys.argv[1])):
        pipes.report_custom_message({"metrics": {"step": step}})
        print("step", step, flush=True)
        time.sleep(0.1)
"""


def talk(steps: int) -> list[str]:
    return [sys.executable, "-c", TALK, str(steps)]


def steps_of(messages: list[dict[str, dict[str, int]]]) -> list[int]:
    return [message["metrics"]["step"] for message in messages]


def await_words(cluster: Cluster, words: str) -> None:
    deadline = time.monotonic() + 60
    while not any(words in cluster.log_of(pod) for pod in cluster.pods()):
        assert time.monotonic() < deadline, f"no pod said {words!r}"
        time.sleep(0.05)


def test_job_of_a_killed_driver_is_adopted_with_all_its_messages(cluster: Cluster, tmp_path: Path) -> None:
    key, store = digest_of(["adopted"]), str(tmp_path / "store")
    first = start_driver(key, store, talk(40))
    await_words(cluster, "step 5")
    first.kill()
    first.communicate()
    (job,) = cluster.jobs()
    messages = launch_as_job(Launch(talk(40), key=key, experiment="tiny", store=open_store(store)))
    assert [message["metrics"]["step"] for message in messages] == list(range(40))
    assert created(cluster) == 1 and "deletionTimestamp" in job["metadata"]
    assert messages_left() == []
    await_empty(cluster)


def test_finished_job_of_a_killed_driver_is_read_and_not_repeated(cluster: Cluster, tmp_path: Path) -> None:
    key, store = digest_of(["read"]), str(tmp_path / "store")
    first = start_driver(key, store, talk(25))
    await_words(cluster, "step 1")
    first.kill()
    first.communicate()
    cluster.await_pods(1, "Succeeded")
    messages = launch_as_job(Launch(talk(25), key=key, experiment="tiny", store=open_store(store)))
    assert len(messages) == 25 and created(cluster) == 1
    assert list(Path(kept_logs(open_store(store), key)).rglob("*.log"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_driver_deletes_its_job_and_keeps_its_logs(cluster: Cluster, tmp_path: Path, number: int) -> None:
    key, store = digest_of(["ended"]), str(tmp_path / "store")
    driver = start_driver(key, store, talk(10_000))
    await_words(cluster, "step 5")
    driver.send_signal(number)
    driver.communicate(timeout=60)
    assert driver.returncode != 0
    await_empty(cluster)
    (log,) = Path(kept_logs(open_store(store), key)).rglob("*.log")
    assert "step 5" in log.read_text()
    assert messages_left() == []


def test_job_of_a_driver_whose_pod_is_moved_goes_on(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, store = digest_of(["moved"]), str(tmp_path / "store")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # the driver is a pod whose run nobody terminates
    driver = start_driver(key, store, talk(60))
    await_words(cluster, "step 5")
    driver.send_signal(signal.SIGTERM)
    driver.communicate(timeout=60)
    assert driver.returncode != 0 and "deletionTimestamp" not in cluster.jobs()[0]["metadata"]
    messages = launch_as_job(Launch(talk(60), key=key, experiment="tiny", store=open_store(store)))
    assert len(messages) == 60 and created(cluster) == 1


@pytest.mark.slow
def test_two_drivers_share_one_job(cluster: Cluster, tmp_path: Path) -> None:
    key, store = digest_of(["shared"]), str(tmp_path / "store")
    drivers = [start_driver(key, store, talk(60)) for _ in range(2)]
    said = [driver.communicate(timeout=120)[0] for driver in drivers]
    assert created(cluster) == 1
    assert list(range(60)) in [steps_of(json.loads(each)) for each in said if each]
    await_empty(cluster)
