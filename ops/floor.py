"""Compare a candidate with the best policy so far, so that small losses don't add up.

    base policy, promotions that the parent builds on -> their gate runs with the present settings -> the highest pass
    rate

The result depends only on the parent, whose ancestors never change: a repeated decision is not affected by later
promotions or rollbacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from contracts.artifacts import Artifact, ArtifactRef
from contracts.store import Store
from curation.statistics import paired_difference, pass_rate, solved_by_task
from ops.readings import gate_reading
from resources.experiment import Experiment
from resources.registry import Registry


@dataclass(frozen=True)
class Floor:
    """The best policy so far on the gate."""

    policy: ArtifactRef
    run: Artifact
    """Gate run of the policy."""
    considered: int
    """Policies whose gate runs were compared."""
    without_run: tuple[str, ...]
    """Digests of ancestors that have no gate run with the present settings and were left out."""


def find_floor(
    store: Store, experiment: Experiment, parent: ArtifactRef, base: ArtifactRef, suite: ArtifactRef
) -> Floor | None:
    """Policy with the highest gate pass rate among the parent and its ancestors; of equal ones the youngest.

    Returns None if none has a gate run.
    """
    best: tuple[float, Floor] | None = None
    lost, considered = [], 0
    for policy in lineage(Registry(store, experiment.name), parent, base):
        run = gate_reading(experiment).work(store, experiment, policy, suite).find()
        rate = pass_rate(run.table("rewards.parquet", ["task_id", "solved"])).rate if run else None
        if run is None or rate is None:
            lost.append(policy.digest)
            continue
        considered += 1
        if best is None or rate >= best[0]:
            best = rate, Floor(policy, run, 0, ())
    return Floor(best[1].policy, best[1].run, considered, tuple(lost)) if best else None


def lineage(registry: Registry, parent: ArtifactRef, base: ArtifactRef) -> list[ArtifactRef]:
    """The base policy, the promotions that `parent` builds on and `parent`, oldest first, without duplicates.

    Excludes rolled-back promotions.
    """
    history = registry.history()
    entry = registry.find(parent.digest)
    numbers: Sequence[int] = registry.standing(entry.origin) if entry else ()
    policies = [base, *(history[number - 1].policy for number in numbers), parent]
    return list({policy.digest: policy for policy in policies}.values())


def compare_with_floor(candidate: Artifact, floor: Floor, confidence: float) -> dict[str, Any]:
    """The `floor` entry of an evaluation: policy, pass rate, and the candidate's paired difference from it."""
    ours, best = candidate.table("rewards.parquet"), floor.run.table("rewards.parquet")
    return {
        "policy": floor.policy.digest,
        "considered": floor.considered,
        "without_run": list(floor.without_run),
        "rate": asdict(pass_rate(best)),
        "difference": asdict(paired_difference(solved_by_task(ours), solved_by_task(best), confidence)),
    }
