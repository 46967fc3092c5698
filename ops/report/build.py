"""Build and commit the report from its sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contracts.artifacts import Artifact
from contracts.digests import digest_of
from contracts.tasks import Split
from curation.measures import MEASURES, measure_names
from ops.costs import Costs, iteration_costs
from ops.graph import REPORT
from ops.report import facts
from ops.report.episodes import viewer
from ops.report.history import REMADE, Row, remade_reports, row_of
from ops.report.page import render
from ops.report.sources import Sources
from ops.report.timings import Seconds, Speeds, earlier_costs


@dataclass(frozen=True)
class Report:
    """Report before it is committed."""

    summary: dict[str, Any]
    """Deterministic: rows of all iterations so far, distributions, families, decision, inputs."""
    spent: dict[str, Costs]
    """Costs of this and earlier iterations, as far as they are known."""
    page: bytes
    """report.html: the summary, timings, costs and the episodes."""


def report_config(sources: Sources, earlier: list[Row]) -> dict[str, Any]:
    """Settings that affect a report, beyond the artifacts of its iteration."""
    return {"experiment": sources.experiment, "iteration": sources.iteration, "history": digest_of(earlier)}


def compose(
    sources: Sources, earlier: list[Row], seconds: Seconds, speeds: Speeds | None = None, gpus: int | None = None
) -> Report:
    """Build the report of an iteration. seconds, speeds: durations of this and earlier iterations' assets, and their
    sampling speeds, if known. gpus: that the trainer uses.
    """
    tasks = sources.tasks()
    rows = [*earlier, row_of(sources)]
    summary = {
        "experiment": sources.experiment,
        "iteration": sources.iteration,
        "rows": rows,
        "headline": headline(rows[-1]),
        **facts.distributions(sources),
        "families": facts.families(sources, tasks),
        "decision": facts.decision(sources),
        **facts.restored(sources),
        "inputs": facts.inputs(sources),
    }
    own = iteration_costs(sources.get("rollouts"), sources.get("dataset"), sources.get("checkpoint"), gpus=gpus)
    spent = earlier_costs(sources.store, sources.experiment, sources.iteration) | {sources.iteration: own}
    shown = summary | {
        "spent": spent,
        "rows": [
            row
            | {"seconds": seconds.get(row["iteration"]) or None}
            | {"tokens_per_second": (speeds or {}).get(row["iteration"])}
            for row in rows
        ],
        "costs": facts.costs(sources),
        "version": REPORT.version,
        "viewer": viewer(sources, tasks),
    }
    return Report(summary, spent, render(shown))


def commit_report(
    sources: Sources, earlier: list[Row], seconds: Seconds, speeds: Speeds | None = None, gpus: int | None = None
) -> Artifact:
    """Commit the `report` artifact of these sources unless it exists; the parameters are those of `compose`."""
    inputs = {asset: artifact.ref for asset, artifact in sources.artifacts.items()}
    work = REPORT.work_with(sources.store, inputs, report_config(sources, earlier))
    found = work.find()
    if found is not None:
        return found
    report = compose(sources, earlier, seconds, speeds, gpus)
    remade = remade_reports(sources.store, sources.experiment, sources.iteration)
    with work.writer() as out:
        out.add_json("summary.json", report.summary)
        # all contain durations, so they are not part of the content digest
        out.add_bytes("report.html", report.page, telemetry=True)
        out.add_json("timings.json", seconds, telemetry=True)
        out.add_json("speeds.json", speeds or {}, telemetry=True)
        out.add_json("costs.json", report.spent, telemetry=True)
        return out.commit(
            meta={
                "iteration": sources.iteration,
                "bytes": len(report.page),
                "episodes": report.summary["rows"][-1]["episodes"],
                **({REMADE: {each: ref.digest for each, ref in remade.items()}} if remade else {}),
            }
        )


def headline(row: Row) -> dict[str, float]:
    """Main numbers of an iteration, as far as they exist."""
    found: dict[str, float | None] = {"train reward": (row["train"] or {}).get("reward")}
    for split in (Split.HELD_OUT, Split.GATE):
        compared = row[split.value]
        found[f"{split.value} pass rate"] = compared["candidate"]["rate"] if compared else None
        found[f"{split.value} difference"] = compared["difference"]["mean"] if compared else None
    for split in (Split.HELD_OUT, Split.UNSEEN):
        own = ((row.get(split.value) or {}).get("measures") or {}).get("candidate")
        names = measure_names(own["k"], own["temperature"]) if own else ()
        found |= {f"{split.value} {name}": own[key]["rate"] for key, name in zip(MEASURES, names, strict=False) if own}
    found |= {"episodes": row["episodes"], "kept": row["kept"], "policy tokens": row["policy_tokens"]}
    return {name: value for name, value in found.items() if value is not None}
