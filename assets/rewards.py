"""rewards[i]: each episode's final state graded by hidden tests in a fresh sandbox."""

import dagster as dg

from assets.naming import check, define
from contracts.artifacts import ArtifactRef, open_artifact
from ops.graph import REWARDS
from ops.health import TAMPERING_IS_RARE, checked, tampering_is_rare
from ops.loading import load_tasks, load_tokenizer
from ops.regrading import flip_metadata
from ops.results import Materialized, link, numbers, result, table_facts
from ops.reward_components import component_metadata
from ops.rewards import grade
from ops.samples import sample_episodes
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.sandboxes import SandboxesResource
from resources.store import StoreResource

CHECK = "nearly_all_graded"
GRADED = 0.98


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        REWARDS,
        kinds={"parquet", "pytest"},
        description="Reward and its components for every episode; null where infrastructure failed, never 0.",
        checks=[
            check(experiment, REWARDS, CHECK, f"At least {GRADED:.0%} of the episodes have a reward.", blocking=False),
            check(experiment, REWARDS, TAMPERING_IS_RARE, "Few episodes tampered with their verdict.", blocking=False),
        ],
    )
    def rewards(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        sandboxes: SandboxesResource,
        progress: dg.ResourceParam[ProgressSink],
        **given: ArtifactRef,
    ) -> Materialized:
        step = begin(context, experiment, REWARDS, store.open(), progress, given)
        graded, inputs, rollouts = grade(step, sandboxes), step.inputs, step.parent("rollouts")
        table = graded.table("rewards.parquet")
        policy = open_artifact(step.store, inputs.policy)
        tokenizer = load_tokenizer(experiment, policy)
        episodes = open_artifact(step.store, rollouts)
        expected = table.num_rows - graded.meta["stragglers"]
        share = graded.meta["graded"] / max(1, expected)
        why = f"{graded.meta['graded']} of {expected} episodes have a reward ({share:.1%}); wanted {GRADED:.0%}"
        metadata = {
            "samples": sample_episodes(episodes, tokenizer, load_tasks(step.store, inputs.task_suite), graded),
            **table_facts(table),
            **numbers(graded.meta),
            **component_metadata(graded, experiment.rewards),
            **flip_metadata(step.store, graded, rollouts),
            "rollouts": link(experiment.name, "rollouts"),
        }
        return result(
            graded,
            metadata,
            [
                checked(CHECK, share >= GRADED, why, graded=share),
                tampering_is_rare(graded.meta, table.num_rows),
            ],
        )

    return rewards
