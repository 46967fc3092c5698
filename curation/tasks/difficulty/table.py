"""The artifact `difficulty`: one row per task that was tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, find_artifact, list_artifacts
from contracts.digests import action_key
from contracts.store import Store
from contracts.tasks import Split, Task
from curation.errors import TaskError
from curation.tasks.difficulty.estimates import estimate
from curation.tasks.difficulty.features import features_of

DIFFICULTY = "difficulty"
DIFFICULTY_VERSION = "1"
_FILE, _SUITE = "difficulty.parquet", "task_suite"
ROWS = pa.schema(
    [
        ("task_id", pa.string()),
        ("split", pa.string()),
        ("samples", pa.int32()),
        ("solved", pa.int32()),
        ("rate", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("pass_at_k", pa.float64()),
        ("files", pa.int32()),
        ("functions", pa.int32()),
        ("changed_lines", pa.int32()),
        ("tests", pa.int32()),
        ("fail_to_pass", pa.int32()),
        ("strategy", pa.string()),
        ("operator", pa.string()),
    ]
)
"""One row per task, in the order of the suite: fields of `Estimate` and `Features`."""


def make_difficulty(
    suite: Artifact,
    runs: Mapping[str, ArtifactRef],
    tasks: Sequence[Task],
    outcomes: Mapping[str, Sequence[int]],
    k: int,
    player: str,
    policy: ArtifactRef | None = None,
) -> Artifact:
    """Publish the difficulty of tasks, or return the existing artifact.

    runs: by role, the artifacts with the episodes. outcomes: 0/1 results of each task's graded samples. player: name of
    the agent or digest of the policy, for display.
    """
    parents = {_SUITE: suite.ref, **runs}
    config = {"k": k}
    key = action_key(DIFFICULTY, {role: ref.digest for role, ref in parents.items()}, config, DIFFICULTY_VERSION)
    found = find_artifact(suite.store, DIFFICULTY, key)
    if found is not None:
        return found
    rows = [_row(task, outcomes.get(task.task_id, ()), k) for task in tasks]
    splits = Counter(task.split.value for task in tasks)
    lineage = parents | ({"policy": policy} if policy else {})
    with ArtifactWriter(
        suite.store, DIFFICULTY, key, parents=lineage, config=config, code_version=DIFFICULTY_VERSION
    ) as out:
        out.add_table(_FILE, pa.Table.from_pylist(rows, schema=ROWS))
        rates = [row["rate"] for row in rows if row["rate"] is not None]
        return out.commit(
            meta={
                "player": player,
                "tasks": len(rows),
                "splits": dict(splits),
                "samples": max((row["samples"] for row in rows), default=0),
                "k": k,
                "pass_rate": fmean(rates) if rates else None,
                "never_solved": rates.count(0.0),
                "always_solved": rates.count(1.0),
            }
        )


def difficulty_rows(difficulty: Artifact) -> list[dict[str, Any]]:
    """Rows of ROWS, in order."""
    rows: list[dict[str, Any]] = difficulty.table(_FILE).to_pylist()
    return rows


def task_rates(difficulty: Artifact) -> dict[str, float | None]:
    """Estimated pass rate by task id."""
    table = difficulty.table(_FILE, ["task_id", "rate"])
    return dict(zip(table["task_id"].to_pylist(), table["rate"].to_pylist(), strict=True))


def find_difficulty(store: Store, suite: ArtifactRef, digest: str | None = None) -> Artifact:
    """The difficulty of a suite whose digest starts with `digest`; None: the newest that tells of training tasks.

    Raises TaskError with the command that makes one.
    """
    made = [each for each in list_artifacts(store, DIFFICULTY) if each.manifest.parents[_SUITE].digest == suite.digest]
    fix = f"make one with `triplane tasks difficulty --suite {suite.short} --policy DIGEST` (or --agent)"
    if digest is None:
        useful = [each for each in made if each.meta["splits"].get(Split.TRAIN.value)]
        if not useful:
            raise TaskError(f"no difficulty of task suite {suite.short} with training tasks is in {store.url}: {fix}")
        return max(useful, key=lambda each: (each.manifest.created_unix, each.ref.key))
    found = {each.ref.digest: each for each in made if each.ref.digest.startswith(digest)}
    if len(found) != 1:
        raise TaskError(
            f"tasks.difficulty.artifact {digest!r} matches {len(found)} difficulties of task suite {suite.short} in"
            f" {store.url}, expected one: {fix}, or give more digits"
        )
    return next(iter(found.values()))


def _row(task: Task, outcomes: Sequence[int], k: int) -> dict[str, Any]:
    found = asdict(estimate(sum(outcomes), len(outcomes), k)) | asdict(features_of(task))
    return {"task_id": task.task_id, "split": task.split.value, **found}
