"""S3 client: one per process, with conditional writes by default and readable errors."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from contracts.errors import ArtifactMissing, StoreError, StoreUnreachable

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

CONNECTIONS = 32
"""Maximum concurrent requests of one process; further requests wait."""
CONNECT_S, READ_S = 5.0, 60.0
"""Seconds to wait for a connection, and for the next byte."""
ATTEMPTS = 5
"""Attempts of one request. With standard backoff (up to 1, 2, 4, 8 s) the pauses for a dead endpoint total at most 15
s.
"""

_MISSING = ("404", "NoSuchKey", "NotFound")
_REFUSED = (
    "AccessDenied",
    "403",
    "Forbidden",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
)
_UNREACHABLE = (
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "ReadTimeoutError",
    "ProxyConnectionError",
    "SSLError",
    "ConnectionError",
    "HTTPClientError",
)
_OVERLOADED = ("500", "502", "503", "504", "InternalError", "ServiceUnavailable", "SlowDown", "RequestTimeout")
_ELSEWHERE = ("301", "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")


def connect(*, conditional: bool = True) -> S3Client:
    """Client for the current AWS_* variables. Raises StoreError if they are invalid.

    conditional: every PutObject and CompleteMultipartUpload succeeds only if the key is new.
    """
    environment = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_")))
    return _connect(os.getpid(), environment, conditional)


@functools.lru_cache(maxsize=8)
def _connect(process: int, environment: tuple[tuple[str, str], ...], conditional: bool) -> S3Client:
    config = Config(
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
    )
    try:
        client: S3Client = Session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise StoreError(
            f"no S3 client can be made ({_line(error)}): correct the AWS_* environment variables"
        ) from None
    for operation in ("PutObject", "CompleteMultipartUpload") if conditional else ():
        client.meta.events.register(f"before-parameter-build.s3.{operation}", _only_when_new)
    return client


def _only_when_new(params: dict[str, Any], **_: object) -> None:
    params["IfNoneMatch"] = "*"


def code_of(error: ClientError | BotoCoreError) -> str:
    """Short code of an error."""
    return (
        str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else type(error).__name__
    )


def is_missing(error: ClientError | BotoCoreError) -> bool:
    """Whether the server reports that the object does not exist."""
    return code_of(error) in _MISSING


def is_refused(error: ClientError | BotoCoreError) -> bool:
    """Whether the server denied permission."""
    return code_of(error) in _REFUSED


def explain(error: ClientError | BotoCoreError, url: str, key: str, endpoint: str) -> StoreError:
    """StoreError or ArtifactMissing for an S3 error, with the thing and the fix. url: of the store."""
    code, bucket = code_of(error), url.removeprefix("s3://").partition("/")[0]
    if is_missing(error):
        return ArtifactMissing(f"store {url} has no {key}")
    if code == "NoSuchBucket":
        return StoreError(f"bucket {bucket} does not exist at {endpoint}: create it, or correct TRIPLANE_STORE")
    if code in _REFUSED:
        return StoreError(
            f"store {url} refuses access to {key} ({code}): check the credentials, and that they may "
            "s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket there"
        )
    if code in _ELSEWHERE:
        return StoreError(f"bucket {bucket} is in another region ({code}): set AWS_DEFAULT_REGION to the bucket's")
    if code in _UNREACHABLE:
        return StoreUnreachable(
            f"store {url} can't be reached at {endpoint} ({code}): check AWS_ENDPOINT_URL and the network, then run the"
            " same command again"
        )
    if code == "NotImplemented":
        return StoreError(f"{endpoint} lacks conditional writes (If-None-Match), which keep writers apart: update it")
    kind = StoreUnreachable if code in _OVERLOADED else StoreError
    return kind(f"store {url} failed on {key} ({_line(error)}): check {endpoint}, then run the same command again")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
