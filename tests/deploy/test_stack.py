"""What deploy/compose.yaml starts, started here process by process, with Debian's PostgreSQL and moto's S3: an
iteration, and every process killed once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer

from contracts.artifacts import list_artifacts
from contracts.store import Store, open_store
from contracts.suites import read_suite
from inference.bridge.client import Bridge
from ops.iteration_keys import iteration_key, next_iteration
from resources.registry import Registry
from tests.acceptance.laboratory import processes_of
from tests.deploy.local_stack import LocalStack, descendants
from tests.deploy.postgres import Postgres, running_postgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def stack(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Everything but the sampler, which has nothing to serve yet.

    At the end all of it stops when asked, and leaves no process.
    """
    s3 = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    s3.start()
    host, port = s3.get_host_and_port()
    variables = {**postgres.environment, "S3_ENDPOINT": f"http://{host}:{port}", "SERVED_EXPERIMENT": "tiny"}
    stack = LocalStack(tmp_path_factory.mktemp("stack"), variables)
    try:
        assert stack.run("buckets") == "bucket triplane created\nbucket triplane-logs created\n"
        for name in ("envd", "code-location", "webserver", "daemon"):
            stack.start(name)
        # this sensor ends runs whose process died; it can't see the processes of another container, as in production
        stack.stop_sensor("tiny_sequence")
        yield stack
    finally:
        ended = stack.stop()
        left = list(processes_of(stack.folder))
        s3.stop()
    assert all(status in (0, -signal.SIGTERM, 128 + signal.SIGTERM) for status in ended.values()), ended
    assert not left


@pytest.fixture(scope="module")
def store(stack: LocalStack) -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stack.environment("code-location").items():
            if name.startswith(("AWS_", "TRIPLANE_")):
                patch.setenv(name, value)
        yield open_store()


@pytest.fixture(scope="module")
def first_iteration(stack: LocalStack) -> str:
    """The run of iteration 0000."""
    stack.wait_for(stack.launch("tiny_base"), "SUCCESS")
    run_id = stack.launch("tiny_iteration", "0000")
    stack.wait_for(run_id, "SUCCESS")
    return run_id


def next_key(store: Store) -> str:
    """Key of the iteration that may run next."""
    return iteration_key(next_iteration(store, "tiny"))


def test_an_iteration_runs_through_the_queue(
    stack: LocalStack, store: Store, postgres: Postgres, first_iteration: str
) -> None:
    assert [entry.iteration for entry in Registry(store, "tiny").history()] == ["0000"]
    assert postgres.rows(f"SELECT status FROM runs WHERE run_id = '{first_iteration}'") == [("SUCCESS",)]
    kinds = dict(
        postgres.rows(
            f"SELECT dagster_event_type, count(*) FROM event_logs WHERE run_id = '{first_iteration}' GROUP BY 1"
        )
    )
    assert kinds["PIPELINE_ENQUEUED"] == kinds["PIPELINE_SUCCESS"] == 1
    assert kinds["ASSET_MATERIALIZATION"] >= 9
    assert {path.name for path in stack.folder.iterdir() if path.is_dir()} == {
        "home",
        "cache",
        "envd",
        "experiments",
        "tmp",
        "deploy",
        "bridge",
        "journal",
    }, "nothing is written where the image's code is"
    assert "listening on unix:" in stack.log("envd") and "backends namespaces" in stack.log("envd")


def test_the_doctor_finds_everything_from_within_the_code_location(stack: LocalStack) -> None:
    done = subprocess.run(
        ["triplane", "doctor", "--json"],
        cwd=stack.folder,
        env=stack.environment("code-location"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["name"]: (row["state"], row["found"]) for row in json.loads(done.stdout)["checks"]}
    for name, words in {
        "PostgreSQL": "at 127.0.0.1",
        "store": "If-None-Match",
        "sandboxes": "namespaces: ran a command, isolates",
        "Dagster instance": "queued_run_coordinator",
    }.items():
        assert found[name][0] == "ok" and words in found[name][1], found[name]


def test_buckets_that_exist_are_no_error(stack: LocalStack) -> None:
    assert "bucket triplane" in stack.run("buckets")


def test_two_runs_of_an_experiment_wait_for_one_another(stack: LocalStack, store: Store, first_iteration: str) -> None:
    key = next_key(store)
    both = [stack.launch("tiny_iteration", key) for _ in range(2)]
    earlier, later = sorted((stack.wait_for(each, "SUCCESS") for each in both), key=lambda run: run["startTime"])
    assert later["startTime"] >= earlier["endTime"]


def test_a_queued_run_survives_the_daemon(stack: LocalStack, store: Store, first_iteration: str) -> None:
    stack.kill("daemon")
    run_id = stack.launch("tiny_iteration", next_key(store))
    time.sleep(5)
    assert stack.run_of(run_id)["status"] == "QUEUED"
    stack.start("daemon")
    stack.wait_for(run_id, "SUCCESS")


def test_a_killed_run_is_marked_as_failed_and_launched_again(
    stack: LocalStack, store: Store, first_iteration: str
) -> None:
    key = next_key(store)
    run_id = stack.launch("tiny_iteration", key)
    stack.wait_for(run_id, "STARTED")
    workers = [pid for pid, line in descendants(stack.pid("code-location")).items() if "spawn_main" in line]
    assert len(workers) == 1
    os.kill(workers[0], signal.SIGKILL)
    stack.wait_for(run_id, "FAILURE")
    stack.wait_for(stack.retry_of(run_id), "SUCCESS")
    assert Registry(store, "tiny").history()[-1].iteration == key


def test_a_run_lost_with_its_code_location_is_marked_as_failed_and_launched_again(
    stack: LocalStack, store: Store, first_iteration: str
) -> None:
    key = next_key(store)
    run_id = stack.launch("tiny_iteration", key)
    stack.wait_for(run_id, "STARTED")
    stack.kill("code-location")
    stack.start("code-location")
    failed = stack.wait_for(run_id, "FAILURE")
    messages = [event["message"] for event in failed["eventConnection"]["events"] if event]
    assert any("executes no such run: it was restarted" in message for message in messages), messages[-4:]
    stack.wait_for(stack.retry_of(run_id), "SUCCESS")
    assert Registry(store, "tiny").history()[-1].iteration == key


def test_the_sampler_serves_what_is_live(stack: LocalStack, store: Store, first_iteration: str) -> None:
    stack.start("sampler")
    while not httpx.get(f"{stack.api}/ready", timeout=60).is_success:  # it is healthy before it has loaded a policy
        time.sleep(0.5)
    live = Registry(store, "tiny").live()
    assert live is not None
    question = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    reply = httpx.post(f"{stack.api}/v1/chat/completions", json=question, timeout=60).raise_for_status().json()
    assert reply["usage"]["completion_tokens"] >= 1
    assert live.policy.digest[:12] in stack.log("sampler")


def test_a_router_with_redis_serves_what_the_replicas_serve(stack: LocalStack, first_iteration: str) -> None:
    commands = [stack.command(name) for name in ("sampler", "replica")]
    assert commands[0] == commands[1], "so the sampler is the router's replica here"
    for name in ("redis", "router"):
        stack.start(name)
    body = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 4}
    reply = httpx.post(f"{stack.router}/v1/completions", json=body, timeout=60).raise_for_status()
    assert reply.json()["usage"]["completion_tokens"] >= 1 and reply.headers["x-replica"]
    told = httpx.get(f"{stack.router}/metrics", timeout=60).raise_for_status().text
    assert 'route_shared_total{result="failures"} 0.0' in told


def test_a_trainer_plays_a_task_over_the_bridge(stack: LocalStack, store: Store, first_iteration: str) -> None:
    stack.start("bridge")
    (suite,) = list_artifacts(store, "task_suite")
    task = read_suite(suite)[0]
    with Bridge(f"unix:{stack.folder / 'bridge' / 'bridge.sock'}") as bridge:
        assert bridge.info().hosted_tasks > 1
        with bridge.start_task(task.task_id, seed=1) as episode:
            while not episode.done:
                turn = episode.step()
    assert turn.reply is not None and turn.reply.reward is not None


def test_step_logs_are_in_their_bucket(stack: LocalStack, store: Store, first_iteration: str) -> None:
    keys = [item["Key"] for item in boto3.client("s3").list_objects_v2(Bucket="triplane-logs").get("Contents", [])]
    assert all(key.startswith("dagster/storage/") for key in keys)
    assert not list(Path(stack.folder, "home").rglob("compute_logs")), "logs are kept on the machine instead"
