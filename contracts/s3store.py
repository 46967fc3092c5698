"""S3 implementation of `contracts.store`: one object per key, exclusive creation by conditional writes, a local read
cache.

create -> s3write (conditional; above 64 MiB in parts)      local_path -> filecache, else a streamed download
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlparse

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from contracts.errors import StoreError
from contracts.filecache import FileCache, cache_base, cache_limit
from contracts.retries import backoff_s
from contracts.s3client import connect, explain, is_missing, is_refused
from contracts.s3write import MULTIPART_BYTES, abort_upload, create_object, delete_all, list_uploads, transfers
from contracts.store_entries import Entry, Upload, check_key

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef

T = TypeVar("T")

READS = 4
"""Attempts of one download whose stream breaks off (the client itself retries requests without a reply)."""
READ_PAUSE_S = 0.2
"""Mean pause after the first broken download, in seconds; `backoff_s` gives later pauses."""
BROKEN_STREAM = (FlexibleChecksumError, IncompleteReadError, ReadTimeoutError, ResponseStreamingError)
_CHUNK = 2**20
_PROBE = "tmp/conditional-writes"
_PROVEN: set[tuple[str, str]] = set()
"""Endpoints and stores whose conditional writes are proven."""
_MOST_PROVEN = 256
"""Size at which `_PROVEN` is emptied. A proof costs two small writes."""
_log = logging.getLogger(__name__)


class S3Store:
    """A store in an S3 bucket, or on any S3 server with `If-None-Match` on PutObject and CompleteMultipartUpload."""

    def __init__(self, bucket: str, prefix: str) -> None:
        if not bucket:
            raise StoreError("the S3 store has no bucket: write s3://bucket/prefix")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = connect()
        server = urlparse(self._client.meta.endpoint_url).netloc.replace(":", "_")
        self._cache = FileCache(cache_base(), f"{server}/{bucket}/{prefix or '_root'}", cache_limit())

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def scratch(self) -> Path:
        """See Store.scratch. On the cache's disk, so that uploads are cached without copying."""
        return self._cache.scratch

    def create(self, key: str, data: bytes, *, cached: bool = False) -> bool:
        """See Store.create."""
        with self._explained(key):
            created = self._create(key, data)
        if created and cached:
            with self._cache.fill(key) as (partial, _):
                partial.write_bytes(data)
        return created

    def create_file(self, key: str, source: Path, *, move: bool = False) -> bool:
        """See Store.create_file."""
        with self._explained(key):
            created = self._create(key, source)
        if created and move:
            source.unlink()
        elif created:
            self._cache.adopt(key, source)
        return created

    def get(self, key: str) -> bytes:
        """See Store.get."""
        check_key(key)
        with self._explained(key):
            return _patiently(lambda: self._object(key)["Body"].read())

    def local_path(self, key: str) -> Path:
        """See Store.local_path."""
        cached = self._cache.find(check_key(key))
        if cached is None:
            with self._explained(key), self._cache.fill(key) as (partial, cached):
                _patiently(lambda: self._download(key, partial))
        return cached

    def exists(self, key: str) -> bool:
        """See Store.exists."""
        check_key(key)
        with self._explained(key):
            try:
                self._client.head_object(Bucket=self._bucket, Key=self._prefix + key)
            except ClientError as error:
                if is_missing(error):
                    return False
                raise
        return True

    def list(self, prefix: str) -> list[str]:
        """See Store.list."""
        return [entry.key for entry in self.entries(prefix)]

    def entries(self, prefix: str) -> Sequence[Entry]:
        """See Store.entries."""
        with self._explained(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            items = [item for page in pages for item in page.get("Contents", [])]
        found = (Entry(self._own(item["Key"]), item["Size"], item["LastModified"].timestamp()) for item in items)
        return sorted(found, key=lambda entry: entry.key)

    def folders(self, folder: str) -> Sequence[str]:
        """See Store.folders."""
        whole = self._prefix + folder
        with self._explained(folder):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=whole, Delimiter="/"
            )
            return sorted(item["Prefix"][len(whole) : -1] for page in pages for item in page.get("CommonPrefixes", []))

    def checksum(self, key: str) -> str:
        """See Store.checksum."""
        check_key(key)
        with self._explained(key):
            return _patiently(lambda: _sha256(self._object(key)))

    def uploads(self) -> Sequence[Upload]:
        """See Store.uploads."""
        with self._explained(""):
            found = list_uploads(self._client, self._bucket, self._prefix)
        uploads = (Upload(self._own(item["Key"]), item["Initiated"].timestamp(), item["UploadId"]) for item in found)
        return sorted(uploads, key=lambda upload: upload.key)

    def abort(self, upload: Upload) -> None:
        """See Store.abort."""
        with self._explained(upload.key):
            abort_upload(self._client, self._bucket, self._prefix + upload.key, upload.upload_id)

    def delete(self, key: str) -> None:
        """See Store.delete."""
        with self._explained(key):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + check_key(key))
        self._cache.forget(key)

    def discard(self, prefix: str) -> None:
        """See Store.discard. Without permission to list uploads, they are left to the bucket's lifecycle rule."""
        keys = self.list(prefix)
        with self._explained(prefix):
            delete_all(self._client, self._bucket, [self._prefix + key for key in keys])
            for key in keys:
                self._cache.forget(key)
            try:
                for item in list_uploads(self._client, self._bucket, self._prefix + prefix):
                    abort_upload(self._client, self._bucket, item["Key"], item["UploadId"])
            except ClientError as error:
                if not is_refused(error):
                    raise
                _log.warning("unfinished uploads under %s stay: %s refuses to list or abort them", prefix, self.url)

    def forget(self, key: str) -> bool:
        """See Store.forget."""
        return self._cache.forget(check_key(key))

    def _create(self, key: str, source: bytes | Path) -> bool:
        check_key(key)
        place = (self._client.meta.endpoint_url, self.url)
        if place not in _PROVEN:
            self._prove()
            if len(_PROVEN) >= _MOST_PROVEN:
                _PROVEN.clear()
            _PROVEN.add(place)
        return create_object(self._client, self._bucket, self._prefix + key, source)

    def _prove(self) -> None:
        """Raise StoreError if the server overwrites objects: old servers ignore If-None-Match, so that two writers
        would collide.
        """
        probe = self._prefix + _PROBE
        if all(create_object(self._client, self._bucket, probe, b"") for _ in range(2)):
            raise StoreError(
                f"{self._client.meta.endpoint_url} ignores If-None-Match: * on PutObject and overwrites objects: update"
                " that server or use another"
            )

    def _own(self, name: str) -> str:
        """Store key of an object."""
        return name[len(self._prefix) :]

    def _object(self, key: str) -> GetObjectOutputTypeDef:
        return self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)

    def _download(self, key: str, target: Path) -> None:
        found = self._object(key)
        with closing(found["Body"]) as stream:
            if found["ContentLength"] <= MULTIPART_BYTES:
                with target.open("wb") as file:
                    for chunk in stream.iter_chunks(_CHUNK):
                        file.write(chunk)
                return
        with transfers(self._client) as manager:
            manager.download(self._bucket, self._prefix + key, str(target)).result()

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            yield
        except (ClientError, BotoCoreError) as error:
            raise explain(error, self.url, key, self._client.meta.endpoint_url) from None


def _sha256(found: GetObjectOutputTypeDef) -> str:
    digest = hashlib.sha256()
    with closing(found["Body"]) as stream:
        for chunk in stream.iter_chunks(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _patiently(read: Callable[[], T]) -> T:
    """Result of `read`, which is retried if the stream breaks off or is damaged."""
    for attempt in range(1, READS):
        try:
            return read()
        except BROKEN_STREAM:
            time.sleep(backoff_s(attempt, READ_PAUSE_S))
    return read()
