"""`triplane unpin`: take back the pinned inputs of an iteration."""

from __future__ import annotations

from typing import Annotated

import typer

from contracts.errors import ConfigError
from contracts.store import open_store
from triplane_dagster.cli.experiments import file_in_store
from triplane_dagster.cli.quiet import quiet_dagster


def unpin(
    iteration: Annotated[str, typer.Argument(metavar="NAME/0006", help="Experiment and partition key.")],
) -> None:
    """Take back the pinned inputs of an iteration that has sampled nothing, so that it starts from other ones.

    Also removes the partition from Dagster. Refused if anything beyond the prompts is committed.

    Example:

        triplane unpin quickstart/0006
    """
    name, _, key = iteration.rpartition("/")
    if not name or not key:
        raise ConfigError(f"{iteration!r} names no iteration: write EXPERIMENT/KEY, such as quickstart/0006")
    from ops.unpin import unpin as take_back
    from resources.experiment import load_experiment
    from triplane_dagster.run import open_instance
    from triplane_dagster.unfinished import require_idle

    store = open_store()
    experiment = load_experiment(file_in_store(store, name))
    with quiet_dagster(), open_instance() as instance:
        require_idle(instance, experiment)
        removed = take_back(store, experiment, key)
        instance.delete_dynamic_partition(experiment.name, key)
    typer.echo(
        f"{experiment.name}/{key} is no longer pinned (inputs {removed.short}); add the partition to begin again"
    )
