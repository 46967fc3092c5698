"""sampler[i]: the decision: live, refused or stale. Refusing is a successful run; goes live only if live is still its parent."""

import dagster as dg

from assets.naming import define
from contracts.artifacts import ArtifactRef
from ops.inputs import read_inputs
from ops.keys import DECISION_VERSION
from ops.publishing import publish, read_decision
from ops.results import Materialized, link, result
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.registry import Registry
from resources.store import StoreResource

NAME = "sampler"


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        NAME,
        kinds={"json"},
        ins=["iteration_inputs", "checkpoint", "evaluation"],
        description="Whether the candidate went live, and why. Non-inferiority on the gate, then compare-and-swap on its parent.",
        code_version=DECISION_VERSION,
    )
    def sampler(
        context: dg.AssetExecutionContext, iteration_inputs: ArtifactRef, checkpoint: ArtifactRef, evaluation: ArtifactRef,
        store: StoreResource, progress: dg.ResourceParam[ProgressSink],
    ) -> Materialized:  # fmt: skip
        step = begin(context, experiment, NAME, store.open(), progress)
        decided = publish(step, read_inputs(step.store, iteration_inputs), checkpoint, evaluation)
        decision = read_decision(decided)
        live = Registry(step.store, experiment.name).live()
        metadata = {
            "decision": decision.decision,
            "reasons": "; ".join(decision.reasons),
            "went live": int(decision.decision == "live"),
            "live number": live.number if live else 0,
            "live policy": live.policy.digest if live else "base policy",
            "evaluation": link(experiment.name, "evaluation"),
        }
        return result(decided, metadata)

    return sampler
