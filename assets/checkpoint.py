"""checkpoint[i]: the candidate: FP8 weights in the Hugging Face layout; its trainer_state is an artifact of its own."""

import dagster as dg

from assets.naming import check, define
from contracts.artifacts import ArtifactRef
from ops.checkpoint_check import CHECK, layout_check
from ops.inputs import read_inputs, trainer_state_of
from ops.results import Materialized, link, result
from ops.step import begin
from ops.training import train_iteration, training_numbers
from resources.experiment import Experiment
from resources.launcher import LocalLauncher
from resources.progress import ProgressSink
from resources.store import StoreResource
from trainer.config import GRPO_VERSION

NAME = "checkpoint"


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        NAME,
        kinds={"pytorch", "huggingface"},
        ins=["iteration_inputs", "dataset"],
        description="Weights after one iteration of policy gradient, exported as the very FP8 codes that were trained.",
        code_version=GRPO_VERSION,
        checks=[check(experiment, NAME, CHECK, "Every tensor that its config.json implies, no more.", blocking=True)],
    )
    def checkpoint(
        context: dg.AssetExecutionContext,
        iteration_inputs: ArtifactRef,
        dataset: ArtifactRef,
        store: StoreResource,
        launcher: LocalLauncher,
        progress: dg.ResourceParam[ProgressSink],
    ) -> Materialized:
        step = begin(context, experiment, NAME, store.open(), progress)
        inputs = read_inputs(step.store, iteration_inputs)
        candidate = train_iteration(step, launcher, inputs, dataset)
        metadata = {
            **training_numbers(candidate),
            "trainer_state": trainer_state_of(step.store, candidate.ref).uri,
            "dataset": link(experiment.name, "dataset"),
        }
        return result(candidate, metadata, [layout_check(candidate)])

    return checkpoint
