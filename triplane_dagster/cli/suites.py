"""Select the task suite of a command: by digest, else the experiment's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from contracts.artifacts import Artifact
from contracts.errors import ArtifactMissing
from contracts.store import Store

if TYPE_CHECKING:
    from resources.experiment import Experiment

OfSuite = Annotated[
    str | None,
    typer.Option("--suite", help="Digest of a task suite, or a prefix of it; default: the experiment's own."),
]


def chosen_suite(store: Store, experiment: Experiment, digest: str | None = None) -> Artifact:
    """Suite for a command: built with these settings, or by an older version, with a warning.

    Raises ArtifactMissing, whose message names the command that builds the suite.
    """
    from curation.tasks.build import find_built
    from curation.tasks.importing.find import find_suite
    from curation.tasks.suite import SUITE_VERSION
    from resources.refs import read_artifact

    if digest is not None:
        return find_suite(store, digest)
    found = find_built(experiment.tasks, store)
    if found is None:
        older = read_artifact(store, experiment.name, "task_suite")
        if (
            older is not None
            and older.manifest.config.get("kind") != "import"
            and older.manifest.code_version != SUITE_VERSION
        ):
            version = older.manifest.code_version
            typer.echo(
                f"the task suite of {experiment.name} was made by version {version} of the step, which is"
                f" {SUITE_VERSION} now",
                err=True,
            )
            return older
        raise ArtifactMissing(
            f"the task suite of {experiment.name} is not in {store.url}: run `triplane tasks build -e"
            f" {experiment.name}`"
        )
    return found
