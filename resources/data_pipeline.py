"""Files of data pipelines."""

from __future__ import annotations

from pathlib import Path

from curation.pipeline.config import Pipeline
from resources.named_files import parse_named, read_values


def load_pipeline(path: Path) -> Pipeline:
    """Read a pipeline's file. Raises ConfigError that names the file, the field, the value and the fix."""
    values = read_values(path, "pipeline", "write that file: docs/data.md")
    return parse_named(values, Pipeline, path, "pipeline")
