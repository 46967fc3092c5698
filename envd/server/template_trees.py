"""Templates on disk: whole ones, directories of files with a git repository that has them in one commit, and lighter
copies without a repository.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from contracts.errors import describe
from envd.errors import TemplateError
from envd.trees import Tree

_STAMP = 1_000_000_000
"""Modification time (seconds since 1970) of every template file; a file with another time was written."""
_IDENTITY = {"NAME": "envd", "EMAIL": "envd@localhost", "DATE": f"{_STAMP} +0000"}
_GIT_ENV = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in _IDENTITY.items()} | {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    # no process that looks for maintenance after each commit
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "maintenance.auto",
    "GIT_CONFIG_VALUE_0": "false",
}
_AS_THEY_ARE = b"* -text -ident -filter -working-tree-encoding\n"
"""Attributes that override those of the tree, with which git would change files or refuse some."""
_BLOCK, _REPOSITORY = 4096, 64 * 1024
"""Block size of a file system, and the size of an empty git repository, in bytes."""

_MAX_PATH = 4096
"""Longest path in characters, as in Linux."""


def charge_of(files: Tree) -> int:
    """Bytes that a template takes on disk: files in whole blocks, as much again for git's copies, and _REPOSITORY."""
    return 2 * files_size(files) + _REPOSITORY


def blocks_of(size: int) -> int:
    """Bytes that a file of `size` bytes takes on disk, in whole blocks."""
    return -(-max(size, 1) // _BLOCK) * _BLOCK


def check_paths(added: Iterable[str], paths: Collection[str]) -> None:
    """Check the paths that a template gets. paths: all of its paths, as a set or a mapping.

    Raises TemplateError for an added path that is not a plain relative one or lies in .git, and for a path that is a
    file and a directory at once.
    """
    for path in added:
        _check_path(path)
    for path in paths:
        end = path.rfind("/")
        while end > 0:
            if path[:end] in paths:
                raise TemplateError(
                    f"template path {path!r} lies below {path[:end]!r}, which is a file: leave one of them out"
                )
            end = path.rfind("/", 0, end)


def _check_path(path: str) -> None:
    pure = PurePosixPath(path)
    bad = pure.is_absolute() or ".." in pure.parts or ".git" in pure.parts or str(pure) != path or path == "."
    if bad or "\0" in path or len(path) > _MAX_PATH:
        raise TemplateError(
            f"template path {path[:200]!r} must be plain and relative, outside .git, of at most {_MAX_PATH} characters"
        )


def read_tree(directory: Path) -> dict[str, bytes]:
    """Files of a template outside .git: content by path. Blocking."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return {
        name: path.read_bytes() for path in found if not (name := str(path.relative_to(directory))).startswith(".git/")
    }


def write_tree(directory: Path, files: Tree, owner: int) -> None:
    """Store a template under a name unique to this attempt, then rename, so that no reader finds a partial one.

    Raises TemplateError. Blocking.
    """
    with _drafted(directory) as draft:
        _write_files(draft, files)
        _commit(draft, attributes=any(PurePosixPath(path).name == ".gitattributes" for path in files))
        _settle(draft, owner)


def write_files(directory: Path, files: Tree, owner: int) -> None:
    """As `write_tree`, without a repository."""
    with _drafted(directory) as draft:
        _write_files(draft, files)
        _settle(draft, owner)


def write_links(directory: Path, source: Path, kept: Iterable[str], changed: Tree, owner: int) -> None:
    """As `write_files`, of the files at `kept` paths of `source`, which `write_files` has made, as hard links, and of
    the changed ones.
    """
    with _drafted(directory) as draft:
        made = set[str]()
        for path in sorted(kept):
            above = path.rpartition("/")[0]
            if above not in made:
                (draft / above).mkdir(parents=True, exist_ok=True)
                made.add(above)
            _link(f"{source}/{path}", f"{draft}/{path}")
        _write_files(draft, changed)
        _settle(draft, owner, of=changed.keys())


def links_size(kept: Iterable[str], changed: Tree) -> int:
    """Bytes that `write_links` takes on disk: directories, and the changed files."""
    folders = {path.rpartition("/")[0] for path in (*kept, *changed)}
    return _BLOCK * len(folders) + files_size(changed)


def files_size(files: Tree) -> int:
    """Bytes that files take on disk, in whole blocks."""
    return sum(blocks_of(len(content)) for content in files.values())


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # such as too many links, or a file system without any
        shutil.copy2(source, target)
        about = Path(source).stat()
        os.chown(target, about.st_uid, about.st_gid)


@contextmanager
def _drafted(directory: Path) -> Iterator[Path]:
    """A new directory, which becomes `directory` at the end of the block. Raises TemplateError."""
    draft = draft_of(directory)
    try:
        draft.mkdir()
        yield draft
        draft.rename(directory)
    except OSError as error:
        if not directory.exists():  # if it exists, another attempt stored it
            raise TemplateError(f"template {directory.name[:12]} can't be stored: {describe(error)}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_files(directory: Path, files: Tree) -> None:
    """In the order of their paths, so that no time and no number of an inode tells one file from another."""
    made = set()
    for path, content in sorted(files.items()):
        target = directory / path
        if target.parent not in made:
            target.parent.mkdir(parents=True, exist_ok=True)
            made.add(target.parent)
        with target.open("wb") as file:
            os.fchmod(file.fileno(), 0o755 if content.startswith(b"#!") else 0o644)
            file.write(content)


def write_patch(path: Path, packed: bytes) -> None:
    """Store a packed patch as one file, which appears with its whole content. Raises TemplateError. Blocking."""
    draft = draft_of(path)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        draft.write_bytes(packed)
        draft.rename(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise TemplateError(f"template {path.name[:12]} can't be stored: {describe(error)}") from error


def draft_of(path: Path) -> Path:
    """Hidden name beside a path for what must not appear under it: a draft, or what is being deleted."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _commit(directory: Path, *, attributes: bool) -> None:
    """Commit the files with fixed names and dates, so that equal files give the same commit on every machine.

    attributes: whether files of the tree give attributes of git, which then change no content.
    """
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": os.devnull} | _GIT_ENV
    if attributes:
        (directory / ".git/info").mkdir(parents=True)
        (directory / ".git/info/attributes").write_bytes(_AS_THEY_ARE)
    for command in (
        ["init", "--quiet", "--initial-branch=main", "--template="],
        ["add", "--all", "--force"],
        ["commit", "--quiet", "--allow-empty", "--message=template"],
    ):
        done = subprocess.run(
            ["git", *command],
            cwd=directory,
            env=environment,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            said = " ".join(done.stderr.decode(errors="replace").split())
            raise TemplateError(
                f"git {command[0]} failed on a template ({said}): check {directory.parent}, and the space on its disk"
            )


def _settle(directory: Path, owner: int, *, of: Container[str] | None = None) -> None:
    """Change the tree's owner to the sandbox's user and set every modification time to _STAMP. of: paths of the only
    files for which that is to be done.
    """
    given, begin = owner != os.geteuid(), len(f"{directory}/")
    for above, _, names in os.walk(directory, topdown=False):
        files = [f"{above}/{name}" for name in names]
        for path in [*(each for each in files if of is None or each[begin:] in of), above]:
            if given:
                os.chown(path, owner, owner, follow_symlinks=False)
            os.utime(path, (_STAMP, _STAMP), follow_symlinks=False)
