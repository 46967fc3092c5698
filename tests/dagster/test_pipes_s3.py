"""A trainer that shares no disk with its Dagster run reports through an S3 bucket: live, completely, and also when it
is killed.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from resources.channel import PIPES_BUCKET
from resources.errors import LaunchFailed
from resources.launcher import LocalLauncher
from tests.dagster.launching import Arrived, launch_in_an_op
from tests.trainer.trainer_world import make_world

pytestmark = pytest.mark.slow

BUCKET = "messages"
REPORT = """
import os, signal, sys, time
from dagster_pipes import PipesMappingParamsLoader
from trainer.pipes import open_pipes
told = PipesMappingParamsLoader(os.environ)
assert set(told.load_context_params()) == {"bucket", "key"} and told.load_messages_params()["bucket"] == "messages"
with open_pipes() as pipes:
    for step in range(int(sys.argv[1])):
        pipes.report_custom_message({"metrics": {"step": step}})
        time.sleep(float(sys.argv[2]))
    if sys.argv[3] == "die":
        print("about to be killed", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server,
        PIPES_BUCKET: BUCKET,
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    return BUCKET


def launch(command: list[str], arrived: Arrived) -> None:
    """Run a command in an op. Raises what the launcher raised."""
    launch_in_an_op(LocalLauncher(), command, arrived, nodes=1, gpus=0, timeout_s=120)


def left() -> list[str]:
    return [item["Key"] for item in boto3.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", [])]


def test_messages_arrive_while_the_process_runs_and_none_is_lost(bucket: str) -> None:
    arrived: Arrived = []
    launch([sys.executable, "-c", REPORT, "30", "0.1", "end"], arrived)
    assert [message["metrics"]["step"] for _, message in arrived] == list(range(30))
    assert arrived[-1][0] - arrived[0][0] > 1
    assert left() == []


def test_a_training_job_reports_its_metrics_and_its_result(bucket: str, tmp_path: Path) -> None:
    job, arrived = make_world(tmp_path).sft_job(), []
    launch([sys.executable, "-m", "trainer", "--job", job.model_dump_json()], arrived)
    messages = [message for _, message in arrived]
    assert any("loss" in message.get("metrics", {}) for message in messages)
    assert messages[-1]["result"]["checkpoint"]["key"] == job.key
    assert left() == []


def test_a_process_that_is_killed_is_quoted_after_what_it_managed_to_say(bucket: str) -> None:
    arrived: Arrived = []
    with pytest.raises(LaunchFailed, match=r"was killed \(SIGKILL\): about to be killed"):
        launch([sys.executable, "-c", REPORT, "20", "0.1", "die"], arrived)
    steps = [message["metrics"]["step"] for _, message in arrived]
    assert steps == list(range(len(steps))) and len(steps) >= 5, "only what it had not sent yet is lost"
    assert left() == []


def test_a_bucket_that_cannot_be_used_is_one_line(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PIPES_BUCKET, "absent")
    with pytest.raises(
        LaunchFailed, match=rf"bucket absent .* can't be used \(NoSuchBucket\): .* unset {PIPES_BUCKET}"
    ):
        launch([sys.executable, "-c", "pass"], [])


def test_a_trainer_that_cannot_read_the_bucket_says_so(bucket: str, tmp_path: Path) -> None:
    job = make_world(tmp_path).sft_job()
    empty = f"""
import boto3, runpy, sys
bucket = boto3.resource("s3").Bucket("{BUCKET}")
bucket.objects.all().delete()
sys.argv = {["trainer", "--job", job.model_dump_json()]!r}
runpy.run_module("trainer", run_name="__main__")
"""
    with pytest.raises(
        LaunchFailed, match=r"ended with code 1: trainer: bucket messages for .* can't be read \(NoSuchKey\)"
    ):
        launch([sys.executable, "-c", empty], [])
