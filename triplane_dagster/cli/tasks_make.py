"""`triplane tasks make`: tasks of any repository that has tests."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contracts.artifacts import Artifact
from contracts.store import open_store
from triplane_dagster.cli.experiments import find_experiment
from triplane_dagster.cli.options import AsJson, SandboxesOf, Shares
from triplane_dagster.cli.output import cell, console, print_json, print_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from contracts.tasks import Split
    from curation.tasks.factory.make import MakeConfig
    from curation.tasks.factory.strategies.asked import Model
    from resources.experiment import Experiment


def make(
    source: Annotated[
        str, typer.Argument(help="A folder, a git repository (its HEAD), or pypi:NAME==VERSION.", show_default=False)
    ],
    count: Annotated[int, typer.Option(min=1, max=100_000, help="Tasks wanted, at most.")] = 500,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="mutate, remove (both by default), revert, rewrite, feature, combine, or an installed one. Repeatable."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Chooses among the edits of a function.")] = 0,
    older: Annotated[
        str | None,
        typer.Option(help="SOURCE of an older version for `revert`, which else undoes commits."),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="URL, ending in /v1, of the OpenAI-compatible model that `rewrite` and `feature` ask."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model at --endpoint.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="NAME of the environment variable that holds the endpoint's API key.")
    ] = None,
    allow_license: Annotated[
        list[str] | None,
        typer.Option(help="Use this licence although it is not permissive; `unknown` for none. Repeatable."),
    ] = None,
    index: Annotated[str | None, typer.Option(help="URL of the package index; default: pip's and uv's.")] = None,
    wheelhouse: Annotated[
        Path | None, typer.Option(help="Folder of source archives and wheels, used instead of an index.", exists=True)
    ] = None,
    split: Shares = None,
    experiment: SandboxesOf = "quickstart",
    as_json: AsJson = False,
) -> None:
    """Make a task suite of a repository with tests: bugs are put into it, and those that its tests notice are proved.

    Its code runs in sandboxes only. A killed command resumes. docs/tasks.md describes the steps.

    Examples:

        triplane tasks make pypi:toolz==1.0.0

        triplane tasks make . --count 100 --strategy mutate --strategy combine

        triplane tasks make pypi:toolz==1.0.0 --strategy revert --older pypi:toolz==0.10.0

        triplane tasks make . --strategy rewrite --endpoint http://localhost:8000/v1 --model Qwen/Qwen3-Coder
    """
    from curation.tasks.factory.make import STRATEGIES, MakeConfig
    from curation.tasks.importing.splits import parse_shares

    shares = parse_shares(split or [])
    writer = None
    if endpoint is not None or model is not None:
        writer = _model(endpoint, model, api_key_env)
    config = MakeConfig(count, tuple(strategy or STRATEGIES), seed, tuple(allow_license or ()), older, writer)
    suite = _made(source, config, shares, find_experiment(experiment), index, wheelhouse)
    if as_json:
        print_json({**suite.ref.model_dump(), **suite.meta, "card": suite.json("card.json")})
    else:
        _show(suite, len(shares))


def _made(
    source: str,
    config: MakeConfig,
    shares: Mapping[Split, float],
    experiment: Experiment,
    index: str | None,
    wheelhouse: Path | None,
) -> Artifact:
    """The suite, made in the experiment's sandboxes, with bars of progress."""
    from curation.tasks.factory.make import make_suite
    from resources.progress import Progress
    from resources.sandboxes import SandboxesResource
    from triplane_dagster.cli.bars import Bars

    sandboxes = SandboxesResource()

    async def work(bars: Bars) -> Artifact:
        async with sandboxes.client(experiment.sandboxes) as client:
            return await make_suite(
                source,
                config,
                shares,
                open_store(),
                client,
                lambda phase, done, total: bars(Progress("task_suite", None, phase, done, total)),
                index=index,
                wheelhouse=wheelhouse,
            )

    try:
        with Bars() as bars:
            return asyncio.run(work(bars))
    finally:
        sandboxes.close()


def _show(suite: Artifact, splits: int) -> None:
    """Print what a suite holds and what was left out. splits: number of those that were asked for."""
    card = suite.json("card.json")
    rows = [{"strategy": name, **counts} for name, counts in card["strategies"].items()]
    print_rows(rows, as_json=False, title=f"{card['source']} ({card['licence']})")
    unused = [{"test": name, "cause": cause} for name, cause in card["tests"]["unused"].items()]
    if unused:
        print_rows(unused[:20], as_json=False, title=f"{len(unused)} tests not used")
    reasons = Counter(card["unused"].values()).most_common()
    if reasons:
        rows = [{"left out": count, "reason": reason} for reason, count in reasons]
        print_rows(rows, as_json=False, title="files, functions and commits without a candidate (card.json names each)")
    if len(card["files"]) < splits:
        console().print("one file is in one split only: fewer files than splits leave splits empty", soft_wrap=True)
    console().print(f"task suite {suite.ref.short}: {cell(suite.meta)}", soft_wrap=True)
    console().print(f"check it with `triplane tasks run --agent oracle --suite {suite.ref.short}`", soft_wrap=True)


def _model(url: str | None, name: str | None, api_key_env: str | None) -> Model:
    """Model that the options name. Raises TaskError."""
    from pydantic import ValidationError

    from curation.endpoint import Endpoint
    from curation.errors import TaskError
    from curation.tasks.factory.strategies.asked import Model

    if not url or not name:
        raise TaskError("--endpoint and --model belong together: give both")
    try:
        return Model(name=name, endpoint=Endpoint(url=url, api_key_env=api_key_env))
    except ValidationError as error:
        raise TaskError(f"--endpoint: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
