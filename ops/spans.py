"""Spans of a run and of its steps. A step's parent is its run, in whatever process or pod the step executes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from contracts import tracing

TRACE_TAG = "triplane/trace"
"""Tag of a run with the id of its trace, while tracing is on."""


@contextmanager
def run_span(run_id: str, job: str) -> Iterator[tracing.Span]:
    """Block that executes a run; its spans are exported at the end."""
    try:
        with tracing.span(f"run {job}", {"dagster.run_id": run_id}, run_id=run_id) as span:
            yield span
    finally:
        tracing.flush()


@contextmanager
def step_span(context: Any) -> Iterator[None]:
    """Block that executes the step of a Dagster context; its spans are exported at the end."""
    if not tracing.is_on():
        yield
        return
    about = {
        "dagster.run_id": context.run_id,
        "triplane.iteration": context.partition_key if context.has_partition_key else None,
        "triplane.attempt": context.retry_number,
    }
    try:
        with tracing.span(f"step {context.op_def.name}", about, parent=tracing.run_context(context.run_id)):
            yield
    finally:
        tracing.flush()


def trace_tag(run_id: str) -> dict[str, str]:
    """Tag by which the page of a run names its trace; none while tracing is off."""
    found = tracing.trace_id(run_id)
    return {TRACE_TAG: found} if found else {}
