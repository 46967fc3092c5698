"""`triplane experiments`: list experiments, show one with its defaults, or describe every key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contracts.errors import ConfigError
from contracts.store import Store
from triplane_dagster.cli.options import AsJson, ExperimentName, Overrides
from triplane_dagster.cli.output import print_json, print_rows, write_page

if TYPE_CHECKING:
    from resources.experiment import Experiment

app = typer.Typer(no_args_is_help=True, help="List experiments, show one, or describe every key of its YAML file.")


def find_experiment(name: str, overrides: list[str] | None = None) -> Experiment:
    """Experiment of this name or file, with overrides applied. Raises ConfigError that lists the known names."""
    from resources.experiment import load_experiment

    return load_experiment(file_of(name), overrides)


def name_in_store(store: Store, name: str) -> str:
    """This name, if `store` has an experiment of it, else that of the experiment which `find_experiment` finds.

    Raises ConfigError that lists the known names.
    """
    from resources.errors import ExperimentError
    from resources.refs import experiments_in

    stored = experiments_in(store)
    if name in stored:
        return name
    try:
        return find_experiment(name).name
    except ExperimentError:
        raise
    except ConfigError as error:
        raise ConfigError(f"{error}; store {store.url} has {', '.join(stored) or '(none)'}") from None


def file_of(name: str) -> Path:
    """File of an experiment, given its path, its file name or the `name` inside it."""
    from triplane_dagster.experiment_files import experiments_folder, load_folder

    if name.endswith((".yaml", ".yml")):
        return Path(name)
    folder = experiments_folder()
    path = folder / f"{name}.yaml"
    if path.is_file():
        return path
    loaded = load_folder(folder)
    for each, experiment in loaded.files.items():
        if experiment.name == name:
            return each
    known = ", ".join(each.stem for each in loaded.files)
    unread = f" ({', '.join(each.path.name for each in loaded.broken)} can't be used)" if loaded.broken else ""
    raise ConfigError(f"no experiment {name!r} in {folder}{unread}: choose one of {known or '(none)'}")


def file_in_store(store: Store, name: str) -> Path:
    """As `file_of`; if `store` has an experiment of this name, its file and never one that is only called like it.

    Raises ConfigError also if the experiment's file was given another name inside.
    """
    from resources.experiment import load_experiment
    from resources.refs import experiments_in
    from triplane_dagster.experiment_files import experiments_folder, load_folder

    path = file_of(name)
    if name not in experiments_in(store) or (called := load_experiment(path).name) == name:
        return path
    for each, experiment in load_folder(experiments_folder()).files.items():
        if experiment.name == name:
            return each
    raise ConfigError(
        f"{path} is called {called}, and {store.url} has an experiment {name}, of which there is no file: restore its"
        f" name, or write {called} if that one is meant"
    )


@app.command("list")
def list_experiments(as_json: AsJson = False) -> None:
    """List the experiments."""
    from triplane_dagster.experiment_files import experiments_folder, load_folder

    loaded = load_folder(experiments_folder())
    rows = [
        {"experiment": path.stem, "name": each.name, "iterations": each.iterations, "description": each.description}
        for path, each in loaded.files.items()
    ]
    for broken in loaded.broken:
        typer.echo(f"warning: {broken.error}", err=True)
    print_rows(rows, as_json=as_json, empty=f"{experiments_folder()} holds no *.yaml")


@app.command()
def show(experiment: ExperimentName = "quickstart", overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print an experiment with every default filled in.

    Example:

        triplane experiments show -e quickstart --set rollouts.group_size=4
    """
    import yaml

    values = find_experiment(experiment, overrides).model_dump(mode="json")
    if as_json:
        print_json(values)
    else:
        typer.echo(yaml.safe_dump(values, sort_keys=False), nl=False)


@app.command()
def docs(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")] = None,
) -> None:
    """Print the reference of all keys of an experiment file as Markdown (docs/experiments.md)."""
    from triplane_dagster.cli.reference import experiment_reference

    text = experiment_reference()
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_page(output, text.encode())


@app.command()
def raters(as_json: AsJson = False) -> None:
    """List the rules for `rewards.components` of kind trace, with descriptions."""
    from curation.rewards.traces import rule_table

    print_rows(rule_table(), as_json=as_json, empty="there are no rules")
