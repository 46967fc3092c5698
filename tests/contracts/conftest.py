"""A store of each kind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.server import ThreadedMotoServer

from contracts.store import Store, open_store


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    """A server whose conditional writes are atomic, as those of S3 are: moto checks, then writes."""
    lock, answer = threading.Lock(), DomainDispatcherApplication.__call__

    def one_write_at_a_time(self: DomainDispatcherApplication, environ: Any, start: Any) -> Any:
        with lock if environ["REQUEST_METHOD"] == "PUT" else contextlib.nullcontext():
            return answer(self, environ, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DomainDispatcherApplication, "__call__", one_write_at_a_time)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Empty. On S3 it is below a prefix of a bucket of the test's own."""
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": request.getfixturevalue("s3_endpoint"),
        "TRIPLANE_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    bucket = tmp_path.name.replace("_", "-").lower()
    boto3.client("s3").create_bucket(Bucket=bucket)
    return open_store(f"s3://{bucket}/some/prefix")
