"""Templates: pristine workspaces, named by the digest of their files and stored in the server's run directory.

    templates/<digest>/   whole: the files, and a git repository that has them in one commit
    patches/<digest>      derived: what the template has in place of its base's files (template_patches.py); in memory
                          if it is smaller than a block of a file system

A sandbox gets a directory, so `ready` makes a whole copy of a derived template before one starts, as `put` would have.
Unused copies are removed first where room is needed. A copy shares nothing with the base that a sandbox could see:
neither objects of git, which hold the base's version of changed files, nor inodes, whose numbers of links and times
tell which files were changed.

To write files and a repository takes longer than most verdicts, so verdicts on derived templates get lighter copies:

    templates/<base>.files        the base's files, which no sandbox sees
    templates/<digest>.verdict    hard links to these, and the changed files, without a repository
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from contracts.errors import describe
from envd.errors import BaseMissing, TemplateError
from envd.server.quotas import Quotas
from envd.server.rules import hides
from envd.server.template_books import FILES, VERDICT, WHOLE, Books, Removed, copy_name, names_of
from envd.server.template_patches import Patch
from envd.server.template_trees import (
    blocks_of,
    charge_of,
    check_paths,
    draft_of,
    files_size,
    links_size,
    read_tree,
    write_files,
    write_links,
    write_patch,
    write_tree,
)
from envd.trees import Tree, digest_of_hashes, hashes_of, patched, template_digest

_MOST_SHOWN = 1024
_MOST_BASES = 8
"""Number of bases whose hashes are kept in memory."""
_IN_MEMORY = 1024
"""Longest packed patch that is kept in memory, in bytes: a file takes a whole block of the disk."""
_UNUSED = 128 << 20
"""Bytes of the whole copies of derived templates that are kept while no sandbox uses them."""
_MAX_DIGEST = 128
"""Longest digest that is looked up, in characters; file systems reject much longer names."""


class Templates:
    """Stores each template once, regardless of how many callers put it."""

    def __init__(self, directory: Path, owner: int, quotas: Quotas | None = None) -> None:
        """quotas: limits for each key; None: no limits."""
        self._directory, self._patches = directory, directory.with_name("patches")
        self._owner = owner
        self._bases: dict[str, str] = {}
        self._packed: dict[str, bytes] = {}
        self._books = Books(quotas, self._bases, self._busy)
        self._held: Counter[str] = Counter()
        self.on_removed: Callable[[str], Coroutine[Any, Any, None]] | None = None
        """Callback with the name of each directory of a template that is removed."""
        self._lock = asyncio.Lock()
        self._storing: dict[str, asyncio.Task[None]] = {}
        self._removing: dict[str, asyncio.Task[None]] = {}
        self._shown: dict[tuple[str, tuple[str, ...]], str] = {}
        self._hashes: OrderedDict[str, dict[str, bytes]] = OrderedDict()

    async def put(self, files: Tree) -> str:
        """Store a template and return its digest. Raises TemplateError for a path outside the workspace."""
        check_paths(files, files)
        digest = template_digest(files)
        with self.held(digest):
            await self._remove(self._books.charge(digest, charge_of(files)))
            await self._once(digest, self._store(digest, dict(files)), new=True)
        return digest

    async def derive(self, base: str, changed: Tree, removed: Collection[str]) -> str:
        """Store a template as a patch of its base, and return its digest: that of the whole tree.

        changed: files that the base lacks or has otherwise. removed: paths of the base that the template lacks. Raises
        BaseMissing, and TemplateError for a path outside the workspace or a removed path that the base lacks.
        """
        if not self._has(base):
            raise BaseMissing(f"envd has no template {base[:80]!r} to derive from: put the base first")
        root = self._bases.get(base, base)
        with self.held(base), self.held(root):
            patch = Patch(root, {}, frozenset())
            if base != root:
                patch = await asyncio.to_thread(self._patch_of, base, root)
            return await self._derive(await self._hashes_of(root), patch, changed, frozenset(removed))

    async def _derive(self, hashes: dict[str, bytes], base: Patch, changed: Tree, removed: frozenset[str]) -> str:
        """hashes: of the files of the base's own base. base: empty for a base that is stored whole."""
        absent = next((each for each in sorted(removed) if each not in hashes and each not in base.changed), None)
        if absent is not None or removed & base.removed:
            absent = absent or min(removed & base.removed)
            raise TemplateError(f"removed path {absent!r} is no file of the base: leave it out")
        both = removed & changed.keys()
        if both:
            raise TemplateError(f"path {min(both)!r} is both changed and removed: leave it out of one of them")
        patch = base.then(changed, removed, hashes)
        whole = {path: each for path, each in hashes.items() if path not in patch.removed} | hashes_of(patch.changed)
        check_paths(changed, whole)
        digest = digest_of_hashes(whole)
        with self.held(digest):
            if self._has(digest):
                await self._remove(self._books.charge(digest, 0))
            else:
                packed = await asyncio.to_thread(patch.pack, self._directory / patch.base)
                await self._remove(self._books.charge(digest, blocks_of(len(packed)), base=patch.base))
                await self._once(digest, self._store_patch(digest, patch.base, packed), new=True)
        return digest

    async def ready(self, digest: str) -> None:
        """Make the directory of a template: that of a derived one may be missing. Hold the template without awaiting.

        Raises TemplateError if the template was removed, and QuotaExceeded.
        """
        while not (self._directory / self.require(digest)).is_dir():
            with self.held(digest):
                await self._once(digest, self._copy(digest))

    async def ready_for_verdict(self, digest: str) -> str:
        """Make the directory in which a verdict on a template starts, and return its name. Hold the template without
        awaiting. Raises as `ready`.
        """
        if self.require(digest) not in self._bases:
            return digest
        name = copy_name(digest, VERDICT)
        while not (self._directory / name).is_dir():
            with self.held(self.require(digest)):
                await self._once(name, self._copy_for_verdict(digest))
        self._books.use(name)
        return name

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
        self._books.use(digest)

    def release(self, digest: str) -> None:
        """Undo one `hold`."""
        self._held[digest] -= 1
        if not self._held[digest]:
            del self._held[digest]
            # not at once: `ready` releases what its caller holds next
            asyncio.get_running_loop().call_soon(self._remove_surplus)

    def _remove_surplus(self) -> None:
        for name in self._books.surplus(_UNUSED):
            self._remove_directory(name)

    def _busy(self, digest: str) -> bool:
        return digest in self._held or not self._storing.keys().isdisjoint(names_of(digest))

    async def _once(self, name: str, work: Coroutine[Any, Any, None], *, new: bool = False) -> None:
        """Do what stores a template, or a copy, or wait for who does so already. new: take it off the books if that
        fails.
        """
        storing = self._storing.get(name)
        if storing is None or storing.done():
            storing = self._storing[name] = asyncio.create_task(work)
            storing.add_done_callback(lambda done: self._stored(name, done))
        else:
            work.close()
        # shielded: a thread can't be cancelled, so the work, and its lock, continue when a caller is cancelled
        try:
            await asyncio.shield(storing)
        except TemplateError:
            if new and not self._has(name):
                self._books.forget(name)
            raise

    def _stored(self, name: str, done: asyncio.Task[None]) -> None:
        if self._storing.get(name) is done:  # it may have a successor already
            del self._storing[name]

    async def _store(self, digest: str, files: Tree) -> None:
        async with self._lock:
            await self._removed(digest)
            if not self._has(digest):
                await asyncio.to_thread(write_tree, self._directory / digest, files, self._owner)
                self._books.resize(digest, charge_of(files))

    async def _store_patch(self, digest: str, base: str, packed: bytes) -> None:
        if not self._has(digest):
            if len(packed) <= _IN_MEMORY:
                self._packed[digest] = packed
            else:
                await asyncio.to_thread(write_patch, self._patches / digest, packed)
            self._bases[digest] = base

    async def _copy(self, digest: str) -> None:
        """Store the whole copy of a derived template."""
        async with self._lock:
            await self._removed(digest)
            with self.held(self._bases[digest]):
                files = await asyncio.to_thread(self.files_of, digest)
                _check(digest, template_digest(files))
                writing = partial(write_tree, self._directory / digest, files, self._owner)
                await self._charged(digest, WHOLE, charge_of(files), writing)

    async def _copy_for_verdict(self, digest: str) -> None:
        """Store the copy of a derived template in which verdicts start."""
        name, base = copy_name(digest, VERDICT), self._bases[digest]
        source = self._directory / copy_name(base, FILES)
        async with self._lock:
            await self._removed(name)
            with self.held(base):
                await self._removed(source.name)
                if not source.is_dir():
                    files = await asyncio.to_thread(self.files_of, base)
                    _check(base, template_digest(files))
                    await self._charged(
                        base, FILES, files_size(files), partial(write_files, source, files, self._owner)
                    )
                self._books.use(source.name)
                hashes, patch = await self._hashes_of(base), await asyncio.to_thread(self._patch_of, digest, base)
                kept = hashes.keys() - patch.removed - patch.changed.keys()
                _check(digest, digest_of_hashes({path: hashes[path] for path in kept} | hashes_of(patch.changed)))
                linking = partial(write_links, self._directory / name, source, kept, patch.changed, self._owner)
                await self._charged(digest, VERDICT, links_size(kept, patch.changed), linking)

    async def _charged(self, digest: str, kind: str, size: int, write: Callable[[], None]) -> None:
        """Charge a template's copy of `size` bytes, then store it by calling `write`."""
        await self._remove(self._books.charge(digest, 0, copy=size, kind=kind))
        try:
            await asyncio.to_thread(write)
        except BaseException:
            self._books.copies.pop(copy_name(digest, kind), None)
            raise

    async def _removed(self, name: str) -> None:
        """Wait until a directory of this name is removed that was to be removed."""
        if name in self._removing:
            await asyncio.wait([self._removing[name]])

    async def _remove(self, removed: Removed) -> None:
        """Remove unused templates and copies."""
        for digest in removed.templates:
            self._hashes.pop(digest, None)
            if self._bases.pop(digest, None) is not None and self._packed.pop(digest, None) is None:
                (self._patches / digest).unlink(missing_ok=True)
            for key in [key for key, shown in self._shown.items() if digest in (key[0], shown)]:
                del self._shown[key]
        names = [*removed.copies, *(name for digest in removed.templates for name in names_of(digest))]
        for name in names:
            self._remove_directory(name)
        await asyncio.gather(*map(self._removed, names))

    def _remove_directory(self, name: str) -> None:
        """Remove a directory, if it exists: rename it, so that no reader finds a part, and delete it later.

        `_removed` waits for the end.
        """
        gone = draft_of(self._directory / name)
        with suppress(FileNotFoundError):
            (self._directory / name).rename(gone)
            removing = self._removing[name] = asyncio.create_task(self._clear(name, gone))
            removing.add_done_callback(lambda _: self._removing.pop(name))

    async def _clear(self, name: str, gone: Path) -> None:
        if self.on_removed is not None:
            await self.on_removed(name)
        await asyncio.to_thread(shutil.rmtree, gone, True)

    async def without(self, digest: str, hidden: Sequence[str]) -> str:
        """Digest of the template without the files that these globs match; stored at first use."""
        key = (digest, tuple(hidden))
        if key not in self._shown:
            files = await asyncio.to_thread(self.files_of, digest)
            shown = await self.derive(digest, {}, [path for path in files if hides(hidden, path)])
            if len(self._shown) >= _MOST_SHOWN:
                self._shown.pop(next(iter(self._shown)))
            self._shown[key] = shown
        return self._shown[key]

    def shown(self, digest: str, hidden: Sequence[str]) -> str:
        """Digest that `without` returned; the template's own digest if `hidden` is empty.

        Raises TemplateError if `without` must be called again.
        """
        if not hidden:
            return digest
        try:
            return self._shown[digest, tuple(hidden)]
        except KeyError:
            raise TemplateError(f"the copy of template {digest[:12]} without hidden files was removed: retry") from None

    async def settled(self) -> None:
        """Wait until no template is being stored or removed."""
        await asyncio.gather(*self._storing.values(), *self._removing.values(), return_exceptions=True)

    def require(self, digest: str) -> str:
        """Return the digest if this server has the template, else raise TemplateError."""
        if not self._has(digest):
            raise TemplateError(f"envd has no template {digest[:80]!r}: call put_template first")
        return digest

    def _has(self, digest: str) -> bool:
        known = digest.isalnum() and len(digest) <= _MAX_DIGEST
        return digest in self._bases or (known and (self._directory / digest).is_dir())

    def directory_of(self, name: str) -> Path:
        """Directory of a template's files, or of its copy of this name, which must not be changed; see `ready`."""
        return self._directory / name

    def files_of(self, digest: str) -> dict[str, bytes]:
        """Files of a template: content by path. Blocking."""
        base = self._bases.get(self.require(digest), digest)
        files = read_tree(self._directory / base)
        if base == digest:
            return files
        patch = self._patch_of(digest, base)
        return patched(files, patch.changed, patch.removed)

    def _patch_of(self, digest: str, base: str) -> Patch:
        """Patch of a derived template. Raises TemplateError. Blocking."""
        try:
            packed = self._packed.get(digest) or (self._patches / digest).read_bytes()
            return Patch.unpack(packed, self._directory / base)
        except OSError as error:
            raise TemplateError(f"template {digest[:12]} can't be read ({describe(error)}): retry") from error

    async def _hashes_of(self, digest: str) -> dict[str, bytes]:
        """Hashes of the files of a template that is stored whole, by path."""
        if digest not in self._hashes:
            found = await asyncio.to_thread(lambda: hashes_of(read_tree(self._directory / digest)))
            self._hashes[digest] = found
            if len(self._hashes) > _MOST_BASES:
                self._hashes.popitem(last=False)
        return self._hashes[digest]


def _check(digest: str, found: str) -> None:
    if found != digest:
        raise TemplateError(f"template {digest[:12]} was changed on the disk: restart this envd server")
