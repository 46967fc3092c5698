"""From committed groups to the rollouts artifact. Its content is the same whichever worker sampled what, when, and however often it was killed."""

from __future__ import annotations

import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.digests import canonical_json
from contracts.store import Store
from inference.errors import GroupsMissing
from inference.rollouts import ROLLOUTS_VERSION
from inference.rollouts.claims import clear_claims
from inference.rollouts.groups import find_group, lacks_variance
from inference.rollouts.plan import GroupPlan, RolloutPlan

ROLLOUTS = "rollouts"
_TABLES = {"episodes.parquet": False, "sequences.parquet": False, "telemetry.parquet": True}
_SHOWN = 5


def expected_groups(plan: RolloutPlan, store: Store) -> tuple[list[GroupPlan], list[GroupPlan]]:
    """The groups this plan leads to as far as known, and those of them not committed yet; both in order of index.

    Every committed group without variance takes the next one of its shard's reserve. Taking stops at the first k for which
    planned groups and the first k of the reserve hold at most k groups without variance; that k does not depend on the order in which
    groups finish, so the set follows from seeds and verdicts alone.
    """
    expected: list[GroupPlan] = []
    missing: list[GroupPlan] = []
    for shard in range(plan.workers):
        pending, reserve = plan.shard(shard)
        while pending:
            group = pending.pop(0)
            expected.append(group)
            artifact = find_group(plan, group, store)
            if artifact is None:
                missing.append(group)
            elif plan.config.refill and reserve and lacks_variance(artifact):
                pending.append(reserve.pop(0))
    return sorted(expected, key=_place), sorted(missing, key=_place)


def merge_groups(plan: RolloutPlan, store: Store) -> Artifact:
    """Commit the rollouts: all groups' rows by group index and sample. Raises GroupsMissing unless every expected group is committed."""
    found = find_artifact(store, ROLLOUTS, plan.key)
    if found is not None:
        return found
    expected, missing = expected_groups(plan, store)
    if missing:
        names = ", ".join(f"{group.index} ({group.task_id})" for group in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise GroupsMissing(
            f"rollouts {plan.key[:12]} lack {len(missing)} of {len(expected)} groups: {names}{more}; run the workers again, committed groups are skipped"
        )
    committed = [find_group(plan, group, store) for group in expected]
    artifact = _merge([group for group in committed if group is not None], plan, store)
    clear_claims(store, plan.key)
    return artifact


def _merge(groups: list[Artifact], plan: RolloutPlan, store: Store) -> Artifact:
    with ArtifactWriter(
        store, ROLLOUTS, plan.key, parents={"policy": plan.policy, **plan.inputs},
        config=plan.config.model_dump(mode="json"), code_version=ROLLOUTS_VERSION,
    ) as out:  # fmt: skip
        for name, telemetry in _TABLES.items():
            out.add_table(name, pa.concat_tables(group.table(name) for group in groups), telemetry=telemetry)
        # how the work was divided is no part of what came out of it
        (out.directory / "plan.json").write_bytes(canonical_json(plan.model_dump(mode="json")))
        out.add_file("plan.json", telemetry=True)
        return out.commit(
            meta={
                "groups": len(groups),
                "refilled": len(groups) - len(plan.groups),
                "without_variance": sum(map(lacks_variance, groups)),
                "episodes": sum(group.meta["episodes"] for group in groups),
                "policy_tokens": sum(group.meta["policy_tokens"] for group in groups),
                "infra_errors": sum(group.meta["infra_errors"] for group in groups),
                "solved": sum(solved is True for group in groups for solved in group.meta["solved"]),
            }
        )


def _place(group: GroupPlan) -> int:
    return group.index
