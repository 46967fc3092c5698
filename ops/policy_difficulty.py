"""Difficulty of a task suite for a policy: its episodes are an `evaluation_run` of each split, as the gate's are."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.artifacts import Artifact, ArtifactRef, open_artifact
from contracts.tasks import Split
from curation.statistics import solved_by_task
from curation.tasks.difficulty.table import make_difficulty
from ops.evaluation import Playing, play_readings
from ops.loading import load_tasks, split_tasks
from ops.readings import Reading


def policy_difficulty(
    playing: Playing, policy: ArtifactRef, suite: ArtifactRef, splits: Sequence[Split], samples: int, k: int
) -> Artifact:
    """Difficulty of the tasks of these splits, from `samples` episodes of the policy a task. A killed call resumes.

    Raises EvaluationIncomplete if too many episodes are lost to infrastructure.
    """
    readings = [Reading(split, samples, greedy=False) for split in splits]
    runs = play_readings(playing, readings, policy, suite)
    tasks = load_tasks(playing.store, suite)
    outcomes: dict[str, list[int]] = {}
    for run in runs.values():
        outcomes |= solved_by_task(run.table("rewards.parquet", ["task_id", "solved"]))
    return make_difficulty(
        open_artifact(playing.store, suite),
        {f"run_{each.name}": runs[each.name].ref for each in readings},
        [task for split in splits for task in split_tasks(tasks, split)],
        outcomes,
        k,
        f"policy {policy.short}",
        policy,
    )
