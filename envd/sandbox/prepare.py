"""Prepare a final state for its tests: apply the diff, restore test configuration, place hidden files.

Where the verifier has two users, it applies the diff as the user that runs the tests and owns the workspace. Hidden
files and their directories belong to the supervisor, and the directories are sticky: the tests can read the hidden
files, and neither change, move nor remove them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from importlib.util import cache_from_source
from pathlib import Path, PurePosixPath
from typing import IO

from contracts.patterns import PathPatterns
from envd.sandbox import linux
from envd.sandbox.diff import LINK, Entry, changed_paths, tree_entries
from envd.sandbox.patch import NotPlain, apply_plain, without_files
from envd.sandbox.review import GRAVE, review
from envd.sandbox.undoing import unwanted
from envd.tools.paths import make_parents, open_in_root

_ALSO_OTHERWISE_USED = frozenset({"setup.cfg", "pyproject.toml", "tox.ini"})
"""Configuration files with other uses, too: a change is noted only if the file mentions pytest."""
_CACHE = "__pycache__"
_GIT = frozenset({".git"})
_UNDECLARED = "undeclared:"
_MACHINE_FAULTS = frozenset({errno.ENOMEM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EAGAIN})
"""Errors of the machine, which a retry may avoid. Every other error of the preparation is the final state's."""
_MOST_NOTES = 32
"""Maximum number of notes beside those of `GRAVE`, which no number of others displaces."""
_MOST_UNDECLARED = 8
"""Maximum number of notes about paths other than the artifacts, so that there is room for other notes."""


class Preparation:
    """Turns one workspace, a copy of the template, into the tree that is tested."""

    def __init__(
        self, workspace: Path, template: Path, scratch: Path, *, supervised: bool, artifacts: PathPatterns | None = None
    ) -> None:
        """artifacts: the paths that the diff may change; None: any."""
        self._workspace, self._template, self._scratch = workspace, template, scratch
        self._supervised, self._artifacts = supervised, artifacts
        self.notes: list[str] = []
        """Names of the diff's changes that influence tests. They are undone; a note does not prove intent."""
        self.changed: list[str] = []
        """Paths that the diff changed, found after undeclared changes were undone and before others were."""

    def run(
        self,
        diff: bytes,
        hidden: Mapping[str, bytes],
        product: Collection[str] = (),
        codes: Mapping[str, bytes] = {},
        modules: Mapping[str, bytes] = {},
    ) -> str | None:
        """Prepare the workspace. Returns the reason if that fails, else None. Raises OSError for machine faults.

        product: files of the template that solutions change. codes: byte code of hidden files, by its own path.
        modules: byte code of modules of the template, by their paths; of those that the diff changes none is placed.
        """
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
                self._note_others(changed, hidden)  # before anything is undone
                self._undo(changed, hidden, product)
                for note in review(self._workspace, self._template, changed):
                    self._note(note)
                for path in sorted(modules.keys() - set(changed)):
                    with contextlib.suppress(OSError):  # runs without, slower
                        _place_file(self._workspace, cache_from_source(path), modules[path])
            for path, content in sorted({**hidden, **codes}.items()):
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
        """Act as the user that the tests run as, at a time when no code of the final state runs."""
        if not self._supervised:
            yield
            return
        linux.act_as(0)
        try:
            yield
        finally:
            linux.act_as(linux.SUPERVISOR)

    def _apply(self, diff: bytes) -> str | None:
        """Apply a git patch to the workspace. Returns git's error message if git refuses, else None."""
        if not diff.strip():
            return None
        with contextlib.suppress(NotPlain):
            apply_plain(self._workspace, diff)
            return None
        with _nameless(self._scratch) as patch, _nameless(self._scratch) as errors:
            _write_all(patch.fileno(), diff)
            patch.seek(0)
            # By descriptor, since the user that git runs as can't enter the supervisor's directory.
            actions = [(os.POSIX_SPAWN_DUP2, patch.fileno(), 0), (os.POSIX_SPAWN_DUP2, errors.fileno(), 2)]
            pid = os.posix_spawnp("git", ["git", "apply", "--whitespace=nowarn", "-"], os.environ, file_actions=actions)
            _, status = os.waitpid(pid, 0)
            errors.seek(0)
            said = errors.read(65536).decode(errors="replace")
        return said.replace("<stdin>", "the diff")[:2000] if status else None

    def _declared(self, diff: bytes) -> bytes:
        """The part of the diff that changes artifacts; other files are noted."""
        if self._artifacts is None:
            return diff
        diff, dropped = without_files(diff, self._artifacts.names)
        for path in dropped:
            self._note_undeclared(path)
        return diff

    def _undo_undeclared(self) -> None:
        """Undo changes to other files than the artifacts, and symbolic links, whatever the diff's headers say."""
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
        """Restore a file or a symbolic link from the template."""
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
        """Remove compiled code that the diff adds: Python and pytest would run it instead of the source."""
        for folder, folders, _ in os.walk(self._workspace):
            if _CACHE in folders:
                folders.remove(_CACHE)
                found = Path(folder, _CACHE)
                if not (self._template / found.relative_to(self._workspace)).exists():
                    shutil.rmtree(found)
                    self._note(f"undone:{_CACHE}")

    def _undo(self, changed: list[str], hidden: Mapping[str, bytes], product: Collection[str]) -> None:
        """Undo and note changes that influence Python or pytest."""
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
        if name not in self.notes and (name in GRAVE or len(self.notes) < _MOST_NOTES):
            self.notes.append(name)

    def _protect(self, path: str) -> None:
        """Give the directories above a hidden file to the supervisor and make them sticky."""
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
    """Whether a symbolic link's target is within the workspace."""
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
    """Write a file and its parents, replacing whatever is at these paths."""
    _make_way(root, path)
    fd = open_in_root(root, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def _make_way(root: Path, path: str) -> None:
    """Remove what is at a file's path, and links or files at its parents' paths; then create the parents."""
    target = root / path
    for part in [*reversed(target.relative_to(root).parents), Path(path)][1:]:
        here = root / part
        if here.is_symlink() or (here.is_file() and here != target):
            here.unlink()
    if target.is_dir():
        shutil.rmtree(target)
    make_parents(root, path)
    target.unlink(missing_ok=True)
