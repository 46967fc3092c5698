"""Executor of the steps of a run, by one environment variable."""

from __future__ import annotations

import os

import dagster as dg

from contracts.errors import ConfigError

VARIABLE = "TRIPLANE_EXECUTOR"
"""in_process: steps follow one another in the run's process. multiprocess: a process for each step, shards of rollouts
side by side. k8s: a pod for each step. `triplane iterate` always runs in its own process.
"""


def step_executor() -> dg.ExecutorDefinition:
    """Executor that $TRIPLANE_EXECUTOR names. Raises ConfigError."""
    name = os.environ.get(VARIABLE) or "in_process"
    if name == "in_process":
        return dg.in_process_executor
    if name == "multiprocess":
        return dg.multiprocess_executor
    if name != "k8s":
        raise ConfigError(f"{VARIABLE}={name}: no such executor; use in_process, multiprocess or k8s")
    try:
        from dagster_k8s import k8s_job_executor
    except ImportError:
        raise ConfigError(f"{VARIABLE}=k8s needs dagster-k8s: run pip install 'triplane[k8s]'") from None
    return k8s_job_executor
