"""reward_flips[i]: changes since the previous grading of the same rollouts, and the checkpoints trained on it."""

import dagster as dg

from assets.naming import define
from contracts.artifacts import ArtifactRef
from ops.graph import REWARD_FLIPS
from ops.regrading import compare_gradings, flips_table
from ops.results import Materialized, link, numbers, result, table_facts
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.store import StoreResource


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        REWARD_FLIPS,
        kinds={"parquet"},
        description="Episodes whose reward or verdict differs from the previous grading of the same rollouts.",
    )
    def reward_flips(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        progress: dg.ResourceParam[ProgressSink],
        **given: ArtifactRef,
    ) -> Materialized:
        made = compare_gradings(begin(context, experiment, REWARD_FLIPS, store.open(), progress, given))
        table = made.table("flips.parquet")
        metadata = {
            "compared with": made.meta["previous"] or "nothing: these rollouts were graded once",
            **({"changed rewards": flips_table(table)} if table.num_rows else {}),
            **table_facts(table),
            **numbers(made.meta),
            "rewards": link(experiment.name, "rewards"),
        }
        return result(made, metadata)

    return reward_flips
