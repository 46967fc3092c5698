"""A tiny experiment, run once for all tests that look at what a run leaves behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster_world import World, opened_world, run_world

from resources.experiment import Experiment, load_experiment
from tests.once import made_once

TINY = Path(__file__).parent / "tiny.yaml"
ITERATIONS = 2


@pytest.fixture(scope="session")
def tiny() -> Experiment:
    return load_experiment(TINY)


@pytest.fixture(scope="session")
def base_world(tiny: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store and Dagster instance with task suite and base policy of the tiny experiment, to copy."""

    def run(folder: Path) -> None:
        for world in run_world(tiny, 0, folder):
            assert world.made == []

    return made_once(tmp_path_factory, "base-world", run)


@pytest.fixture(scope="session")
def untouched_world(tiny: Experiment, base_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store and Dagster instance after two iterations of the tiny experiment, to copy."""

    def run(folder: Path) -> None:
        for world in run_world(tiny, ITERATIONS, folder, base_world):
            assert world.made == [f"{number:04d}" for number in range(ITERATIONS)]

    return made_once(tmp_path_factory, "untouched-world", run)


@pytest.fixture(scope="session")
def ran(tiny: Experiment, untouched_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The tiny experiment after two iterations."""
    folder = tmp_path_factory.mktemp("ran")
    shutil.copytree(untouched_world, folder, dirs_exist_ok=True)
    yield from opened_world(tiny, [f"{number:04d}" for number in range(ITERATIONS)], folder)


@pytest.fixture(scope="session")
def untouched(untouched_world: Path) -> Path:
    """The store of `ran`, to copy, without what tests have added to it."""
    return untouched_world / "store"


@pytest.fixture(scope="session")
def blank_dagster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Dagster instance in which nothing ran, to copy: to make its databases takes longer than most tests."""

    def make(folder: Path) -> None:
        with dg.DagsterInstance.local_temp(str(folder)):
            pass

    return made_once(tmp_path_factory, "blank-dagster", make)
