"""`triplane rollback`: make an earlier policy live again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from contracts.errors import ConfigError
from contracts.store import Store, open_store
from triplane_dagster.cli.experiments import file_in_store, name_in_store
from triplane_dagster.cli.interrupts import stoppable
from triplane_dagster.cli.options import AsJson, ExperimentName
from triplane_dagster.cli.output import console, print_json, print_rows
from triplane_dagster.cli.quiet import quiet_dagster

if TYPE_CHECKING:
    from ops.rollback import RollbackPlan, RolledBack
    from resources.deployment import ServerState
    from resources.experiment import Experiment
    from resources.registry import LivePolicy


def rollback(
    experiment: ExperimentName = "quickstart",
    to: Annotated[
        str | None,
        typer.Option(
            help="base, number of a change, or digest prefix of a policy that was live; default: the previous one."
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="Reason; recorded in the registry.")] = "by hand",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    list_changes: Annotated[bool, typer.Option("--list", help="Only list the changes of the live policy.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make an earlier policy live again.

    Nothing is deleted: the registry gets one more change, and servers are swapped.

    The next iteration acts with the restored policy and continues from its weights and optimizer.

    Naming the live policy changes nothing and updates the servers to it again.

    Examples:

        triplane rollback --reason "pass rate fell in production"

        triplane rollback --to 3 --yes

        triplane rollback --list
    """
    from ops.rollback import RolledBack, bring_live, change_live, plan_rollback
    from resources.errors import AlreadyLive
    from resources.experiment import load_experiment

    store = open_store()
    if list_changes:
        name = name_in_store(store, experiment)
        print_rows(_changes(store, name), as_json=as_json, title=name, empty=f"nothing of {name} was promoted yet")
        return
    wanted = load_experiment(file_in_store(store, experiment))
    try:
        plan = plan_rollback(store, wanted.name, to)
    except AlreadyLive as error:
        _bring_again(store, wanted, str(error), as_json)
        return
    if not as_json:
        show_plan(wanted, plan)
    if not yes:
        confirm("a rollback", "roll back?")
    listing = f"triplane rollback -e {wanted.name} --list"
    with stoppable(
        f"interrupted: `{listing}` shows whether it was rolled back; if not, run the command again"
    ) as state:
        entry = change_live(store, wanted.name, plan, reason)
        state.line = f"interrupted: rolled back, {_how_to_bring(wanted, entry)}"
        if not as_json:
            console().print(Text(f"live: {entry.policy.short}, {entry.made_by} ({entry.came_by})"))
        done = RolledBack(plan, entry, bring_live(store, wanted))
        told = tell_dagster(wanted, done)
    if as_json:
        print_json(_json_of(done))
    warn(done.servers, told)


def _bring_again(store: Store, experiment: Experiment, said: str, as_json: bool) -> None:
    """Update the servers to the live policy without changing the registry."""
    from ops.deploy import servers_line
    from ops.rollback import bring_live
    from resources.registry import Registry

    live = Registry(store, experiment.name).live()
    assert live is not None, "a live policy requires a promotion"
    with stoppable(f"interrupted: {_how_to_bring(experiment, live)}"):
        servers = bring_live(store, experiment)
    if as_json:
        print_json({"live": live.model_dump(mode="json"), "servers": [each.row() for each in servers]})
    else:
        console().print(Text(f"{said}; {servers_line(servers)}"), soft_wrap=True)
    warn(servers, [])


def _how_to_bring(experiment: Experiment, live: LivePolicy) -> str:
    """Message with the current state and the command that updates the remaining servers without another rollback."""
    command = f"triplane rollback -e {experiment.name} --to {live.origin or 'base'}"
    return f"{live.policy.short} is live; not all servers were updated, `{command}` updates them"


def warn(servers: Sequence[ServerState], told: Sequence[str]) -> None:
    """Print servers that are behind, and further warnings, on stderr."""
    for warning in (*(f"{each.url}: {each.fault}" for each in servers if each.fault), *told):
        typer.echo(f"warning: {warning}", err=True)


def show_plan(experiment: Experiment, plan: RollbackPlan) -> None:
    """Print what a rollback changes."""
    out, live, target = console(), plan.live, plan.target
    origin = (
        "the base policy" if target.number == 0 else f"made by iteration {target.iteration}, change {target.number}"
    )
    out.print(Text(experiment.name, "bold"))
    out.print(Text(f"from  {live.policy.short}  {live.made_by}, {live.came_by}"))
    out.print(Text(f"to    {target.policy.short}  {origin}"))
    for what, iterations in (("will not count any more", plan.undone), ("will count again", plan.redone)):
        if iterations:
            out.print(f"{what}: what iterations {', '.join(iterations)} learned")
    out.print("the next iteration acts with and trains from the restored policy; nothing is deleted")
    if experiment.deployment.servers:
        out.print(f"servers to be swapped: {', '.join(experiment.deployment.servers)}")


def confirm(what: str, question: str) -> None:
    """Ask the operator; exits 1 for a no."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{what} needs confirmation and stdin is not a terminal: add --yes")
    if not typer.confirm(question):
        raise typer.Exit(1)


def tell_dagster(experiment: Experiment, done: RolledBack) -> list[str]:
    """Report the rollback on the sampler's page. Returns the error if that fails; the rollback stays."""
    from dagster import DagsterError

    from ops.rollback import observation
    from triplane_dagster.run import open_instance

    try:
        with quiet_dagster(), open_instance() as instance:
            instance.report_runless_asset_event(observation(experiment.name, done))
    except (DagsterError, OSError) as error:
        return [
            f"rolled back, but Dagster's pages do not show it ({type(error).__name__}): its instance can't be opened"
        ]
    return []


def _changes(store: Store, experiment: str) -> list[dict[str, Any]]:
    from resources.registry import Registry

    registry = Registry(store, experiment)
    undone, history = registry.rolled_back(), registry.history()
    return [
        {
            "change": entry.number,
            "policy": entry.policy.short,
            "what": f"rollback to {entry.rollback.to or 'base'}" if entry.rollback else "promotion",
            "iteration": entry.iteration,
            "reason": entry.rollback.reason if entry.rollback else None,
            "when": _time(entry.rollback.unix) if entry.rollback else None,
            "state": "live" if entry is history[-1] else "undone" if entry.policy.digest in undone else None,
        }
        for entry in history
    ]


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _json_of(done: RolledBack) -> dict[str, Any]:
    plan = done.plan
    return {
        "from": plan.live.model_dump(mode="json"),
        "live": done.entry.model_dump(mode="json"),
        "undone": list(plan.undone),
        "redone": list(plan.redone),
        "servers": [each.row() for each in done.servers],
    }
