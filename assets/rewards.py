"""rewards[i]: each episode's final state graded by hidden tests in a fresh sandbox, never the agent's."""

import dagster as dg

from assets.naming import check, define
from contracts.artifacts import ArtifactRef, open_artifact
from contracts.chat import ChatTokenizer
from curation.rewards import REWARDS_VERSION
from ops.grading import grade
from ops.inputs import load_tasks, read_inputs
from ops.regrading import flip_metadata
from ops.results import Materialized, link, numbers, result, table_facts
from ops.reward_components import component_metadata
from ops.samples import sample_episodes
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.sandboxes import SandboxesResource
from resources.store import StoreResource

NAME = "rewards"
CHECK = "nearly_all_graded"
GRADED = 0.98


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        NAME,
        kinds={"parquet", "pytest"},
        ins=["iteration_inputs", "rollouts"],
        description="Reward and its components for every episode; null where infrastructure failed, never 0.",
        code_version=REWARDS_VERSION,
        checks=[
            check(experiment, NAME, CHECK, f"At least {GRADED:.0%} of the episodes have a reward.", blocking=False)
        ],
    )
    def rewards(
        context: dg.AssetExecutionContext,
        iteration_inputs: ArtifactRef,
        rollouts: ArtifactRef,
        store: StoreResource,
        sandboxes: SandboxesResource,
        progress: dg.ResourceParam[ProgressSink],
    ) -> Materialized:
        step = begin(context, experiment, NAME, store.open(), progress)
        inputs = read_inputs(step.store, iteration_inputs)
        graded = grade(step, sandboxes, inputs, rollouts)
        table = graded.table("rewards.parquet")
        policy = open_artifact(step.store, inputs.policy)
        tokenizer = ChatTokenizer.from_directory(policy.directory(), spaced=experiment.base.spaced)
        episodes = open_artifact(step.store, rollouts)
        share = graded.meta["graded"] / max(1, table.num_rows - graded.meta["stragglers"])
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
            [dg.AssetCheckResult(check_name=CHECK, passed=share >= GRADED, metadata={"graded": share})],
        )

    return rewards
