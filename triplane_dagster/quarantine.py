"""Rebuild datasets and train again after a change of what is quarantined, in this process.

mark or lift -> dataset of each iteration concerned, if its quarantined episodes changed
             -> with retrain: registry rolled back, then dataset to report of the first tainted iteration
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby

import dagster as dg

from assets.naming import key_of
from contracts.artifacts import Artifact
from contracts.errors import ConfigError, TriplaneError
from contracts.store import Store
from ops.graph import DATASET
from ops.quarantine.retrain import MADE_AGAIN, Retraining, needs_rebuild
from ops.rollback import RolledBack, bring_live, change_live
from resources.errors import ExperimentBusy
from resources.experiment import Experiment
from resources.progress import ProgressSink, no_progress
from resources.refs import read_artifact
from triplane_dagster.dead_runs import end_dead_runs
from triplane_dagster.run import open_runner
from triplane_dagster.unfinished import require_idle


@dataclass(frozen=True)
class Rebuilt:
    """A dataset that was made again."""

    experiment: str
    iteration: str
    before: str
    after: str
    """Content digests."""
    rows_before: int
    rows_after: int
    """Episodes that train."""


@dataclass
class Rebuilding:
    """Result of `rebuild`."""

    done: list[Rebuilt] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """One line for each dataset that could not be made."""


Load = Callable[[str], Experiment]
"""Finds the experiment of a name. Raises ConfigError."""


def rebuild(
    store: Store,
    iterations: Iterable[tuple[str, str]],
    load: Load,
    instance: dg.DagsterInstance,
    progress: ProgressSink = no_progress,
) -> Rebuilding:
    """Make the datasets of these iterations again whose quarantined episodes changed. Continues after a kill."""
    found = Rebuilding()
    for name, group in groupby(sorted(iterations), key=lambda each: each[0]):
        try:
            experiment = load(name)
            wanted = [each for _, each in group if _is_behind(store, experiment, each, instance)]
            if wanted:
                _rebuild(store, experiment, wanted, instance, progress, found)
        except (ConfigError, ExperimentBusy) as error:
            found.faults.append(f"{name} was not rebuilt: {error}")
    return found


def _rebuild(
    store: Store,
    experiment: Experiment,
    iterations: Iterable[str],
    instance: dg.DagsterInstance,
    progress: ProgressSink,
    found: Rebuilding,
) -> None:
    with open_runner(experiment, instance, progress) as runner:
        for iteration in iterations:
            before = read_artifact(store, experiment.name, DATASET.name, iteration)
            try:
                runner.assets(iteration, [DATASET.name])
            except ExperimentBusy:
                raise
            except TriplaneError as error:
                found.faults.append(str(error))
                continue
            after = read_artifact(store, experiment.name, DATASET.name, iteration)
            if before is not None and after is not None and before.ref != after.ref:
                found.done.append(_rebuilt(experiment.name, iteration, before, after))


def retrain(
    store: Store,
    experiment: Experiment,
    plan: Retraining,
    reason: str,
    instance: dg.DagsterInstance,
    progress: ProgressSink = no_progress,
) -> RolledBack | None:
    """Carry out a plan. Returns the rollback, if there was one. Continues after a kill with a new plan."""
    end_dead_runs(instance)
    require_idle(instance, experiment)
    done = None
    if plan.rollback is not None:
        entry = change_live(store, experiment.name, plan.rollback, reason)
        done = RolledBack(plan.rollback, entry, bring_live(store, experiment))
    with open_runner(experiment, instance, progress) as runner:
        runner.assets(plan.iteration, MADE_AGAIN)
    return done


def _is_behind(store: Store, experiment: Experiment, iteration: str, instance: dg.DagsterInstance) -> bool:
    """Whether a dataset has to be made again, or Dagster does not know that it was."""
    if needs_rebuild(store, experiment, iteration):
        return True
    made = read_artifact(store, experiment.name, DATASET.name, iteration)
    wanted = dg.AssetRecordsFilter(key_of(experiment, DATASET.name), asset_partitions=[iteration])
    records = instance.fetch_materializations(wanted, limit=1).records
    shown = records[0].asset_materialization if records else None
    digest = shown.metadata.get("digest") if shown else None  # none in what was reported in the UI
    return made is not None and (digest is None or digest.value != made.ref.digest)


def _rebuilt(experiment: str, iteration: str, before: Artifact, after: Artifact) -> Rebuilt:
    kept = (before.meta["kept_episodes"], after.meta["kept_episodes"])
    return Rebuilt(experiment, iteration, before.ref.digest, after.ref.digest, *kept)
