"""`triplane iterate --on kubernetes`: ask a deployment for iterations, or print the objects that they would create."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import typer

from contracts.errors import ConfigError
from contracts.store import open_store
from triplane_dagster.cli.output import print_json

if TYPE_CHECKING:
    from resources.experiment import Experiment


def print_objects(experiment: Experiment, *, as_json: bool) -> None:
    """Print every object of the next iteration: as YAML for `kubectl apply --dry-run=server -f -`, or as JSON."""
    from triplane_dagster.cli.quiet import quiet_dagster
    from triplane_dagster.cluster_plan import objects_of
    from triplane_dagster.run import open_instance

    with quiet_dagster(), open_instance() as instance:
        planned = objects_of(experiment, open_store(), instance)
    if as_json:
        print_json([{"purpose": each.purpose, "manifest": each.manifest} for each in planned])
        return
    import yaml

    for each in planned:
        typer.echo(f"---\n# {each.purpose}\n{yaml.safe_dump(each.manifest, sort_keys=False)}", nl=False)


def ask(experiment: Experiment, count: int, overrides: list[str] | None, *, as_json: bool) -> None:
    """Ask the deployment that shares the store for iterations, as the job NAME_train does.

    Raises ConfigError for what a deployment can't see: settings of the command line, and a store on this machine.
    """
    from triplane_dagster.targets import request_target

    store = open_store()
    if overrides:
        raise ConfigError("--on kubernetes takes no --set: a deployment runs its own experiment files; edit them there")
    if not store.url.startswith("s3://"):
        raise ConfigError(f"--on kubernetes: store {store.url} is on this machine: set TRIPLANE_STORE to the cluster's")
    request = f"command-{uuid.uuid4()}"
    target = request_target(store, experiment, count, request=request, reason="triplane iterate --on kubernetes")
    if as_json:
        print_json({"experiment": experiment.name, "iterations": target.iterations(), "request": request})
        return
    typer.echo(
        f"asked for {target} of {experiment.name}: the deployment's sensor {experiment.name}_sequence runs them, one at"
        " a time; `triplane status` shows them"
    )
