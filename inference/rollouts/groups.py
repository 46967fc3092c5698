"""Groups as artifacts, the commit unit of rollouts. The manifest of a group contains what decides its refill."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.digests import digest_of
from contracts.episodes import (
    STRAGGLERS,
    Episode,
    Outcome,
    episodes_table,
    lacks_variance,
    sequences_table,
    telemetry_table,
)
from contracts.store import Store
from inference.rollouts import ROLLOUTS_VERSION
from inference.rollouts.plan import GroupPlan, RolloutPlan

GROUP = "group"
READERS = 16
"""Groups read at once: each is a few small objects of its own, far away on S3."""
TABLES = {"episodes.parquet": False, "sequences.parquet": False, "telemetry.parquet": True}
"""Tables of groups and of what is made of them; whether each is telemetry."""


def group_key(plan: RolloutPlan, group: GroupPlan) -> str:
    """Action key of one group of the plan's rollouts."""
    return digest_of({"rollouts": plan.key, "group": group.group_id})


def add_tables(out: ArtifactWriter, groups: Sequence[Artifact]) -> None:
    """Write the rows of all groups, in this order."""
    with ThreadPoolExecutor(READERS) as pool:
        for name, telemetry in TABLES.items():
            tables = pool.map(lambda group, name=name: group.table(name), groups)
            out.add_table(name, pa.concat_tables(tables), telemetry=telemetry)


def find_group(plan: RolloutPlan, group: GroupPlan, store: Store) -> Artifact | None:
    """The committed group, or None."""
    return find_artifact(store, GROUP, group_key(plan, group))


def commit_group(
    plan: RolloutPlan, group: GroupPlan, episodes: Sequence[Episode], solved: Sequence[bool | None], store: Store
) -> Artifact:
    """Commit a group's episodes in order of sample, including stragglers. solved: verdict of each, or None.

    If another worker was first, its group is returned and this one dropped.
    """
    rows = list(episodes)
    with ArtifactWriter(
        store,
        GROUP,
        group_key(plan, group),
        parents={"policy": plan.policy, **plan.inputs},
        config={"group_id": group.group_id, "task_id": group.task_id, "rollouts": plan.key},
        code_version=ROLLOUTS_VERSION,
    ) as out:
        out.add_table("episodes.parquet", episodes_table(rows))
        out.add_table("sequences.parquet", sequences_table(rows, *plan.config.recorded))
        out.add_table("telemetry.parquet", telemetry_table(rows), telemetry=True)
        unfinished = sum(episode.outcome is Outcome.UNFINISHED for episode in rows)
        return out.commit(
            meta={
                "index": group.index,
                "episodes": len(rows),
                "solved": list(solved),
                "stragglers": sum(episode.outcome in STRAGGLERS for episode in rows),
                "policy_tokens": sum(episode.policy_tokens for episode in rows),
                "infra_errors": sum(episode.outcome is Outcome.INFRA_ERROR for episode in rows),
                **({"unfinished": unfinished} if unfinished else {}),
            }
        )


def is_complete(group: Artifact) -> bool:
    """Whether no episode of a group is to be continued in the next iteration."""
    return not group.meta.get("unfinished")


def without_variance(group: Artifact) -> bool:
    """Whether all graded episodes of a complete group were solved, or none: it is refilled, and the dataset leaves it
    out.
    """
    return is_complete(group) and lacks_variance(group.meta["solved"])
