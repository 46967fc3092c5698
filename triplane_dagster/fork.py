"""Forks: experiment files whose first iterations train on the episodes of another experiment.

SOURCE/ITERATION + overrides -> experiments/NAME.yaml, which extends the source's file
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from contracts.new_files import write_new
from contracts.pointers import pointer_folders
from contracts.store import Store
from inference.engines.places import shared_places
from ops.fork import source_inputs, source_key
from ops.iteration_keys import iteration_key
from ops.off_policy import FAR, trainings_between
from ops.replay import differences, preview
from resources.errors import ExperimentError, IterationRefused
from resources.experiment import Experiment, ForkConfig, load_experiment, parse_experiment, read_values
from resources.overrides import apply_overrides, merge
from triplane_dagster.experiment_files import load_folder

_OWN = ("name", "fork", "extends")


@dataclass(frozen=True)
class Fork:
    """A fork that can be written."""

    path: Path
    text: str
    experiment: Experiment
    shared: list[str]
    """Servers and GPUs of engines that get the weights of source and fork."""

    def write(self) -> None:
        """Write the file; a killed writer leaves nothing under its name. Raises ExperimentError if there is one."""
        try:
            write_new(self.path, self.text)
        except FileExistsError:
            raise _taken(self.path.stem, str(self.path)) from None


def plan_fork(store: Store, source: Path, iteration: str, name: str, overrides: list[str], replay: int) -> Fork:
    """The fork `name` of an iteration of the experiment in the file `source`.

    Raises, and writes nothing: ExperimentError for wrong settings or a name that is taken, NotMaterialized or
    ArtifactMissing without the source's rollouts, IterationRefused if the overrides change what was sampled or the
    source's policies are too far from the weights that the fork trains.
    """
    original = load_experiment(source)
    changes = apply_overrides({}, overrides, Experiment)
    for field in _OWN:
        if field in changes:
            raise ExperimentError(
                f"override {field}: a fork's {field} follows from SOURCE/ITERATION and --as; leave it"
            )
    fork = {"experiment": original.name, "iteration": iteration, "replay": replay}
    path = source.parent / f"{name}.yaml"
    own: dict[str, Any] = {"name": name, "description": f"Fork of {original.name}/{iteration}.", "fork": fork}
    if original.deployment.servers:
        own["deployment"] = {"servers": []}  # the source's servers keep serving the source's policy
    if original.schedule is not None:
        own["schedule"] = None  # nights that nobody starts would be overdue
    values = merge(own, changes, Experiment)
    forked = parse_experiment(merge(read_values(source), values, Experiment), f"{name!r} (not written)")
    _require_free(store, forked.name, path)
    _require_by_reference(original, forked)
    for number in range(replay):
        _require_recent(store, forked, number)
        preview(store, forked, number)
    text = yaml.safe_dump({"extends": source.name, **values}, sort_keys=False, allow_unicode=True)
    return Fork(path, text, forked, _shared_places(original, forked))


def _shared_places(original: Experiment, forked: Experiment) -> list[str]:
    pairs = itertools.product(original.engines.values(), forked.engines.values())
    return sorted({place for theirs, ours in pairs for place in shared_places(theirs, ours)})


def _taken(name: str, where: str) -> ExperimentError:
    return ExperimentError(f"experiment {name} exists in {where}: choose another name for --as")


def _require_free(store: Store, name: str, path: Path) -> None:
    for each, experiment in load_folder(path.parent).files.items():
        if experiment.name == name:
            raise _taken(name, str(each))
    if path.exists():
        raise _taken(name, str(path))
    if any(pointer_folders(store, f"{kind}/{name}") for kind in ("assets", "live", "targets")):
        raise _taken(name, store.url)


def _require_by_reference(original: Experiment, forked: Experiment) -> None:
    """Raise IterationRefused if the fork has other settings than its source for what it takes by reference."""
    for path, old, new in differences(_referenced(original), _referenced(forked)):
        raise IterationRefused(
            f"{path} is {new!r} in {forked.name} and {old!r} in {original.name}: a fork keeps suite, base policy,"
            f" precision and episodes of {forked.fork}; leave {path} out, or start an experiment of its own"
        )


def _referenced(experiment: Experiment) -> dict[str, Any]:
    """Settings of what a fork takes from its source without looking at them again."""
    found = {"base": experiment.base, "trainer.precision": experiment.trainer.precision}
    return {"tasks": experiment.tasks.made_from} | {name: each.model_dump(mode="json") for name, each in found.items()}


def _require_recent(store: Store, forked: Experiment, number: int) -> None:
    """Raise IterationRefused if a repeated iteration is too stale once the fork's candidates go live one by one."""
    fork, most = _fork_of(forked), forked.off_policy.max_staleness
    start, policy = source_inputs(store, fork).started.checkpoint, source_inputs(store, fork, number).policy
    apart = trainings_between(store, policy, start, FAR)
    if apart is not None and apart + number <= most:
        return
    what = f"{fork.experiment}/{source_key(fork, number)}, which {forked.name}/{iteration_key(number)} would repeat,"
    if apart is None:
        raise IterationRefused(f"{what} was sampled by a policy that has no ancestor in common with {start.short}")
    fix = f"--set off_policy.max_staleness={apart + number}" + (f", or --replay {number}" if number else "")
    raise IterationRefused(
        f"{what} was sampled by policy {policy.short}, {apart + number} trainings from the weights that train on it, at"
        f" most {most} (off_policy.max_staleness): add {fix}"
    )


def _fork_of(experiment: Experiment) -> ForkConfig:
    assert experiment.fork is not None, "plan_fork sets it"
    return experiment.fork
