"""Runs of an experiment in a store and a Dagster instance of their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest

from contracts.store import Store, open_store
from resources.experiment import Experiment
from triplane_dagster.sequence import run_iterations


@dataclass(frozen=True)
class World:
    """One store and one Dagster instance in which the tiny experiment ran."""

    experiment: Experiment
    store: Store
    instance: dg.DagsterInstance
    made: list[str]


def run_world(experiment: Experiment, count: int, folder: Path, base: Path | None = None) -> Iterator[World]:
    """Run `count` iterations below `folder`, in a fresh store and a fresh instance, or in copies of those of `base`."""
    if base is None:
        (folder / "dagster").mkdir()
    else:
        shutil.copytree(base, folder, dirs_exist_ok=True)
    with _environment(folder) as instance:
        made = run_iterations(experiment, count, instance)
        yield World(experiment, open_store(), instance, made)


def opened_world(experiment: Experiment, made: list[str], folder: Path) -> Iterator[World]:
    """The world below `folder`, in which the iterations `made` were run."""
    with _environment(folder) as instance:
        yield World(experiment, open_store(), instance, made)


@contextmanager
def _environment(folder: Path) -> Iterator[dg.DagsterInstance]:
    with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.local_temp(str(folder / "dagster")) as instance:
        patch.setenv("TRIPLANE_STORE", str(folder / "store"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield instance
