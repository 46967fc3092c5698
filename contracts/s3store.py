"""The S3 side of `contracts.store`: one object a key, exclusive creation by conditional put, a local read cache."""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from contracts.errors import ArtifactMissing, StoreError
from contracts.store import check_key

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


class S3Store:
    """A store in an S3 bucket (or any server that speaks S3 with `If-None-Match` on PutObject)."""

    def __init__(self, bucket: str, prefix: str, client: S3Client | None = None) -> None:
        if not bucket:
            raise StoreError("s3 store without a bucket: write s3://bucket/prefix")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client: S3Client = client or boto3.client("s3")
        base = os.environ.get("TRIPLANE_CACHE") or str(Path(tempfile.gettempdir()) / f"triplane-cache-{os.getuid()}")
        self._cache = Path(base) / "s3" / bucket / (prefix or "_root")

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def create(self, key: str, data: bytes) -> bool:
        """See Store.create."""
        return self._put(check_key(key), data)

    def create_file(self, key: str, source: Path) -> bool:
        """See Store.create_file."""
        with source.open("rb") as file:
            return self._put(check_key(key), file)

    def get(self, key: str) -> bytes:
        """See Store.get."""
        try:
            return self._client.get_object(Bucket=self._bucket, Key=self._prefix + check_key(key))["Body"].read()
        except (ClientError, BotoCoreError) as error:
            raise self._explain(error, key) from None

    def local_path(self, key: str) -> Path:
        """See Store.local_path. Objects are immutable, so a cached copy never goes stale."""
        cached = self._cache / check_key(key)
        if not cached.is_file():
            cached.parent.mkdir(parents=True, exist_ok=True)
            partial = cached.with_name(f"{cached.name}.{uuid.uuid4().hex}")
            try:
                self._client.download_file(self._bucket, self._prefix + key, str(partial))
                partial.replace(cached)
            except (ClientError, BotoCoreError) as error:
                raise self._explain(error, key) from None
            finally:
                partial.unlink(missing_ok=True)
        return cached

    def exists(self, key: str) -> bool:
        """See Store.exists."""
        try:
            self._client.head_object(Bucket=self._bucket, Key=self._prefix + check_key(key))
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey", "NotFound"):
                return False
            raise self._explain(error, key) from None
        except BotoCoreError as error:
            raise self._explain(error, key) from None
        return True

    def list(self, prefix: str) -> list[str]:
        """See Store.list."""
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            return sorted(item["Key"][len(self._prefix) :] for page in pages for item in page.get("Contents", []))
        except (ClientError, BotoCoreError) as error:
            raise self._explain(error, prefix) from None

    def delete(self, key: str) -> None:
        """See Store.delete."""
        try:
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + check_key(key))
        except (ClientError, BotoCoreError) as error:
            raise self._explain(error, key) from None
        (self._cache / key).unlink(missing_ok=True)

    def _put(self, key: str, body: object) -> bool:
        try:
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=body, IfNoneMatch="*")  # type: ignore[arg-type]
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in ("PreconditionFailed", "412"):
                return False
            raise self._explain(error, key) from None
        except BotoCoreError as error:
            raise self._explain(error, key) from None
        return True

    def _explain(self, error: ClientError | BotoCoreError, key: str) -> StoreError:
        code = (
            error.response.get("Error", {}).get("Code", "") if isinstance(error, ClientError) else type(error).__name__
        )
        if code in ("404", "NoSuchKey", "NotFound"):
            return ArtifactMissing(f"store {self.url} has no {key}")
        if code == "NoSuchBucket":
            return StoreError(f"bucket {self._bucket} does not exist: create it, or correct TRIPLANE_STORE")
        if code in (
            "AccessDenied",
            "403",
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "NoCredentialsError",
        ):
            return StoreError(
                f"store {self.url} refuses access to {key} ({code}): check the credentials and the bucket's policy"
            )
        return StoreError(f"store {self.url} failed on {key} ({code or error}): check the endpoint and try again")
