"""Executor of the steps of a run, by one environment variable."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dagster as dg

from contracts.errors import ConfigError
from ops.retries import EXECUTOR_VARIABLE, steps_are_pods
from ops.spans import run_span, trace_tag
from triplane_dagster.dead_runs import end_with_record, process_tag
from triplane_dagster.jobs import REPEATED_WHOLE


def step_executor() -> dg.ExecutorDefinition:
    """Executor that $TRIPLANE_EXECUTOR names. Raises ConfigError."""
    name = os.environ.get(EXECUTOR_VARIABLE) or "in_process"
    if name == "in_process" or (name == "k8s" and not steps_are_pods()):
        return _tagging(dg.in_process_executor)
    if name == "multiprocess":
        return _tagging(dg.multiprocess_executor, _forked)
    if name != "k8s":
        raise ConfigError(f"{EXECUTOR_VARIABLE}={name}: no such executor; use in_process, multiprocess or k8s")
    try:
        from triplane_dagster.step_pods import configured, prepared, step_pods_definition
    except ImportError:
        raise ConfigError(f"{EXECUTOR_VARIABLE}=k8s needs dagster-k8s: run pip install 'triplane[k8s]'") from None
    return _tagging(step_pods_definition, configured, prepared)


def _forked(config: Mapping[str, Any]) -> Mapping[str, object]:
    """The configuration, with steps forked from a process that has imported the definitions, which takes seconds."""
    return {"start_method": {"forkserver": {}}, **config}


class _Tagging(dg.Executor):
    """Executor that first records which process executes the run, and that a repetition repeats all of its steps: runs
    from an asset's page have no tags of ours. The process ends with the record of its run.
    """

    def __init__(self, inner: dg.Executor) -> None:
        self._inner = inner

    @property
    def retries(self) -> Any:
        """See Executor.retries."""
        return self._inner.retries

    @property
    def step_dependency_config(self) -> Any:
        """See Executor.step_dependency_config."""
        return self._inner.step_dependency_config

    def execute(self, plan_context: Any, execution_plan: Any) -> Iterator[dg.DagsterEvent]:
        """See Executor.execute."""
        run_id = plan_context.run_id
        tags = {**process_tag(run_id), **REPEATED_WHOLE, **trace_tag(run_id)}
        instance = plan_context.instance
        instance.add_run_tags(run_id, tags)
        with end_with_record(instance, run_id), run_span(run_id, plan_context.job_name) as span:
            for event in self._inner.execute(plan_context, execution_plan):
                if event.is_step_failure:  # raises nothing here
                    span.fail("StepFailed")
                yield event


def _tagging(
    inner: dg.ExecutorDefinition,
    configure: Callable[[Mapping[str, Any]], Mapping[str, object]] = dict,
    prepare: Callable[[dg.Executor], dg.Executor] = lambda made: made,
) -> dg.ExecutorDefinition:
    def create(context: dg.InitExecutorContext) -> dg.Executor:
        made = inner.executor_creation_fn
        assert made is not None, "every executor of Dagster has one"
        return _Tagging(prepare(made(context._replace(executor_config=configure(context.executor_config)))))

    schema: Any = inner.config_schema
    return dg.ExecutorDefinition(inner.name, schema, inner.get_requirements, create, inner.description)
