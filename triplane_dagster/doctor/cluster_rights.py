"""Rights of Dagster's pods in their namespace, each with the feature that fails without it. The chart's Role has these
and no others; with `trainer.jobset`, those on JobSets, too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Right:
    """A verb on a kind of objects."""

    verb: str
    resource: str
    feature: str
    """What fails without it."""
    group: str = ""
    subresource: str = ""

    def __str__(self) -> str:
        """The right as kubectl writes it, e.g. get jobs.batch/status."""
        kind = f"{self.resource}.{self.group}" if self.group else self.resource
        return f"{self.verb} {kind}{f'/{self.subresource}' if self.subresource else ''}"


RIGHTS = (
    Right("create", "jobs", "launching runs, steps and trainers", "batch"),
    Right("get", "jobs", "adopting a trainer that a killed step left", "batch"),
    Right("list", "jobs", "finding trainers without owner, and steps of a lost run", "batch"),
    Right("delete", "jobs", "terminating runs, steps and trainers", "batch"),
    Right("get", "jobs", "noticing lost run and step pods", "batch", "status"),
    Right("get", "pods", "deleting the steps of a run with its pod"),
    Right("list", "pods", "telling why a pod was lost"),
    Right("delete", "pods", "terminating runs and steps, and pods of lost nodes"),
    Right("get", "pods", "the logs of trainers", "", "log"),
    Right("list", "events", "telling why a pod does not start"),
    Right("create", "services", "trainers of several nodes"),
    Right("get", "services", "trainers of several nodes"),
    Right("delete", "services", "removing services that a trainer left"),
)

JOBSET_RIGHTS = tuple(
    Right(verb, "jobsets", feature, "jobset.x-k8s.io")
    for verb, feature in {
        "create": "launching trainers as JobSets (placement.trainer.workload)",
        "get": "adopting a trainer that a killed step left",
        "list": "finding trainers without owner",
        "delete": "terminating trainers",
    }.items()
)
