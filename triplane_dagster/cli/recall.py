"""`triplane recall`: find what saw an episode, a task, an image, a tool or a reward rule, and what learned from it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contracts.errors import ConfigError
from contracts.store import open_store
from triplane_dagster.cli.options import AsJson
from triplane_dagster.cli.output import console, print_json, print_rows

if TYPE_CHECKING:
    from ops.ledger.recall import Recall, What

SHORT = 12
"""Digits of a digest in a table."""


Episode = Annotated[str | None, typer.Option(help="Episode id, or its first digits.")]
Task = Annotated[str | None, typer.Option(help="Task id.")]
Image = Annotated[str | None, typer.Option(help="Digest of the files a task starts from, or its first digits.")]
Tool = Annotated[str | None, typer.Option(help="Name of a tool that the policy called, e.g. exec.")]
RewardRule = Annotated[
    str | None, typer.Option(help="Code version and settings of a grading, or the beginning, as `recall` lists them.")
]


def recall(
    episode: Episode = None,
    task: Task = None,
    image: Image = None,
    tool: Tool = None,
    reward_rule: RewardRule = None,
    as_json: AsJson = False,
) -> None:
    """Show which rollouts, datasets and checkpoints an episode, task, image, tool or reward rule reached, and whether a
    live policy was trained on it.

    Reads the ledger, an index of the store that is brought up to date first.

    Examples:

        triplane recall --task calc-0007

        triplane recall --episode 3f9c2a71 --json

        triplane recall --tool exec
    """
    from ops.ledger.recall import recall as ask

    what, value = one_question("recall answers", episode, task, image, tool, reward_rule)
    store = open_store()
    found = ask(store, what, value)
    if as_json:
        print_json({"store": store.url, "asked": {what: value}, **asdict(found)})
    else:
        _print(found, what, value)


def one_question(who: str, *values: str | None) -> tuple[What, str]:
    """The only question given. values: of the options in the order of `recall`. Raises ConfigError."""
    options: tuple[What, ...] = ("episode", "task", "image", "tool", "rule")
    given = [(what, value) for what, value in zip(options, values, strict=True) if value]
    if len(given) != 1:
        raise ConfigError(f"{who} one question: give one of --episode, --task, --image, --tool, --reward-rule")
    what, value = given[0]
    if any("\ud800" <= character <= "\udfff" for character in value):  # bytes of the command line
        raise ConfigError(f"--{'reward-rule' if what == 'rule' else what} {value!r} is not UTF-8: write it so")
    return what, value


def _print(found: Recall, what: str, value: str) -> None:
    out = console()
    out.print(f"{found.episodes} episode{'s' * (found.episodes != 1)} with the {what} {value}")
    print_rows([_seen(row) for row in found.seen], as_json=False, title="sampled by")
    print_rows(
        [placed(row) | {"trains": row["kept"], "left out": row["left_out"] or None} for row in found.used],
        as_json=False,
        title="considered by datasets",
        empty="no dataset considered them",
    )
    show_trained(found.trained, found.live, "checkpoints")


def show_trained(trained: Collection[dict[str, Any]], live: Sequence[dict[str, Any]], title: str) -> None:
    """Print checkpoints trained on episodes, or further from such ones, and which of them are live."""
    print_rows(
        [placed(row) | {"trained": "on them" if not row["distance"] else descended(row)} for row in trained],
        as_json=False,
        title=title,
        empty="no checkpoint was trained on them",
    )
    for row in live:
        console().print(f"live in {row['experiment']}: {row['digest'][:SHORT]}, change {row['change']} of the registry")
    if trained and not live:
        console().print("none of these checkpoints is live")


def placed(row: dict[str, Any]) -> dict[str, Any]:
    """Columns that say which artifact a row is about."""
    return {"experiment": row["experiment"], "iteration": row["iteration"], "digest": row["digest"][:SHORT]}


def _seen(row: dict[str, Any]) -> dict[str, Any]:
    counts = {name: row[name] for name in ("episodes", "solved", "reward", "policy_tokens")}
    return {"kind": row["kind"], **placed(row), "policy": (row["policy"] or "")[:SHORT] or None, **counts}


def descended(row: dict[str, Any]) -> str:
    """How a checkpoint descends from one that was trained on the episodes."""
    return f"{row['distance']} iteration{'s' * (row['distance'] != 1)} after one that was"
