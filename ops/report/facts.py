"""Summaries of one iteration: histograms, outcomes, reasons, families, costs, the decision and its inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from contracts.artifacts import Artifact
from contracts.episodes import Outcome
from contracts.tasks import Split, Task
from curation.statistics import pass_rate
from ops.report.sources import Sources

BINS = 24
COSTS = ("seconds", "sampling_seconds", "tool_seconds", "engine_tokens", "retries")


def histogram(values: Sequence[float | None]) -> dict[str, Any]:
    """Counts in at most BINS equal bins of a round width; null values are counted apart."""
    known = [value for value in values if value is not None]
    if not known:
        return {"low": 0.0, "width": 1.0, "counts": [], "missing": len(values)}
    low, high = min(known), max(known)
    width = _round_width((high - low) / BINS) if high > low else 1.0
    if all(float(value).is_integer() for value in known):
        width = max(1.0, math.ceil(width))
    start = math.floor(low / width + 1e-9)
    places = [math.floor(value / width + 1e-9) - start for value in known]
    counts = Counter(places)
    return {
        "low": start * width,
        "width": width,
        "counts": [counts[place] for place in range(max(places) + 1)],
        "missing": len(values) - len(known),
    }


def distributions(sources: Sources) -> dict[str, Any]:
    """Histograms of rewards, lengths and turns; counts of outcomes (graded ones as solved and failed) and of
    reasons.
    """
    rollouts, rewards, dataset = (sources.get(asset) for asset in ("rollouts", "rewards", "dataset"))
    found: dict[str, Any] = {"histograms": {}, "outcomes": {}, "reasons": {}}
    if rollouts:
        episodes = rollouts.table("episodes.parquet", ["episode_id", "outcome", "turns", "policy_tokens"])
        solved = _column(rewards.table("rewards.parquet", ["episode_id", "solved"]), "solved") if rewards else {}
        outcomes = Counter(
            graded_outcome(outcome, solved.get(episode))
            for episode, outcome in zip(
                episodes["episode_id"].to_pylist(), episodes["outcome"].to_pylist(), strict=True
            )
        )
        found["outcomes"] = dict(sorted(outcomes.items()))
        found["histograms"]["tokens"] = histogram(episodes["policy_tokens"].to_pylist())
        found["histograms"]["turns"] = histogram(episodes["turns"].to_pylist())
    if rewards:
        values = rewards.table("rewards.parquet", ["reward"])["reward"].to_pylist()
        found["histograms"]["reward"] = histogram([None if value is None else round(value, 6) for value in values])
    if dataset:
        members = dataset.table("members.parquet", ["reason"])["reason"].to_pylist()
        found["reasons"] = dict(sorted(Counter(reason or "kept" for reason in members).items()))
    return found


def graded_outcome(outcome: str, solved: bool | None) -> str:
    """The outcome of an episode after grading: one that completed is solved or failed, if it was graded."""
    if outcome != Outcome.COMPLETED or solved is None:
        return outcome
    return (Outcome.SOLVED if solved else Outcome.FAILED).value


def families(sources: Sources, tasks: Mapping[str, Task]) -> dict[str, list[dict[str, Any]]]:
    """Pass rate of every task family before (parent) and after (candidate), by evaluated split."""
    found: dict[str, list[dict[str, Any]]] = {}
    for split in (Split.HELD_OUT, Split.UNSEEN, Split.GATE):
        runs = {who: sources.parent("evaluation", f"{who}_{split.value}") for who in ("parent", "candidate")}
        rates = {who: _family_rates(run, tasks) for who, run in runs.items() if run}
        if len(rates) == 2:
            names = sorted(set(rates["parent"]) | set(rates["candidate"]))
            found[split.value] = [
                {"family": name, "parent": rates["parent"].get(name), "candidate": rates["candidate"].get(name)}
                for name in names
            ]
    return found


def costs(sources: Sources) -> list[dict[str, Any]]:
    """Sums of telemetry of the rollouts and of each evaluation run. Not deterministic."""
    evaluation = sources.get("evaluation")
    parts = {"rollouts": sources.get("rollouts")}
    parents = evaluation.manifest.parents if evaluation else {}
    for role in sorted(role for role, ref in parents.items() if ref.kind == "evaluation_run"):
        parts[role.replace("_", " ", 1)] = sources.parent("evaluation", role)
    return [
        {"what": what, "episodes": table.num_rows, **{name: pc.sum(table[name]).as_py() or 0 for name in COSTS}}
        for what, part in parts.items()
        if part is not None and "telemetry.parquet" in part.names()
        for table in [part.table("telemetry.parquet", list(COSTS))]
    ]


def inputs(sources: Sources) -> list[dict[str, Any]]:
    """Artifacts that this report shows, with their digests."""
    return [
        {
            "asset": asset,
            "kind": artifact.ref.kind,
            "digest": artifact.ref.digest,
            "action_key": artifact.ref.key,
            "code_version": artifact.manifest.code_version,
        }
        for asset, artifact in sources.artifacts.items()
    ]


def decision(sources: Sources) -> dict[str, Any] | None:
    """Decision about the candidate with its reasons, or None if there is none yet."""
    decided = sources.get("sampler")
    if decided is None:
        return None
    body = decided.json("decision.json")
    return {
        "decision": body["decision"],
        "reasons": body["reasons"],
        "candidate": body["candidate"]["digest"],
        "parent": body["parent"]["digest"],
        "pointer_number": body["pointer_number"],
        "margin": decided.manifest.config.get("margin"),
    }


def restored(sources: Sources) -> dict[str, Any]:
    """Rollback that restored the acting policy, as {"rollback": {number, to, reason}}, if there was one."""
    pinned = sources.get("iteration_inputs")
    rollback = pinned.meta.get("rollback") if pinned else None
    return {"rollback": rollback} if rollback else {}


def _family_rates(run: Artifact, tasks: Mapping[str, Task]) -> dict[str, dict[str, Any]]:
    table = run.table("rewards.parquet", ["task_id", "solved"])
    names = [tasks[task].family if task in tasks else "unknown" for task in table["task_id"].to_pylist()]
    return {
        name: vars(pass_rate(table.filter(pa.array([each == name for each in names])))) for name in sorted(set(names))
    }


def _column(table: pa.Table, name: str) -> dict[str, Any]:
    return dict(zip(table["episode_id"].to_pylist(), table[name].to_pylist(), strict=True))


def _round_width(width: float) -> float:
    """Smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is at least `width`."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= width * (1 - 1e-9))
