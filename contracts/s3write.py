"""Exclusive creation on S3, which identifies the first writer even after a lost reply.

Every object's metadata contains a token of its writer. After a write without a clear reply, or with the reply "exists"
(perhaps to the retry of a successful request), the token shows whose object it is.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError
from s3transfer.futures import TransferFuture
from s3transfer.manager import TransferConfig, TransferManager
from s3transfer.subscribers import BaseSubscriber

from contracts.errors import StoreError
from contracts.failpoints import failpoint
from contracts.retries import backoff_s
from contracts.s3client import code_of, is_missing

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import MultipartUploadTypeDef


def _megabytes(variable: str, default: float) -> int:
    """Number of bytes from a variable in MiB, or the default. Raises StoreError."""
    text = os.environ.get(variable) or str(default)
    try:
        megabytes = float(text)
        if not 0 < megabytes < 1e6:
            raise ValueError
    except ValueError:
        raise StoreError(f"{variable}={text!r} is not a number of megabytes above 0: correct or unset it") from None
    return int(megabytes * 2**20)


WRITER = "writer"
"""Metadata field `x-amz-meta-writer`."""
MULTIPART_BYTES = _megabytes("TRIPLANE_S3_MULTIPART_MB", 64.0)
"""Size in bytes above which files are uploaded and downloaded in parts."""
PART_BYTES = 16 * 2**20
PARTS_AT_ONCE = 8
DELETED_AT_ONCE = 1000
"""S3's limit of objects per request."""
CONFLICTS = 6
"""Attempts if S3 reports a concurrent writer of the key."""
CONFLICT_PAUSE_S = 0.05
"""Mean pause after the first conflict, in seconds; `backoff_s` gives later pauses."""

_log = logging.getLogger(__name__)
_LOST = ("PreconditionFailed", "412")
_CONFLICT = ("ConditionalRequestConflict", "OperationAborted", "409")


def create_object(client: S3Client, bucket: str, key: str, source: bytes | Path) -> bool:
    """Write `source` unless `key` exists. Returns True if this call created it. Raises ClientError, BotoCoreError.

    client: of `contracts.s3client.connect`, whose writes are conditional.
    """
    for attempt in range(1, CONFLICTS + 1):
        token = uuid.uuid4().hex
        try:
            _send(client, bucket, key, source, token)
        except (ClientError, BotoCoreError) as error:
            if not _is_open(error):
                raise
            try:
                writer = _writer(client, bucket, key)
            except (ClientError, BotoCoreError):
                raise error from None
            if writer == token:
                return True
            if code_of(error) in _LOST or (code_of(error) == "NoSuchUpload" and writer is not None):
                return False
            if code_of(error) not in _CONFLICT or attempt == CONFLICTS:
                raise
            time.sleep(backoff_s(attempt, CONFLICT_PAUSE_S))
        else:
            return True
    raise AssertionError("the last attempt returns or raises")


def transfers(client: S3Client) -> TransferManager:
    """Context manager for the transfer of large files in parts, a few at once."""
    config = TransferConfig(
        multipart_threshold=MULTIPART_BYTES,
        multipart_chunksize=PART_BYTES,
        max_request_concurrency=PARTS_AT_ONCE,
        max_in_memory_upload_chunks=PARTS_AT_ONCE,
        max_in_memory_download_chunks=PARTS_AT_ONCE,
    )
    return TransferManager(client, config)


def delete_all(client: S3Client, bucket: str, keys: Sequence[str]) -> None:
    """Delete objects, a thousand per request; ignore missing ones. Raises ClientError, BotoCoreError."""
    for start in range(0, len(keys), DELETED_AT_ONCE):
        some = keys[start : start + DELETED_AT_ONCE]
        answer = client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in some], "Quiet": True})
        for error in answer.get("Errors", []):
            raise ClientError(
                {"Error": {"Code": error.get("Code", ""), "Message": error.get("Message", "")}}, "DeleteObjects"
            )


def list_uploads(client: S3Client, bucket: str, prefix: str) -> list[MultipartUploadTypeDef]:
    """Multipart uploads in progress, or left by dead writers, to keys that start with `prefix`.

    Raises ClientError, BotoCoreError.
    """
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
    # some servers ignore the prefix
    return [item for page in pages for item in page.get("Uploads", []) if item["Key"].startswith(prefix)]


def abort_upload(client: S3Client, bucket: str, key: str, upload_id: str) -> None:
    """Abort a multipart upload; ignore it if it has ended. Raises ClientError, BotoCoreError."""
    try:
        client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)
    except ClientError as error:
        if code_of(error) != "NoSuchUpload":
            raise


class _UnderWay(BaseSubscriber):
    def on_progress(self, future: TransferFuture, bytes_transferred: int, **kwargs: Any) -> None:
        failpoint("multipart-under-way")


def _send(client: S3Client, bucket: str, key: str, source: bytes | Path, token: str) -> None:
    if isinstance(source, bytes):
        client.put_object(Bucket=bucket, Key=key, Body=source, Metadata={WRITER: token})
    elif source.stat().st_size > MULTIPART_BYTES:
        with transfers(client) as manager:
            extra = {"Metadata": {WRITER: token}}
            manager.upload(str(source), bucket, key, extra_args=extra, subscribers=[_UnderWay()]).result()
        _abort_others(client, bucket, key)
    else:
        with source.open("rb") as file:
            client.put_object(Bucket=bucket, Key=key, Body=file, Metadata={WRITER: token})


def _abort_others(client: S3Client, bucket: str, key: str) -> None:
    """Abort other uploads to a key that now exists: those of losing writers, or of a first request with a lost
    reply.
    """
    try:
        for upload in list_uploads(client, bucket, key):
            if upload["Key"] == key:
                abort_upload(client, bucket, key, upload["UploadId"])
    except (ClientError, BotoCoreError) as error:
        _log.warning("unfinished uploads to %s stay until `triplane store gc`: %s", key, error)


def _is_open(error: ClientError | BotoCoreError) -> bool:
    """Whether this call may have created the object despite the error."""
    if not isinstance(error, ClientError):
        return True
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status >= 500 or code_of(error) in (*_LOST, *_CONFLICT, "NoSuchUpload")


def _writer(client: S3Client, bucket: str, key: str) -> str | None:
    """Token of the object's writer; "" if another program wrote it, None if there is no object."""
    try:
        return client.head_object(Bucket=bucket, Key=key)["Metadata"].get(WRITER, "")
    except ClientError as error:
        if is_missing(error):
            return None
        raise
