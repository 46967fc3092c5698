"""A stand-in cluster, and an S3 server for messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from resources.channel import PIPES_BUCKET
from resources.kubernetes.settings import IMAGE
from tests.kubernetes.api_server import Cluster, serving

BUCKET = "messages"


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    moto.stop()


@pytest.fixture
def cluster(s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster whose pods may use the S3 server, as this process."""
    for name, value in {**s3, PIPES_BUCKET: BUCKET, IMAGE: "triplane:1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    with serving(Cluster(tmp_path / "cluster", s3)) as running:
        yield running


def messages_left() -> list[str]:
    """Keys in the bucket of messages."""
    return [item["Key"] for item in boto3.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", [])]
