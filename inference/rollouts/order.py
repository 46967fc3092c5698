"""Order in which a worker starts its groups: those that took longest before come first.

A long episode that begins last keeps the whole iteration waiting; among jobs of known length, longest first is within a
third of the best order (Graham, 1969). Lengths are the means of earlier iterations' telemetry, by task, else by family
of tasks. The order changes no content.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from contracts.artifacts import Artifact
from contracts.tasks import Task
from inference.rollouts.oversampling import Group


def seconds_of(rollouts: Sequence[Artifact]) -> dict[str, float]:
    """Mean seconds of an episode by task, over some iterations' rollouts; without those that have no telemetry."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in rollouts:
        if "telemetry.parquet" not in each.names():
            continue
        tasks = each.table("episodes.parquet", ["episode_id", "task_id"])
        task_of = dict(zip(tasks["episode_id"].to_pylist(), tasks["task_id"].to_pylist(), strict=True))
        costs = each.table("telemetry.parquet", ["episode_id", "seconds"])
        for episode, seconds in zip(costs["episode_id"].to_pylist(), costs["seconds"].to_pylist(), strict=True):
            if seconds is not None and episode in task_of:
                found[task_of[episode]].append(seconds)
    return {task: fmean(values) for task, values in found.items()}


def longest_first(groups: Sequence[Group], seconds: Mapping[str, float], families: Mapping[str, str]) -> list[Group]:
    """`groups` by falling expected seconds; as given where nothing is known. seconds: by task. families: of tasks."""
    by_family: dict[str, list[float]] = defaultdict(list)
    for task, value in seconds.items():
        if task in families:
            by_family[families[task]].append(value)
    overall = fmean(seconds.values()) if seconds else 0.0

    def expected(task: Task) -> float:
        own = by_family.get(task.family)
        return seconds.get(task.task_id, fmean(own) if own else overall)

    return sorted(groups, key=lambda group: -expected(group.task))
