"""The job `NAME_evaluate`: a policy of the store under a named evaluation, launched in the UI.

A job and no asset: the policy is chosen by a person, and is no partition of anything. Its result appears as a
materialization of `evaluations/NAME`, whose plots tab then shows the pass rates in order.
"""

import dagster as dg
from pydantic import Field

from contracts.artifacts import open_artifact
from curation.tasks.importing.find import find_suite
from ops.evaluation import Playing
from ops.named_evaluations import evaluate_policy, rows_of, settings_for
from ops.policies import stored_policy
from resources.evaluation import load_evaluation
from resources.experiment import Experiment
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource
from resources.store import StoreResource
from triplane_dagster.experiment_files import evaluations_folder
from triplane_dagster.jobs import job_op, shared_tags


class EvaluatePolicy(dg.Config):
    """Run configuration of an evaluation."""

    policy: str = Field(
        default="live",
        description=(
            "live, base or the digest of a checkpoint; of another experiment: NAME/live, NAME/base or an iteration such"
            " as NAME/0003."
        ),
    )
    evaluation: str = Field(description="Named evaluation: a file in experiments/evaluations/, without .yaml.")


def evaluation_job_name(experiment: Experiment) -> str:
    """Name of the evaluation job, e.g. quickstart_evaluate."""
    return f"{experiment.name}_evaluate"


def evaluation_job(experiment: Experiment) -> dg.JobDefinition:
    """Job that evaluates one policy, in the pods of an experiment."""

    @job_op(experiment, f"{experiment.name}_evaluate_policy")
    def evaluate_op(
        context: dg.OpExecutionContext,
        config: EvaluatePolicy,
        store: StoreResource,
        sampler: SamplerResource,
        sandboxes: SandboxesResource,
    ) -> None:
        opened, evaluation = store.open(), load_evaluation(evaluations_folder() / f"{config.evaluation}.yaml")
        policy = open_artifact(opened, stored_policy(opened, experiment.name, config.policy))
        suite, settings = find_suite(opened, evaluation.suite), settings_for(evaluation, policy)
        playing = Playing(opened, settings, sampler, sandboxes, lambda phase, done, total, **numbers: None)
        run = evaluate_policy(playing, evaluation, policy, suite)
        (row,) = rows_of(opened, [run], [evaluation])
        rate, costs = row["pass_rate"], row["costs"]
        metadata = {
            **{name: rate[name] for name in ("low", "high", "solved", "tasks")},
            "pass_rate": rate["rate"],
            **{name: row[name] for name in ("evaluation", "policy", "suite", "split", "samples")},
            "trained_on": len(row["trained_on"]),
            "engine_tokens": costs["engine_tokens"],
        }
        context.log_event(
            dg.AssetMaterialization(
                ["evaluations", evaluation.name], description=f"policy {policy.ref.short}", metadata=metadata
            )
        )

    @dg.job(
        name=evaluation_job_name(experiment),
        description=(
            f"{experiment.name}: evaluate a policy under a named evaluation; the result is kept and found again."
        ),
        tags=shared_tags(experiment),
    )
    def job() -> None:
        evaluate_op()

    return job
