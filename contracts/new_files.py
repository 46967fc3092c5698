"""Write files that users keep, such as settings, so that a killed writer leaves nothing under their name."""

from __future__ import annotations

import os
from pathlib import Path

from contracts.failpoints import failpoint


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet, in a folder that does. Raises FileExistsError."""
    staged = path.with_name(f".{path.stem}.{os.getpid()}.part")
    try:
        with staged.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        failpoint("file-staged")
        os.link(staged, path)
    finally:
        staged.unlink(missing_ok=True)
