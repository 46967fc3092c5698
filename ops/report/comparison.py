"""Compare the candidates of experiments iteration by iteration, paired by task, on the splits that no decision reads.

    evaluation_run(candidate of A), evaluation_run(candidate of B) -> pass rates, difference from A with its interval

Iterations are aligned by number; those of forks of the same experiment by the iteration whose episodes they repeat.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from contracts.artifacts import Artifact, open_artifact
from contracts.errors import ArtifactMissing
from contracts.store import Store
from contracts.tasks import Split
from curation.statistics import CONFIDENCE, paired_difference, pass_rate, solved_by_task
from ops.iteration_keys import iteration_key
from ops.report.chart import picture
from resources.refs import experiments_in, partitions, read_artifact

READINGS = tuple((split, greedy) for split in (Split.HELD_OUT, Split.UNSEEN) for greedy in (True, False))
COLORS = ("#2268c9", "#c65a11", "#2f8f4e", "#8d4bb8")
Row = dict[str, Any]


def compare(store: Store, experiments: Sequence[str]) -> list[Row]:
    """One row for each iteration, split and temperature: per experiment its iteration, policy and pass rate (None where
    there is none), and the paired difference of each later experiment from the first.

    Raises ArtifactMissing for an experiment without an evaluation.
    """
    runs = {name: _runs(store, name) for name in experiments}
    origins = {name: _origin(store, name) for name in experiments}
    same = len({root for root, _ in origins.values()}) == 1
    offsets = {name: offset if same else 0 for name, (_, offset) in origins.items()}
    places = sorted({number + offsets[name] for name, found in runs.items() for number, _, _ in found})
    rows = []
    for place in places:
        for split, greedy in READINGS:
            at = {name: runs[name].get((place - offsets[name], split, greedy)) for name in experiments}
            if any(at.values()):
                rows.append(
                    {
                        "split": split.value,
                        "greedy": greedy,
                        "experiments": {
                            name: _rate(run, place - offsets[name]) if run else None for name, run in at.items()
                        },
                        "differences": {name: difference(at[experiments[0]], at[name]) for name in experiments[1:]},
                    }
                )
    return rows


def cells(row: Row) -> dict[str, str]:
    """A row as text by column."""
    own = row["experiments"]
    return {
        "iteration": " / ".join(found["iteration"] if found else "-" for found in own.values()),
        "split": row["split"].replace("_", "-") + (", greedy" if row["greedy"] else ", sampled"),
        **{name: percent(found) for name, found in own.items()},
        **{f"{name}: difference in points": points(found) for name, found in row["differences"].items()},
    }


def percent(found: Row | None) -> str:
    """A pass rate or a measure with its interval; - for none."""
    if found is None or found["rate"] is None:
        return "-"
    return f"{found['rate']:.1%} [{found['low']:.0%}, {found['high']:.0%}]"


def points(found: Row | None) -> str:
    """A paired difference with its interval, in percentage points; - for none."""
    if found is None:
        return "-"
    if found["why"]:
        return str(found["why"])
    mean, low, high = (f"{100 * found[each]:+.1f}" for each in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}], {found['n']} tasks"


def page(experiments: Sequence[str], rows: Sequence[Row]) -> bytes:
    """The comparison as one HTML file that needs no network."""
    title = html.escape(f"{', '.join(experiments)} compared")
    texts = [cells(row) for row in rows]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in texts[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in text.values()) + "</tr>" for text in texts
    )
    pictures = "".join(
        f'<figure><img alt="" src="{drawn}"><figcaption>{text}</figcaption></figure>'
        for text, drawn in _pictures(experiments, rows)
    )
    rules = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    style = (
        "body{font:15px sans-serif;margin:2em}td,th{padding:.3em .8em;text-align:left;border-bottom:1px solid #bbb}"
        "div{display:flex;flex-wrap:wrap}figure{margin:.5em 2em 1em 0}"
    )
    note = html.escape(
        f"Pass rates of the candidates, with {CONFIDENCE:.0%} intervals by task; differences are paired by task and"
        f" taken from {experiments[0]}. Iterations of a row are those of {' / '.join(experiments)}; - means none."
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy"'
        f' content="{rules}"><title>{title}</title><style>{style}</style><h1>{title}</h1><p>{note}</p>'
        f"<div>{pictures}</div><table><tr>{head}</tr>{body}</table></html>\n"
    ).encode()


def _pictures(experiments: Sequence[str], rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """(caption, picture as a data URI) of each reading that has a row."""
    for split, greedy in READINGS:
        found = [row for row in rows if (row["split"], row["greedy"]) == (split.value, greedy)]
        if found:
            curves = [
                (
                    html.escape(name),
                    COLORS[place % len(COLORS)],
                    [(row["experiments"][name] or {}).get("rate") for row in found],
                )
                for place, name in enumerate(experiments)
            ]
            texts = [cells(row) for row in found]
            yield texts[0]["split"], picture(texts, curves, (0.0, 1.0), "{:.0%}")


def _runs(store: Store, experiment: str) -> dict[tuple[int, Split, bool], Artifact]:
    """Runs of the candidates by number of the iteration, split and temperature. Raises ArtifactMissing."""
    found = {}
    for key in partitions(store, experiment, "evaluation"):
        evaluation = read_artifact(store, experiment, "evaluation", key)
        for split, greedy in READINGS if evaluation else ():
            role = f"candidate_{split.value}" + "_greedy" * greedy
            ref = evaluation.manifest.parents.get(role) if evaluation else None
            if ref is not None:
                found[int(key), split, greedy] = open_artifact(store, ref)
    if not found:
        known = ", ".join(experiments_in(store)) or "(none)"
        raise ArtifactMissing(
            f"{experiment!r} has no evaluation on held-out or unseen tasks in {store.url}, which has {known}: run"
            f" `triplane iterate -e {experiment}` first"
        )
    return found


def _origin(store: Store, experiment: str) -> tuple[str, int]:
    """Experiment that sampled the first iteration, and the number of that iteration there."""
    inputs = read_artifact(store, experiment, "iteration_inputs", iteration_key(0))
    replayed = inputs.json("inputs.json").get("replayed") if inputs else None
    return (replayed["experiment"], int(replayed["iteration"])) if replayed else (experiment, 0)


def _rate(run: Artifact, number: int) -> Row:
    rate = asdict(pass_rate(run.table("rewards.parquet", ["task_id", "solved"])))
    return {"iteration": iteration_key(number), "policy": run.manifest.parents["policy"].digest, **rate}


def difference(first: Artifact | None, other: Artifact | None) -> Row | None:
    """Paired difference from the first; without numbers, but with `why`, if the runs can't be paired."""
    if first is None or other is None:
        return None
    if first.manifest.parents["task_suite"] != other.manifest.parents["task_suite"]:
        return dict.fromkeys(("mean", "low", "high")) | {"n": 0, "why": "not paired: another task suite"}
    ours, theirs = (solved_by_task(run.table("rewards.parquet", ["task_id", "solved"])) for run in (other, first))
    return asdict(paired_difference(ours, theirs)) | {"why": None}
