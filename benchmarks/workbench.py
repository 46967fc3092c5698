"""Separate folder for benchmarks that run iterations: store, Dagster records and experiment files, kept for resuming.

    .triplane/benchmarks/  store/  dagster/<experiment>/  experiments/  logs/

Each experiment has separate Dagster records, so that several can run concurrently without waiting for one SQLite file.
Experiments that differ only in name share the artifacts that don't depend on it: task suite, demonstrations, a seed's
base policy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from contracts.store import Store, open_store
from resources.experiment import Experiment, load_experiment, read_values
from resources.overrides import apply_overrides

DEFAULT_FOLDER = ".triplane/benchmarks"
DAGSTER_YAML = "telemetry:\n  enabled: false\n"


@dataclass(frozen=True)
class Workbench:
    """The folder."""

    root: Path

    @classmethod
    def at(cls, folder: str) -> Workbench:
        """Create the folder if it does not exist."""
        bench = cls(Path(folder).absolute())
        for name in ("store", "dagster", "experiments", "logs"):
            (bench.root / name).mkdir(parents=True, exist_ok=True)
        return bench

    @property
    def store(self) -> Store:
        """Store with the artifacts."""
        return open_store(str(self.root / "store"))

    def environment(self, experiment: str) -> dict[str, str]:
        """Environment variables for a process that uses this folder and experiment."""
        return {
            **os.environ,
            "TRIPLANE_STORE": str(self.root / "store"),
            "TRIPLANE_EXPERIMENTS": str(self.root / "experiments"),
            "DAGSTER_HOME": str(self.root / "dagster" / experiment),
            "DAGSTER_DISABLE_TELEMETRY": "1",
        }

    def enter(self, experiment: str) -> None:
        """Make this process use this folder and experiment."""
        os.environ.update(self.environment(experiment))

    def add_experiment(self, source: Path, name: str, overrides: list[str]) -> Experiment:
        """Write `source`, renamed and overridden, as an experiment of this folder. Raises ExperimentError."""
        values: dict[str, Any] = apply_overrides(read_values(source), [f"name={name}", *overrides], Experiment)
        path = self.root / "experiments" / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        records = self.root / "dagster" / name
        records.mkdir(exist_ok=True)
        (records / "dagster.yaml").write_text(DAGSTER_YAML)
        return load_experiment(path)
