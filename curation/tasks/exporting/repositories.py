"""Bare git repositories in which each task's files are one commit without parents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from curation.errors import TaskError
from curation.tasks.importing.trees import Tree, run_git

_WHO = b"triplane <triplane@localhost> 946684800 +0000"
"""Author and time of every commit, so that equal trees give equal commits."""


def write_repository(folder: Path, trees: Mapping[str, Tree]) -> dict[str, str]:
    """Write one repository, and return the commit of each task's tree by task id.

    Commits are refs/tasks/<number>: they are not branches, so that a clone does not take other tasks' files along.
    """
    folder.mkdir(parents=True)
    _done(run_git(["init", "--bare", "--quiet", "--template=", "--initial-branch=main"], folder).returncode, folder)
    marks = folder / "marks"
    stream = b"".join(_stream(trees))
    _done(
        run_git(["fast-import", "--quiet", f"--export-marks={marks.absolute()}"], folder, data=stream).returncode,
        folder,
    )
    commits = dict(line.split() for line in marks.read_text().splitlines())
    marks.unlink()
    return {task_id: commits[f":{number}"] for number, task_id in enumerate(trees, 1)}


def _stream(trees: Mapping[str, Tree]) -> Iterator[bytes]:
    """Input of `git fast-import`; blobs that tasks share are written once. Marks of commits are 1, 2, ..."""
    blobs: dict[bytes, int] = {}
    for tree in trees.values():
        for data in tree.values():
            if data not in blobs:
                blobs[data] = len(trees) + len(blobs) + 1
                yield b"blob\nmark :%d\ndata %d\n%s\n" % (blobs[data], len(data), data)
    for number, tree in enumerate(trees.values(), 1):
        yield b"commit refs/tasks/%d\nmark :%d\ncommitter %s\ndata 0\n\ndeleteall\n" % (number, number, _WHO)
        for path, data in sorted(tree.items()):
            yield b"M 100644 :%d %s\n" % (blobs[data], _quoted(path))
        yield b"\n"


def _quoted(path: str) -> bytes:
    text = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'.encode()


def _done(code: int, folder: Path) -> None:
    if code:
        raise TaskError(f"git can't write {folder.name} (exit {code}): is git 2.28 or later installed?")
