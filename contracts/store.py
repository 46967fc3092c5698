"""`Store`: a flat map from key to immutable bytes, in a local directory or an S3 bucket.

Keys are relative POSIX paths. Nothing is overwritten: `create` is exclusive and atomic (hard link locally,
`If-None-Match: *` on S3). So a reader sees a whole object or none, even if a writer is killed. The
content digests of artifacts are computed in `contracts.artifacts`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import ParseResult, unquote, urlparse

from contracts.errors import ArtifactMissing, StoreError
from contracts.failpoints import failpoint
from contracts.owned import owned_directory, owned_name
from contracts.store_entries import Entry, Upload, check_key

DEFAULT_STORE = ".triplane/store"
STAGE = "stage-"
"""Prefix of the names of staging directories."""
_GONE = (
    "is gone, or its disk is not mounted any more: bring it back before you run the same command again, which would"
    " begin an empty store; to begin one on purpose, first restart what has opened this one"
)
_CONTENT = ("artifacts", "pointers")
"""Folders by which a local store with content is known."""
_filled: set[str] = set()
"""URLs of the local stores in which this process has seen one of them."""


class Store(Protocol):
    """A flat, append-only map from key to bytes."""

    @property
    def url(self) -> str:
        """URL of this store for `open_store`."""

    @property
    def scratch(self) -> Path:
        """Local folder for staging; files left there belong to no artifact."""

    def create(self, key: str, data: bytes, *, cached: bool = False) -> bool:
        """Write `data` under `key` unless it exists. Returns True if this call created it.

        cached: also put a copy into the cache of `local_path`, if this machine will soon read it.
        """

    def create_file(self, key: str, source: Path, *, move: bool = False) -> bool:
        """Like `create`, from a local file, without loading it into memory.

        move: this machine needs `source` no more; it is removed, or becomes the object, and leaves no cached copy.
        """

    def get(self, key: str) -> bytes:
        """Bytes under `key`. Raises ArtifactMissing."""

    def local_path(self, key: str) -> Path:
        """Local, read-only file with the bytes under `key` (a cached download of a remote store).

        Raises ArtifactMissing.
        """

    def exists(self, key: str) -> bool:
        """Whether `key` exists."""

    def list(self, prefix: str) -> list[str]:
        """All keys that start with `prefix`, sorted."""

    def entries(self, prefix: str) -> Sequence[Entry]:
        """Like `list`, with the metadata of each key."""

    def folders(self, folder: str) -> Sequence[str]:
        """Names of the folders with keys directly below `folder`, sorted. Does not walk them.

        folder: a prefix that ends with a slash.
        """

    def checksum(self, key: str) -> str:
        """SHA-256 of the stored bytes under `key`, not of a cached copy: 64 hex digits.

        Raises ArtifactMissing.
        """

    def uploads(self) -> Sequence[Upload]:
        """Incomplete uploads, including those in progress, sorted by key."""

    def abort(self, upload: Upload) -> None:
        """Abort an upload; ignore it if it has ended."""

    def delete(self, key: str) -> None:
        """Remove `key`; ignore a missing key. Only for keys that no manifest names."""

    def discard(self, prefix: str) -> None:
        """Remove every key that starts with `prefix`, and incomplete uploads to such keys.

        Only for leftovers of dead writers.
        """

    def forget(self, key: str) -> bool:
        """Drop a cached download of `key`, so that `local_path` fetches it again.

        Returns False if there is none, because `local_path` returned the original.
        """


def open_store(url: str | None = None) -> Store:
    """Open the store at `url`, else at $TRIPLANE_STORE, else in `.triplane/store` in the working directory.

    url: a directory, `file:///dir`, or `s3://bucket/prefix` (endpoint and credentials by boto3's own environment
    variables; downloads are cached in $TRIPLANE_CACHE, up to $TRIPLANE_CACHE_GB). Raises StoreError.
    """
    where = url or os.environ.get("TRIPLANE_STORE") or DEFAULT_STORE
    parsed = _parsed(where)
    if parsed.scheme == "s3":
        from contracts.s3store import S3Store  # needs boto3, which local stores do not

        return S3Store(parsed.netloc, parsed.path.strip("/"))
    return LocalStore(local_folder(where))


def local_folder(where: str) -> Path:
    """Directory that a store's location other than S3 names. Raises StoreError."""
    parsed = _parsed(where)
    if parsed.scheme not in ("", "file"):
        raise StoreError(
            f"store {where!r} has an unknown scheme {parsed.scheme!r}: use a directory or s3://bucket/prefix"
        )
    if parsed.scheme == "file" and parsed.netloc:
        raise StoreError(
            f"store {where!r} names the host {parsed.netloc!r}: use file:///DIR with three slashes, or a directory"
        )
    if parsed.scheme == "file" and (parsed.query or parsed.fragment):
        raise StoreError(f"store {where!r} has a query or fragment: write ? as %3F and # as %23, or use a directory")
    path = unquote(parsed.path) if parsed.scheme == "file" else where
    if path.startswith("~"):
        raise StoreError(
            f"store {where!r} begins with ~, which only a shell expands: write the whole path, or ./~ for a folder of"
            " that name"
        )
    if "\0" in path:
        raise StoreError(f"store {where!r} has a null byte: use a directory or s3://bucket/prefix")
    return Path(path)


def _parsed(where: str) -> ParseResult:
    try:
        return urlparse(where)
    except ValueError as error:
        raise StoreError(f"store {where!r} is no location ({error}): use a directory or s3://bucket/prefix") from None


class LocalStore:
    """A store in a directory.

    Writers fill a file under `tmp/` and link it to its place; a killed writer leaves only a temporary file.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._tmp = self._root / "tmp"
        with readable_errors(self._root):
            self._require_there()
            self._tmp.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        """Absolute path of the directory."""
        return str(self._root)

    @property
    def scratch(self) -> Path:
        """See Store.scratch. On the store's own disk, so that a link puts a file in place."""
        return self._tmp

    def create(self, key: str, data: bytes, *, cached: bool = False) -> bool:
        """See Store.create."""
        if (self._root / check_key(key)).exists():
            return False
        with self._scratch() as scratch:
            with scratch.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            return self._link(scratch, key)

    def create_file(self, key: str, source: Path, *, move: bool = False) -> bool:
        """See Store.create_file."""
        if (self._root / check_key(key)).exists():
            return False
        with self._scratch() as scratch:
            if move:
                shutil.move(source, scratch)  # a rename on the same disk, as from `scratch`
            else:
                shutil.copyfile(source, scratch)
            with scratch.open("rb") as file:
                os.fsync(file.fileno())
            return self._link(scratch, key)

    def get(self, key: str) -> bytes:
        """See Store.get."""
        with readable_errors(self._root):
            try:
                with open(f"{self._root}/{check_key(key)}", "rb") as file:  # noqa: PTH123 - twice as fast
                    return file.read()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                self._require_there()
                raise ArtifactMissing(f"store {self._root} has no {key}") from None

    def local_path(self, key: str) -> Path:
        """See Store.local_path."""
        if not self.exists(key):
            raise ArtifactMissing(f"store {self._root} has no {key}")
        return self._root / key

    def exists(self, key: str) -> bool:
        """See Store.exists."""
        with readable_errors(self._root):
            found = (self._root / check_key(key)).is_file()
            if not found:
                self._require_there()
        return found

    def list(self, prefix: str) -> list[str]:
        """See Store.list."""
        folder = self._root / prefix.rpartition("/")[0]
        found = []
        with readable_errors(self._root):
            for base, _, names in os.walk(folder, onerror=_unless_missing):
                relative = Path(base).relative_to(self._root)
                if relative.parts[:1] == ("tmp",):
                    continue
                found += [key for name in names if (key := (relative / name).as_posix()).startswith(prefix)]
            if not found:
                self._require_there()
        return sorted(found)

    def entries(self, prefix: str) -> Sequence[Entry]:
        """See Store.entries."""
        found = []
        for key in self.list(prefix):
            try:
                status = (self._root / key).stat()
            except FileNotFoundError:
                continue
            found.append(Entry(key, status.st_size, status.st_mtime))
        return found

    def folders(self, folder: str) -> Sequence[str]:
        """See Store.folders."""
        with readable_errors(self._root):
            try:
                with os.scandir(self._root / folder) as found:
                    return sorted(each.name for each in found if each.is_dir() and _has_file(each.path))
            except (FileNotFoundError, NotADirectoryError):
                self._require_there()
                return []

    def checksum(self, key: str) -> str:
        """See Store.checksum."""
        with self.local_path(key).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def uploads(self) -> Sequence[Upload]:
        """See Store.uploads. Always empty: files are created whole."""
        return ()

    def abort(self, upload: Upload) -> None:
        """See Store.abort. Does nothing."""

    def delete(self, key: str) -> None:
        """See Store.delete. Also removes empty folders, except those by which a store is known."""
        path = self._root / check_key(key)
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent in (self._root, *(self._root / folder for folder in _CONTENT)):
                break
            try:
                parent.rmdir()
            except OSError:
                break

    def discard(self, prefix: str) -> None:
        """See Store.discard."""
        for key in self.list(prefix):
            self.delete(key)

    def forget(self, key: str) -> bool:
        """See Store.forget. Nothing is cached here."""
        return False

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        scratch = self._tmp / owned_name()
        with readable_errors(self._root):
            try:
                failpoint("store-write")
                yield scratch
            finally:
                scratch.unlink(missing_ok=True)

    def _require_there(self) -> None:
        """Raise StoreError if the directory has lost its content since this process saw it: what was made would count
        as never made.
        """
        if any((self._root / folder).is_dir() for folder in _CONTENT):
            _filled.add(self.url)
        elif self.url in _filled:
            raise StoreError(f"store {self._root} {_GONE}")

    def _link(self, scratch: Path, key: str) -> bool:
        target = self._root / key
        scratch.chmod(0o444)
        self._require_there()  # else the next line would begin a store
        for _ in range(3):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(scratch, target)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                continue  # `delete` swept the empty folder between mkdir and link
        raise StoreError(f"{target.parent} disappears while {key} is being written: stop the process that removes it")


def _has_file(folder: str) -> bool:
    """Whether a folder holds a file at any depth: a writer may have made the folder, but not the file."""
    try:
        with os.scandir(folder) as found:
            return any(not each.is_dir() or _has_file(each.path) for each in found)
    except FileNotFoundError:
        return False


def _unless_missing(error: OSError) -> None:
    """Raise an error of a walk, unless the folder is gone. An unreadable folder is not an empty one."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


@contextmanager
def readable_errors(root: Path, what: str = "store", variable: str = "TRIPLANE_STORE") -> Iterator[None]:
    """Convert system errors of a full, broken or forbidden disk to StoreError with the fix.

    root: folder for the message; what: its name; variable: environment variable that moves it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = f"is full: free some space, or point {variable} elsewhere, then run the same command again"
        elif error.errno in (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT):
            fix = f"can't be read or written ({error.strerror}): check its disk, then run the same command again"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            fix = f"is not writable ({error.strerror}): fix its permissions, or point {variable} elsewhere"
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            fix = f"can't be read ({error.strerror}): raise the limit, `ulimit -n`"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG):
            fix = f"is not a directory ({error.strerror}): point {variable} at one"
        elif error.errno == errno.ENOENT and not root.exists():
            other = (
                f"is gone or can't be made: point {variable} elsewhere, or run the same command again to make it anew"
            )
            fix = other if _filled.isdisjoint(map(str, (root, root.parent))) else _GONE  # the parent of its tmp/
        else:
            raise
        raise StoreError(f"{what} {root} {fix}") from None


@contextmanager
def staging_errors(store: Store) -> Iterator[None]:
    """Like `readable_errors`, for a store's scratch folder, which is in the cache for a remote store."""
    beside = store.url == str(store.scratch.parent)
    variable = "TRIPLANE_STORE" if beside else "TRIPLANE_CACHE"
    with readable_errors(store.scratch, "store's folder" if beside else "cache", variable):
        yield


def scratch_directory(store: Store) -> tempfile.TemporaryDirectory[str]:
    """A temporary directory for staging files before they are committed. Raises StoreError."""
    with staging_errors(store):
        return owned_directory(STAGE, store.scratch)
