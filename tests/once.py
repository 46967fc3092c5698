"""What is expensive to make, made by one of the processes of a run of pytest for all of them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Folder that all processes of this run of pytest see."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@contextmanager
def one_at_a_time(place: Path) -> Iterator[None]:
    """Hold the lock of a place; released when its process dies, too."""
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills in one process. Not to be changed."""
    place = shared_folder(factory) / name
    with one_at_a_time(place):
        if not place.exists():
            draft = factory.mktemp(name)
            make(draft)
            draft.rename(place)
    return place
