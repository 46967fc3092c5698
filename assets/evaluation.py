"""evaluation[i]: candidate and parent on the gate, which decides, and on held-out, which no decision reads."""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from assets.naming import define
from contracts.artifacts import ArtifactRef
from curation.statistics import CONFIDENCE
from ops.evaluation import evaluate
from ops.inputs import read_inputs
from ops.keys import EVALUATION_VERSION
from ops.results import Materialized, label, link, markdown_table, numbers, result
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource
from resources.store import StoreResource

NAME = "evaluation"


def pass_rates(body: Mapping[str, Any]) -> dg.MarkdownMetadataValue:
    """What an `evaluation` artifact says, in percent and points, as a table."""
    rows = []
    for split, found in body.items():
        for who in ("candidate", "parent"):
            rate = found[who]
            value = "not graded" if rate["rate"] is None else f"{rate['rate']:.1%}"
            rows.append(
                (
                    label(split),
                    who,
                    value,
                    f"{rate['low']:.0%} to {rate['high']:.0%}",
                    f"{rate['n']} episodes of {rate['tasks']} tasks",
                )
            )
        rows.append(_difference_row(split, "difference", found["difference"]))
        if "floor" in found:
            rows.append(
                _difference_row(
                    split,
                    f"difference from the best so far, {found['floor']['policy'][:12]}",
                    found["floor"]["difference"],
                )
            )
    head = ("split", "policy", "percent solved", f"{CONFIDENCE:.0%} interval", "over")
    return markdown_table([dict(zip(head, row, strict=True)) for row in rows])


def _difference_row(split: str, what: str, difference: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    mean, low, high = (f"{100 * difference[name]:+.1f}" for name in ("mean", "low", "high"))
    return label(split), what, mean, f"{low} to {high}", f"{difference['n']} tasks"


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
        evaluated = evaluate(
            step, sampler, sandboxes, checkpoint, inputs.start.checkpoint, inputs.task_suite, inputs.base
        )
        body = evaluated.json("evaluation.json")
        plots = {
            f"{split} {who} pass rate": found[who]["rate"]
            for split, found in body.items()
            for who in ("candidate", "parent")
        }
        plots |= {f"{split} difference": found["difference"]["mean"] for split, found in body.items()}
        plots |= {
            f"{split} difference from the best": found["floor"]["difference"]["mean"]
            for split, found in body.items()
            if "floor" in found
        }
        metadata = {
            "pass rates": pass_rates(body),
            **numbers(plots),
            "checkpoint": link(experiment.name, "checkpoint"),
        }
        return result(evaluated, metadata)

    return evaluation
