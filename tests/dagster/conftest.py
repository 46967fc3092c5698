"""A tiny experiment, run once for all tests that look at what a run leaves behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster_world import World, run_world

from resources.experiment import Experiment, load_experiment

TINY = Path(__file__).parent / "tiny.yaml"


@pytest.fixture(scope="session")
def tiny() -> Experiment:
    return load_experiment(TINY)


@pytest.fixture(scope="session")
def ran(tiny: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The tiny experiment after two iterations."""
    folder = tmp_path_factory.mktemp("ran")
    for world in run_world(tiny, 2, folder):
        shutil.copytree(folder / "store", folder / "untouched")
        yield world


@pytest.fixture(scope="session")
def untouched(ran: World) -> Path:
    """A copy of the store of `ran`, to copy again, without what tests have added to it."""
    return Path(ran.store.url).parent / "untouched"
