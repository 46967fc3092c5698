"""Channel through an S3 bucket. Requires boto3."""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dagster as dg
from botocore.exceptions import BotoCoreError, ClientError
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
"""Polling interval for messages, in seconds."""
_LAST_LOOKS_S = 10.0
"""Longest time to try to read messages after the end of the process."""
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


class _Messages(dg.PipesMessageReader):
    """Reader that fetches all messages at once and closes the channel for a killed process.

    Dagster's own looks every other second and sleeps through the end of the process.
    """

    def __init__(self, client: S3Client, bucket: str, folder: str) -> None:
        self.ended = threading.Event()
        self._s3, self._bucket, self._folder = client, bucket, f"{folder}/messages"
        self._next = 1

    @contextmanager
    def read_messages(self, handler: dg.PipesMessageHandler) -> Iterator[Mapping[str, Any]]:
        """Read in a thread, to the last message. Yields where the process writes its messages."""
        thread = threading.Thread(target=self._follow, args=(handler,), daemon=True)
        thread.start()
        try:
            yield {"bucket": self._bucket, "key_prefix": self._folder}
        finally:
            self.ended.set()
            thread.join()

    def no_messages_debug_text(self) -> str:
        """Where the messages would have been, for a process that reported nothing."""
        return f"Attempted to read messages from s3://{self._bucket}/{self._folder}/."

    def _follow(self, handler: dg.PipesMessageHandler) -> None:
        until = math.inf
        try:
            while not handler.received_closed_message and time.monotonic() < until:
                ended = self.ended.is_set()  # before reading: what is read then is all there is
                complete = self._read(handler)
                if not ended:
                    self.ended.wait(LOOK_S)
                elif complete and not handler.received_closed_message:
                    handler.handle_message(json.loads(CLOSED))
                elif not complete:
                    until = min(until, time.monotonic() + _LAST_LOOKS_S)
                    time.sleep(LOOK_S)
        except BaseException:
            handler.report_pipes_framework_exception("messages thread", sys.exc_info())
            raise

    def _read(self, handler: dg.PipesMessageHandler) -> bool:
        """Handle the messages of all chunks from the next one on. Returns whether there were no others."""
        try:
            while True:
                found = self._s3.get_object(Bucket=self._bucket, Key=f"{self._folder}/{self._next}.json")
                chunk = found["Body"].read().decode()
                self._next += 1
                for line in chunk.splitlines():
                    handler.handle_message(json.loads(line))
        except (ClientError, BotoCoreError) as error:
            if not is_missing(error):
                _log.warning("messages in bucket %s can't be read now: %s", self._bucket, code_of(error))
                return False
        return True


def _remove(client: S3Client, bucket: str, folder: str) -> None:
    try:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{folder}/"):
            delete_all(client, bucket, [item["Key"] for item in page.get("Contents", [])])
    except (ClientError, BotoCoreError) as error:
        _log.warning("%s/%s/ stays until the bucket's lifecycle rule removes it: %s", bucket, folder, code_of(error))
