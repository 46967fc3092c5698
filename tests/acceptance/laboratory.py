"""A folder in which the real command line runs an experiment, as a user's own folder would be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.artifacts import Artifact, list_artifacts, open_artifact
from contracts.store import Store, open_store
from resources.experiment import Experiment, load_experiment
from resources.refs import read_ref

ROOT = Path(__file__).parents[2]


@dataclass
class Laboratory:
    """One experiment, one store, one Dagster instance, all below `folder`."""

    folder: Path
    experiment_file: Path
    overrides: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "dagster.yaml", self.folder / "dagster.yaml")

    @property
    def store(self) -> Store:
        return open_store(self.environment.get("TRIPLANE_STORE") or str(self.folder / ".triplane" / "store"))

    @property
    def experiment(self) -> Experiment:
        return load_experiment(self.experiment_file, list(self.overrides))

    @property
    def settings(self) -> list[str]:
        return ["-e", str(self.experiment_file), *(part for each in self.overrides for part in ("--set", each))]

    @property
    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("TRIPLANE_STORE", "DAGSTER_HOME")}
        return {**kept, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **self.environment}

    def command(self, *arguments: str) -> list[str]:
        return [str(Path(sys.executable).with_name("triplane")), *arguments]

    def run(self, *arguments: str, timeout: float = 1800) -> str:
        done = subprocess.run(
            self.command(*arguments), cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, (
            f"triplane {' '.join(arguments)} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json"))

    def iterate(self, count: int) -> Any:
        return self.json("iterate", *self.settings, "-n", str(count))

    def take_base_from(self, other: Laboratory) -> None:
        """Copy what base_policy and task_suite are made of, and nothing else, from a laboratory of the same
        experiment.
        """
        base = other.artifact("base_policy").ref.key
        for source in (other.folder / ".triplane" / "store" / "artifacts").glob("*/*"):
            kind, key = source.parts[-2:]
            if kind in ("task_suite", "tokenizer", "demonstrations") or key == base:
                shutil.copytree(source, self.folder / ".triplane" / "store" / "artifacts" / kind / key)

    def artifact(self, kind: str, iteration: str | None = None) -> Artifact:
        """What the experiment's asset of this name refers to now."""
        ref = read_ref(self.store, self.experiment.name, kind, iteration)
        assert ref is not None, f"{kind} {iteration} was never materialized"
        return open_artifact(self.store, ref)

    def digests(self, *kinds: str) -> dict[str, list[str]]:
        """Content digests by kind, sorted."""
        return {kind: sorted(artifact.ref.digest for artifact in list_artifacts(self.store, kind)) for kind in kinds}


def processes_of(folder: Path) -> Iterator[str]:
    """Command lines of live processes that work in or name `folder`."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                place = str((entry / "cwd").readlink())
            except OSError:
                continue
            if str(folder) in line or place.startswith(str(folder)):
                yield line
