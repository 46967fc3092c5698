"""Episodes that an iteration leaves unfinished, and the next one continues (`rollouts.carry_over`).

    more groups in flight than are needed -> enough are complete -> the others stop after their turn
      -> artifact `unfinished` -> pinned in iteration_inputs.carried_over -> first groups of the next plan

Waiting for every episode prefers none; ending at the first ones to arrive would train on short episodes only. Here slow
ones train later. `max_carries` bounds how much later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from contracts.artifacts import Artifact, ArtifactWriter
from contracts.episodes import Episode, read_episodes
from contracts.store import Store
from inference.rollouts import ROLLOUTS_VERSION
from inference.rollouts.groups import TABLES, add_tables
from inference.rollouts.plan import Carried, GroupPlan, RolloutPlan

UNFINISHED = "unfinished"
"""Kind of the artifact. It has the key of the rollouts that left it."""
_GROUPS = "groups.json"


class Quota:
    """Counts a shard's complete groups, and stops its episodes once there are enough."""

    def __init__(self, needed: int | None, waited_for: Collection[str], stopping: asyncio.Event) -> None:
        """needed: number of complete groups; None: all. waited_for: groups that can't be carried over again."""
        self._needed, self._waited_for, self._stopping = needed, set(waited_for), stopping
        self._complete = 0

    def completed(self, group_id: str, refilled: bool) -> None:
        """Count a complete group. refilled: another one is played because of it, which is needed, too."""
        self._waited_for.discard(group_id)
        self._complete += not refilled
        if self._needed is not None and self._complete >= self._needed and not self._waited_for:
            self._stopping.set()


def waited_for(plan: RolloutPlan, groups: Sequence[GroupPlan]) -> list[str]:
    """Ids of the groups that were carried over as often as they may be."""
    return [each.group_id for each in groups if each.carried and each.carried.times >= plan.config.max_carries]


def commit_unfinished(plan: RolloutPlan, groups: Mapping[str, Artifact], store: Store) -> Artifact:
    """Commit what the plan's rollouts left unfinished. groups: committed groups by group_id, in order of index."""
    planned = {each.group_id: each for each in (*plan.groups, *plan.reserve)}
    with ArtifactWriter(
        store,
        UNFINISHED,
        plan.key,
        parents={"policy": plan.policy, **plan.inputs},
        config=plan.config.model_dump(mode="json"),
        code_version=ROLLOUTS_VERSION,
    ) as out:
        add_tables(out, list(groups.values()))
        out.add_json(_GROUPS, [_carried(planned[group_id], plan).model_dump() for group_id in groups])
        return out.commit(
            meta={
                "groups": len(groups),
                "unfinished": sum(each.meta["unfinished"] for each in groups.values()),
                "policy_tokens": sum(each.meta["policy_tokens"] for each in groups.values()),
            }
        )


def _carried(group: GroupPlan, plan: RolloutPlan) -> GroupPlan:
    """The group as one that was carried over once more."""
    iteration, times = (group.carried.iteration, group.carried.times) if group.carried else (plan.iteration, 0)
    return group.model_copy(update={"carried": Carried(iteration=iteration, times=times + 1)})


def carried_groups(unfinished: Artifact, task_digests: Mapping[str, str]) -> list[GroupPlan]:
    """Groups to plan first, with indices from 0. task_digests: of the suite's tasks, by id; groups of tasks that are
    not in it as they were played are left out, and their tokens are lost.
    """
    rows = unfinished.table("episodes.parquet", columns=["group_id", "task_digest"]).to_pylist()
    played = {row["group_id"]: row["task_digest"] for row in rows}
    groups = map(GroupPlan.model_validate, unfinished.json(_GROUPS))
    kept = [each for each in groups if task_digests.get(each.task_id) == played[each.group_id]]
    return [each.model_copy(update={"index": index}) for index, each in enumerate(kept)]


def read_unfinished(unfinished: Artifact) -> dict[str, dict[int, Episode]]:
    """Episodes by group_id and sample, with their telemetry."""
    tables = [unfinished.table(name) for name in TABLES]
    costs = {row.pop("episode_id"): row for row in tables[2].to_pylist()}
    found: dict[str, dict[int, Episode]] = {}
    for episode in read_episodes(tables[0], tables[1]):
        known = replace(episode, telemetry=costs[episode.episode_id])
        found.setdefault(episode.group_id, {})[episode.sample] = known
    return found
