"""report[i]: one self-contained HTML page: curves, distributions, every episode."""

from collections.abc import Sequence

import dagster as dg

from assets.naming import define
from contracts.artifacts import ArtifactRef
from contracts.tasks import Split
from ops.graph import REPORT
from ops.ledger.index import update_fault
from ops.report import ROUTE
from ops.report.build import commit_report
from ops.report.chart import loss_picture, pass_rate_picture, reward_picture
from ops.report.history import Row, earlier_rows
from ops.report.sources import open_sources
from ops.report.timings import earlier_seconds, earlier_speeds, iteration_seconds
from ops.results import Materialized, markdown_table, numbers, result
from ops.rollout_numbers import sampling_speed
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.store import StoreResource

SHOWN = 8
"""Rows of the table on the asset's page: as many as it shows without a click."""


def iterations_table(rows: Sequence[Row]) -> dg.MarkdownMetadataValue:
    """Table of the last iterations."""

    def rate(row: Row, split: Split) -> str:
        found = row[split.value]
        return f"{found['candidate']['rate']:.1%}" if found and found["candidate"]["rate"] is not None else "-"

    def greedy(row: Row, split: Split) -> str:
        own = ((row.get(split.value) or {}).get("measures") or {}).get("candidate")
        return f"{own['greedy']['rate']:.1%}" if own and own["greedy"]["rate"] is not None else "-"

    def reward(row: Row) -> str:
        found = row["train"]
        return f"{found['reward']:.3f}" if found and found["reward"] is not None else "-"

    return markdown_table(
        [
            {
                "iteration": row["iteration"],
                "train reward": reward(row),
                "gate": rate(row, Split.GATE),
                "held-out": rate(row, Split.HELD_OUT),
                "held-out greedy": greedy(row, Split.HELD_OUT),
                "unseen greedy": greedy(row, Split.UNSEEN),
                "decision": row["decision"] or "-",
            }
            for row in rows[-SHOWN:]
        ]
    )


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        REPORT,
        kinds={"html"},
        description=(
            "One self-contained page: curves over all iterations so far, distributions, costs, and a viewer of every"
            " episode."
        ),
    )
    def report(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        progress: dg.ResourceParam[ProgressSink],
        **given: ArtifactRef,
    ) -> Materialized:
        step = begin(context, experiment, REPORT, store.open(), progress, given)
        sources = open_sources(step.store, experiment.name, step.iteration, step.state.made)
        seconds = earlier_seconds(step.store, experiment.name, step.iteration)
        seconds[step.iteration] = iteration_seconds(context.instance, experiment.name, step.iteration)
        speeds = earlier_speeds(step.store, experiment.name, step.iteration)
        speed = sampling_speed(context.instance, experiment.name, step.iteration)
        if speed is not None:
            speeds[step.iteration] = speed
        earlier, gpus = earlier_rows(step.store, experiment.name, step.iteration), experiment.trainer.launcher.all_gpus
        made = commit_report(sources, earlier, seconds, speeds, gpus)
        if fault := update_fault(step.store):
            context.log.warning(fault)
        summary = made.json("summary.json")
        # Dagster plots partitions in the order in which they were materialized; these are in the order of iterations
        pictures = {
            f"{what} over iterations": picture(summary["rows"])
            for what, picture in (
                ("pass rates", pass_rate_picture),
                ("reward mean", reward_picture),
                ("loss", loss_picture),
            )
        }
        name = f"{experiment.name} {step.iteration}"
        metadata = {
            "page": dg.MetadataValue.md(f"[Open the report of {name}]({ROUTE}/{made.ref.key})"),
            "iterations": iterations_table(summary["rows"]),
            **{
                name: dg.MetadataValue.md(f"![{name}]({picture})" if picture else "none yet")
                for name, picture in pictures.items()
            },
            **numbers(summary["headline"]),
            "in a terminal": f"triplane report -e {experiment.name} -i {step.iteration} --open",
            "file": dg.MetadataValue.path(made.path("report.html")),
        }
        return result(made, metadata)

    return report
