"""`triplane tasks import` and `triplane tasks run`: user-supplied tasks, and scripted agents to check a suite with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contracts.artifacts import Artifact
from contracts.errors import TriplaneError
from contracts.store import open_store
from contracts.tasks import Split
from triplane_dagster.cli.experiments import find_experiment
from triplane_dagster.cli.options import AsJson, ExperimentName, SandboxesOf, Shares
from triplane_dagster.cli.output import cell, console, print_json, print_rows
from triplane_dagster.cli.suites import OfSuite, chosen_suite

if TYPE_CHECKING:
    from curation.tasks.agents import Agent, Played
    from triplane_dagster.cli.bars import Bars

EXPECTED = {"oracle": 1.0, "noop": 0.0}
"""Scores that these agents must reach on every sound suite."""


def import_tasks(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of repositories with a task.yaml or of Harbor tasks, or .jsonl file of SWE-bench style rows or"
            " interactions."
        ),
    ],
    repos: Annotated[
        Path | None,
        typer.Option(help="Folder of the clones that a .jsonl file names; default: the folder of the file."),
    ] = None,
    toolset: Annotated[
        str, typer.Option(help="Tools of the agent in tasks that name none, such as default+sql (docs/sandboxes.md).")
    ] = "",
    split: Shares = None,
    experiment: SandboxesOf = "quickstart",
    as_json: AsJson = False,
) -> None:
    """Make a task suite from your own repositories. Every task is proved in sandboxes; broken ones are named and left
    out.

    docs/tasks.md describes the formats. An existing import is reused.

    Examples:

        triplane tasks import my-tasks/

        triplane tasks import instances.jsonl --repos clones/ --split train=0.8 --split gate=0.1 --split held_out=0.1
    """
    from curation.tasks.importing.splits import parse_shares
    from curation.tasks.importing.suite import import_suite, read_source, suite_report
    from resources.sandboxes import SandboxesResource
    from triplane_dagster.cli.bars import Bars

    shares, reading = parse_shares(split or []), read_source(source, repos, toolset)
    wanted, sandboxes = find_experiment(experiment), SandboxesResource()

    async def make(bars: Bars) -> Artifact:
        async with sandboxes.client(wanted.sandboxes) as client:
            return await import_suite(
                reading, shares, open_store(), client, lambda done, total: _show(bars, "validating", done, total)
            )

    try:
        with Bars() as bars:
            suite = asyncio.run(make(bars))
    finally:
        sandboxes.close()
    broken = [each.model_dump() for each in suite_report(suite).broken]
    if as_json:
        print_json({**suite.ref.model_dump(), **suite.meta, "broken": broken})
        return
    if broken:
        print_rows(broken, as_json=False, title=f"{len(broken)} left out")
    console().print(f"task suite {suite.ref.short}: {cell(suite.meta)}", soft_wrap=True)
    console().print(f"check it with `triplane tasks run --agent oracle --suite {suite.ref.short}`", soft_wrap=True)


def run(
    agent: Annotated[
        str, typer.Option(help="oracle (the reference fix), noop, or a .py file with `def act(observation)`.")
    ],
    suite: OfSuite = None,
    experiment: ExperimentName = "quickstart",
    split: Annotated[Split | None, typer.Option("--split", help="Only tasks of this split.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many tasks.")] = 1_000_000,
    max_turns: Annotated[int, typer.Option(min=1, help="Maximum number of turns of a script.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Run an agent on a suite in real sandboxes, with the grading of episodes.

    The oracle must solve every task, and noop none; otherwise an error names the first task.

    Examples:

        triplane tasks run --agent oracle --suite 0a1b2c3d4e5f

        triplane tasks run --agent my_agent.py -e quickstart --split gate --limit 20
    """
    from curation.tasks.agents import agent_named
    from curation.tasks.inspect import suite_tasks

    player, wanted = agent_named(agent), find_experiment(experiment)
    artifact = chosen_suite(open_store(), wanted, suite)
    tasks = list(suite_tasks(artifact, split).values())[:limit]
    if not tasks:
        raise TriplaneError(f"task suite {artifact.ref.short} has no task in split {split}: choose another")
    played = _play(player, tasks, wanted, max_turns, artifact.store)
    rows = [_row(each) for each in played]
    score = sum(each.verdict.solved for each in played) / len(played)
    if as_json:
        print_json({"suite": artifact.ref.digest, "agent": agent, "score": score, "tasks": rows})
    else:
        print_rows(rows, as_json=False, title=f"{agent} on task suite {artifact.ref.short}")
        console().print(
            f"score {score:.3f}: {sum(each.verdict.solved for each in played)} of {len(played)} tasks solved"
        )
    if score != EXPECTED.get(agent, score):
        odd = next(each.task.task_id for each in played if each.verdict.solved != bool(EXPECTED[agent]))
        raise TriplaneError(
            f"{agent} scores {score:.3f}, not {EXPECTED[agent]:g}, first at {odd}: prove that task again with `triplane"
            " tasks check`"
        )


def _play(agent: Agent, tasks: list[Any], experiment: Any, max_turns: int, store: Any) -> list[Played]:
    from curation.tasks.agents import play_suite
    from curation.verify import Verifier
    from resources.sandboxes import SandboxesResource
    from triplane_dagster.cli.bars import Bars

    sandboxes = SandboxesResource()

    async def play(bars: Bars) -> list[Played]:
        async with sandboxes.client(experiment.sandboxes) as client:
            return await play_suite(
                tasks,
                agent,
                client,
                Verifier(client, None, runtimes=store),
                limits=experiment.sandboxes.limits.limits(),
                max_turns=max_turns,
                progress=lambda done, total: _show(bars, "playing", done, total),
            )

    try:
        with Bars() as bars:
            return asyncio.run(play(bars))
    finally:
        sandboxes.close()


def _row(played: Played) -> dict[str, Any]:
    return {
        "task_id": played.task.task_id,
        "split": played.task.split.value,
        "solved": played.verdict.solved,
        "tests": f"{played.verdict.tests_passed}/{played.verdict.tests_total}",
        "exit": played.verdict.exit,
        "turns": played.turns,
        "calls": played.calls,
        "diff_bytes": len(played.diff),
    }


def _show(bars: Bars, phase: str, done: int, total: int) -> None:
    from resources.progress import Progress

    bars(Progress("task_suite", None, phase, done, total))
