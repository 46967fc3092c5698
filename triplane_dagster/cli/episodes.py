"""`triplane episodes`: list and read episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from contracts.artifacts import Artifact, list_artifacts, open_artifact
from contracts.errors import ArtifactMissing
from contracts.store import Store, open_store
from triplane_dagster.cli.experiments import name_in_store
from triplane_dagster.cli.options import AsJson, ExperimentName, Limit
from triplane_dagster.cli.output import console, print_json, print_rows, write_file
from triplane_dagster.cli.transcript import episode_json, print_episode
from triplane_dagster.episode_export import exported
from triplane_dagster.episode_index import find_episode, rewards_of, sampled_by

Iteration = Annotated[
    str, typer.Option("--iteration", "-i", help="Iteration key such as 0003; default: the last with rollouts.")
]
Source = Annotated[str, typer.Option(help="Digest of a rollouts or evaluation_run artifact instead of an iteration's.")]

app = typer.Typer(no_args_is_help=True, help="List episodes, or read one: transcript, tool calls, diff, verdict.")


@app.command("list")
def list_episodes(
    experiment: ExperimentName = "quickstart",
    iteration: Iteration = "",
    artifact: Source = "",
    solved: Annotated[
        bool | None, typer.Option("--solved/--unsolved", help="Only solved, or only unsolved episodes.")
    ] = None,
    task: Annotated[str, typer.Option(help="Only episodes of this task.")] = "",
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List the episodes of an iteration.

    Examples:

        triplane episodes list                        # the last iteration's

        triplane episodes list -i 0002 --unsolved     # what went wrong in iteration 2
    """
    store = open_store()
    place = None if artifact else _place(store, experiment, iteration)
    source = _rollouts(store, *place) if place else _artifact(store, artifact)
    rows = [
        row
        for row in _rows(store, source, place)
        if (not task or row["task"] == task) and (solved is None or row["solved"] == solved)
    ]
    title = f"{source.ref.kind} {source.ref.short}: {min(limit, len(rows))} of {len(rows)} episodes"
    print_rows(rows[:limit], as_json=as_json, title=title, empty="no matching episode")


@app.command()
def show(
    episode: Annotated[str, typer.Argument(help="Episode id or an unambiguous prefix of it.")],
    as_json: AsJson = False,
) -> None:
    """Show one episode: messages by role, tool calls, final diff, verdict, and how the dataset used it.

    Example:

        triplane episodes show 3f9c2a71
    """
    store = open_store()
    found = episode_json(store, find_episode(store, episode))
    if as_json:
        print_json(found)
    else:
        print_episode(console(), found)


@app.command()
def export(
    experiment: ExperimentName = "quickstart",
    iteration: Iteration = "",
    artifact: Source = "",
    kept: Annotated[bool, typer.Option("--kept", help="Only episodes that the iteration's dataset kept.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="With token ids, roles and log-probabilities.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: stdout.")] = None,
) -> None:
    """Write the episodes of an iteration as JSON lines: messages, calls, diff, verdict, reward, use in the dataset.

    Examples:

        triplane episodes export -i 0003 -o episodes.jsonl

        triplane episodes export --kept | jq -r '[.task, .reward.reward] | @tsv'
    """
    store = open_store()
    place = None if artifact else _place(store, experiment, iteration)
    source = _rollouts(store, *place) if place else _artifact(store, artifact)
    place = place or sampled_by(store, source)
    members = _members(store, source, place)
    if kept and members is None:
        raise ArtifactMissing(
            f"no current dataset is of {source.ref.kind} {source.ref.short}, which --kept asks: leave it out, or"
            " materialize `dataset`"
        )
    lines = (
        json.dumps(row)
        for row in exported(store, source, rewards_of(store, source, place), members or {}, tokens=tokens)
        if not kept or row["kept"]
    )
    if output is None:
        for line in lines:
            print(line)
        return
    written = write_file(output, (f"{line}\n".encode() for line in lines))
    typer.echo(f"{written} episodes of {source.ref.kind} {source.ref.short} in {output}")


def _rows(store: Store, source: Artifact, place: tuple[str, str] | None) -> Iterator[dict[str, Any]]:
    rewards = rewards_of(store, source, place)
    columns = ["episode_id", "task_id", "sample", "outcome", "turns", "policy_tokens"]
    for row in source.table("episodes.parquet", columns=columns).to_pylist():
        graded = rewards.get(row["episode_id"], {})
        yield {
            "episode": row["episode_id"],
            "task": row["task_id"],
            "sample": row["sample"],
            "outcome": row["outcome"],
            "turns": row["turns"],
            "policy tokens": row["policy_tokens"],
            "solved": graded.get("solved"),
            "reward": graded.get("reward"),
            "findings": len(graded.get("findings") or ()),
        }


def _members(store: Store, source: Artifact, place: tuple[str, str] | None) -> dict[str, dict[str, Any]] | None:
    """Rows of the dataset of an iteration by episode; None: there is none, or it is not of these episodes."""
    from resources.refs import read_artifact

    dataset = read_artifact(store, place[0], "dataset", place[1]) if place else None
    if dataset is None or source.ref not in dataset.manifest.parents.values():
        return None
    return {row["episode_id"]: row for row in dataset.table("members.parquet").to_pylist()}


def _place(store: Store, experiment: str, iteration: str) -> tuple[str, str]:
    """Name of the experiment in the store, and the iteration or, if none is given, the last one with rollouts."""
    from resources.refs import partitions

    name = name_in_store(store, experiment)
    wanted = iteration or max(partitions(store, name, "rollouts"), default="")
    if not wanted:
        raise ArtifactMissing(f"{name} has no rollouts in {store.url}: run `triplane iterate -e {name}` first")
    return name, wanted


def _rollouts(store: Store, experiment: str, iteration: str) -> Artifact:
    from resources.refs import require_ref

    return open_artifact(store, require_ref(store, experiment, "rollouts", iteration))


def _artifact(store: Store, prefix: str) -> Artifact:
    found = [
        artifact
        for kind in ("rollouts", "evaluation_run")
        for artifact in list_artifacts(store, kind)
        if artifact.ref.digest.startswith(prefix)
    ]
    if len({artifact.ref.digest for artifact in found}) != 1:
        raise ArtifactMissing(
            f"{prefix!r} matches {len(found)} rollouts and evaluation_run artifacts, expected one: give more digits"
        )
    return found[0]
