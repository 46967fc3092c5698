"""`triplane quarantine`: keep episodes out of every dataset, and return to a policy that was not trained on them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from contracts.errors import ConfigError, StoreError
from contracts.store import Store, open_store
from triplane_dagster.cli.experiments import file_in_store, find_experiment
from triplane_dagster.cli.interrupts import stoppable
from triplane_dagster.cli.options import AsJson
from triplane_dagster.cli.output import console, print_json, print_rows
from triplane_dagster.cli.quiet import quiet_dagster
from triplane_dagster.cli.recall import (
    SHORT,
    Episode,
    Image,
    RewardRule,
    Task,
    Tool,
    one_question,
    placed,
    show_trained,
)
from triplane_dagster.cli.rollback import confirm, show_plan, tell_dagster, warn

if TYPE_CHECKING:
    from ops.ledger.recall import What
    from ops.quarantine.question import Reach
    from ops.quarantine.retrain import Retraining
    from resources.experiment import Experiment
    from resources.quarantine import Mark
    from triplane_dagster.quarantine import Rebuilding

WHAT_NEXT = "triplane quarantine {question} --retrain"


def quarantine(
    episode: Episode = None,
    task: Task = None,
    image: Image = None,
    tool: Tool = None,
    reward_rule: RewardRule = None,
    reason: Annotated[str, typer.Option(help="Reason; recorded in the mark.")] = "by hand",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what is concerned.")] = False,
    retrain: Annotated[
        bool,
        typer.Option("--retrain", help="Roll a tainted live policy back, and train its first tainted iteration again."),
    ] = False,
    list_marks: Annotated[bool, typer.Option("--list", help="Only list the marks.")] = False,
    lift: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, help="Take back this mark; the datasets return.")
    ] = None,
    experiment: Annotated[
        str, typer.Option("--experiment", "-e", help="YAML file of an experiment that is not in experiments/.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Keep episodes out of training: mark them, rebuild the datasets that use them, name the policies trained on them.

    A mark holds the episodes that match now; those sampled later need another one. Nothing is deleted: the mark is
    numbered and can be lifted, the earlier datasets and policies stay.

    A reward rule is marked for the datasets that it graded; another grading of the same episodes still trains.

    After a kill at any point, the same command continues.

    Examples:

        triplane quarantine --task calc-0007 --dry-run

        triplane quarantine --task calc-0007 --reason "its tests are public" --retrain

        triplane quarantine --lift 3
    """
    store = open_store()
    load = _loader(store, experiment)
    if (list_marks or lift is not None) and any((episode, task, image, tool, reward_rule)):
        raise ConfigError("--list and --lift ask no question: leave the other options out")
    if list_marks:
        print_rows(_history(store), as_json=as_json, empty="nothing is quarantined")
    elif lift is not None:
        _lift(store, lift, reason, load, as_json=as_json)
    else:
        what, value = one_question("quarantine asks", episode, task, image, tool, reward_rule)
        _quarantine(store, what, value, reason, load, dry_run=dry_run, retrain=retrain, yes=yes, as_json=as_json)


def _quarantine(
    store: Store,
    what: What,
    value: str,
    reason: str,
    load: Callable[[str], Experiment],
    *,
    dry_run: bool,
    retrain: bool,
    yes: bool,
    as_json: bool,
) -> None:
    from ops.quarantine.question import reach_of

    reach, marked = reach_of(store, what, value, only_count=dry_run)
    answer = _json_of(store, what, value, reach)
    if not as_json:
        _show(reach, what, value)
    if dry_run:
        if as_json:
            print_json(answer)
        return
    plans, faults = _plans(store, reach, load) if retrain else ([], [])
    for fault in faults:
        typer.echo(f"warning: {fault}", err=True)
    if not as_json:
        for wanted, plan in plans:
            _show_plan(wanted, plan)
    if not yes:
        confirm("a quarantine", f"quarantine {reach.episodes} episodes{' and train again' * bool(plans)}?")
    with stoppable():
        from resources.quarantine import Quarantine

        mark, new = Quarantine(store).mark(what, value, marked, reason)
        if not as_json:
            console().print(Text(f"{'quarantined by' if new else 'quarantined already by'} {mark}"), soft_wrap=True)
        rebuilt, retrained = _carry_out(store, mark, reach, load, retrain=retrain)
    if as_json:
        done = [asdict(each) for each in rebuilt.done]
        print_json({**answer, "mark": mark.model_dump(mode="json"), "rebuilt": done, "retrained": retrained})
    else:
        _show_rebuilt(rebuilt)
        for row in retrained:
            console().print(_retrained_line(row), soft_wrap=True)
    if not retrain:
        _warn_of_live(reach, what, value)
    _fail(rebuilt, f"mark {mark.number} stands")


def _carry_out(
    store: Store, mark: Mark, reach: Reach, load: Callable[[str], Experiment], *, retrain: bool
) -> tuple[Rebuilding, list[dict[str, Any]]]:
    """Rebuild the datasets, then train again. Returns the datasets, and a row for each experiment trained again."""
    from ops.quarantine.retrain import needs_rebuild
    from triplane_dagster import quarantine as work
    from triplane_dagster.cli.bars import Bars
    from triplane_dagster.iterations import standing_decision
    from triplane_dagster.run import open_instance

    rows = []
    with Bars() as bars, quiet_dagster(), open_instance() as instance:
        rebuilt = work.rebuild(store, reach.iterations, load, instance, bars)
        plans, faults = _plans(store, reach, load) if retrain else ([], [])
        rebuilt.faults.extend(faults)
        for wanted, plan in plans:
            if needs_rebuild(store, wanted, plan.iteration):
                rebuilt.faults.append(f"{wanted.name} was not trained again: iteration {plan.iteration} has no dataset")
                continue
            done = work.retrain(store, wanted, plan, f"quarantine: {mark}", instance, bars)
            decided = standing_decision(store, wanted, plan.iteration)
            rows.append(
                {
                    "experiment": wanted.name,
                    "iteration": plan.iteration,
                    "rolled_back_to": plan.rollback.target.policy.digest if plan.rollback else None,
                    "superseded": list(plan.superseded),
                    "decision": decided.decision if decided else None,
                    "candidate": decided.candidate.digest if decided else None,
                    "reasons": decided.reasons if decided else [],
                    "servers": [each.row() for each in done.servers] if done else [],
                }
            )
            if done is not None:
                warn(done.servers, tell_dagster(wanted, done))
    return rebuilt, rows


def _plans(
    store: Store, reach: Reach, load: Callable[[str], Experiment]
) -> tuple[list[tuple[Experiment, Retraining]], list[str]]:
    """How to replace each tainted live policy that this question or an earlier mark concerns, and a line for each
    experiment that has no usable file.
    """
    from ops.quarantine.question import reach_of_marks
    from ops.quarantine.retrain import plan_retraining
    from resources.quarantine import Quarantine

    tainted = reach.checkpoints.keys() | reach_of_marks(store, Quarantine(store).marks()).checkpoints.keys()
    names = sorted({row["experiment"] for row in reach.live} | {name for name, _ in reach.iterations})
    found, faults = [], []
    for name in names:
        try:
            wanted = load(name)
        except ConfigError as error:
            faults.append(f"{name} is not trained again: {error}")
            continue
        plan = plan_retraining(store, wanted, tainted)
        if plan is not None:
            found.append((wanted, plan))
    return found, faults


def _lift(store: Store, number: int, reason: str, load: Callable[[str], Experiment], *, as_json: bool) -> None:
    from ops.quarantine.question import reach_of_marks
    from resources.quarantine import Quarantine
    from triplane_dagster.cli.bars import Bars
    from triplane_dagster.quarantine import rebuild
    from triplane_dagster.run import open_instance

    with stoppable():
        mark, new = Quarantine(store).lift(number, reason)
        with Bars() as bars, quiet_dagster(), open_instance() as instance:
            rebuilt = rebuild(store, reach_of_marks(store, [mark]).iterations, load, instance, bars)
    if as_json:
        print_json({"lifted": mark.model_dump(mode="json"), "rebuilt": [asdict(each) for each in rebuilt.done]})
    else:
        console().print(Text(f"lifted{' before' * (not new)}: {mark}"), soft_wrap=True)
        _show_rebuilt(rebuilt)
    _fail(rebuilt, f"mark {number} is lifted")


def _loader(store: Store, file: str) -> Callable[[str], Experiment]:
    """Finds experiments of the store by name. file: of one that is not in experiments/."""
    own = find_experiment(file) if file else None

    def load(name: str) -> Experiment:
        return own if own is not None and own.name == name else find_experiment(str(file_in_store(store, name)))

    return load


def _fail(rebuilt: Rebuilding, stands: str) -> None:
    """Exit with one line if something could not be made."""
    if rebuilt.faults:
        more = f"; and {len(rebuilt.faults) - 1} more" if len(rebuilt.faults) > 1 else ""
        raise StoreError(f"{stands}, but not all is done: {rebuilt.faults[0]}{more}")


def _show(reach: Reach, what: str, value: str) -> None:
    out = console()
    out.print(Text(f"{reach.episodes} episode{'s' * (reach.episodes != 1)} with the {what} {value}"))
    print_rows(
        [placed(row) | {"trains": row["trains"], "in a group's mean": row["counted"]} for row in reach.datasets],
        as_json=False,
        title="datasets that use them",
        empty="no dataset uses them",
    )
    show_trained(reach.checkpoints.values(), reach.live, "tainted checkpoints")


def _show_plan(experiment: Experiment, plan: Retraining) -> None:
    if plan.rollback is not None:
        show_plan(experiment, plan.rollback)
    out = console()
    out.print(f"iteration {plan.iteration} of {experiment.name} is trained again, from its dataset to its report")
    if plan.superseded:
        out.print(f"superseded: iterations {', '.join(plan.superseded)}; their rollouts stay")


def _show_rebuilt(rebuilt: Rebuilding) -> None:
    print_rows(
        [
            {
                "experiment": each.experiment,
                "iteration": each.iteration,
                "before": each.before[:SHORT],
                "after": each.after[:SHORT],
                "episodes that train": f"{each.rows_before} -> {each.rows_after}",
            }
            for each in rebuilt.done
        ],
        as_json=False,
        title="rebuilt datasets",
        empty="no dataset had to be rebuilt",
    )


def _retrained_line(row: dict[str, Any]) -> Text:
    candidate = (
        f"{row['candidate'][:SHORT]}: {row['decision']}, {'; '.join(row['reasons'])}" if row["candidate"] else ""
    )
    return Text(f"{row['experiment']}: iteration {row['iteration']} was trained again, candidate {candidate}")


def _warn_of_live(reach: Reach, what: str, value: str) -> None:
    option = "--reward-rule" if what == "rule" else f"--{what}"
    for row in reach.live:
        command = WHAT_NEXT.format(question=shlex.join([option, value]))
        typer.echo(
            f"warning: {row['digest'][:SHORT]}, which was trained on them, is live in {row['experiment']}:"
            f" `{command}` rolls it back and trains again",
            err=True,
        )


def _json_of(store: Store, what: str, value: str, reach: Reach) -> dict[str, Any]:
    return {
        "store": store.url,
        "asked": {what: value},
        "episodes": reach.episodes,
        "datasets": reach.datasets,
        "checkpoints": [*reach.checkpoints.values()],
        "live": reach.live,
    }


def _history(store: Store) -> list[dict[str, Any]]:
    from resources.quarantine import Lift, Quarantine

    quarantine = Quarantine(store)
    force, rows = {mark.number for mark in quarantine.marks()}, []
    for each in quarantine.history():
        lift = isinstance(each, Lift)
        rows.append(
            {
                "number": each.number,
                "what": f"lifts {each.lifts}" if isinstance(each, Lift) else f"{each.what} {each.value}",
                "episodes": None if isinstance(each, Lift) else each.episodes,
                "reason": each.reason,
                "by": each.by,
                "when": datetime.fromtimestamp(each.unix, UTC).strftime("%Y-%m-%d %H:%M UTC"),
                "state": None if lift else "in force" if each.number in force else "lifted",
            }
        )
    return rows
