"""Run jobs of the asset graph in this process for the command line, through the Dagster instance that the UI shows."""

from __future__ import annotations

import glob
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import dagster as dg

from assets.naming import key_of
from contracts.errors import ConfigError
from contracts.store import open_store
from ops.iteration_keys import require_key
from ops.retries import steps_in_one_process
from ops.spans import run_span, trace_tag
from resources.errors import StepFailed
from resources.experiment import Experiment
from resources.progress import ProgressSink, no_progress
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource
from triplane_dagster.assembly import definitions_for
from triplane_dagster.dead_runs import CANCELED, end_dead_runs, end_with_record, process_tag
from triplane_dagster.jobs import Half, base_job_name, half_job_name, iteration_job_name
from triplane_dagster.pools import limit_pools
from triplane_dagster.unfinished import require_idle

_QUIET = {"loggers": {"console": {"config": {"log_level": "WARNING"}}}}
"""Dagster's log goes to the instance only; the terminal shows progress."""


def open_instance(folder: Path | None = None) -> dg.DagsterInstance:
    """Dagster instance, shared with the web server: $DAGSTER_HOME, else the dagster.yaml in `folder` (default:
    here). Raises ConfigError.
    """
    home = os.environ.get("DAGSTER_HOME")
    if home:
        _require_plain(home, home)
        return dg.DagsterInstance.get()
    where = folder or Path()
    if not (where / "dagster.yaml").is_file():
        where = Path(__file__).resolve().parents[1]
    _require_plain(str(where), str(Path.cwd()))
    return dg.DagsterInstance.from_config(str(where))


def _require_plain(config: str, records: str) -> None:
    """Raise ConfigError for a folder that Dagster takes for another one: it looks for dagster.yaml with wildcards, and
    names its databases by URLs.
    """
    misread = records if unquote(records.split("?")[0]) != records else None
    misread = config if glob.escape(config) != config else misread
    if misread is not None:
        raise ConfigError(
            f"Dagster misreads the path {misread}: rename the folder that has a ?, *, [ or % in its name, or point"
            " DAGSTER_HOME at another one"
        )


class Runner:
    """Runs an experiment's jobs in this process. Its servers and engines stay up until it is closed."""

    def __init__(self, experiment: Experiment, instance: dg.DagsterInstance, progress: ProgressSink) -> None:
        self.experiment, self._instance = experiment, instance
        self._sandboxes, self._sampler = SandboxesResource(), SamplerResource()
        shared: dict[str, Any] = {
            "sandboxes": dg.ResourceDefinition.hardcoded_resource(self._sandboxes),
            "sampler": dg.ResourceDefinition.hardcoded_resource(self._sampler),
        }
        with steps_in_one_process():
            self._definitions = definitions_for([experiment], progress, shared)

    def base(self) -> None:
        """Materialize task suite and base policy.

        Committed artifacts are reused. Raises the error of the failing step.
        """
        self._run(base_job_name(self.experiment), None)

    def iteration(self, partition: str, start_from: str = "live", half: Half | None = None) -> None:
        """Materialize one iteration. Raises IterationRefused for a wrong key, else the error of the failing step.

        start_from: live, base, or the beginning of a checkpoint's digest; ignored if the iteration has begun. half:
        only this half, for an experiment with overlap.
        """
        require_key(open_store(), self.experiment, partition)
        self._instance.add_dynamic_partitions(self.experiment.name, [partition])
        step = key_of(self.experiment, "iteration_inputs").to_python_identifier()
        config = {} if half == "learn" else {"ops": {step: {"config": {"policy": start_from}}}}
        job = half_job_name(self.experiment, half) if half else iteration_job_name(self.experiment)
        self._run(job, partition, config, half)

    def assets(self, partition: str, names: Sequence[str]) -> None:
        """Materialize some assets of an iteration again, in graph order. Raises the error of the failing step."""
        self._instance.add_dynamic_partitions(self.experiment.name, [partition])
        self._run(
            iteration_job_name(self.experiment), partition, selection=[key_of(self.experiment, name) for name in names]
        )

    def close(self) -> None:
        """Stop servers and engines started by this runner."""
        self._sampler.close()
        self._sandboxes.close()

    def _run(
        self,
        name_of_job: str,
        partition: str | None,
        config: Mapping[str, Any] | None = None,
        half: Half | None = None,
        selection: Sequence[dg.AssetKey] | None = None,
    ) -> None:
        require_idle(self._instance, self.experiment, half)
        job = self._definitions.resolve_job_def(name_of_job)
        run_id = str(uuid.uuid4())
        try:
            with end_with_record(self._instance, run_id, CANCELED), run_span(run_id, name_of_job):
                done = job.execute_in_process(
                    instance=self._instance,
                    partition_key=partition,
                    run_config={**_QUIET, **(config or {})},
                    run_id=run_id,
                    asset_selection=selection,
                    tags={**process_tag(run_id), **trace_tag(run_id)},
                )
        except BaseException as error:
            if not isinstance(error, Exception):
                self._cancel(run_id)
            raise
        if not done.success:
            raise StepFailed(f"run {done.run_id[:8]} of {job.name} failed: see its log in `triplane ui`")

    def _cancel(self, run_id: str) -> None:
        """Mark an interrupted run as canceled.

        Dagster records it as failed, since Dagster did not terminate it.
        """
        run = self._instance.get_run_by_id(run_id)
        if run is not None:
            self._instance.report_run_canceled(
                run, "Interrupted. Committed work is kept; the next run continues from it."
            )


@contextmanager
def open_runner(
    experiment: Experiment, instance: dg.DagsterInstance, progress: ProgressSink = no_progress
) -> Iterator[Runner]:
    """Context of a runner that is closed at the end of the block.

    First ends the runs of killed processes.
    """
    end_dead_runs(instance)
    limit_pools(instance, [experiment])
    runner = Runner(experiment, instance, progress)
    try:
        yield runner
    finally:
        runner.close()
