"""Channel through an S3 bucket. Requires dagster-aws."""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dagster as dg
from botocore.exceptions import BotoCoreError, ClientError
from dagster_aws.pipes import PipesS3MessageReader
from dagster_pipes import PIPES_PROTOCOL_VERSION, PIPES_PROTOCOL_VERSION_FIELD, PipesContextData

from contracts.s3client import code_of, connect, is_missing
from contracts.s3write import delete_all
from resources.channel import PIPES_BUCKET, Channel
from resources.errors import LaunchFailed

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

PREFIX = "triplane-pipes"
"""Folder of the bucket. Use a lifecycle rule (expire after a day) to remove leftovers of killed runs."""
LOOK_S = 0.5
"""Shortest polling interval for messages, in seconds."""
CLOSED = json.dumps({PIPES_PROTOCOL_VERSION_FIELD: PIPES_PROTOCOL_VERSION, "method": "closed", "params": None})
_log = logging.getLogger(__name__)


@contextmanager
def bucket_channel(bucket: str, folder: str = "") -> Iterator[Channel]:
    """Open a channel in its own folder of `bucket`; the folder is removed at the end. Raises LaunchFailed.

    folder: one that stays, so that another process can open it too and read all messages; see `remove_folder`.
    """
    client, own = connect(conditional=False), folder or f"{PREFIX}/{uuid.uuid4().hex}"
    try:
        reader = _Messages(client, bucket, own)
        yield Channel(_Context(client, bucket, own), reader, reader.ended.set)
    except (ClientError, BotoCoreError) as error:
        raise LaunchFailed(
            f"bucket {bucket} for the messages of the trainer can't be used ({code_of(error)}): "
            f"check that it exists and the credentials, or unset {PIPES_BUCKET}"
        ) from None
    finally:
        if not folder:
            _remove(client, bucket, own)


def remove_folder(bucket: str, folder: str) -> None:
    """Remove the folder of a channel. Logs a warning if that fails."""
    _remove(connect(conditional=False), bucket, folder)


class _Context(dg.PipesContextInjector):
    """Injector whose context stays in the folder, for processes that start after the end of this one."""

    def __init__(self, client: S3Client, bucket: str, folder: str) -> None:
        self._s3, self._place = client, {"bucket": bucket, "key": f"{folder}/context.json"}

    @contextmanager
    def inject_context(self, context: PipesContextData) -> Iterator[Mapping[str, Any]]:
        """Location from which the process reads its context."""
        self._s3.put_object(Body=json.dumps(context).encode(), Bucket=self._place["bucket"], Key=self._place["key"])
        yield self._place

    def no_messages_debug_text(self) -> str:
        """Where the context was, for a process that reported nothing."""
        return f"Attempted to inject context via s3://{self._place['bucket']}/{self._place['key']}."


class _Messages(PipesS3MessageReader):
    """Reader that fetches all messages at once and closes the channel for a killed process."""

    def __init__(self, client: S3Client, bucket: str, folder: str) -> None:
        super().__init__(interval=LOOK_S, bucket=bucket, client=client)
        self.ended = threading.Event()
        self._s3, self._folder = client, folder

    @contextmanager
    def get_params(self) -> Iterator[Mapping[str, Any]]:
        """Location to which the process writes its messages."""
        with super().get_params() as params:
            yield {**params, "key_prefix": f"{self._folder}/messages"}

    def messages_are_readable(self, params: Mapping[str, Any]) -> bool:
        """Return True: a missing message is requested again later."""
        return True

    def download_messages(self, cursor: Any, params: Mapping[str, Any]) -> tuple[Any, str] | None:
        """Lines of all chunks from the next one on.

        Once the process has ended and nothing is left, that it closed the channel.
        """
        ended, chunks = self.ended.is_set(), []
        try:
            while True:
                found = self._s3.get_object(Bucket=self.bucket, Key=f"{params['key_prefix']}/{self.counter}.json")
                chunks.append(found["Body"].read().decode())
                self.counter += 1
        except (ClientError, BotoCoreError) as error:
            if not is_missing(error):
                _log.warning("messages in bucket %s can't be read now: %s", self.bucket, code_of(error))
            elif ended and not chunks:
                chunks.append(CLOSED)
        return (self.counter, "\n".join(chunks)) if chunks else None


def _remove(client: S3Client, bucket: str, folder: str) -> None:
    try:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{folder}/"):
            delete_all(client, bucket, [item["Key"] for item in page.get("Contents", [])])
    except (ClientError, BotoCoreError) as error:
        _log.warning("%s/%s/ stays until the bucket's lifecycle rule removes it: %s", bucket, folder, code_of(error))
