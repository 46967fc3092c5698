"""Tags that place the pods of runs and steps on Kubernetes, as `placement.steps` says.

A run's tags never reach its step pods, and the ops of a graph asset take none from it: every op has the tag.
"""

from __future__ import annotations

from typing import Any

from resources.experiment import Experiment

CONFIG_TAG = "dagster-k8s/config"
"""Tag that dagster-k8s merges into the Job of a run (tag of a job) or of a step (tag of an op)."""
EXPERIMENT_LABEL = "triplane/experiment"
"""Label of all pods of an experiment, and tag of the runs of its jobs."""


def pod_tags(experiment: Experiment) -> dict[str, Any]:
    """Tag of a job or op. Other executors and launchers ignore it, so definitions are the same everywhere."""
    placement = experiment.placement.steps
    labels = {EXPERIMENT_LABEL: experiment.name.rstrip("_")}  # a label must not end so
    return {
        CONFIG_TAG: {
            "container_config": {"resources": placement.resources()},
            "pod_spec_config": placement.pod_fields(),
            "pod_template_spec_metadata": {"labels": labels},
            "job_metadata": {"labels": labels},
        }
    }
