"""Runtimes: packages that sandboxes see instead of this host's, or root file systems instead of its whole system, each
a directory named by the digest of its tar.

A tar that begins with the directory `.` is a root file system; all others hold packages.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, Self

from contracts.errors import describe
from envd.backends.base import Backend, Runtime
from envd.errors import EnvdError, RuntimeMissing, TemplateError, Unsupported
from envd.server.admission import check_env

MOST_BYTES = 8 << 30
"""Largest tar, in bytes."""
_MOST_KEPT_BYTES = 32 << 30
"""Bytes of the tars of all runtimes that are kept, besides those in use."""
_MOST_DRAFTS, _MOST_FILES = 4, 500_000
"""Number of unfinished uploads besides the current one, and of files of a runtime."""
_NEEDED = ("proc", "sys", "dev", "tmp", "workspace", ".template", ".scratch", ".envd", ".agent")
"""Directories that a root file system needs, since something is mounted there."""
_ABOUT = ".envd/image.json"
"""File of a root file system with its environment variables."""
_MOST_ENV = 32 << 10
"""Largest JSON of them, in bytes."""
_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
"""Types of extended headers, which describe the next members of a tar."""
_MOST_HEADER = 64 << 10
"""Largest extended header, in bytes."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
"""Packages that a process with pytest has imported."""
_IDLE = frozenset({"a1_coverage.pth", "pytest-cov.pth"})
"""Path files that do nothing unless an environment variable asks for coverage."""
_COMPILE_S = 600.0
_NOT_SHOWN = "the {} backend can't show a task's own"


class Runtimes:
    """Stores each runtime once. The least recently used that no sandbox uses make room for others."""

    def __init__(self, directory: Path, most: int = 64) -> None:
        """most: number of runtimes that are kept, besides those in use."""
        self._directory, self._most = directory, most
        self._ready: OrderedDict[str, Runtime] = OrderedDict()
        self._bytes: dict[str, int] = {}
        self._held: Counter[str] = Counter()
        self.on_removed: Callable[[str], Coroutine[Any, Any, None]] | None = None
        """Callback with the digest of each runtime that is removed."""
        self._lock = asyncio.Lock()

    async def put(self, digest: str, size: int, offset: int, data: bytes) -> int:
        """Take a piece of a tar, and store the runtime after the last one. Returns the bytes received so far.

        Raises TemplateError for a tar that is too large, has another digest, or holds what it may not.
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
            received, runtime = await asyncio.to_thread(self._take, digest, size, offset, data)
            if runtime is not None:
                self._ready[digest], self._bytes[digest] = runtime, size
                for gone in self._evicted():
                    if self.on_removed is not None:
                        await self.on_removed(gone)
                    await asyncio.to_thread(self._remove, gone)
            return received

    def require(self, digest: str, backend: Backend) -> Runtime | None:
        """Return a runtime that the server has and the backend can show; None for an empty digest.

        Raises RuntimeMissing, Unsupported.
        """
        if not digest:
            return None
        can, runtime = backend.features.can, self._ready.get(digest)
        if not can & {"runtime", "root"}:
            raise Unsupported(f"{_NOT_SHOWN.format(backend.name)} packages: use another (docs/tasks.md)")
        if runtime is None:
            raise RuntimeMissing(f"envd has no runtime {digest[:80]!r}: call put_runtime first")
        if ("root" if runtime.is_root else "runtime") not in can:
            what = "root file system" if runtime.is_root else "packages"
            raise Unsupported(f"{_NOT_SHOWN.format(backend.name)} {what}: use another (docs/tasks.md)")
        return runtime

    @contextmanager
    def held(self, runtime: Runtime | None) -> Iterator[None]:
        """Hold a runtime for the duration of the block."""
        self.hold(runtime)
        try:
            yield
        finally:
            self.release(runtime)

    def hold(self, runtime: Runtime | None) -> None:
        """Mark a runtime as in use, until `release` is called as often."""
        if runtime:
            self._held[runtime.digest] += 1
            self._ready.move_to_end(runtime.digest)

    def release(self, runtime: Runtime | None) -> None:
        """Undo one `hold`."""
        if runtime:
            self._held[runtime.digest] -= 1
            if self._held[runtime.digest] <= 0:
                del self._held[runtime.digest]

    def _take(self, digest: str, size: int, offset: int, data: bytes) -> tuple[int, Runtime | None]:
        """Bytes received so far; after the last piece also the runtime."""
        draft, runtime = self._directory / f".{digest}.tar", None
        try:
            others = [each for each in self._directory.glob(".*.tar") if each != draft]
            for abandoned in sorted(others, key=lambda each: each.stat().st_mtime)[:-_MOST_DRAFTS]:
                abandoned.unlink()
            with draft.open("ab") as file:
                received = file.tell()
                if offset == received and received + len(data) <= size:
                    received += file.write(data)
            if received >= size:
                runtime = self._store(digest, draft)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise TemplateError(f"runtime {digest[:12]} can't be stored: {describe(error)}") from error
        return received, runtime

    def _store(self, digest: str, tar: Path) -> Runtime:
        """Unpack and compile a runtime under a name of its own, then rename, so that no sandbox sees a partial one."""
        draft = self._directory / f".{digest}.{secrets.token_hex(4)}"
        try:
            with tar.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise TemplateError(f"runtime {digest[:12]} has another SHA-256 than its name: send it again")
            is_root = _unpack(tar, draft)
            env = _environment(draft) if is_root else ()
            if not is_root:
                _compile(draft)
            draft.rename(self._directory / digest)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            tar.unlink(missing_ok=True)
        place = self._directory / digest
        return Runtime(digest, place, is_root, not is_root and _has_our_pytest(place), env)

    def _evicted(self) -> list[str]:
        """Take runtimes off the list until those not in use are few and small enough, and return them.

        Never the last one, which was just stored: its client uses it next.
        """
        gone = list[str]()
        unused = [each for each in self._ready if each not in self._held]
        size = sum(self._bytes[each] for each in unused)
        for digest in unused[:-1]:
            if len(unused) - len(gone) <= self._most and size <= _MOST_KEPT_BYTES:
                break
            del self._ready[digest]
            size -= self._bytes.pop(digest)
            gone.append(digest)
        return gone

    def _remove(self, digest: str) -> None:
        gone = self._directory / f".{digest}.{secrets.token_hex(4)}"
        with suppress(OSError):
            (self._directory / digest).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _unpack(tar: Path, into: Path) -> bool:
    """Unpack a tar into a new directory, and return whether it is a root file system. Raises TemplateError, OSError."""
    into.mkdir()
    into.chmod(0o755)
    try:
        with tarfile.open(tar, "r:", tarinfo=_Member) as archive:
            first = archive.next()
            is_root = first is not None and first.isdir() and first.name == "."
            unpacking = _Unpacking(archive, into, is_root)
            for number, member in enumerate(archive):
                if number >= _MOST_FILES:
                    raise TemplateError(
                        f"a runtime holds at most {_MOST_FILES} files: {member.name[:200]!r} is one more"
                    )
                if number or not is_root:
                    unpacking.add(member)
                archive.members.clear()  # type: ignore[attr-defined]  # else every extended header stays in memory
                archive.pax_headers = {}
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise TemplateError(f"a runtime is an uncompressed tar; this one can't be read ({error})") from error
    missing = [each for each in _NEEDED if is_root and each not in unpacking.directories]
    if missing:
        raise TemplateError(f"a root file system needs the directory /{missing[0]}: make it by `triplane tasks image`")
    return is_root


class _Member(tarfile.TarInfo):
    """A member whose extended headers have at most _MOST_HEADER bytes, since tarfile reads them whole into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """See tarfile.TarInfo. Raises tarfile.TarError for a header of another size."""
        found = super().frombuf(buf, encoding, errors)
        if found.type in _HEADERS and not 0 <= found.size <= _MOST_HEADER:
            raise tarfile.TarError(f"a header of {found.size} bytes: at most {_MOST_HEADER} are read")
        return found


class _Unpacking:
    """Unpacks a tar. Nothing is written through a link, since links are no directories of it."""

    def __init__(self, archive: tarfile.TarFile, into: Path, is_root: bool) -> None:
        self._archive, self._into, self._is_root = archive, into, is_root
        self.directories, self._files = {"."}, set[str]()

    def add(self, member: tarfile.TarInfo) -> None:
        """Unpack a file, or what only a root may hold. Raises TemplateError, OSError."""
        path = PurePosixPath(member.name)
        safe = not path.is_absolute() and ".." not in path.parts and path.parts
        if safe and not self._is_root:
            self._make(path.parent)
        target = self._into / path
        if not safe or str(path.parent) not in self.directories:
            self._refuse(member, "lies outside of it, or in no directory of it")
        if member.isreg() and not member.issparse():
            source = self._archive.extractfile(member)
            assert source is not None, "it is a regular file"
            with target.open("xb") as file:
                shutil.copyfileobj(source, file)
            target.chmod(0o755 if member.mode & 0o100 else 0o644)
            self._files.add(str(path))
        elif not self._is_root:
            self._refuse(member, "is a link or a directory: packages are files only")
        elif member.isdir():
            self._make(path)
        elif member.issym():
            target.symlink_to(member.linkname)
        elif member.islnk() and member.linkname in self._files:
            os.link(self._into / member.linkname, target)
        else:
            self._refuse(member, "is a device, a pipe, or a link to what does not stand before it")

    def _make(self, path: PurePosixPath) -> None:
        for each in (*reversed(path.parents), path):
            if str(each) not in self.directories:
                (self._into / each).mkdir()
                (self._into / each).chmod(0o755)
                self.directories.add(str(each))

    @staticmethod
    def _refuse(member: tarfile.TarInfo, why: str) -> NoReturn:
        raise TemplateError(f"the runtime can't be unpacked: {member.name[:200]!r} {why}")


def _environment(directory: Path) -> tuple[tuple[str, str], ...]:
    """Environment variables of a root file system. Raises TemplateError."""
    try:
        with os.fdopen(os.open(directory / _ABOUT, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            found = json.loads(file.read(_MOST_ENV + 1))["env"]
        env = {str(name): str(value) for name, value in found.items()}
        check_env(env)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EnvdError) as error:
        raise TemplateError(f"/{_ABOUT} of a root file system does not hold its variables ({error})") from error
    return tuple(sorted(env.items()))


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
