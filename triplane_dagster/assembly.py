"""Build Dagster definitions from experiments: assets, jobs, schedules, sensors and shared resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from assets import experiment_assets
from curation.pipeline.config import Pipeline
from resources.experiment import Experiment
from resources.progress import ProgressSink, no_progress
from resources.ref_io import RefIOManager
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource
from resources.store import StoreResource
from resources.training_launcher import TrainingLauncher
from triplane_dagster.alerts import alert_on_failure
from triplane_dagster.broken_files import broken_assets
from triplane_dagster.data_job import data_job, load_pipelines
from triplane_dagster.evaluation_job import evaluation_job
from triplane_dagster.executors import step_executor
from triplane_dagster.experiment_files import BrokenFile, experiments_folder, load_folder, pipelines_folder
from triplane_dagster.freshness import with_freshness
from triplane_dagster.jobs import base_job, half_jobs, iteration_job, rollback_job
from triplane_dagster.orphans import orphan_sensors
from triplane_dagster.overdue import overdue_sensors
from triplane_dagster.schedules import nightly
from triplane_dagster.sensors import continue_sequence
from triplane_dagster.training_job import train_job


def load_definitions() -> dg.Definitions:
    """Definitions of the experiments folder, broken files included."""
    loaded = load_folder(experiments_folder())
    pipelines, broken = load_pipelines(pipelines_folder())
    return definitions_for(loaded.experiments, broken=[*loaded.broken, *broken], pipelines=pipelines)


def resources_with(sink: ProgressSink) -> dict[str, Any]:
    """Resources that assets ask for, by name."""
    store = StoreResource()
    return {
        "store": store,
        "io_manager": RefIOManager(store=store),
        "sandboxes": SandboxesResource(),
        "sampler": SamplerResource(),
        "launcher": TrainingLauncher(),
        "progress": sink,
    }


def definitions_for(
    experiments: Sequence[Experiment],
    sink: ProgressSink = no_progress,
    resources: Mapping[str, Any] | None = None,
    broken: Sequence[BrokenFile] = (),
    pipelines: Mapping[Path, Pipeline] | None = None,
) -> dg.Definitions:
    """Definitions of these experiments, and of data pipelines by file. resources: replacements for the default ones, by
    name.
    """
    bases = [base_job(experiment) for experiment in experiments]
    iterations = [iteration_job(experiment) for experiment in experiments]
    halves = [half_jobs(experiment) if experiment.off_policy.overlap else [] for experiment in experiments]
    trainings = [train_job(experiment) for experiment in experiments]
    return dg.Definitions(
        assets=[
            *(with_freshness(each, asset) for each in experiments for asset in experiment_assets(each)),
            *broken_assets(broken, [experiment.name for experiment in experiments]),
        ],
        jobs=[
            *bases,
            *iterations,
            *(job for jobs in halves for job in jobs),
            *trainings,
            *(rollback_job(experiment) for experiment in experiments),
            *(evaluation_job(experiment) for experiment in experiments),
            *(data_job(path, pipeline) for path, pipeline in (pipelines or {}).items()),
        ],
        schedules=[nightly(experiment, job) for experiment, job in zip(experiments, trainings, strict=True)],
        sensors=[
            *(
                continue_sequence(experiment, [base, iteration, *half])
                for experiment, base, iteration, half in zip(experiments, bases, iterations, halves, strict=True)
            ),
            alert_on_failure,
            *overdue_sensors(experiments),
            *orphan_sensors(experiments),
        ],
        resources={**resources_with(sink), **(resources or {})},
        executor=step_executor(),
    )
