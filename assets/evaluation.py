"""evaluation[i]: candidate and parent on the gate, which decides, and on held-out, which no decision reads."""

import dagster as dg

from assets.naming import define
from contracts.artifacts import ArtifactRef
from ops.evaluation import evaluate
from ops.inputs import read_inputs
from ops.keys import EVALUATION_VERSION
from ops.results import Materialized, link, markdown_table, numbers, result
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource
from resources.store import StoreResource

NAME = "evaluation"


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        NAME,
        kinds={"json"},
        ins=["iteration_inputs", "checkpoint"],
        description="Pass rates of candidate and parent and their paired difference, each with its interval.",
        code_version=EVALUATION_VERSION,
    )
    def evaluation(
        context: dg.AssetExecutionContext, iteration_inputs: ArtifactRef, checkpoint: ArtifactRef, store: StoreResource,
        sampler: SamplerResource, sandboxes: SandboxesResource, progress: dg.ResourceParam[ProgressSink],
    ) -> Materialized:  # fmt: skip
        step = begin(context, experiment, NAME, store.open(), progress)
        inputs = read_inputs(step.store, iteration_inputs)
        evaluated = evaluate(step, sampler, sandboxes, checkpoint, inputs.start.checkpoint, inputs.task_suite)
        body = evaluated.json("evaluation.json")
        rows = [
            {"split": split, "policy": who, **{name: found[who][name] for name in ("rate", "low", "high", "n")}}
            for split, found in body.items()
            for who in ("candidate", "parent")
        ]
        plots = {f"{split} difference": found["difference"]["mean"] for split, found in body.items()}
        plots |= {f"{row['split']} {row['policy']} pass rate": row["rate"] for row in rows}
        metadata = {
            **numbers(plots),
            "pass rates": markdown_table(rows),
            "checkpoint": link(experiment.name, "checkpoint"),
        }
        return result(evaluated, metadata)

    return evaluation
