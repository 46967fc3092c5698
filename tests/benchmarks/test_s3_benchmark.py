"""The `s3` benchmark: its server counts what it is asked, and nothing of it is left, also after Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.s3requests import traffic_of
from benchmarks.s3server import Request, s3_server
from contracts.store import open_store
from tests.acceptance.laboratory import ROOT, processes_of

TINY = ROOT / "tests" / "dagster" / "tiny.yaml"


def test_the_server_notes_what_it_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(tmp_path) as server:
        for name, value in {**server.environment, "TRIPLANE_CACHE": str(tmp_path / "cache")}.items():
            monkeypatch.setenv(name, value)
        import boto3

        boto3.client("s3").create_bucket(Bucket="bucket")
        store = open_store("s3://bucket/name")
        store.create("verdicts/aa/x.json", b"12345")
        server.taken()
        store.create("artifacts/group/key/attempt/data.bin", b"1234567")
        assert store.get("verdicts/aa/x.json") == b"12345"
        assert not store.exists("artifacts/group/key/manifest.json")
        store.list("pointers/live/")
        traffic = traffic_of(server.taken())
        assert server.taken() == []
    assert traffic.subjects == {
        "PUT group/data.bin": 1,
        "GET verdicts/": 1,
        "HEAD group/manifest.json (not there)": 1,
        "LIST pointers/live/": 1,
    }
    assert traffic.verbs == {"PUT": 1, "GET": 1, "HEAD": 1, "LIST": 1} and traffic.requests == 4
    assert traffic.received == 7 and traffic.sent > 5
    assert list(processes_of(tmp_path)) == []


def test_requests_are_named_by_what_they_are_about() -> None:
    asked = [
        Request("PUT", "bucket/name/artifacts/group/key/manifest.json", 412, 1, 0),
        Request("GET", "bucket/name/pointers/assets/tiny/rollouts/0000/00000001.json", 404, 0, 9),
        Request("LIST", "bucket/name/artifacts/group/key/", 200, 0, 9),
        Request("PUT", "bucket", 200, 0, 0),
    ]
    assert list(traffic_of(asked).subjects) == [
        "PUT group/manifest.json (exists already)",
        "GET pointers/assets/ (not there)",
        "LIST group/",
        "PUT the store",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_leaves_no_server_and_no_file() -> None:
    command = [sys.executable, "-m", "benchmarks", "s3", "--experiment", str(TINY), "--iterations", "1"]
    # pytest's own folder is too deep for the sockets of sandboxes
    with tempfile.TemporaryDirectory(prefix="s3-") as folder:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "TMPDIR": folder}, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        said = ""
        while "s3 base_policy" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=120)
        assert process.returncode == 130 and rest.endswith("interrupted: run the same command again\n"), rest
        assert list(Path(folder).iterdir()) == [] and list(processes_of(Path(folder))) == []
