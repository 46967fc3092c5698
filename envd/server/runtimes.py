"""Runtimes: packages that sandboxes see instead of this host's, each a directory named by the digest of its tar."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path, PurePosixPath

from contracts.errors import describe
from envd.backends.base import Backend
from envd.errors import RuntimeMissing, TemplateError, Unsupported

MOST_BYTES = 1 << 30
"""Largest tar, in bytes."""
_MOST_DRAFTS, _MOST_FILES = 4, 200_000
"""Number of unfinished uploads besides the current one, and of files of a runtime."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
"""Packages that a process with pytest has imported."""
_IDLE = frozenset({"a1_coverage.pth", "pytest-cov.pth"})
"""Path files that do nothing unless an environment variable asks for coverage."""
_COMPILE_S = 600.0


class Runtimes:
    """Stores each runtime once. The least recently used that no sandbox uses make room for others."""

    def __init__(self, directory: Path, most: int = 64) -> None:
        """most: number of runtimes that are kept, besides those in use."""
        self._directory, self._most = directory, most
        self._ready: OrderedDict[str, bool] = OrderedDict()
        """By digest, whether its pytest is that of this process."""
        self._held: Counter[str] = Counter()
        self._lock = asyncio.Lock()

    async def put(self, digest: str, size: int, offset: int, data: bytes) -> int:
        """Take a piece of a tar, and store the runtime after the last one. Returns the bytes received so far.

        Raises TemplateError for a tar that is too large, has another digest, or holds other than plain files.
        """
        if not _DIGEST.fullmatch(digest) or not 0 < size <= MOST_BYTES:
            raise TemplateError(
                f"a runtime is a tar of 1 to {MOST_BYTES} bytes, named by its SHA-256: this one is {digest[:80]!r} of"
                f" {size} bytes"
            )
        async with self._lock:
            if digest in self._ready:
                self._ready.move_to_end(digest)
                return size
            received, ours = await asyncio.to_thread(self._take, digest, size, offset, data)
            if ours is not None:
                self._ready[digest] = ours
                await asyncio.to_thread(self._remove, self._evicted())
            return received

    def require(self, digest: str, backend: Backend) -> str:
        """Return the digest if the server has this runtime and the backend can show it, or if it is empty.

        Raises RuntimeMissing, Unsupported.
        """
        if digest and "runtime" not in backend.features.can:
            raise Unsupported(
                f"the {backend.name} backend can't show a task's own packages: use the backend namespaces"
            )
        if digest and digest not in self._ready:
            raise RuntimeMissing(f"envd has no runtime {digest[:80]!r}: call put_runtime first")
        return digest

    def is_ours(self, digest: str) -> bool:
        """Whether a runtime has the pytest of this process, so that tests can run where it is imported already."""
        return self._ready[digest]

    @contextmanager
    def held(self, digest: str) -> Iterator[None]:
        """Hold a runtime for the duration of the block."""
        self.hold(digest)
        try:
            yield
        finally:
            self.release(digest)

    def hold(self, digest: str) -> None:
        """Mark a runtime as in use, until `release` is called as often."""
        if digest:
            self._held[digest] += 1
            self._ready.move_to_end(digest)

    def release(self, digest: str) -> None:
        """Undo one `hold`."""
        self._held[digest] -= 1
        if self._held[digest] <= 0:
            del self._held[digest]

    def _take(self, digest: str, size: int, offset: int, data: bytes) -> tuple[int, bool | None]:
        """Bytes received so far; after the last piece also whether the runtime's pytest is ours."""
        draft, ours = self._directory / f".{digest}.tar", None
        try:
            others = [each for each in self._directory.glob(".*.tar") if each != draft]
            for abandoned in sorted(others, key=lambda each: each.stat().st_mtime)[:-_MOST_DRAFTS]:
                abandoned.unlink()
            with draft.open("ab") as file:
                received = file.tell()
                if offset == received and received + len(data) <= size:
                    received += file.write(data)
            if received >= size:
                ours = self._store(digest, draft)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise TemplateError(f"runtime {digest[:12]} can't be stored: {describe(error)}") from error
        return received, ours

    def _store(self, digest: str, tar: Path) -> bool:
        """Unpack and compile a runtime under a name of its own, then rename, so that no sandbox sees a partial one."""
        draft = self._directory / f".{digest}.{secrets.token_hex(4)}"
        try:
            with tar.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise TemplateError(f"runtime {digest[:12]} has another SHA-256 than its name: send it again")
            _unpack(tar, draft)
            _compile(draft)
            draft.rename(self._directory / digest)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            tar.unlink(missing_ok=True)
        return _has_our_pytest(self._directory / digest)

    def _evicted(self) -> list[str]:
        """Take unused runtimes off the list until it is short enough, and return them."""
        unused = [each for each in self._ready if each not in self._held]
        gone = unused[: max(0, len(self._ready) - self._most)]
        for digest in gone:
            del self._ready[digest]
        return gone

    def _remove(self, digests: list[str]) -> None:
        for digest in digests:
            gone = self._directory / f".{digest}.{secrets.token_hex(4)}"
            with suppress(OSError):
                (self._directory / digest).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _unpack(tar: Path, into: Path) -> None:
    into.mkdir()
    try:
        with tarfile.open(tar, "r:") as archive:
            for number, member in enumerate(archive):
                path = PurePosixPath(member.name)
                plain = member.isreg() and not member.issparse() and not path.is_absolute() and ".." not in path.parts
                source = archive.extractfile(member) if plain else None
                if source is None or number >= _MOST_FILES:
                    raise TemplateError(
                        f"a runtime holds at most {_MOST_FILES} files and nothing else: {member.name[:200]!r} is one"
                        " more, a link, a directory or outside of it"
                    )
                target = into / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as file:
                    shutil.copyfileobj(source, file)
                target.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, ValueError) as error:
        raise TemplateError(f"a runtime is an uncompressed tar; this one can't be read ({error})") from error


def _compile(directory: Path) -> None:
    """Add byte code, since sandboxes can't write it. Files that are not Python of this version stay as they are."""
    flags = ["-q", "-q", "--invalidation-mode", "unchecked-hash", "-s", str(directory), str(directory)]
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-I", "-S", "-m", "compileall", *flags],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_COMPILE_S,
            umask=0o022,
        )


def _has_our_pytest(directory: Path) -> bool:
    if {each.name for each in directory.glob("*.pth")} - _IDLE:
        return False  # only a fresh interpreter reads them
    return all((directory / f"{name}-{metadata.version(name)}.dist-info").is_dir() for name in _PYTEST)
