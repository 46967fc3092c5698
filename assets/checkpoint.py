"""checkpoint[i]: the candidate's FP8 weights in the Hugging Face layout; trainer_state is a separate artifact."""

import dagster as dg

from assets.naming import check, define
from contracts.artifacts import ArtifactRef
from ops.checkpoint_check import CHECK, layout_check
from ops.graph import CHECKPOINT
from ops.inputs import trainer_state_of
from ops.results import Materialized, link, result
from ops.step import begin
from ops.training import train_iteration, training_numbers
from resources.experiment import Experiment
from resources.launcher import LocalLauncher
from resources.progress import ProgressSink
from resources.sampler import SamplerResource
from resources.store import StoreResource


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
            )
        ],
    )
    def checkpoint(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        launcher: LocalLauncher,
        sampler: SamplerResource,
        progress: dg.ResourceParam[ProgressSink],
        **given: ArtifactRef,
    ) -> Materialized:
        step = begin(context, experiment, CHECKPOINT, store.open(), progress, given)
        sampler.give_back(experiment.engine)
        candidate = train_iteration(step, launcher)
        metadata = {
            **training_numbers(candidate),
            "trainer_state": trainer_state_of(step.store, candidate.ref).uri,
            "dataset": link(experiment.name, "dataset"),
        }
        return result(candidate, metadata, [layout_check(candidate)])

    return checkpoint
