"""Templates: pristine workspaces, named by the digest of their files and stored in the server's run directory."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import subprocess
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from contracts.errors import describe
from contracts.rpc import caller
from envd.errors import TemplateError
from envd.server.quotas import Quotas
from envd.server.rules import hides

_STAMP = 1_000_000_000
"""Modification time (seconds since 1970) of every template file; a file with another time was written."""
_IDENTITY = {"NAME": "envd", "EMAIL": "envd@localhost", "DATE": f"{_STAMP} +0000"}
_GIT_ENV = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in _IDENTITY.items()} | {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
}

_MOST_DERIVED = 1024
_BLOCK, _REPOSITORY = 4096, 64 * 1024
"""Block size of a file system, and the size of an empty git repository, in bytes."""

_MAX_DIGEST = 128
"""Longest digest that is looked up, in characters; file systems reject much longer names."""


class Templates:
    """Stores each template once, regardless of how many callers put it."""

    def __init__(self, directory: Path, owner: int, quotas: Quotas | None = None) -> None:
        """quotas: limits for each key; None: no limits."""
        self._directory = directory
        self._owner = owner
        self._quotas = quotas
        self._books: defaultdict[str, OrderedDict[str, int]] = defaultdict(OrderedDict)
        self._held: Counter[str] = Counter()
        self.on_removed: Callable[[str], Coroutine[Any, Any, None]] | None = None
        """Callback with the digest of each removed template."""
        self._lock = asyncio.Lock()
        self._storing: dict[str, asyncio.Task[None]] = {}
        self._derived: dict[tuple[str, tuple[str, ...]], str] = {}

    async def put(self, files: Mapping[str, bytes]) -> str:
        """Store a template and return its digest. Raises TemplateError for a path outside the workspace."""
        for path in files:
            _check_path(path)
            for above in PurePosixPath(path).parents:
                if str(above) in files:
                    raise TemplateError(
                        f"template path {path!r} lies below {str(above)!r}, which is a file: leave one of them out"
                    )
        digest = template_digest(files)
        await self._book(digest, files)
        storing = self._storing.get(digest)
        if storing is None:
            storing = self._storing[digest] = asyncio.create_task(self._store_once(digest, dict(files)))
            storing.add_done_callback(lambda _: self._storing.pop(digest))
        # shielded: a thread can't be cancelled, so the work, and its lock, continue when a caller is cancelled
        try:
            await asyncio.shield(storing)
        except TemplateError:
            self._forget(digest)
            raise
        return digest

    @contextmanager
    def held(self, digest: str) -> Iterator[None]:
        """Hold a template for the duration of the block."""
        self.hold(digest)
        try:
            yield
        finally:
            self.release(digest)

    def hold(self, digest: str) -> None:
        """Mark a template as in use, so that it is not removed until `release` is called as often."""
        self._held[digest] += 1
        for book in self._books.values():
            if digest in book:
                book.move_to_end(digest)

    def release(self, digest: str) -> None:
        """Undo one `hold`."""
        self._held[digest] -= 1
        if not self._held[digest]:
            del self._held[digest]

    async def _book(self, digest: str, files: Mapping[str, bytes]) -> None:
        """Charge a template to the key of the call, and remove the key's least recently used ones to make room.

        Raises QuotaExceeded.
        """
        book = self._books[caller.key()]
        if self._quotas is None or digest in book:
            book[digest] = book.pop(digest, 0)
            return
        size, most = _charge(files), self._quotas.rules.template_mb << 20
        if size > most:
            self._quotas.refuse("template_mb", f"no template of {size >> 20} MiB (files and git's copy)", "send less")
        removed = self._make_room(book, size, most)
        book[digest] = size
        for each in removed:
            await self._remove(each)

    def _make_room(self, book: OrderedDict[str, int], size: int, most: int) -> list[str]:
        """Take templates off a key's book until one more fits; return those that no other book lists.

        Raises QuotaExceeded, and then changes nothing.
        """
        assert self._quotas is not None
        left, count, victims = sum(book.values()), len(book), []
        for digest in book:
            if left + size <= most and count < self._quotas.rules.templates:
                break
            if digest not in self._held and digest not in self._storing:
                victims.append(digest)
                left, count = left - book[digest], count - 1
        else:
            if left + size > most:
                self._quotas.refuse(
                    "template_mb", f"{left >> 20} MiB of templates that are in use", "end some sandboxes"
                )
            if count >= self._quotas.rules.templates:
                self._quotas.refuse("templates", f"{count} templates that are in use", "end some sandboxes")
        for digest in victims:
            del book[digest]
        return [digest for digest in victims if not any(digest in each for each in self._books.values())]

    async def _remove(self, digest: str) -> None:
        """Remove an unused template. Rename first, then delete, so that no reader finds a partial template."""
        gone = self._directory / f".{digest}.{secrets.token_hex(4)}"
        with suppress(OSError):
            (self._directory / digest).rename(gone)
        for key in [key for key, shown in self._derived.items() if digest in (key[0], shown)]:
            del self._derived[key]
        if self.on_removed is not None:
            await self.on_removed(digest)
        await asyncio.to_thread(shutil.rmtree, gone, True)

    def _forget(self, digest: str) -> None:
        """Remove the charges for a template that could not be stored."""
        for book in self._books.values():
            book.pop(digest, None)

    async def without(self, digest: str, hidden: Sequence[str]) -> str:
        """Digest of the template without the files that these globs match; stored at first use."""
        key = (digest, tuple(hidden))
        if key not in self._derived:
            files = await asyncio.to_thread(self.files_of, digest)
            shown = await self.put({path: data for path, data in files.items() if not hides(hidden, path)})
            if len(self._derived) >= _MOST_DERIVED:
                self._derived.pop(next(iter(self._derived)))
            self._derived[key] = shown
        return self._derived[key]

    def shown(self, digest: str, hidden: Sequence[str]) -> str:
        """Digest that `without` returned; the template's own digest if `hidden` is empty.

        Raises TemplateError if `without` must be called again.
        """
        if not hidden:
            return digest
        try:
            return self._derived[digest, tuple(hidden)]
        except KeyError:
            raise TemplateError(f"the copy of template {digest[:12]} without hidden files was removed: retry") from None

    async def settled(self) -> None:
        """Wait until no template is being stored."""
        await asyncio.gather(*self._storing.values(), return_exceptions=True)

    def require(self, digest: str) -> str:
        """Return the digest if this server has the template, else raise TemplateError."""
        if not digest.isalnum() or len(digest) > _MAX_DIGEST or not (self._directory / digest).is_dir():
            raise TemplateError(f"envd has no template {digest[:80]!r}: call put_template first")
        return digest

    def directory_of(self, digest: str) -> Path:
        """Directory of a template's files, which must not be changed."""
        return self._directory / digest

    def files_of(self, digest: str) -> dict[str, bytes]:
        """Files of a template: content by path. Blocking."""
        root = self._directory / self.require(digest)
        found = (path for path in root.rglob("*") if path.is_file())
        return {
            name: path.read_bytes() for path in found if not (name := str(path.relative_to(root))).startswith(".git/")
        }

    async def _store_once(self, digest: str, files: Mapping[str, bytes]) -> None:
        async with self._lock:
            if not (self._directory / digest).exists():
                await asyncio.to_thread(self._store, digest, files)

    def _store(self, digest: str, files: Mapping[str, bytes]) -> None:
        """Store a template under a name unique to this attempt, then rename, so that no reader finds a partial one."""
        draft = self._directory / f".{digest}.{secrets.token_hex(4)}"
        try:
            draft.mkdir()
            for path, content in sorted(files.items()):
                target = draft / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
                target.chmod(0o755 if content.startswith(b"#!") else 0o644)
            _commit(draft)
            _settle(draft, self._owner)
            draft.rename(self._directory / digest)
        except OSError as error:
            if not (self._directory / digest).exists():  # if it exists, another attempt stored it
                raise TemplateError(f"template {digest[:12]} can't be stored: {describe(error)}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _charge(files: Mapping[str, bytes]) -> int:
    """Bytes that a template takes on disk: files in whole blocks, as much again for git's copies, and _REPOSITORY."""
    return 2 * sum(-(-max(len(content), 1) // _BLOCK) * _BLOCK for content in files.values()) + _REPOSITORY


def template_digest(files: Mapping[str, bytes]) -> str:
    """Digest of a template: SHA-256 over the sorted paths and the SHA-256 of each content."""
    whole = hashlib.sha256(b"envd template 1\n")
    for path, content in sorted(files.items()):
        whole.update(path.encode() + b"\0" + hashlib.sha256(content).digest())
    return whole.hexdigest()


def _check_path(path: str) -> None:
    pure = PurePosixPath(path)
    bad = pure.is_absolute() or ".." in pure.parts or ".git" in pure.parts or str(pure) != path or path == "."
    if bad or "\0" in path:
        raise TemplateError(f"template path {path!r} must be a plain relative path outside .git")


def _commit(directory: Path) -> None:
    """Commit the files with fixed names and dates, so that equal files give the same commit on every machine."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(directory)} | _GIT_ENV
    for command in (
        ["init", "--quiet", "--initial-branch=main", "--template="],
        ["add", "--all", "--force"],
        ["commit", "--quiet", "--allow-empty", "--message=template"],
    ):
        done = subprocess.run(["git", *command], cwd=directory, env=environment, capture_output=True, check=False)
        if done.returncode:
            said = " ".join(done.stderr.decode(errors="replace").split())
            raise TemplateError(
                f"git {command[0]} failed on a template ({said}): check {directory.parent}, and the space on its disk"
            )


def _settle(directory: Path, owner: int) -> None:
    """Change the tree's owner to the sandbox's user and set every modification time to _STAMP."""
    for path in [directory, *directory.rglob("*")]:
        if owner != os.geteuid():
            os.chown(path, owner, owner, follow_symlinks=False)
        os.utime(path, (_STAMP, _STAMP), follow_symlinks=False)
