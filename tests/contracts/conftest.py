"""A store of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from contracts.store import Store, open_store


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
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
