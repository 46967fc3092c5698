"""Runs whose steps execute in the step pool make what runs in one process make; a lost pod costs a retry."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from tests.ports import free_port

pytest.importorskip("dagster_k8s")

from envd.sandbox.proctree import descendants
from resources.placement import PlacementConfig
from tests.kubernetes.run_world import PATIENCE_S, ROOT, RunWorld, run_world
from tests.kubernetes.test_step_pool import is_gone, until
from triplane_dagster.step_pool import PASSWORD, RESOURCES, VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
PODS = 4


class Pool:
    """Pods of a pool, as processes of this machine."""

    def __init__(self) -> None:
        self.ports = [free_port() for _ in range(PODS)]
        self.pods: list[subprocess.Popen[str]] = []

    @property
    def variables(self) -> dict[str, str]:
        addresses = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return {VARIABLE: addresses, PASSWORD: "secret", RESOURCES: json.dumps(PlacementConfig().steps.resources())}

    def start(self, environment: dict[str, str]) -> None:
        for port in self.ports:
            command = [sys.executable, "-m", "triplane_dagster.step_worker", "--listen", f"127.0.0.1:{port}"]
            self.pods.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
        for port, pod in zip(self.ports, self.pods, strict=True):
            assert pod.stdout is not None and pod.stdout.readline() == f"step pool: ready on port {port}\n"

    def step(self) -> tuple[subprocess.Popen[str], int]:
        """The pod that executes a step, and the step's pid."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for pod in self.pods:
                for pid in descendants(pod.pid):
                    if os.getsid(pid) == pid:
                        return pod, pid
            time.sleep(0.01)
        raise AssertionError("no pod of the pool executes a step")

    def stop(self, pod: subprocess.Popen[str]) -> None:
        """Kill all processes of a pod, as the end of a container does."""
        for pid in [pod.pid, *descendants(pod.pid)]:
            os.kill(pid, signal.SIGKILL)
        pod.wait()
        self.pods.remove(pod)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    for pod in list(made.pods):
        made.stop(pod)


@pytest.fixture(scope="module")
def world(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunWorld]:
    with run_world(tmp_path_factory.mktemp("cluster"), pool.variables) as running:
        pool.start(running.environment)
        yield running


def started(world: RunWorld, run_id: str, step: str) -> None:
    """Wait until a step has started."""
    until(lambda: step in [each.step_key for each in world.events(run_id, dg.DagsterEventType.STEP_START)])


def jobs_of_steps(world: RunWorld) -> list[str]:
    names = [str(job["metadata"]["name"]) for job in world.cluster.jobs()]
    return [name for name in names if name.startswith("dagster-step-")]


def test_a_run_that_is_terminated_ends_its_step_in_the_pool(world: RunWorld, pool: Pool) -> None:
    run_id = world.launch("tiny_base")
    started(world, run_id, "tiny__task_suite")
    _, pid = pool.step()
    assert world.instance.run_launcher.terminate(run_id)
    world.wait_for(run_id, dg.DagsterRunStatus.CANCELED)
    until(lambda: is_gone(pid))


def test_a_lost_run_ends_its_step_in_the_pool(world: RunWorld, pool: Pool) -> None:
    run_id = world.launch("tiny_base")
    started(world, run_id, "tiny__base_policy")
    _, pid = pool.step()
    world.cluster.kubelet.kill(world.pod_of(f"dagster-run-{run_id}"), reason="OOMKilled")
    until(lambda: is_gone(pid))
    world.wait_for(run_id, dg.DagsterRunStatus.FAILURE)
    world.wait_for(world.retry_of(run_id))
    assert jobs_of_steps(world) == []


def test_an_iteration_with_a_killed_step_and_a_killed_pod_has_the_digests_of_one_process(
    world: RunWorld, pool: Pool, tmp_path: Path
) -> None:
    world.instance.add_dynamic_partitions("tiny", ["0000"])
    run_id = world.launch("tiny_iteration", "0000")
    started(world, run_id, "tiny__prompts")
    os.kill(pool.step()[1], signal.SIGKILL)
    started(world, run_id, "tiny__checkpoint")
    pool.stop(pool.step()[0])
    world.wait_for(run_id)
    retried = {event.step_key: event for event in world.events(run_id, dg.DagsterEventType.STEP_UP_FOR_RETRY)}
    assert set(retried) == {"tiny__prompts", "tiny__checkpoint"}
    errors = {name: event.step_retry_data.error for name, event in retried.items()}
    assert errors["tiny__prompts"] and "was killed by signal 9" in errors["tiny__prompts"].message
    assert errors["tiny__checkpoint"] and "of the step pool is lost" in errors["tiny__checkpoint"].message
    assert jobs_of_steps(world) == []
    world.check_against_one_process(tmp_path / "alone")


def test_without_a_ready_pod_each_step_gets_its_own(world: RunWorld, pool: Pool) -> None:
    for pod in list(pool.pods):
        pool.stop(pod)
    world.instance.add_dynamic_partitions("tiny", ["0001"])
    world.wait_for(world.launch("tiny_iteration", "0001"))
    assert len(jobs_of_steps(world)) > 5
