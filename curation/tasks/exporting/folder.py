"""A folder that appears whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contracts.owned import owned_directory, sweep_abandoned
from curation.errors import TaskError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Hidden folder beside `out`, which becomes `out` when the block ends without an error.

    Raises TaskError if `out` exists and is not an empty folder, or can't be replaced: the current one, or a mount.
    """
    try:
        out = out.resolve()
        out.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise TaskError(f"{out} can't be made ({error}): name a new folder with --out") from None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TaskError(f"{out} exists and is not empty: name a new folder with --out")
    if out == Path.cwd():
        raise TaskError(f"{out} is the current folder, which can't be replaced: name a new folder with --out")
    if out.is_mount():
        raise TaskError(
            f"{out} is a mount, which can't be replaced: name a folder in it, such as --out {out / 'tasks'}"
        )
    parent, prefix = out.parent, f".{out.name}."
    sweep_abandoned(parent, prefix)
    with owned_directory(prefix, parent) as scratch:
        folder = Path(scratch, out.name)
        folder.mkdir()
        yield folder
        folder.rename(out)
