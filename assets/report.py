"""report[i]: what happened, as one HTML page that needs nothing else: curves, distributions, every episode to read."""

import dagster as dg

from assets.naming import define
from contracts.artifacts import ArtifactRef
from ops.report import REPORT_VERSION
from ops.report.build import commit_report
from ops.report.chart import pass_rate_picture
from ops.report.history import earlier_rows
from ops.report.sources import REPORTED, open_sources
from ops.report.timings import earlier_seconds, iteration_seconds
from ops.results import Materialized, numbers, result
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.store import StoreResource

NAME = "report"


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        NAME,
        kinds={"html"},
        ins=REPORTED,
        description="One self-contained page: curves over all iterations so far, distributions, costs, and a viewer of every episode.",
        code_version=REPORT_VERSION,
    )
    def report(
        context: dg.AssetExecutionContext, iteration_inputs: ArtifactRef, prompts: ArtifactRef, rollouts: ArtifactRef,
        rewards: ArtifactRef, dataset: ArtifactRef, checkpoint: ArtifactRef, evaluation: ArtifactRef, sampler: ArtifactRef,
        store: StoreResource, progress: dg.ResourceParam[ProgressSink],
    ) -> Materialized:  # fmt: skip
        step = begin(context, experiment, NAME, store.open(), progress)
        shown = (iteration_inputs, prompts, rollouts, rewards, dataset, checkpoint, evaluation, sampler)
        refs = dict(zip(REPORTED, shown, strict=True))
        sources = open_sources(step.store, experiment.name, step.iteration, refs)
        seconds = earlier_seconds(step.store, experiment.name, step.iteration)
        seconds[step.iteration] = iteration_seconds(context.instance, experiment.name, step.iteration)
        made = commit_report(sources, earlier_rows(step.store, experiment.name, step.iteration), seconds)
        summary = made.json("summary.json")
        picture = pass_rate_picture(summary["rows"])
        metadata = {
            **numbers(summary["headline"]),
            "page": dg.MetadataValue.path(made.path("report.html")),
            "page bytes": made.meta["bytes"],
            "open": f"triplane report -e {experiment.name} -i {step.iteration} --open",
            "pass rates": dg.MetadataValue.md(f"![pass rates over iterations]({picture})" if picture else "none yet"),
        }
        return result(made, metadata)

    return report
