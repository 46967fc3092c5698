"""checkpoint[i]: the candidate's FP8 weights in the Hugging Face layout; trainer_state is a separate artifact."""

import dagster as dg

from assets.naming import check, define
from contracts.artifacts import Artifact, ArtifactRef, open_artifact
from ops import health
from ops.checkpoint_check import CHECK, layout_check
from ops.costs import training_costs
from ops.graph import CHECKPOINT
from ops.inputs import trainer_state_of, with_start
from ops.off_policy import staleness
from ops.results import Materialized, link, result
from ops.step import Step, begin
from ops.training import train_iteration, training_logs, training_numbers, training_records
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.sampler import SamplerResource
from resources.store import StoreResource
from resources.training_launcher import TrainingLauncher


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        CHECKPOINT,
        kinds={"pytorch", "huggingface"},
        description="Weights after one iteration of policy gradient, exported as the FP8 codes that were trained.",
        checks=[
            check(
                experiment,
                CHECKPOINT,
                CHECK,
                "The checkpoint has exactly the tensors that its config.json implies.",
                blocking=True,
            ),
            check(
                experiment,
                CHECKPOINT,
                health.AGREE,
                "Sampler and trainer give the sampled tokens the same probabilities.",
                blocking=False,
            ),
            check(
                experiment,
                CHECKPOINT,
                health.FP8,
                "Few FP8 codes saturate, no tensor is zero, and scales are near those of the parent.",
                blocking=False,
            ),
            check(experiment, CHECKPOINT, health.FINITE_LOSS, "Every optimizer step is finite.", blocking=False),
        ],
    )
    def checkpoint(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        launcher: TrainingLauncher,
        sampler: SamplerResource,
        progress: dg.ResourceParam[ProgressSink],
        **given: ArtifactRef,
    ) -> Materialized:
        step = with_start(begin(context, experiment, CHECKPOINT, store.open(), progress, given))
        for name, engine in experiment.engines.items():
            if name != "engine" or not experiment.off_policy.overlap:  # else it samples the next iteration meanwhile
                sampler.give_back(engine)
        candidate = train_iteration(step, launcher)
        age = staleness(step.store, step.inputs.policy, step.parent("checkpoint"))
        metadata = {
            **training_numbers(candidate),
            "staleness": age,
            **training_costs(candidate, experiment.trainer.launcher.all_gpus),
            **training_logs(step.store, candidate.ref),
            "trainer_state": trainer_state_of(step.store, candidate.ref).uri,
            "dataset": link(experiment.name, "dataset"),
        }
        checks = [layout_check(candidate), *_health_checks(step, candidate, age)]
        return result(candidate, metadata, checks)

    return checkpoint


def _health_checks(step: Step, candidate: Artifact, age: int) -> list[dg.AssetCheckResult]:
    """What the trainer recorded, and the codes that it exported. age: trainings since the sampler's weights."""
    records = training_records(candidate)
    parent = open_artifact(step.store, step.parent("checkpoint"))
    return [
        health.sampler_and_trainer_agree(records, age),
        health.finite_loss(records),
        health.fp8_codes_are_sound(candidate, parent),
    ]
