"""`triplane tasks difficulty`: how often a policy or a scripted agent solves each task of a suite."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contracts.artifacts import Artifact
from contracts.errors import ConfigError, TriplaneError
from contracts.store import open_store
from contracts.tasks import Split
from triplane_dagster.cli.experiments import find_experiment
from triplane_dagster.cli.options import AsJson, ExperimentName, Limit, Overrides
from triplane_dagster.cli.output import console, print_json, print_rows
from triplane_dagster.cli.suites import OfSuite, chosen_suite

if TYPE_CHECKING:
    from contracts.tasks import Task
    from resources.experiment import Experiment
    from triplane_dagster.cli.bars import Bars


def difficulty(
    agent: Annotated[
        str | None, typer.Option(help="oracle, noop, or a .py file with `def act(observation)`.", show_default=False)
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="live, base, NAME/0003, or the digest of a checkpoint, played with the experiment's settings."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Episodes per task.")] = 8,
    k: Annotated[int, typer.Option("--k", "-k", min=1, max=1024, help="k of pass@k; at most --samples.")] = 1,
    suite: OfSuite = None,
    experiment: ExperimentName = "quickstart",
    overrides: Overrides = None,
    split: Annotated[Split | None, typer.Option("--split", help="Only tasks of this split.")] = None,
    max_turns: Annotated[int, typer.Option(min=1, help="Maximum number of turns of an agent.")] = 50,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """Estimate how difficult each task of a suite is: pass rate with its 95% interval, pass@k, size of the fix.

    The estimates are an artifact, from which `tasks.difficulty: {low, high}` of an experiment selects training tasks. A
    killed command resumes; equal estimates are found, not made again.

    Examples:

        triplane tasks difficulty --policy base --samples 16 --k 4

        triplane tasks difficulty --suite 0a1b2c3d4e5f --agent my_agent.py --split train
    """
    if (agent is None) == (policy is None):
        raise ConfigError("tasks difficulty: name one of --agent and --policy")
    if k > samples:
        raise ConfigError(f"--k {k} is above --samples {samples}: pass@k needs at least k samples a task")
    wanted = find_experiment(experiment, overrides)
    chosen = chosen_suite(open_store(), wanted, suite)
    tasks = _tasks(chosen, split)
    if agent is not None:
        made = _of_agent(agent, chosen, tasks, wanted, samples, k, max_turns)
    else:
        made = _of_policy(policy or "", chosen, tasks, wanted, samples, k)
    _print(made, limit, as_json=as_json)


def _tasks(suite: Artifact, split: Split | None) -> list[Task]:
    from curation.tasks.inspect import suite_tasks

    tasks = list(suite_tasks(suite, split).values())
    if not tasks:
        raise TriplaneError(f"task suite {suite.ref.short} has no task in split {split}: choose another")
    return tasks


def _of_agent(
    name: str, suite: Artifact, tasks: list[Task], experiment: Experiment, samples: int, k: int, max_turns: int
) -> Artifact:
    from curation.statistics import solved_by_task
    from curation.tasks.agents import agent_identity, agent_named
    from curation.tasks.difficulty.playing import AgentRun, run_agent, run_outcomes
    from curation.tasks.difficulty.table import make_difficulty
    from resources.progress import Progress
    from resources.sandboxes import SandboxesResource
    from triplane_dagster.cli.bars import Bars

    player, sandboxes = agent_named(name), SandboxesResource()
    run = AgentRun(agent_identity(name), samples, max_turns, experiment.sandboxes.limits.limits())

    async def play(bars: Bars) -> Artifact:
        async with sandboxes.client(experiment.sandboxes) as client:
            return await run_agent(
                run,
                player,
                suite.ref,
                tasks,
                suite.store,
                client,
                lambda done, total: bars(Progress("difficulty", None, "playing", done, total)),
            )

    try:
        with Bars() as bars:
            played = asyncio.run(play(bars))
    finally:
        sandboxes.close()
    outcomes = solved_by_task(run_outcomes(played))
    return make_difficulty(suite, {"run": played.ref}, tasks, outcomes, k, f"agent {name}")


def _of_policy(name: str, suite: Artifact, tasks: list[Task], experiment: Experiment, samples: int, k: int) -> Artifact:
    from ops.policies import stored_policy
    from ops.policy_difficulty import policy_difficulty
    from triplane_dagster.cli.playing import playing

    policy = stored_policy(suite.store, experiment.name, name)
    splits = [split for split in Split if any(task.split == split for task in tasks)]
    with playing(suite.store, experiment, "difficulty") as opened:
        return policy_difficulty(opened, policy, suite.ref, splits, samples, k)


def _print(made: Artifact, limit: int, *, as_json: bool) -> None:
    from curation.tasks.difficulty.table import difficulty_rows

    rows, meta = difficulty_rows(made), made.meta
    if as_json:
        print_json({**made.ref.model_dump(), **meta, "rows": rows})
        return
    shown = [
        {
            "task_id": row["task_id"],
            "split": row["split"],
            "solved": f"{row['solved']}/{row['samples']}",
            "pass rate": _rate_text(row),
            f"pass@{meta['k']}": row["pass_at_k"],
            "changed lines": row["changed_lines"],
            "fail to pass": row["fail_to_pass"],
            "made by": row["operator"] or row["strategy"],
        }
        for row in rows[:limit]
    ]
    print_rows(shown, as_json=False, title=f"difficulty {made.ref.short}: {len(shown)} of {len(rows)} tasks")
    mean = "nothing was graded" if meta["pass_rate"] is None else f"mean pass rate {meta['pass_rate']:.3f}"
    console().print(
        f"{meta['player']}: {mean}; {meta['never_solved']} tasks never solved, {meta['always_solved']} always",
        soft_wrap=True,
    )
    console().print(
        "train on tasks between two rates with `tasks: {difficulty: {low: 0.1, high: 0.9}}` in the experiment",
        soft_wrap=True,
    )


def _rate_text(row: dict[str, Any]) -> str:
    return "" if row["rate"] is None else f"{row['rate']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
