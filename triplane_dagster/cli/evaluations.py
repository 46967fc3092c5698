"""`triplane evaluations`: named evaluations, and results of policies side by side."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contracts.artifacts import Artifact
from contracts.errors import ConfigError
from contracts.store import open_store
from contracts.tasks import Split
from triplane_dagster.cli.options import AsJson, Limit
from triplane_dagster.cli.output import console, print_json, print_rows

if TYPE_CHECKING:
    from resources.evaluation import Evaluation

app = typer.Typer(no_args_is_help=True, help="List evaluations and their results, and compare them by task.")

Name = Annotated[str | None, typer.Option("--name", help="Only results of this named evaluation.")]
SHORT = 12
"""Digits of a digest in a table."""
SHOWN_TASKS = 4
"""Tasks that a line names."""


def named_evaluation(name: str) -> Evaluation:
    """The named evaluation of this name. Raises ConfigError that lists the known names."""
    from resources.evaluation import load_evaluation
    from triplane_dagster.experiment_files import evaluations_folder

    return load_evaluation(evaluations_folder() / f"{name}.yaml")


def _definitions() -> list[Evaluation]:
    """Every named evaluation; files that can't be used are warned of."""
    from resources.evaluation import load_evaluation
    from triplane_dagster.experiment_files import evaluations_folder

    found = []
    for path in sorted(evaluations_folder().glob("*.yaml")):
        try:
            found.append(load_evaluation(path))
        except ConfigError as error:
            typer.echo(f"warning: {error}", err=True)
    return found


@app.command()
def names(as_json: AsJson = False) -> None:
    """List the named evaluations: files in experiments/evaluations/, which `triplane evaluate --save` writes."""
    rows: list[dict[str, Any]] = [
        {
            "name": each.name,
            "suite": each.suite if as_json else each.suite[:SHORT],
            "split": each.split.value,
            "samples": each.samples,
            "temperature": 0.0 if each.greedy else each.rollouts.temperature,
            "engine": each.engine.kind,
            "description": each.description,
        }
        for each in _definitions()
    ]
    print_rows(rows, as_json=as_json, empty="no evaluation has a name: triplane evaluate POLICY --save NAME")


@app.command("list")
def list_results(
    name: Name = None,
    policy: Annotated[
        str, typer.Option(help="Only of this policy: the beginning of its digest, live, base, NAME/live, NAME/0003.")
    ] = "",
    suite: Annotated[str, typer.Option("--suite", help="Only on this suite: the beginning of its digest.")] = "",
    split: Annotated[Split | None, typer.Option("--split", help="Only of this split.")] = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List results, the newest first: those of `triplane evaluate` and those that iterations made.

    Examples:

        triplane evaluations list --name unseen4

        triplane evaluations list --policy quickstart/live --json
    """
    from ops.named_evaluations import results, rows_of
    from ops.policies import LATEST, stored_policy

    store, known = open_store(), [named_evaluation(name)] if name else _definitions()
    digest = stored_policy(store, "quickstart", policy).digest if "/" in policy or policy in LATEST else policy
    found = results(store, known if name else (), policy=digest, suite=suite, split=split)
    rows = rows_of(store, found[:limit], known)
    if as_json:
        print_json(rows)
        return
    title = f"{len(rows)} of {len(found)} results in {store.url}"
    empty = (
        "no result: triplane evaluate POLICY makes one" if not (name or policy or suite or split) else "no such result"
    )
    print_rows([_cells(row) for row in rows], as_json=False, title=title, empty=empty)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="Digests of two or more results, as `list` prints them.")],
    as_json: AsJson = False,
) -> None:
    """Compare results on the same tasks: differences in pass rate from the first, paired by task, with 95% intervals.

    Example:

        triplane evaluations compare 3f9c2a71 77ab01c2
    """
    from ops.named_evaluations import compare_runs, find_run, other_settings, rows_of
    from ops.report.comparison import points

    store, known = open_store(), _definitions()
    found = [find_run(store, each) for each in runs]
    if len({run.ref.key for run in found}) != len(found) or len(found) < 2:
        raise ConfigError(f"{' '.join(runs)}: give two or more different results")
    compared = compare_runs(found)
    rows = [row | other for row, other in zip(rows_of(store, found, known), compared, strict=True)]
    if as_json:
        print_json(rows)
        return
    shown = [_cells(row) | {"difference in points": points(row["difference"])} for row in rows]
    print_rows(shown, as_json=False, title=f"{rows[0]['split']} of suite {rows[0]['suite'][:SHORT]}")
    for run in found[1:]:
        for line in other_settings(found[0], run):
            typer.echo(f"warning: {found[0].ref.short} and {run.ref.short} differ in {line}", err=True)


def show_result(run: Artifact, *, as_json: bool) -> None:
    """Print one result, with what makes it doubtful as a measure of the policy."""
    from ops.named_evaluations import rows_of

    (row,) = rows_of(run.store, [run], _definitions())
    if as_json:
        print_json(row)
        return
    print_rows([_cells(row)], as_json=False, title=f"{row['split']} of suite {row['suite'][:SHORT]}")
    for line in _doubts(row):
        console().print(line, soft_wrap=True)


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    """A result as text by column."""
    from ops.report.comparison import percent

    made, rate, costs = row["measures"], row["pass_rate"], row["costs"]
    greedy = not made["k"]
    return {
        "evaluation": row["evaluation"][:SHORT],
        "name": ", ".join(row["names"]) or None,
        "policy": row["policy"][:SHORT] + " (outside)" * (row["policy_kind"] != "checkpoint"),
        "suite": row["suite"][:SHORT],
        "split": row["split"],
        "tasks x samples": f"{row['tasks']} x {row['samples']}",
        "sampled": "greedy" if greedy else f"T={made['temperature']:g}",
        "pass rate": percent(rate),
        "maj@k, pass@k": None if greedy else f"{percent(made['majority'])}, {percent(made['any'])}",
        "tokens": costs["engine_tokens"],
        "sandbox s": round(costs["sandbox_seconds"], 1),
        "trained on": f"{len(row['trained_on'])} tasks" if row["trained_on"] else None,
        "when (UTC)": datetime.fromtimestamp(row["created_unix"], UTC).strftime("%Y-%m-%d %H:%M"),
    }


def _doubts(row: dict[str, Any]) -> list[str]:
    """What speaks against taking a result for a measure of the policy on new tasks."""
    policy, seen, lines = row["policy"][:SHORT], row["trained_on"], []
    if row["trained_on_split"]:
        lines.append("train is the split that training draws its tasks from: this does not measure generalization")
    if seen:
        more = f" and {len(seen) - SHOWN_TASKS} more" * (len(seen) > SHOWN_TASKS)
        some = ", ".join(seen[:SHOWN_TASKS])
        lines.append(
            f"contaminated: policy {policy} was trained on {len(seen)} of these {row['tasks']} tasks: {some}{more}"
        )
    if row["imported"]:
        lines.append(f"policy {policy} descends from weights trained elsewhere: whether on these tasks is not known")
    return lines
