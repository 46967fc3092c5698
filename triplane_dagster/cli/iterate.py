"""`triplane iterate` and `triplane demo`: base policy, then iterations in sequence, in this process."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from contracts.store import open_store
from contracts.tasks import Split
from triplane_dagster.cli.experiments import find_experiment
from triplane_dagster.cli.interrupts import stoppable
from triplane_dagster.cli.options import AsJson, ExperimentName, Overrides
from triplane_dagster.cli.output import console, print_json, print_rows
from triplane_dagster.cli.quiet import quiet_dagster

if TYPE_CHECKING:
    from dagster import DagsterInstance

    from resources.experiment import Experiment


def demo(experiment: ExperimentName = "quickstart", overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Train a small model from scratch to fix code, on this CPU: tasks, base policy, then the experiment's iterations.

    Interrupt it at any time: the same command continues. If all iterations exist, it shows their results.

    Examples:

        triplane demo

        triplane demo --set iterations=2
    """
    from triplane_dagster.cli.history import summaries
    from triplane_dagster.targets import decided_target

    wanted, store = find_experiment(experiment, overrides), open_store()
    made = [each for each in summaries(store, wanted.name) if each.decision]
    interrupted = decided_target(store, wanted)
    _warn_of_other_versions(wanted)
    _run(wanted, max(0, wanted.iterations - len(made)) or (interrupted.count if interrupted else 0))
    _warn_of_other_settings(wanted)
    _report(wanted, None, as_json=as_json)
    if not as_json:
        _say_what_next(wanted)


def iterate(
    experiment: ExperimentName = "quickstart",
    count: Annotated[
        int | None,
        typer.Option(
            "-n", "--iterations", min=1, max=9999, help="Number of iterations; default: that of the experiment."
        ),
    ] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only print what would run: every step, its key, and whether its result exists."
        ),
    ] = False,
    on: Annotated[
        Literal["here", "kubernetes"],
        typer.Option(
            "--on",
            help="here: in this process. kubernetes: ask the deployment that shares the store; with --dry-run, print"
            " every object that it would create, as YAML.",
        ),
    ] = "here",
    as_json: AsJson = False,
) -> None:
    """Run further iterations of an experiment; make the base policy first if it is missing.

    After a kill at any point, the same command finishes its iterations; no committed group is sampled again.

    Examples:

        triplane iterate -n 1

        triplane iterate -e quickstart -n 3 --set trainer.learning_rate=1e-4

        triplane iterate -e qwen3-30b-a3b --dry-run

        triplane iterate --on kubernetes -n 3
    """
    wanted = find_experiment(experiment, overrides)
    if on == "kubernetes":
        from triplane_dagster.cli.on_kubernetes import ask, print_objects

        if dry_run:
            print_objects(wanted, as_json=as_json)
        else:
            ask(wanted, count or wanted.iterations, overrides, as_json=as_json)
        return
    if dry_run:
        _print_plan(wanted, as_json=as_json)
        return
    _warn_of_other_versions(wanted)
    made = _run(wanted, count or wanted.iterations)
    _report(wanted, made, as_json=as_json)


def _run(experiment: Experiment, count: int) -> list[str]:
    """Run `count` iterations with progress bars. Returns the partition keys with a decision."""
    if not count:
        return []
    with stoppable() as interruption:
        from triplane_dagster.cli.bars import Bars
        from triplane_dagster.run import open_instance
        from triplane_dagster.sequence import run_iterations

        with quiet_dagster(), open_instance() as instance:
            warn_of_other_request(experiment, instance)
            with Bars(side_by_side=experiment.off_policy.overlap) as bars:
                return run_iterations(experiment, count, instance, bars, interruption.check)


def warn_of_other_request(experiment: Experiment, instance: DagsterInstance) -> None:
    """Warn on stderr that the command replaces a request of `NAME_train`.

    Raises ExperimentBusy while a run of the experiment is at work: then nothing is replaced.
    """
    from triplane_dagster.dead_runs import end_dead_runs
    from triplane_dagster.targets import unfinished_target
    from triplane_dagster.unfinished import require_idle

    target = unfinished_target(open_store(), experiment)
    end_dead_runs(instance)
    require_idle(instance, experiment)
    if target is not None and target.by == "dagster":
        typer.echo(
            f"warning: this command replaces the request of {experiment.name}_train for {target} ({target.reason})",
            err=True,
        )


def _report(experiment: Experiment, only: list[str] | None, *, as_json: bool) -> None:
    """Print the table of iterations. only: these partitions; default: all."""
    from triplane_dagster.cli.history import (
        REPORTED,
        base_measures,
        base_rate,
        base_row,
        json_of,
        rate_json,
        row_of,
        summaries,
    )
    from triplane_dagster.cli.timings import experiment_seconds

    found = summaries(open_store(), experiment.name)
    shown = [each for each in found if only is None or each.iteration in only]
    seconds = experiment_seconds(experiment.name)
    if as_json:
        rows = [{**json_of(each), "seconds": seconds.get(each.iteration, {})} for each in shown]
        rates = {split.value: rate_json(base_rate(found, split)) for split in Split if split is not Split.TRAIN}
        measured = {split.value: base_measures(found, split) for split in REPORTED}
        base = {"pass_rates": rates, "measures": measured, "seconds": seconds.get(None, {})}
        print_json({"experiment": experiment.name, "base": base, "iterations": rows})
        return
    base_seconds = {"seconds per asset": _seconds_text(seconds.get(None, {}))}
    table = [base_row(found) | base_seconds] if found else []
    table += [row_of(each) | {"seconds per asset": _seconds_text(seconds.get(each.iteration, {}))} for each in shown]
    print_rows(table, as_json=False, title=experiment.name, empty="no iteration yet")


def _warn_of_other_versions(experiment: Experiment) -> None:
    """Warn on stderr, before anything runs, of artifacts made by other code versions."""
    from triplane_dagster.cli.stale import stale_lines

    for line in stale_lines(open_store(), experiment.name, newest=True):
        typer.echo(line, err=True)


def _warn_of_other_settings(experiment: Experiment) -> None:
    """Warn on stderr if the shown results were made with other settings."""
    from resources.refs import partitions
    from triplane_dagster.settings import changed_steps

    store = open_store()
    changed = changed_steps(store, experiment, partitions(store, experiment.name, "iteration_inputs"))
    if changed:
        typer.echo(
            f"warning: {', '.join(changed)} of {experiment.name} were made with other settings than the current"
            " ones: give the experiment another name (--set name=...), or make further iterations with `triplane"
            " iterate`",
            err=True,
        )


def _seconds_text(seconds: dict[str, float]) -> str:
    """Durations of the assets that took a tenth of a second or more."""
    return " ".join(f"{asset} {value:.1f}" for asset, value in seconds.items() if value >= 0.1)


def _print_plan(experiment: Experiment, *, as_json: bool) -> None:
    from triplane_dagster.dry_run import plan_of

    steps = [dataclasses.asdict(step) for step in plan_of(experiment)]
    if as_json:
        print_json(steps)
        return
    notes = [step.pop("note") for step in steps]
    short = [{**step, "key": (step["key"] or "")[:12] or None, "config": step["config"][:12]} for step in steps]
    print_rows(short, as_json=False, title=f"{experiment.name}: what would run (nothing was run)")
    for note in filter(None, notes):
        console().print(note)


def _say_what_next(experiment: Experiment) -> None:
    name = "" if experiment.name == "quickstart" else f" -e {experiment.name}"
    lines = {
        "triplane ui": "the same graph, with plots and runs, in the Dagster UI",
        f"triplane episodes list{name}": "list episodes; then triplane episodes show ID",
        "triplane lineage DIGEST": "ancestors and descendants of a policy or an episode",
        f"triplane iterate{name} -n 1": "one more iteration",
        f"triplane serve{name}": "the live policy over the OpenAI API",
    }
    width = max(len(command) for command in lines)
    console().print("\nLook further:")
    for command, text in lines.items():
        console().print(f"  {command:<{width}}   {text}")
