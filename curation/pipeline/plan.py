"""What a pipeline does: its stages with their schemas, cut into segments that end in an artifact each.

    source | stages of rows and requests | selection | stages ... | sink
             `----- data_rows ----------'  data_kept                data

The key of a segment has the digests and settings of everything up to it, so a changed stage leaves those before it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.digests import action_key, digest_of, file_sha256
from curation.errors import PipelineError
from curation.pipeline.config import (
    DATA_VERSION,
    AskStage,
    JoinStage,
    MapStage,
    Pipeline,
    SampleStage,
    SqlStage,
    WhereStage,
)
from curation.pipeline.databases import database_digest, database_files
from curation.pipeline.requests import after_request_stage
from curation.pipeline.rows import Step, after_row_stage, function_files
from curation.pipeline.schemas import require_distinct
from curation.pipeline.selections import check_selection
from curation.pipeline.sources import PLACE, Reader, Unchanged, open_source, source_digest, source_files, source_slice

DATA, ROWS, KEPT_ROWS = "data", "data_rows", "data_kept"
"""Kinds of artifacts: a pipeline's result, rows before a selection, and the numbers of the rows that it keeps."""


@dataclass(frozen=True)
class Segment:
    """Stages that make one artifact."""

    kind: str
    key: str
    steps: tuple[Step, ...]
    config: dict[str, Any]
    """Settings of everything up to the end of the segment."""
    inputs: dict[str, str]
    """Digests of everything read up to there, by role."""
    files: tuple[Path, ...]
    """Files that its stages, and the first segment's source, are in."""


@dataclass(frozen=True)
class Plan:
    """A pipeline that can run."""

    pipeline: Pipeline
    folder: Path
    """Folder of the pipeline's file, to which paths are relative."""
    reader: Reader
    segments: tuple[Segment, ...]
    """In order; the last one makes the result."""
    unchanged: Unchanged
    """Knows the files that the segments read."""

    @property
    def workers(self) -> int:
        """Number of worker processes."""
        return self.pipeline.workers or len(os.sched_getaffinity(0))

    @property
    def key(self) -> str:
        """Action key of the result."""
        return self.segments[-1].key


def plan_pipeline(pipeline: Pipeline, folder: Path) -> Plan:
    """Check a pipeline against its source, and derive schemas and keys. folder: of its file. Reads files and databases
    for their digests. Raises PipelineError that names the place in the file.
    """
    listed = source_files(pipeline.source, folder)
    reader = open_source(pipeline.source, listed, pipeline.batch_rows, folder)
    if pipeline.key not in reader.schema.names:
        raise PipelineError(
            f"key = {pipeline.key!r}: the source has {', '.join(reader.schema.names)}: name one of them"
        )
    require_distinct(reader.schema.names, PLACE)
    steps, schema = list[Step](), reader.schema
    for number, stage in enumerate(pipeline.stages):
        step = Step(number, stage, pipeline.key, schema, schema)
        if stage.selects:
            check_selection(stage, schema, pipeline.key, step.place)
        elif isinstance(stage, JoinStage | AskStage):
            schema = after_request_stage(stage, schema, step.place)
        elif isinstance(stage, SqlStage | WhereStage | MapStage | SampleStage):
            schema = after_row_stage(stage, schema, pipeline.key, step.place, folder)
        require_distinct(schema.names, step.place)
        if not schema.names:
            raise PipelineError(f"{step.place}.drop: no column is left: keep at least one")
        drawn = sum(hasattr(earlier.stage, "seed") for earlier in steps)
        steps.append(Step(number, stage, pipeline.key, step.before, schema, drawn))
    files = {step.number: _files(step, folder) for step in steps} | {-1: listed}
    unchanged = Unchanged([path for each in files.values() for path in each])
    return Plan(pipeline, folder, reader, tuple(_segments(pipeline, folder, steps, files)), unchanged)


def _segments(pipeline: Pipeline, folder: Path, steps: list[Step], files: dict[int, list[Path]]) -> list[Segment]:
    inputs, config = {"source": source_digest(pipeline.source, files[-1], folder)}, source_slice(pipeline)
    found, done, pending = list[Segment](), list[dict[str, Any]](), list[Step]()

    def add(kind: str, own: list[Step], **more: Any) -> None:
        settings = {**config, "stages": [*done], **more}
        read = tuple(
            path for each in [*([] if found else [-1]), *(step.number for step in own)] for path in files[each]
        )
        key = action_key(kind, inputs, settings, DATA_VERSION)
        found.append(Segment(kind, key, tuple(own), settings, {**inputs}, read))

    for step in steps:
        if step.stage.selects:
            add(ROWS, pending)
            pending = []
        done.append(step.stage.slice)
        inputs |= _digests(step, folder, files[step.number])
        if step.stage.selects:
            add(KEPT_ROWS, [step])
        else:
            pending.append(step)
    add(DATA, pending, sink=pipeline.sink.model_dump(mode="json"))
    return found


def _files(step: Step, folder: Path) -> list[Path]:
    """Files that a stage reads, or whose functions it calls."""
    if isinstance(step.stage, MapStage):
        return function_files(step.stage, folder, step.place)
    return database_files(step.stage.database, folder) if isinstance(step.stage, JoinStage) else []


def _digests(step: Step, folder: Path, files: list[Path]) -> dict[str, str]:
    """What a stage reads beside the rows."""
    try:
        if isinstance(step.stage, MapStage):
            return {f"{step.number} map": digest_of([file_sha256(path) for path in files])}
        if isinstance(step.stage, JoinStage):
            return {f"{step.number} join": database_digest(step.stage.database, folder)}
        return {}
    except OSError as error:
        raise PipelineError(
            f"{step.place}.database: {error.filename} can't be read ({error.strerror}): correct the path"
        ) from None
