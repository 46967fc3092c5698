"""Sets a final state up for its tests: the diff applied, test configuration restored, hidden files placed.

Where the verifier has two users, the diff is applied as the one that the tests run as, to whom the workspace belongs.
Hidden files belong to the supervisor, and so do the directories they lie in, which are sticky: the tests can read them,
and neither change, move nor remove them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO

from contracts.patterns import PathPatterns
from envd.sandbox import linux
from envd.sandbox.diff import LINK, Entry, changed_paths, tree_entries
from envd.sandbox.patch import NotPlain, apply_plain, without_files
from envd.sandbox.review import review
from envd.sandbox.undoing import unwanted
from envd.tools.paths import make_parents, open_in_root

_ALSO_OTHERWISE_USED = frozenset({"setup.cfg", "pyproject.toml", "tox.ini"})
"""Changing these says something about tests only where they speak of pytest."""
_CACHE = "__pycache__"
_GIT = frozenset({".git"})
_UNDECLARED = "undeclared:"
_MACHINE_FAULTS = frozenset({errno.ENOMEM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EAGAIN})
"""What a final state does not cause by itself: to be tried again. Every other failure to set it up is its own."""
_MOST_NOTES = 32
_MOST_UNDECLARED = 8
"""Of these notes, for what the diff touches beside the artifacts: other notes must have room."""


class Preparation:
    """One workspace on its way from the template to what is tested."""

    def __init__(
        self, workspace: Path, template: Path, scratch: Path, *, supervised: bool, artifacts: PathPatterns | None = None
    ) -> None:
        """artifacts: the paths that the diff may change; None: any."""
        self._workspace, self._template, self._scratch = workspace, template, scratch
        self._supervised, self._artifacts = supervised, artifacts
        self.notes: list[str] = []
        """What the diff brought that steers tests, by name: it was undone, and says nothing about why it was there."""
        self.changed: list[str] = []
        """Paths that the diff changed, as they were found before anything was undone but what artifacts leave out."""

    def run(self, diff: bytes, hidden: Mapping[str, bytes], product: Collection[str] = ()) -> str | None:
        """Set it up; the reason when it can't be. product: files of the template that solutions change."""
        try:
            with self._as_tests():
                diff = self._declared(diff)
                problem = self._apply(diff)
                if problem is not None:
                    return problem
                self._undo_undeclared()
                if _CACHE.encode() in diff:
                    self._drop_caches()
                changed = self.changed = changed_paths(self._template, self._workspace)
                self._note_others(changed, hidden)  # before anything is undone: it tells what the diff brought
                self._undo(changed, hidden, product)
                for note in review(self._workspace, self._template, changed):
                    self._note(note)
            for path, content in sorted(hidden.items()):
                _place_file(self._workspace, path, content)
                if self._supervised:
                    self._protect(path)
        except OSError as error:
            if error.errno in _MACHINE_FAULTS:
                raise
            return f"the final state leaves no place for the hidden tests: {error.strerror}"
        return None

    @contextlib.contextmanager
    def _as_tests(self) -> Iterator[None]:
        """As the user that the tests run as. Nothing of the final state's runs yet."""
        if not self._supervised:
            yield
            return
        linux.act_as(0)
        try:
            yield
        finally:
            linux.act_as(linux.SUPERVISOR)

    def _apply(self, diff: bytes) -> str | None:
        """Apply a git patch to the workspace; the reason when git refuses."""
        if not diff.strip():
            return None
        with contextlib.suppress(NotPlain):
            apply_plain(self._workspace, diff)
            return None
        with _nameless(self._scratch) as patch, _nameless(self._scratch) as errors:
            _write_all(patch.fileno(), diff)
            patch.seek(0)
            # by descriptor: the user that git runs as can't enter the supervisor's directory
            actions = [(os.POSIX_SPAWN_DUP2, patch.fileno(), 0), (os.POSIX_SPAWN_DUP2, errors.fileno(), 2)]
            pid = os.posix_spawnp("git", ["git", "apply", "--whitespace=nowarn", "-"], os.environ, file_actions=actions)
            _, status = os.waitpid(pid, 0)
            errors.seek(0)
            said = errors.read(65536).decode(errors="replace")
        return said.replace("<stdin>", "the diff")[:2000] if status else None

    def _declared(self, diff: bytes) -> bytes:
        """The diff of the artifacts: hunks of other files are not applied."""
        if self._artifacts is None:
            return diff
        diff, dropped = without_files(diff, self._artifacts.names)
        for path in dropped:
            self._note_undeclared(path)
        return diff

    def _undo_undeclared(self) -> None:
        """What changed all the same, whatever the diff said of itself: files beside the artifacts, and links."""
        if self._artifacts is None:
            return
        before = tree_entries(self._template, _GIT)
        for path in changed_paths(self._template, self._workspace, _GIT):
            target = self._workspace / path
            if not self._artifacts.names(path):
                self._note_undeclared(path)
            elif target.is_symlink():
                self._note("link:artifact")
            else:
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                target.unlink()
            if path in before:
                self._put_back(path, before[path])

    def _put_back(self, path: str, entry: Entry) -> None:
        """Restore a file or a link of the template's."""
        if entry.mode == LINK:
            _make_way(self._workspace, path)
            (self._workspace / path).symlink_to((self._template / path).readlink())
            return
        _place_file(self._workspace, path, (self._template / path).read_bytes())
        (self._workspace / path).chmod(int(entry.mode[-3:], 8))

    def _note_undeclared(self, path: str) -> None:
        if sum(note.startswith(_UNDECLARED) for note in self.notes) < _MOST_UNDECLARED:
            self._note(_UNDECLARED + path)

    def _drop_caches(self) -> None:
        """Remove compiled code that the diff brought: Python and pytest would run it in place of the source beside
        it.
        """
        for folder, folders, _ in os.walk(self._workspace):
            if _CACHE in folders:
                folders.remove(_CACHE)
                found = Path(folder, _CACHE)
                if not (self._template / found.relative_to(self._workspace)).exists():
                    shutil.rmtree(found)
                    self._note(f"undone:{_CACHE}")

    def _undo(self, changed: list[str], hidden: Mapping[str, bytes], product: Collection[str]) -> None:
        """Undo what steers Python or pytest, and name it."""
        for path, note in unwanted(changed, self._template, hidden, product):
            target, original = self._workspace / path, self._template / path
            if note and (Path(path).name not in _ALSO_OTHERWISE_USED or _speaks_of_pytest(target)):
                self._note(note)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                target.unlink()
            if original.exists() and not original.is_symlink():
                _place_file(self._workspace, path, original.read_bytes())

    def _note_others(self, changed: list[str], hidden: Mapping[str, bytes]) -> None:
        for path in changed:
            if path in hidden or any(f"{each}/" == path[: len(each) + 1] for each in hidden):
                self._note("undone:hidden-test")
            target = self._workspace / path
            if target.is_symlink() and any(each.startswith(f"{path}/") for each in hidden):
                self._note("link:hidden-test")
            elif target.is_symlink() and not _stays(target.readlink(), PurePosixPath(path).parent):
                self._note("link:outside")

    def _note(self, name: str) -> None:
        name = os.fsencode(name).decode(errors="backslashreplace")
        name = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in name)[:200]
        if name not in self.notes and len(self.notes) < _MOST_NOTES:
            self.notes.append(name)

    def _protect(self, path: str) -> None:
        """Make the directories down to a hidden file the supervisor's, where others may make files and touch only their
        own.
        """
        for parent in PurePosixPath(path).parents:
            fd = open_in_root(self._workspace, str(parent), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                os.fchown(fd, linux.SUPERVISOR, linux.SUPERVISOR)
                os.fchmod(fd, 0o1777)
            finally:
                os.close(fd)


def _nameless(directory: Path) -> IO[bytes]:
    return tempfile.TemporaryFile("w+b", 0, dir=directory)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _stays(target: Path, folder: PurePosixPath) -> bool:
    """Whether a link's target is within the workspace."""
    if target.is_absolute():
        return target.is_relative_to("/workspace")
    return not os.path.normpath(folder / target).startswith("..")


def _speaks_of_pytest(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            return b"pytest" in file.read()
    except OSError:
        return False


def _place_file(root: Path, path: str, content: bytes) -> None:
    """Write a file, replacing whatever stands in its way."""
    _make_way(root, path)
    fd = open_in_root(root, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def _make_way(root: Path, path: str) -> None:
    """Remove what stands where a file is to be, a link, a directory, or a file where a parent must be, and make its
    parents.
    """
    target = root / path
    for part in [*reversed(target.relative_to(root).parents), Path(path)][1:]:
        here = root / part
        if here.is_symlink() or (here.is_file() and here != target):
            here.unlink()
    if target.is_dir():
        shutil.rmtree(target)
    make_parents(root, path)
    target.unlink(missing_ok=True)
