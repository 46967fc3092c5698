"""File operations of the Python agent, inside its workspace. No path leads out of it (envd/tools/paths.py)."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from envd.guest.protocol import CHUNK, LIST_BYTES, PART, Writer
from envd.tools.paths import make_parents, open_in_root, relative

LAST, PARENTS, EXCLUSIVE, IN_PLACE = 1, 2, 4, 16
SKIP_HIDDEN, FILES_ONLY = 1, 2
_HIDDEN = frozenset({".git", "__pycache__", ".pytest_cache"})
_MAX_WRITES = 64
_TYPES = {stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFLNK: 3}
_RENAMEAT2 = {"x86_64": 316, "aarch64": 276}.get(platform.machine())
_RENAME_NOREPLACE = 1
_UNREADABLE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENAMETOOLONG})
"""Removed or replaced meanwhile, locked by the sandbox's own code, or too deep to name: such is left out of a listing."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class _Write:
    """A file of which pieces are still to come."""

    file: int
    directory: int
    temporary: str
    """Empty: written into place."""
    size: int = 0


class Files:
    """The workspace."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._writes: dict[int, _Write] = {}

    def read(self, path: str, offset: int, at_most: int) -> bytes:
        """READ's fields."""
        fd = open_in_root(self._root, path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            about = os.fstat(fd)
            if stat.S_ISDIR(about.st_mode):
                raise _error(errno.EISDIR)
            if not stat.S_ISREG(about.st_mode):
                raise _error(errno.ENXIO)
            data = os.pread(fd, min(at_most, CHUNK), min(offset, (1 << 63) - 1))
            return _entry(Writer(), relative(path), about, "").data(data).body()
        finally:
            os.close(fd)

    def stat(self, path: str, follow: bool) -> bytes:
        """STAT's fields."""
        fd = open_in_root(self._root, path, os.O_PATH | (0 if follow else os.O_NOFOLLOW))
        try:
            about = os.fstat(fd)
            target = os.readlink("", dir_fd=fd) if stat.S_ISLNK(about.st_mode) else ""
            return _entry(Writer(), relative(path), about, target).body()
        finally:
            os.close(fd)

    def write(self, identity: int, path: str, flags: int, mode: int, offset: int, data: bytes) -> bytes:
        """One piece of WRITE; its fields."""
        try:
            write = self._writes.get(identity) if offset else self._open(identity, path, flags, mode)
            if write is None or offset != write.size:
                raise OSError(errno.EINVAL, "pieces of a file have to come in order")
            view = memoryview(data)
            while view:
                view = view[os.write(write.file, view) :]
            write.size += len(data)
            about = os.fstat(write.file)
            if flags & LAST:
                self._finish(identity, write, path, flags)
            return _entry(Writer(), relative(path), about, "").body()
        except OSError:
            self.drop(identity)
            raise

    def drop(self, identity: int) -> None:
        """Throw away a file whose pieces do not come any more."""
        write = self._writes.pop(identity, None)
        if write is None:
            return
        os.close(write.file)
        if write.temporary:
            try:
                os.unlink(write.temporary, dir_fd=write.directory)
            except FileNotFoundError:
                pass
        os.close(write.directory)

    def entries(self, path: str, depth: int, limit: int, flags: int) -> Iterator[tuple[bytes, bool]]:
        """LIST's parts, and with the last (empty) one whether something was left out."""
        prefix = relative(path)
        part, count, held, sent = Writer(), 0, 0, 0
        for number, (name, about, target) in enumerate(self._walk("" if prefix == "." else prefix, path, depth, flags)):
            if number == limit or sent > LIST_BYTES - 2 * PART:
                yield Writer().u32(count).body() + part.body(), False
                yield b"", True
                return
            _entry(part, name, about, target)
            count += 1
            held += len(name) + len(target) + 64
            if held > PART:
                yield Writer().u32(count).body() + part.body(), False
                part, count, held, sent = Writer(), 0, 0, sent + held
        if count:
            yield Writer().u32(count).body() + part.body(), False
        yield b"", False

    def move(self, source: str, target: str, overwrite: bool) -> bytes:
        """MOVE's fields."""
        from_fd, from_name = self._parent(source)
        try:
            to_fd, to_name = self._parent(target)
            try:
                if overwrite:
                    os.rename(from_name, to_name, src_dir_fd=from_fd, dst_dir_fd=to_fd)
                else:
                    _rename_to_nothing(from_fd, from_name, to_fd, to_name)
            finally:
                os.close(to_fd)
        finally:
            os.close(from_fd)
        return self.stat(target, follow=False)

    def remove(self, path: str, recursive: bool) -> None:
        """REMOVE."""
        parent, name = self._parent(path)
        try:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=parent)
            elif recursive:
                self._remove_tree(relative(path))
            else:
                os.rmdir(name, dir_fd=parent)
        finally:
            os.close(parent)

    def mkdir(self, path: str, parents: bool) -> bytes:
        """MKDIR's fields."""
        if relative(path) != ".":
            if parents:
                make_parents(self._root, path)
            parent, name = self._parent(path)
            try:
                os.mkdir(name, dir_fd=parent)
            except FileExistsError:
                if not parents or not stat.S_ISDIR(os.stat(name, dir_fd=parent).st_mode):
                    raise
            finally:
                os.close(parent)
        elif not parents:
            raise _error(errno.EEXIST)
        return self.stat(path, follow=True)

    def sync(self) -> None:
        """Write the workspace's file system out."""
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _libc.syncfs(fd) < 0:
                raise _error(ctypes.get_errno())
        finally:
            os.close(fd)

    def _parent(self, path: str) -> tuple[int, str]:
        """A descriptor of the directory that a path is in, and its name there."""
        pure = PurePosixPath(relative(path))
        if pure.name in ("", ".."):
            raise OSError(errno.EBUSY, "not a name in a directory of the workspace")
        return open_in_root(self._root, str(pure.parent), os.O_PATH | os.O_DIRECTORY), pure.name

    def _open(self, identity: int, path: str, flags: int, mode: int) -> _Write:
        self.drop(identity)
        if len(self._writes) >= _MAX_WRITES:
            raise OSError(errno.EMFILE, f"{_MAX_WRITES} files are being written")
        if relative(path) == ".":
            raise _error(errno.EISDIR)
        if flags & PARENTS:
            make_parents(self._root, path)
        if flags & IN_PLACE:
            how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | (os.O_EXCL if flags & EXCLUSIVE else 0)
            write = _Write(
                open_in_root(self._root, path, how, mode or 0o644), os.open("/", os.O_PATH | os.O_CLOEXEC), ""
            )
            if not stat.S_ISREG(os.fstat(write.file).st_mode):
                os.close(write.file)
                os.close(write.directory)
                raise _error(errno.ENXIO)
        else:
            write = self._open_beside(path, flags, mode)
        self._writes[identity] = write
        return write

    def _open_beside(self, path: str, flags: int, mode: int) -> _Write:
        directory, name = self._parent(path)
        try:
            try:
                there = os.stat(name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                there = None
            if there is not None and stat.S_ISDIR(there.st_mode):
                raise _error(errno.EISDIR)
            if there is not None and flags & EXCLUSIVE:
                raise _error(errno.EEXIST)
            if not mode:
                mode = there.st_mode if there is not None and stat.S_ISREG(there.st_mode) else 0o644
            temporary = f".envd-{secrets.token_hex(8)}"
            how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(temporary, how, 0o600, dir_fd=directory)
            os.fchmod(file, mode & 0o7777)
            return _Write(file, directory, temporary)
        except BaseException:
            os.close(directory)
            raise

    def _finish(self, identity: int, write: _Write, path: str, flags: int) -> None:
        if write.temporary:
            name = PurePosixPath(relative(path)).name
            if flags & EXCLUSIVE:
                _rename_to_nothing(write.directory, write.temporary, write.directory, name)
            else:
                os.rename(write.temporary, name, src_dir_fd=write.directory, dst_dir_fd=write.directory)
        write.temporary = ""
        self.drop(identity)

    def _walk(self, prefix: str, path: str, depth: int, flags: int) -> Iterator[tuple[str, os.stat_result, str]]:
        """(path, what it is, link target), sorted, parents before children.

        Directories are opened anew by their paths: a tree may be deeper than descriptors last.
        """
        pending = [iter(self._children(prefix, path, flags, os.O_RDONLY | os.O_DIRECTORY))]
        while pending:
            found = next(pending[-1], None)
            if found is None:
                pending.pop()
                continue
            name, about, _ = found
            if stat.S_ISDIR(about.st_mode):
                if not flags & FILES_ONLY:
                    yield found
                if depth == 0 or len(pending) < depth:
                    pending.append(iter(self._children(name, name, flags, _DIRECTORY)))
            elif not flags & FILES_ONLY or stat.S_IFMT(about.st_mode) in _TYPES:
                yield found

    def _children(self, prefix: str, path: str, flags: int, how: int) -> list[tuple[str, os.stat_result, str]]:
        try:
            fd = open_in_root(self._root, path, how)
        except OSError as error:
            if how != _DIRECTORY or error.errno not in _UNREADABLE:
                raise
            return []
        found = []
        try:
            for name in sorted(os.listdir(fd), key=os.fsencode):  # noqa: PTH208 - a descriptor
                if name in _HIDDEN and flags & SKIP_HIDDEN:
                    continue
                try:
                    about = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    target = os.readlink(name, dir_fd=fd) if stat.S_ISLNK(about.st_mode) else ""
                except OSError as error:
                    if error.errno not in _UNREADABLE:
                        raise
                    continue
                found.append((f"{prefix}/{name}" if prefix else name, about, target))
        finally:
            os.close(fd)
        return found

    def _remove_tree(self, path: str) -> None:
        pending = [path]
        while pending:
            above = pending[-1]
            deeper = []
            for name, about, _ in self._children(above, above, 0, _DIRECTORY):
                if stat.S_ISDIR(about.st_mode):
                    deeper.append(name)
                else:
                    self.remove(name, recursive=False)
            if deeper:
                pending += deeper
            else:
                pending.pop()
                self.remove(above, recursive=False)


def _entry(fields: Writer, path: str, about: os.stat_result, target: str) -> Writer:
    kind = _TYPES.get(stat.S_IFMT(about.st_mode), 4)
    fields.data(os.fsencode(path)).u8(kind).u32(stat.S_IMODE(about.st_mode)).u64(about.st_size)
    return fields.i64(about.st_mtime_ns).data(os.fsencode(target))


def _rename_to_nothing(from_fd: int, source: str, to_fd: int, target: str) -> None:
    """Rename, but never over something."""
    if _RENAMEAT2 is None:
        raise _error(errno.ENOSYS)
    names = os.fsencode(source), os.fsencode(target)
    if _libc.syscall(_RENAMEAT2, from_fd, names[0], to_fd, names[1], _RENAME_NOREPLACE) < 0:
        raise _error(ctypes.get_errno())


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))
