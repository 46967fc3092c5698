"""Where bytes live: `Store` is a flat map from key to immutable bytes, a local directory or an S3 bucket behind one interface.

Keys are relative POSIX paths. Nothing overwrites: `create` is exclusive and atomic (hard link locally, `If-None-Match: *` on S3),
so a reader sees a whole object or none, whoever dies while writing.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlparse

from contracts.errors import ArtifactMissing, StoreError

DEFAULT_STORE = ".triplane/store"
_KEY = re.compile(r"[A-Za-z0-9_.=@+-]+(/[A-Za-z0-9_.=@+-]+)*")


class Store(Protocol):
    """A flat, append-only map from key to bytes."""

    @property
    def url(self) -> str:
        """What `open_store` takes to reach this store again."""

    @property
    def scratch(self) -> Path:
        """A local folder for staging; what is left there belongs to nothing."""

    def create(self, key: str, data: bytes) -> bool:
        """Write `data` under `key` unless it exists. True when this call created it."""

    def create_file(self, key: str, source: Path) -> bool:
        """Like `create`, from a local file, without loading it into memory."""

    def get(self, key: str) -> bytes:
        """The bytes under `key`. Raises ArtifactMissing."""

    def local_path(self, key: str) -> Path:
        """A local, read-only file with the bytes under `key` (a cached download where the store is remote). Raises ArtifactMissing."""

    def exists(self, key: str) -> bool:
        """Whether `key` was created."""

    def list(self, prefix: str) -> list[str]:
        """Every key that starts with `prefix`, sorted."""

    def delete(self, key: str) -> None:
        """Remove `key`; silent when absent. Only for what no manifest names."""

    def forget(self, key: str) -> bool:
        """Drop a cached download of `key`, so that `local_path` fetches it again. False when there is none: what it gave is the original."""


def open_store(url: str | None = None) -> Store:
    """The store at `url`, else at $TRIPLANE_STORE, else in `.triplane/store` below the working directory.

    url: a directory, `file:///dir`, or `s3://bucket/prefix` (endpoint and credentials by boto3's own environment variables; downloads
    are cached in $TRIPLANE_CACHE, up to $TRIPLANE_CACHE_GB).
    """
    where = url or os.environ.get("TRIPLANE_STORE") or DEFAULT_STORE
    parsed = urlparse(where)
    if parsed.scheme == "s3":
        from contracts.s3store import S3Store

        return S3Store(parsed.netloc, parsed.path.strip("/"))
    if parsed.scheme not in ("", "file"):
        raise StoreError(
            f"store {where!r} has an unknown scheme {parsed.scheme!r}: use a directory or s3://bucket/prefix"
        )
    return LocalStore(Path(parsed.path if parsed.scheme == "file" else where))


def check_key(key: str) -> str:
    """`key` itself when well-formed. Raises StoreError: keys never climb, never start with a slash."""
    if not _KEY.fullmatch(key) or any(part in (".", "..") for part in key.split("/")):
        raise StoreError(f"store key {key!r} is not a relative path of letters, digits and _.=@+-")
    return key


class LocalStore:
    """A store in a directory. Writers fill a file under `tmp/` and link it to its place; a killed writer leaves only that."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._tmp = self._root / "tmp"
        with readable_errors(self._root):
            self._tmp.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        """The directory, absolute."""
        return str(self._root)

    @property
    def scratch(self) -> Path:
        """See Store.scratch. On the store's own disk, so that a link puts a file in place."""
        return self._tmp

    def create(self, key: str, data: bytes) -> bool:
        """See Store.create."""
        if (self._root / check_key(key)).exists():
            return False
        with self._scratch() as scratch:
            with scratch.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            return self._link(scratch, key)

    def create_file(self, key: str, source: Path) -> bool:
        """See Store.create_file."""
        if (self._root / check_key(key)).exists():
            return False
        with self._scratch() as scratch:
            shutil.copyfile(source, scratch)
            with scratch.open("rb") as file:
                os.fsync(file.fileno())
            return self._link(scratch, key)

    def get(self, key: str) -> bytes:
        """See Store.get."""
        return self.local_path(key).read_bytes()

    def local_path(self, key: str) -> Path:
        """See Store.local_path."""
        path = self._root / check_key(key)
        if not path.is_file():
            raise ArtifactMissing(f"store {self._root} has no {key}")
        return path

    def exists(self, key: str) -> bool:
        """See Store.exists."""
        return (self._root / check_key(key)).is_file()

    def list(self, prefix: str) -> list[str]:
        """See Store.list."""
        folder = self._root / prefix.rpartition("/")[0]
        found = []
        for base, _, names in os.walk(folder):
            relative = Path(base).relative_to(self._root)
            if relative.parts[:1] == ("tmp",):
                continue
            found += [key for name in names if (key := (relative / name).as_posix()).startswith(prefix)]
        return sorted(found)

    def delete(self, key: str) -> None:
        """See Store.delete. Folders left empty go too."""
        path = self._root / check_key(key)
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == self._root:
                break
            try:
                parent.rmdir()
            except OSError:
                break

    def forget(self, key: str) -> bool:
        """See Store.forget. Nothing is cached here."""
        return False

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        scratch = self._tmp / uuid.uuid4().hex
        with readable_errors(self._root):
            try:
                yield scratch
            finally:
                scratch.unlink(missing_ok=True)

    def _link(self, scratch: Path, key: str) -> bool:
        target = self._root / key
        scratch.chmod(0o444)
        for _ in range(3):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(scratch, target)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                continue  # `delete` swept the empty folder between mkdir and link
        raise StoreError(
            f"{target.parent} vanishes while {key} is being written: is something else cleaning the store?"
        )


@contextmanager
def readable_errors(root: Path) -> Iterator[None]:
    """Turn what the system says of a full or forbidden disk into StoreError with its fix. root: the folder to name."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"store {root} is full: free some space, or point TRIPLANE_STORE elsewhere, then run the same command again"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreError(
                f"store {root} is not writable ({error.strerror}): fix its permissions, or point TRIPLANE_STORE elsewhere"
            ) from None
        raise


def scratch_directory(store: Store) -> tempfile.TemporaryDirectory[str]:
    """A temporary directory for staging files before they are committed."""
    return tempfile.TemporaryDirectory(prefix="stage-", dir=store.scratch)
