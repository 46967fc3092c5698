"""Unpack archives that tests download or keep."""

from __future__ import annotations

import tarfile
from pathlib import Path


def extract(archive: Path, folder: Path) -> None:
    """Extract a tar archive, refusing members that lead out of `folder` where Python can."""
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has no filters
        tar.extractall(folder)
