"""The job `NAME_data`: run a data pipeline, launched in the UI.

Its result appears as a materialization of `data/NAME`, whose plots tab then shows the rows of each version.
"""

from pathlib import Path

import dagster as dg

from contracts.errors import ConfigError
from curation.pipeline.config import Pipeline
from curation.pipeline.plan import plan_pipeline
from curation.pipeline.runner import run_pipeline
from curation.pipeline.versions import record_version
from resources.data_pipeline import load_pipeline
from resources.errors import ExperimentError
from resources.store import StoreResource
from triplane_dagster.experiment_files import BrokenFile
from triplane_dagster.jobs import REPEATED_WHOLE, job_op


def load_pipelines(folder: Path) -> tuple[dict[Path, Pipeline], list[BrokenFile]]:
    """(pipelines of a folder by file, files that can't be used)."""
    files, broken = dict[Path, Pipeline](), []
    for path in sorted(folder.glob("*.yaml")):
        try:
            files[path] = load_pipeline(path)
        except ConfigError as error:
            broken.append(BrokenFile(path, ExperimentError(str(error))))
    return files, broken


def data_job(path: Path, pipeline: Pipeline) -> dg.JobDefinition:
    """Job that runs one pipeline. path: of its file, which is read again by each run."""

    @job_op(None, f"{pipeline.name}_run_pipeline")
    def data_op(context: dg.OpExecutionContext, store: StoreResource) -> None:
        opened = store.open()
        plan = plan_pipeline(load_pipeline(path), path.resolve().parent)
        version = record_version(opened, pipeline.name, run_pipeline(plan, opened))
        left_out = {
            f"{number} {stage['stage']}: left out, {reason}": count
            for number, stage in enumerate(version.artifact.meta["stages"])
            for reason, count in stage["left_out"].items()
        }
        metadata = {"dagster/row_count": version.artifact.meta["rows"], "version": version.number, **left_out}
        context.log_event(dg.AssetMaterialization(["data", pipeline.name], description=str(version), metadata=metadata))

    @dg.job(
        name=f"{pipeline.name}_data",
        description=f"Data pipeline {pipeline.name}: {pipeline.description or 'rows in stages into versioned Parquet'}",
        tags=REPEATED_WHOLE,
    )
    def job() -> None:
        data_op()

    return job
