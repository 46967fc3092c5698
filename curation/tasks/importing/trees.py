"""Trees of files by path: of a folder, of a commit, with a patch applied; and the patch between two trees. Uses git
without its configuration.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from curation.errors import TaskError

Tree = dict[str, bytes]
"""Contents by relative POSIX path."""
LEFT_OUT = frozenset(
    {".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".tox", ".venv", "node_modules"}
)
"""Directories that are not part of a repository's content."""


def folder_tree(root: Path) -> Tree:
    """Every file below root. A link to a file of the same folder counts as that file; other links are left out."""
    tree: Tree = {}
    inside = root.resolve()
    for directory, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        for name in sorted(set(names) - LEFT_OUT):
            path = Path(directory, name)
            if path.is_file() and path.resolve().is_relative_to(inside):
                tree[_relative(path, root)] = path.read_bytes()
    return tree


def commit_tree(clone: Path, commit: str) -> Tree:
    """Every file of a commit, exactly as in git; the clone stays unchanged.

    Raises TaskError for an unknown commit.
    """
    if run_git(["cat-file", "-e", f"{commit}^{{commit}}"], clone).returncode:
        raise TaskError(
            f"its clone {clone.name} lacks commit {commit}: fetch it there (`git fetch --unshallow` or `git fetch"
            f" origin {commit}`)"
        )
    with tempfile.TemporaryDirectory() as scratch:
        # a bare clone has no work tree, which checkout-index asks for
        index = {"GIT_INDEX_FILE": f"{scratch}/index", "GIT_WORK_TREE": scratch}
        for command in (["read-tree", commit], ["checkout-index", "--all", f"--prefix={scratch}/tree/"]):
            done = run_git(command, clone, environment=index)
            if done.returncode:
                raise TaskError(f"commit {commit} can't be read from {clone.name}: {_said(done)}")
        return folder_tree(Path(scratch, "tree"))


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
        _must(run_git(["init", "--quiet", "--template="], root))
        _must(run_git(["add", "--all", "--force"], root))
        old = _must(run_git(["write-tree"], root)).decode().strip()
        for path in before.keys() - after.keys():
            (root / path).unlink()
        write_tree(root, after)
        _must(run_git(["add", "--all", "--force"], root))
        options = ["--cached", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-renames"]
        return _must(run_git(["diff", *options, old], root))


def write_tree(root: Path, tree: Tree) -> None:
    """Write every file below root."""
    root.mkdir(exist_ok=True)
    for path, data in tree.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def _relative(path: Path, root: Path) -> str:
    name = path.relative_to(root).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError:
        raise TaskError(f"its file {os.fsencode(name)!r} has a name that is not UTF-8: rename it") from None
    return name


def run_git(
    command: Sequence[str], where: Path, *, data: bytes = b"", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run git in `where` without its configuration, ignoring repositories above `where`. data: its standard input."""
    settings = {
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CEILING_DIRECTORIES": str(where.absolute().parent),
        "GIT_TERMINAL_PROMPT": "0",
    }
    options = ["-c", "core.autocrlf=false", "-c", "safe.directory=*"]
    return subprocess.run(
        ["git", *options, *command],
        cwd=where,
        input=data,
        env=settings | (environment or {}),
        capture_output=True,
        check=False,
    )


def _must(done: subprocess.CompletedProcess[bytes]) -> bytes:
    if done.returncode:
        raise TaskError(f"git could not compare it with its fix: {_said(done)}")
    return done.stdout


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    return " ".join(done.stderr.decode(errors="replace").split())[:300]
