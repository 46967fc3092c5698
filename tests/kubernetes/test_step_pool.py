"""A pod of the step pool executes one step at a time, for runs that may use it, and leaves nothing of a step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import grpc
import pytest

from contracts.errors import ConfigError
from contracts.pb import steps_pb2, steps_pb2_grpc
from resources.experiment import load_experiment
from tests.kubernetes.pool_driver import IMAGE
from tests.ports import free_port
from triplane_dagster.assembly import definitions_for
from triplane_dagster.experiment_files import experiments_digest
from triplane_dagster.step_pool import PASSWORD, PooledSteps, fits, pool_key

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "dagster" / "tiny.yaml"
PATIENCE_S = 60.0


class Server:
    """A pod of the pool."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.experiments = folder / "experiments"
        self.experiments.mkdir()
        (self.experiments / "one.yaml").write_text("name: one\nextends: base.yml")
        (self.experiments / "base.yml").write_text("seed: 1")
        command = [sys.executable, "-m", "tests.kubernetes.pool_driver", str(self.port), str(self.experiments)]
        environment = {**os.environ, PASSWORD: "secret"}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"step pool: ready on port {self.port}\n"


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    made = Server(folder)
    yield made
    made.process.kill()
    made.process.wait()


class Pod:
    """A run that uses a pod."""

    def __init__(self, server: Server) -> None:
        self.process, self.experiments = server.process, server.experiments
        self.key = f"Bearer {pool_key()}"
        self.channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
        self.stub = steps_pb2_grpc.StepPoolStub(self.channel)  # type: ignore[no-untyped-call]

    def claim(self, **changes: str) -> Any:
        asked = {"image": IMAGE, "experiments": experiments_digest(self.experiments), **changes}
        return self.stub.Claim(steps_pb2.ClaimRequest(**asked), metadata=[("authorization", self.key)], timeout=30)

    def run(self, *arguments: str, claim: str | None = None) -> Any:
        """A future of the reply."""
        request = steps_pb2.RunRequest(
            claim=claim or self.claim().claim, arguments=arguments, environment={"WORD": "said"}
        )
        return self.stub.Run.future(request, metadata=[("authorization", self.key)])

    def is_free(self) -> bool:
        """Whether the pod executes a step now."""
        try:
            return bool(self.run("exit", "0").result().exit_code == 0)
        except grpc.RpcError:
            return False

    def started(self, what: str, file: Path) -> tuple[Any, list[int]]:
        """A running step, its pid and that of a process that it started in a session of its own."""
        call = self.run(what, str(file))
        until(file.exists)
        return call, [int(each) for each in file.read_text().split()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("pod")) as running:
        yield running


@pytest.fixture
def pod(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pod]:
    """The pod that all tests share, once it executes no step."""
    monkeypatch.setenv(PASSWORD, "secret")
    made = Pod(server)
    until(made.is_free)
    yield made
    made.channel.close()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pod]:
    """A pod of the test alone."""
    monkeypatch.setenv(PASSWORD, "secret")
    with serving(tmp_path) as running:
        yield Pod(running)


def until(done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_step_ends_with_the_exit_code_of_its_process(pod: Pod) -> None:
    assert pod.run("exit", "0").result().exit_code == 0
    assert pod.run("exit", "3").result().exit_code == 3
    assert pod.run("killed").result().exit_code == -signal.SIGKILL
    assert pod.run("exit", "0").result().exit_code == 0, "a killed step costs the pod nothing"
    assert pod.process.stdout is not None and pod.process.stdout.readline() == "said\n", "the environment arrives"


def test_a_pod_takes_one_step_of_runs_like_itself(pod: Pod, tmp_path: Path) -> None:
    code, words = refused(lambda: pod.claim(image="triplane:2"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "has image triplane:1, the run triplane:2" in words
    call, _ = pod.started("sleep", tmp_path / "pids")
    assert refused(pod.claim)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    call.cancel()
    until(lambda: (tmp_path / "pids.told").exists())


def test_a_claim_reserves_the_pod_for_a_moment_and_for_one_run(pod: Pod) -> None:
    claim = pod.claim().claim
    assert refused(pod.claim)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused(pod.run("exit", "0", claim="another").result)[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert pod.run("exit", "0", claim=claim).result().exit_code == 0
    assert refused(pod.run("exit", "0", claim=claim).result)[0] is grpc.StatusCode.FAILED_PRECONDITION
    pod.claim()
    time.sleep(1.1)
    assert pod.run("exit", "0").result().exit_code == 0, "an unused claim expires"


def test_nobody_without_the_key_runs_anything(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, "another")
    pod.key = f"Bearer {pool_key()}"
    assert refused(pod.claim)[0] is grpc.StatusCode.UNAUTHENTICATED
    assert refused(pod.run("exit", "0", claim="x").result)[0] is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("end", ["cancel", "lost"])
def test_a_step_whose_run_is_gone_is_told_to_end_with_all_that_it_started(pod: Pod, tmp_path: Path, end: str) -> None:
    call, pids = pod.started("sleep", tmp_path / "pids")
    call.cancel() if end == "cancel" else pod.channel.close()
    until(lambda: all(map(is_gone, pids)))
    assert (tmp_path / "pids.told").exists()


def test_a_step_that_ignores_sigterm_is_killed(pod: Pod, tmp_path: Path) -> None:
    call, pids = pod.started("stubborn", tmp_path / "pids")
    call.cancel()
    until(lambda: all(map(is_gone, pids)))
    until(pod.is_free)


def test_a_step_that_is_ended_while_it_starts_does_not_run(pod: Pod, tmp_path: Path) -> None:
    for pause in (0.0, 0.005, 0.01, 0.02):
        call = pod.run("sleep", str(tmp_path / f"pids{pause}"))
        time.sleep(pause)
        call.cancel()
        until(pod.is_free)


def test_what_a_step_leaves_running_is_killed(pod: Pod, tmp_path: Path) -> None:
    call, pids = pod.started("leave", tmp_path / "pids")
    assert call.result().exit_code == 0 and all(map(is_gone, pids))


@pytest.mark.slow
def test_sigterm_ends_the_step_before_the_pod(own: Pod, tmp_path: Path) -> None:
    call, pids = own.started("sleep", tmp_path / "pids")
    own.process.send_signal(signal.SIGTERM)
    assert call.result().exit_code == 0 and (tmp_path / "pids.told").exists()
    assert own.process.wait(PATIENCE_S) == 0 and all(map(is_gone, pids))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "text"), [("one.yaml", "name: two"), ("base.yml", "seed: 2"), ("two.yaml", "name: ")])
def test_changed_experiment_files_restart_the_pod(own: Pod, file: str, text: str) -> None:
    (own.experiments / file).write_text(text)
    code, words = refused(own.claim)
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "other experiment files" in words
    assert own.process.wait(PATIENCE_S) == 0


def test_a_pod_with_the_present_files_stays_when_a_run_has_older_ones(pod: Pod) -> None:
    assert refused(lambda: pod.claim(experiments="0" * 64))[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert pod.run("exit", "0").result().exit_code == 0


def test_steps_that_ask_for_no_more_than_the_pool_has_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPLANE_EXECUTOR", "k8s")
    pool = {"requests": {"cpu": "250m", "memory": "2Gi"}, "limits": {"memory": "2Gi"}}

    def fitting(*overrides: str) -> set[bool]:
        repository = definitions_for([load_experiment(TINY, list(overrides))]).get_repository_def()
        ops = [op for job in repository.get_all_jobs() if job.name == "tiny_iteration" for op in job.all_node_defs]
        return {fits(op.tags, pool) for op in ops if isinstance(op, dg.OpDefinition)}

    assert fitting() == fitting("placement.steps.memory=512Mi", "placement.steps.cpu=0.1") == {True}
    for override in ("memory=3Gi", "cpu=2", "node_selector={a: b}", "priority_class=high"):
        assert fitting(f"placement.steps.{override}") == {False}
    assert not fits({}, pool), "a job without an experiment has resources of the chart"
    assert not fits({}, {})


@pytest.mark.parametrize("addresses", ["pool", "pool:x", "a:1,", ":4100"])
def test_an_address_that_is_none_is_refused(addresses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, "secret")
    with pytest.raises(ConfigError, match="write host:port"):
        PooledSteps(None, addresses, tmp_path)  # type: ignore[arg-type]


def test_a_pool_without_a_password_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD, raising=False)
    assert PASSWORD not in os.environ
    with pytest.raises(ConfigError, match=PASSWORD):
        PooledSteps(None, "127.0.0.1:1", tmp_path)  # type: ignore[arg-type]
