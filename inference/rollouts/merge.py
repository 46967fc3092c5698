"""Merge committed groups into the rollouts artifact. Its content does not depend on workers, times and kills.

Groups that are carried over make up an artifact of their own (`carry_over`).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.digests import canonical_json
from contracts.store import Store
from inference.errors import GroupsMissing
from inference.rollouts import ROLLOUTS_VERSION
from inference.rollouts.carry_over import commit_unfinished
from inference.rollouts.claims import clear_claims
from inference.rollouts.groups import READERS, add_tables, find_group, is_complete, without_variance
from inference.rollouts.plan import GroupPlan, RolloutPlan
from inference.rollouts.straggler_bias import played_in, solve_rates

ROLLOUTS = "rollouts"
_SHOWN = 5


@dataclass(frozen=True)
class Gathered:
    """Groups that a plan requires as far as known, and those that are committed."""

    expected: list[GroupPlan]
    """In order of index."""
    committed: Mapping[str, Artifact]
    """By group_id."""

    @property
    def missing(self) -> list[GroupPlan]:
        """Groups that are not committed, in order of index."""
        return [group for group in self.expected if group.group_id not in self.committed]


def gather_groups(plan: RolloutPlan, store: Store) -> Gathered:
    """Find every group that the plan requires.

    Every committed group without variance takes the next one of its shard's reserve. Taking stops at the first k for
    which planned groups and the first k of the reserve hold at most k groups without variance; that k does not depend
    on the order in which groups finish, so the set follows from seeds and verdicts alone.
    """
    expected: list[GroupPlan] = []
    committed: dict[str, Artifact] = {}
    with ThreadPoolExecutor(READERS) as pool:
        shards = [plan.shard(shard) for shard in range(plan.workers)]
        wave = [group for groups, _ in shards for group in groups]
        while wave:
            expected += wave
            found = pool.map(lambda group: find_group(plan, group, store), wave)
            arrived = {group.group_id: artifact for group, artifact in zip(wave, found, strict=True) if artifact}
            committed |= arrived
            wave = []
            for groups, reserve in shards if plan.config.refill else ():
                lacking = sum(without_variance(arrived[each.group_id]) for each in groups if each.group_id in arrived)
                groups[:], reserve[:] = reserve[:lacking], reserve[lacking:]
                wave += groups
    return Gathered(sorted(expected, key=lambda group: group.index), committed)


def merge_groups(plan: RolloutPlan, store: Store, gathered: Gathered | None = None) -> Artifact:
    """Commit the rollouts: all complete groups' rows by group index and sample. The others are committed before.

    Raises GroupsMissing unless every expected group is committed.

    gathered: what `gather_groups` just found, if it was asked already.
    """
    found = find_artifact(store, ROLLOUTS, plan.key)
    if found is None:
        gathered = gathered or gather_groups(plan, store)
        if gathered.missing:
            raise GroupsMissing(_missing_line(plan, gathered))
        groups = {group.group_id: gathered.committed[group.group_id] for group in gathered.expected}
        carried = {group_id: group for group_id, group in groups.items() if not is_complete(group)}
        if carried:
            commit_unfinished(plan, carried, store)
        found = _merge([group for group in groups.values() if is_complete(group)], len(carried), plan, store)
    clear_claims(store, plan.key)
    return found


def _missing_line(plan: RolloutPlan, gathered: Gathered) -> str:
    missing = gathered.missing
    names = ", ".join(f"{group.index} ({group.task_id})" for group in missing[:_SHOWN])
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return (
        f"rollouts {plan.key[:12]} lack {len(missing)} of {len(gathered.expected)} groups: {names}{more}; "
        "run the workers again, committed groups are skipped"
    )


def _merge(groups: list[Artifact], carried: int, plan: RolloutPlan, store: Store) -> Artifact:
    with ArtifactWriter(
        store,
        ROLLOUTS,
        plan.key,
        parents={"policy": plan.policy, **plan.inputs},
        config=plan.config.model_dump(mode="json"),
        code_version=ROLLOUTS_VERSION,
    ) as out:
        add_tables(out, groups)
        # how the work was divided is no part of what came out of it
        (out.directory / "plan.json").write_bytes(canonical_json(plan.model_dump(mode="json")))
        out.add_file("plan.json", telemetry=True)
        rates = solve_rates(played_in(groups)) if plan.config.oversample else None
        continued = sum(group.carried is not None for group in plan.groups)
        return out.commit(
            meta={
                "groups": len(groups),
                "refilled": len(groups) + carried - len(plan.groups),
                "without_variance": sum(map(without_variance, groups)),
                "episodes": sum(group.meta["episodes"] for group in groups),
                "policy_tokens": sum(group.meta["policy_tokens"] for group in groups),
                "stragglers": sum(group.meta["stragglers"] for group in groups),
                "infra_errors": sum(group.meta["infra_errors"] for group in groups),
                "solved": sum(solved is True for group in groups for solved in group.meta["solved"]),
                **(rates.facts() if rates else {}),
                **({"groups_carried_over": carried} if carried else {}),
                **({"groups_continued": continued} if continued else {}),
            }
        )
