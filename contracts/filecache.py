"""Local copies of remote objects: bounded in size, shared by all processes of a user, complete or absent.

    <base>/tmp/              partial downloads and staging
    <base>/<place>/<key>     complete copies, read-only

The least recently used copies are removed first. Copies used within `keep_s` are never removed: a process may be about
to open them.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from contracts.errors import StoreError
from contracts.owned import is_leftover, owned_name

DEFAULT_GB = 20.0
KEEP_S = 3600.0
CACHE_FOLDER = "triplane-cache"
"""Name of the cache's folder in $TRIPLANE_CACHE, which may hold other files too."""
PARTIAL = "part-"
"""Prefix of the names of unfinished copies."""
_ATTEMPTS = 20
"""To place a copy in a folder that other processes sweep."""


class FileCache:
    """Copies of one store's objects by key. `place` names a folder below `base`; the limit counts all places.

    base: a folder with nothing else in it, as files in it are counted and removed whoever made them.
    """

    def __init__(self, base: Path, place: str, limit_bytes: int, keep_s: float = KEEP_S) -> None:
        self._base, self._root, self.scratch = base, base / place, base / "tmp"
        self._limit, self._keep_s = limit_bytes, keep_s
        self._unswept = limit_bytes
        with self._readable_errors():
            self.scratch.mkdir(parents=True, exist_ok=True)

    def find(self, key: str) -> Path | None:
        """Copy of `key`, marked as recently used, or None."""
        path = self._root / key
        try:
            status = path.stat()
            # set only the access time: readers recognize a checked file by its modification time
            os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
        except FileNotFoundError:
            return None
        return path

    @contextmanager
    def fill(self, key: str) -> Iterator[tuple[Path, Path]]:
        """(path to write to, final path): the first is renamed to the second if the block ends without an error."""
        partial = self.scratch / f"{PARTIAL}{owned_name()}"
        with self._readable_errors():
            try:
                yield partial, self._root / key
                self._place(key, partial)
            finally:
                partial.unlink(missing_ok=True)

    def adopt(self, key: str, source: Path) -> None:
        """Use `source`, an immutable file that was just uploaded, as the copy of `key`, by a hard link if possible."""
        partial = self.scratch / f"{PARTIAL}{owned_name()}"
        try:
            os.link(source, partial)
        except OSError:
            return
        with self._readable_errors():
            try:
                self._place(key, partial)
            finally:
                partial.unlink(missing_ok=True)

    def forget(self, key: str) -> bool:
        """Remove the copy of `key`. Returns False if there was none."""
        try:
            (self._root / key).unlink()
        except FileNotFoundError:
            return False
        return True

    def sweep(self) -> None:
        """Bring the cache below its limit, and remove incomplete copies of killed processes.

        Safe to run concurrently.
        """
        now, files = time.time(), sorted(self._files())
        excess = sum(size for _, size, _ in files) - self._limit
        for used, size, path in files:
            if excess <= 0 or now - used < self._keep_s:
                break
            path.unlink(missing_ok=True)
            excess -= size
            self._remove_empty(path.parent)
        for entry in self.scratch.glob(f"{PARTIAL}*"):
            with suppress(FileNotFoundError):
                if is_leftover(entry.name, now - entry.stat().st_mtime, PARTIAL):
                    entry.unlink()

    def _place(self, key: str, partial: Path) -> None:
        target = self._root / key
        partial.chmod(0o444)
        size = partial.stat().st_size
        for _ in range(_ATTEMPTS):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                partial.replace(target)
                break
            except FileNotFoundError:
                continue  # a sweep removed the empty folder between mkdir and replace
            except FileExistsError:
                # a file is in the way; or mkdir found a folder that a sweep removed before mkdir checked its type
                if any(each.exists() and not each.is_dir() for each in target.parents):
                    raise
        else:
            raise StoreError(
                f"cache {target.parent} disappears while {key} is being written: stop the process that removes it"
            )
        self._unswept += size
        if self._unswept > self._limit // 20:
            self._unswept = 0
            self.sweep()

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """(time of last use, bytes, path) of all copies in all places."""
        for folder, names, files in os.walk(self._base):
            if Path(folder) == self._base:
                names[:] = [name for name in names if name != self.scratch.name]
            for name in files:
                path = Path(folder, name)
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue
                yield max(status.st_atime, status.st_mtime), status.st_size, path

    def _remove_empty(self, folder: Path) -> None:
        while folder != self._base:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreError(
                    f"cache {self._base} is full: free some space, lower TRIPLANE_CACHE_GB, or point TRIPLANE_CACHE"
                    " elsewhere"
                ) from None
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
                raise StoreError(
                    f"cache {self._base} is not writable ({error.strerror}): fix it, or point TRIPLANE_CACHE elsewhere"
                ) from None
            raise


def cache_base() -> Path:
    """Folder of the cache: CACHE_FOLDER in $TRIPLANE_CACHE, else one of this user in the system's temporary folder.

    Raises StoreError if it belongs to another user.
    """
    chosen = os.environ.get("TRIPLANE_CACHE")
    if chosen:
        return Path(chosen) / CACHE_FOLDER
    base = Path(tempfile.gettempdir()) / f"triplane-cache-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    if base.lstat().st_uid != os.getuid():
        raise StoreError(f"cache {base} belongs to another user: point TRIPLANE_CACHE at a folder of your own")
    return base


def cache_limit() -> int:
    """Size limit in bytes: $TRIPLANE_CACHE_GB (10^9 bytes), else 20 GB. Raises StoreError."""
    text = os.environ.get("TRIPLANE_CACHE_GB") or str(DEFAULT_GB)
    try:
        gigabytes = float(text)
        if not 0 < gigabytes < 1e6:
            raise ValueError
    except ValueError:
        raise StoreError(
            f"TRIPLANE_CACHE_GB={text!r} is not a number of gigabytes above 0: correct or unset it"
        ) from None
    return int(gigabytes * 1e9)
