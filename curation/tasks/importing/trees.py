"""Trees of files by path: of a folder, of a commit, with a patch applied; and the patch between two trees.

A repository's configuration can name programs that git runs (filters, textconv, fsmonitor, remotes of a partial clone),
and `.gitattributes` change the files that git writes. So clones are read as objects, in a repository of our own.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from curation.errors import TaskError

Tree = dict[str, bytes]
"""Contents by relative POSIX path."""
LEFT_OUT = frozenset(
    {".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".tox", ".venv", "node_modules"}
)
"""Directories that are not part of a repository's content."""
_MOST_STEPS = 1000
"""Path components that are followed at most to resolve one link."""
_AS_THEY_ARE = b"* -text -ident -filter -working-tree-encoding\n"
"""Git attributes that keep files unchanged; they take precedence over the `.gitattributes` of a tree."""


def folder_tree(root: Path) -> Tree:
    """Every file below root. A link to a file of the same folder counts as that file; other links are left out."""
    tree: Tree = {}
    inside = root.resolve()
    for directory, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        for name in sorted(set(names) - LEFT_OUT):
            path = Path(directory, name)
            if path.is_file() and path.resolve().is_relative_to(inside):
                tree[utf8_name(path.relative_to(root).as_posix())] = path.read_bytes()
    return tree


@dataclass(frozen=True)
class Entry:
    """An entry of a commit that is not a directory."""

    path: str
    mode: str
    """Octal, as git prints it."""
    digest: str
    size: int
    """Bytes of its blob; 0 if the clone lacks it, and for a submodule."""

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return self.mode == "120000"

    @property
    def is_submodule(self) -> bool:
        """Whether it is a commit of another repository."""
        return self.mode == "160000"


@contextmanager
def objects_of(clone: Path) -> Iterator[Path]:
    """Bare repository with the objects of a clone, for the time of the block. It has none of the clone's configuration,
    attributes and references. Raises TaskError if the folder is no git repository.
    """
    found = run_git(["rev-parse", "--show-object-format", "--git-common-dir"], clone)
    if found.returncode:
        raise TaskError(f"{clone} can't be read as a git repository: {_said(found)}")
    form, _, common = os.fsdecode(found.stdout).removesuffix("\n").partition("\n")
    place = Path(clone.absolute(), common)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        sha256 = ["--object-format=sha256"] if form == "sha256" else []
        _must(run_git(["init", "--quiet", "--bare", "--template=", *sha256], root), "make a repository")
        (root / "objects/info/alternates").write_bytes(os.fsencode(place / "objects") + b"\n")
        if (place / "shallow").is_file():
            (root / "shallow").write_bytes((place / "shallow").read_bytes())
        yield root


def commit_tree(clone: Path, commit: str) -> Tree:
    """Every file of a commit, exactly as in git; the clone stays unchanged.

    Raises TaskError for an unknown commit.
    """
    with objects_of(clone) as objects:
        if run_git(["cat-file", "-e", f"{commit}^{{commit}}"], objects).returncode:
            raise TaskError(
                f"its clone {clone.name} lacks commit {commit}: fetch it there (`git fetch --unshallow` or `git fetch"
                f" origin {commit}`)"
            )
        return entries_tree(objects, commit_entries(objects, commit))


def commit_entries(objects: Path, commit: str) -> list[Entry]:
    """Entries of a commit, by path. objects: of `objects_of`.

    Raises TaskError if the commit can't be read, and for paths that no folder can have.
    """
    done = _must(run_git(["ls-tree", "-r", "-l", "-z", "--full-tree", commit], objects), f"read commit {commit}")
    entries = []
    for line in done.split(b"\0")[:-1]:
        about, _, name = line.partition(b"\t")
        mode, _, digest, size = about.decode().split()
        entries.append(Entry(utf8_name(os.fsdecode(name)), mode, digest, int(size) if size.isdigit() else 0))
    _check_paths({each.path for each in entries})
    return entries


def entries_tree(objects: Path, entries: Sequence[Entry]) -> Tree:
    """Files of a commit's entries, with links as in `folder_tree`. Raises TaskError if the clone lacks one."""
    blobs = _blobs(objects, [each.digest for each in entries if not each.is_submodule])
    contents = {each.path: blobs[each.digest] for each in entries if not each.is_submodule}
    links = {each.path: os.fsdecode(contents.pop(each.path)) for each in entries if each.is_link}
    for path in links:
        target = _followed(path, links)
        if target is not None and target in contents:
            contents[path] = contents[target]
    return {path: contents[path] for path in sorted(contents) if LEFT_OUT.isdisjoint(path.split("/"))}


def _blobs(objects: Path, digests: Sequence[str]) -> dict[str, bytes]:
    """Contents of blobs by their digest."""
    asked = "".join(f"{each}\n" for each in dict.fromkeys(digests)).encode()
    said = _must(run_git(["cat-file", "--batch"], objects, data=asked), "read a commit's files")
    blobs, at = dict[str, bytes](), 0
    while at < len(said):
        start = said.index(b"\n", at) + 1
        digest, kind, *size = said[at:start].decode().split()
        if kind != "blob":
            raise TaskError(f"its clone lacks the file {digest}: clone it whole, without --filter")
        at = start + int(size[0]) + 1
        blobs[digest] = said[start : at - 1]
    return blobs


def _followed(path: str, links: Mapping[str, str]) -> str | None:
    """Path to which links lead; None if it is outside, or if they lead in a circle."""
    left, place = path.split("/")[::-1], list[str]()
    for _ in range(_MOST_STEPS):
        if not left:
            return "/".join(place)
        part = left.pop()
        if part == "..":
            if not place:
                return None
            place.pop()
        elif part not in ("", "."):
            target = links.get("/".join([*place, part]))
            if target is None:
                place.append(part)
            elif target.startswith("/"):
                return None
            else:
                left += target.split("/")[::-1]
    return None


def patched_tree(tree: Tree, patch: bytes, name: str) -> Tree:
    """`tree` with a patch applied. name: of the patch, for the message. Raises TaskError if git refuses the patch."""
    if not patch.strip():
        return dict(tree)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "tree")
        write_tree(root, tree)
        done = run_git(["apply", "--whitespace=nowarn", "-"], root, data=patch)
        if done.returncode:
            raise TaskError(f"its {name} does not apply: {_said(done)}; make it anew against this very tree")
        return folder_tree(root)


def tree_patch(before: Tree, after: Tree) -> bytes:
    """Patch in git's format that changes one tree into the other."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "tree")
        write_tree(root, before)
        compare = "compare it with its fix"
        _must(run_git(["init", "--quiet", "--template="], root), compare)
        (root / ".git/info").mkdir(exist_ok=True)
        (root / ".git/info/attributes").write_bytes(_AS_THEY_ARE)
        _must(run_git(["add", "--all", "--force"], root), compare)
        old = _must(run_git(["write-tree"], root), compare).decode().strip()
        for path in before.keys() - after.keys():
            (root / path).unlink()
        write_tree(root, after)
        _must(run_git(["add", "--all", "--force"], root), compare)
        options = ["--cached", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-renames"]
        return _must(run_git(["diff", *options, old], root), compare)


def write_tree(root: Path, tree: Tree) -> None:
    """Write every file below root. Raises TaskError for a path that leads out of it or into a git repository."""
    _check_paths(tree.keys())
    root.mkdir(exist_ok=True)
    for path, data in tree.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def _check_paths(paths: Set[str]) -> None:
    for path in paths:
        parts = path.split("/")
        above = {"/".join(parts[:end]) for end in range(1, len(parts))}
        if not {"", ".", "..", ".git"}.isdisjoint(parts) or not above.isdisjoint(paths):
            raise TaskError(f"it holds the path {path!r}, which is unsafe or below a file: leave it out")


def utf8_name(name: str) -> str:
    """The name of a file. Raises TaskError if it is not UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise TaskError(f"its file {os.fsencode(name)!r} has a name that is not UTF-8: rename it") from None
    return name


def run_git(
    command: Sequence[str], where: Path, *, data: bytes = b"", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run git in `where` without the user's configuration, ignoring repositories above `where`. data: its standard
    input. Of a clone only `rev-parse` may be asked here, since git reads its configuration; see `objects_of`.
    """
    settings = {
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(where.absolute().parent),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "",  # for git before 2.45, which does not know the line above
    }
    options = ["core.autocrlf=false", "core.fsmonitor=false", f"core.hooksPath={os.devnull}", "safe.directory=*"]
    return subprocess.run(
        ["git", *(word for each in options for word in ("-c", each)), *command],
        cwd=where,
        input=data,
        env=settings | (environment or {}),
        capture_output=True,
        check=False,
    )


def _must(done: subprocess.CompletedProcess[bytes], what: str) -> bytes:
    """Output of a command of git. what: its purpose, for the message of the TaskError if it failed."""
    if done.returncode:
        raise TaskError(f"git could not {what}: {_said(done)}")
    return done.stdout


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    return " ".join(done.stderr.decode(errors="replace").split())[:300]
