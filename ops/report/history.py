"""One row for each iteration, as the curves show it. Deterministic; the page adds seconds.

    report[previous].rows + rows of iterations since, from their artifacts + this iteration's row

Each report contains earlier rows, so a long history needs one read. Rows from a report and from artifacts are equal.
The row of an iteration that was made again comes from its own report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from contracts.artifacts import Artifact, ArtifactRef, find_artifact
from contracts.store import Store
from contracts.tasks import Split
from curation.statistics import pass_rate
from ops.report.sources import Sources, find_sources
from resources.refs import changed_refs, partitions, read_artifact

Row = dict[str, Any]
STEPS = 16
"""Maximum optimizer steps per iteration."""
REMADE = "remade"
"""Key in a report's meta: digests of the reports of earlier iterations that were made again, as its rows know them."""
SOLVE_RATES = ("solve_rate_kept", "solve_rate_estimated", "solve_rate_bias")
"""Of rollouts that left out stragglers; see inference/rollouts/straggler_bias.py."""
STEP_NUMBERS = ("loss", "entropy", "old_kl", "grad_norm", "clip_fraction")


def row_of(sources: Sources) -> Row:
    """Numbers of one iteration; None if they don't exist yet."""
    inputs, rollouts = sources.get("iteration_inputs"), sources.get("rollouts")
    rewards, dataset = sources.get("rewards"), sources.get("dataset")
    candidate, evaluation, decision = (sources.get(asset) for asset in ("checkpoint", "evaluation", "sampler"))
    compared = evaluation.json("evaluation.json") if evaluation else {}
    acting = (inputs or rollouts).manifest.parents.get("policy") if inputs or rollouts else None  # type: ignore[union-attr]
    return {
        "iteration": sources.iteration,
        "acting": acting.digest if acting else None,
        "candidate": candidate.ref.digest if candidate else None,
        "train": _train(rewards),
        **{split.value: compared.get(split.value) for split in (Split.GATE, Split.HELD_OUT, Split.UNSEEN)},
        "training": _training(candidate),
        "decision": decision.json("decision.json")["decision"] if decision else None,
        "kept": sum(dataset.table("members.parquet", ["kept"])["kept"].to_pylist()) if dataset else None,
        **_volume(rollouts),
    }


def earlier_rows(store: Store, experiment: str, iteration: str) -> list[Row]:
    """Rows of the iterations before this one, in order."""
    reports = [each for each in partitions(store, experiment, "report") if each < iteration]
    report = read_artifact(store, experiment, "report", reports[-1]) if reports else None
    rows: list[Row] = report.json("summary.json")["rows"] if report else []
    seen = report.meta.get(REMADE, {}) if report else {}
    changed = remade_reports(store, experiment, iteration)
    rows = [_current(store, row, changed.get(row["iteration"]), seen) for row in rows]
    known = rows[-1]["iteration"] if rows else ""
    since = [each for each in partitions(store, experiment, "rollouts") if known < each < iteration]
    return rows + [row_of(find_sources(store, experiment, each)) for each in since]


def remade_reports(store: Store, experiment: str, iteration: str) -> dict[str, ArtifactRef]:
    """Current reports of the iterations before this one that were reported again, by iteration."""
    return {each: ref for each, ref in changed_refs(store, experiment, "report").items() if each < iteration}


def _current(store: Store, row: Row, report: ArtifactRef | None, seen: Mapping[str, str]) -> Row:
    """The row, or that of the iteration's own report if it was made again since. seen: digests of the reports that rows
    are from already, by iteration.
    """
    if report is None or seen.get(row["iteration"]) == report.digest:
        return row
    made = find_artifact(store, report.kind, report.key)
    own: Row = made.json("summary.json")["rows"][-1] if made else row
    return own


def metrics_of(checkpoint: Artifact | None) -> list[dict[str, Any]]:
    """Records of the optimizer steps that made a checkpoint, in order."""
    if checkpoint is None or "metrics.jsonl" not in checkpoint.names():
        return []
    records = [json.loads(line) for line in checkpoint.path("metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record]


def finite(value: Any) -> float | None:
    """Number if it is finite, else None, which JSON requires."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _train(rewards: Artifact | None) -> dict[str, Any] | None:
    if rewards is None:
        return None
    table = rewards.table("rewards.parquet", ["task_id", "reward", "solved"])
    graded = [value for value in table["reward"].to_pylist() if value is not None]
    return {"reward": fmean(graded) if graded else None, "graded": len(graded), **vars(pass_rate(table))}


def _training(checkpoint: Artifact | None) -> dict[str, Any] | None:
    records = metrics_of(checkpoint)
    if not records:
        return None
    stride = -(-len(records) // STEPS)
    means = {
        name: fmean(values)
        for name in STEP_NUMBERS
        if (values := [value for record in records if (value := finite(record.get(name))) is not None])
    }
    shown = [
        {"step": record["step"], **{name: finite(record.get(name)) for name in STEP_NUMBERS}} for record in records
    ]
    return {"optimizer_steps": len(records), **means, "steps": shown[::stride]}


def _volume(rollouts: Artifact | None) -> dict[str, Any]:
    if rollouts is None:
        return {"episodes": None, "policy_tokens": None}
    tokens = rollouts.table("episodes.parquet", ["policy_tokens"])["policy_tokens"].to_pylist()
    rates = {name: rollouts.meta[name] for name in SOLVE_RATES if name in rollouts.meta}
    return {"episodes": len(tokens), "policy_tokens": sum(tokens), **rates}
