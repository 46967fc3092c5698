"""quickstart for trainers that are not ours: its base policy, tasks and bridge."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from benchmarks.workbench import Workbench
from contracts.artifacts import open_artifact
from contracts.store import open_store
from contracts.tasks import Split
from curation.tasks.inspect import suite_tasks
from inference.engines.vllm_plain import plain_checkpoint
from resources.progress import no_progress
from resources.refs import require_ref
from triplane_dagster.assembly import definitions_for
from triplane_dagster.cli.quiet import quiet_dagster
from triplane_dagster.experiment_files import experiments_folder
from triplane_dagster.jobs import base_job_name
from triplane_dagster.run import open_instance


@dataclass(frozen=True)
class Quickstart:
    """What a trainer gets."""

    start: str
    """Checkpoint of the base policy, with float32 weights."""
    train: list[str]
    """Ids of tasks."""
    held_out: list[str]
    command: list[str]
    """Starts the bridge of these tasks, without its address and policy."""
    environment: dict[str, str]

    def write(self, path: Path) -> None:
        """As JSON, for a trainer in another environment."""
        path.write_text(json.dumps(asdict(self)))


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quickstart]:
    """Makes the base policy, in minutes."""
    bench = Workbench.at(str(tmp_path_factory.mktemp("quickstart")))
    experiment = bench.add_experiment(experiments_folder() / "quickstart.yaml", "quickstart", [])
    environment = bench.environment("quickstart") | {"TRIPLANE_CACHE": str(bench.root / "cache")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        definitions = definitions_for([experiment], no_progress)
        with quiet_dagster(), open_instance() as instance:
            definitions.resolve_job_def(base_job_name(experiment)).execute_in_process(instance=instance)
        store = open_store()
        base = open_artifact(store, require_ref(store, experiment.name, "base_policy"))
        suite = open_artifact(store, require_ref(store, experiment.name, "task_suite"))
        ids = {split: list(suite_tasks(suite, split)) for split in (Split.TRAIN, Split.HELD_OUT)}
        start = plain_checkpoint(base.directory(), base.ref.digest)
        command = [sys.executable, "-m", "triplane_dagster.cli", "bridge", "-e", "quickstart", "--policy", "base"]
        yield Quickstart(str(start), ids[Split.TRAIN], ids[Split.HELD_OUT], command, environment)
