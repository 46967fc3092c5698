"""dataset[i]: sequences that train, and the reason for each episode left out. Rewards and groups, never advantages."""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from assets.naming import check, define
from contracts.artifacts import ArtifactRef, open_artifact
from ops.costs import tokens_lost
from ops.dataset import make_dataset
from ops.graph import DATASET
from ops.health import REWARD_VARIES, reward_varies
from ops.results import Materialized, label, link, numbers, result, table_facts
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.store import StoreResource

CHECK = "has_something_to_learn_from"


def something_to_learn_from(meta: Mapping[str, Any]) -> dg.AssetCheckResult:
    """Whether a dataset contains rows to train on, and the most frequent reason to leave episodes out."""
    left_out, episodes = sum(meta["reasons"].values()), meta["episodes"]
    most = max(meta["reasons"], key=lambda reason: meta["reasons"][reason])
    words = f"{left_out} of {episodes} episodes were left out"
    return dg.AssetCheckResult(
        check_name=CHECK,
        passed=meta["sequences"] > 0,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={
            "why": f"{words}, most often for {label(most)}." if left_out else "No episode was left out.",
            "sequences kept": meta["sequences"],
            "episodes left out": left_out,
        },
    )


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        DATASET,
        kinds={"parquet", "duckdb"},
        description="Rows that train, and the reason for each episode left out.",
        checks=[
            check(experiment, DATASET, CHECK, "At least one sequence was kept.", blocking=False),
            check(experiment, DATASET, REWARD_VARIES, "Rewards differ within enough groups.", blocking=False),
        ],
    )
    def dataset(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        progress: dg.ResourceParam[ProgressSink],
        **given: ArtifactRef,
    ) -> Materialized:
        step = begin(context, experiment, DATASET, store.open(), progress, given)
        made = make_dataset(step)
        lost = tokens_lost(open_artifact(step.store, step.parent("rollouts")), made)
        metadata = {
            **table_facts(made.table("train.parquet")),
            **numbers(made.meta),
            **numbers({f"left out: {reason}": count for reason, count in made.meta["reasons"].items()}),
            **numbers({f"engine tokens lost: {reason}": tokens for reason, tokens in lost.items()}),
            "engine tokens lost": sum(lost.values()),
            "rewards": link(experiment.name, "rewards"),
        }
        return result(
            made, metadata, [something_to_learn_from(made.meta), reward_varies(made.table("members.parquet"))]
        )

    return dataset
