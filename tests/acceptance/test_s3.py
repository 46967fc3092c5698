"""The whole graph on an S3 server: the same content as on a local disk, and the same one-line errors."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from benchmarks.faulty_s3 import Fault, faulty_s3
from contracts.filecache import CACHE_FOLDER
from tests.acceptance.laboratory import ROOT, Laboratory
from tests.acceptance.test_iterations_are_exact import KINDS, TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ITERATIONS = 2
REQUESTS_PER_ITERATION = 608
"""Upper bound that one extra request per group, turn or reading of a policy would exceed. Measured: 604, some 20 of
them for each of five readings. 38 of these keep tasks as parts: 18 PUT, then each reading lists its parts at the start
and removes them at the end (2 LIST, 1 DeleteObjects, 1 LIST of uploads).
"""
MESSAGES = "messages of trainers"
"""Requests for them: how often they are looked for depends on the clock."""
RENEWALS = "renewals of leases"
"""Requests for them, which depend on the clock as well: a lease has one request to take it and one to give it up."""


class RequestLog(logging.Handler):
    """Counts what moto's web server logs, by method."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"(GET|HEAD|PUT|POST|DELETE) (/\S*) HTTP", record.getMessage())
        if found:
            method, path = found.groups()
            name = f"{'LIST' if 'list-type=2' in path else method} {_part_of(path)}"
            lease = re.search(r"/owners/\w+/(\d+)\.json$", path)
            renewed = lease is not None and int(lease[1]) > 2
            self.seen[MESSAGES if path.startswith("/pipes") else RENEWALS if renewed else name] += 1


def _part_of(path: str) -> str:
    """What the request was about: the folders below the store that say so."""
    found = re.search(r"laboratory(?:/|%2F)([a-z]+)(?:/|%2F)([a-z_]*)(.*)", path)
    if found is None:
        return "other"
    name = {"manifest.json": "manifest"}.get(path.rpartition("/")[2], "")
    return f"{found[1]}/{found[2]} {name}".strip()


@pytest.fixture(scope="module")
def requests_seen() -> Iterator[Counter[str]]:
    log, server_log = RequestLog(), logging.getLogger("werkzeug")
    server_log.addHandler(log)
    yield log.seen
    server_log.removeHandler(log)


@pytest.fixture(scope="module")
def on_s3(tmp_path_factory: pytest.TempPathFactory, requests_seen: Counter[str]) -> Iterator[Laboratory]:
    folder = tmp_path_factory.mktemp("s3")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=True)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "TRIPLANE_CACHE": str(folder / "cache"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        for bucket in ("triplane", "logs", "pipes"):
            boto3.client("s3").create_bucket(Bucket=bucket)
        places = {
            "TRIPLANE_STORE": "s3://triplane/laboratory",
            "TRIPLANE_LOGS_BUCKET": "logs",
            "TRIPLANE_PIPES_BUCKET": "pipes",
        }
        laboratory = Laboratory(folder, TINY, environment={**environment, **places})
        shutil.copy(ROOT / "deploy" / "dagster-aws.yaml", folder / "dagster.yaml")
        yield laboratory
    server.stop()


def test_iterations_on_s3_equal_those_on_a_local_disk(
    on_s3: Laboratory, requests_seen: Counter[str], tmp_path: Path
) -> None:
    on_s3.iterate(1)
    before = Counter(requests_seen)
    on_s3.iterate(1)
    made = requests_seen - before
    assert made.pop(MESSAGES) > 0, "the trainer reported through its bucket"
    made.pop(RENEWALS, None)
    print(f"{before.total()} requests, then {made.total()} of the second iteration:", *made.most_common(), sep="\n")
    assert made.total() <= REQUESTS_PER_ITERATION
    local = Laboratory(tmp_path, TINY)
    local.iterate(ITERATIONS)
    assert on_s3.digests(*KINDS) == local.digests(*KINDS)
    assert not (on_s3.folder / ".triplane" / "store").exists(), "nothing was written beside the store"
    assert "Contents" not in boto3.client("s3").list_objects_v2(Bucket="pipes"), "what was reported there was removed"


def test_what_was_made_can_be_looked_at(on_s3: Laboratory) -> None:
    assert [row["iteration"] for row in on_s3.json("status", "-e", "tiny")[0]["iterations"]] == ["0000", "0001"]
    assert "rollouts" in on_s3.run("lineage", on_s3.artifact("checkpoint", "0001").ref.digest)


def test_what_steps_print_is_in_the_logs_bucket(on_s3: Laboratory) -> None:
    """`on_s3` runs with deploy/dagster-aws.yaml; its own steps print nothing, and empty logs are not uploaded."""
    code = (
        "import dagster as dg, subprocess\n"
        "@dg.op\ndef speak(): subprocess.run(['echo', 'heard from afar'], check=True)\n"
        "@dg.job\ndef talk(): speak()\n"
        "with dg.DagsterInstance.from_config('.') as instance: talk.execute_in_process(instance=instance)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=on_s3.folder, env=on_s3.env, check=True, timeout=120)
    s3 = boto3.client("s3")
    keys = [item["Key"] for item in s3.list_objects_v2(Bucket="logs", Prefix="dagster/storage/")["Contents"]]
    bodies = [s3.get_object(Bucket="logs", Key=key)["Body"].read() for key in keys]
    assert b"heard from afar\n" in bodies


def test_a_second_machine_works_from_the_bucket_alone(on_s3: Laboratory, tmp_path: Path) -> None:
    elsewhere = Laboratory(tmp_path, TINY, environment={**on_s3.environment, "TRIPLANE_CACHE": str(tmp_path / "cache")})
    groups = elsewhere.digests("group")
    elsewhere.iterate(1)
    assert len(elsewhere.digests("rollouts")["rollouts"]) == ITERATIONS + 1
    assert set(groups["group"]) < set(elsewhere.digests("group")["group"])
    assert list((tmp_path / "cache" / CACHE_FOLDER / "tmp").iterdir()) == [], (
        "no partial download or staged file is left"
    )


@pytest.mark.parametrize(
    ("store", "endpoint", "message"),
    [
        ("s3://absent/x", None, r"error: bucket absent does not exist at http\S+: create it"),
        ("s3:///x", None, "error: the S3 store has no bucket"),
        (
            "s3://triplane/x",
            "http://127.0.0.1:9",
            r"error: store s3://triplane/x can't be reached at http://127.0.0.1:9",
        ),
        ("s3://triplane/x", "nonsense", "error: no S3 client can be made"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_line(
    on_s3: Laboratory, tmp_path: Path, store: str, endpoint: str | None, message: str
) -> None:
    changed = {"TRIPLANE_STORE": store, **({"AWS_ENDPOINT_URL": endpoint} if endpoint else {})}
    laboratory = Laboratory(tmp_path, TINY, environment={**on_s3.environment, **changed})
    done = subprocess.run(
        laboratory.command("iterate", *laboratory.settings, "-n", "1"),
        cwd=tmp_path,
        env=laboratory.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert re.match(message, done.stderr.strip().splitlines()[-1]) and "Traceback" not in done.stderr, done.stderr


def test_credentials_without_rights_are_one_line(on_s3: Laboratory, tmp_path: Path) -> None:
    with faulty_s3(on_s3.environment["AWS_ENDPOINT_URL"].removeprefix("http://")) as proxy:
        proxy.faults += [Fault("refuse", method, times=999) for method in ("GET", "PUT", "HEAD", "POST")]
        places = {"AWS_ENDPOINT_URL": proxy.endpoint, "TRIPLANE_STORE": "s3://triplane/forbidden"}
        laboratory = Laboratory(tmp_path, TINY, environment={**on_s3.environment, **places})
        done = subprocess.run(
            laboratory.command("iterate", *laboratory.settings, "-n", "1"),
            cwd=tmp_path,
            env=laboratory.env,
            capture_output=True,
            text=True,
            timeout=120,
        )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert last.startswith("error: store s3://triplane/forbidden refuses access to ") and "s3:PutObject" in last
