"""Where a report's numbers come from: the artifacts that the assets of one iteration last produced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from contracts.artifacts import Artifact, ArtifactRef, open_artifact
from contracts.store import Store
from contracts.tasks import Task, read_tasks
from ops.graph import REPORTED
from resources.errors import NotMaterialized
from resources.refs import read_ref


@dataclass(frozen=True)
class Sources:
    """The artifacts of one iteration, by asset; an asset it has not reached yet is absent."""

    store: Store
    experiment: str
    iteration: str
    artifacts: Mapping[str, Artifact]

    def get(self, asset: str) -> Artifact | None:
        """What an asset produced, or None."""
        return self.artifacts.get(asset)

    def parent(self, asset: str, role: str) -> Artifact | None:
        """An input of what an asset produced, or None."""
        child = self.get(asset)
        ref = child.manifest.parents.get(role) if child else None
        return open_artifact(self.store, ref) if ref else None

    def tasks(self) -> dict[str, Task]:
        """The task suite by task id; empty when no artifact names it."""
        suite = self.parent("rollouts", "task_suite") or self.parent("iteration_inputs", "task_suite")
        return {task.task_id: task for task in read_tasks(suite.table("tasks.parquet"))} if suite else {}


def open_sources(store: Store, experiment: str, iteration: str, refs: Mapping[str, ArtifactRef]) -> Sources:
    """The artifacts behind `refs`, by asset."""
    return Sources(store, experiment, iteration, {asset: open_artifact(store, ref) for asset, ref in refs.items()})


def find_sources(store: Store, experiment: str, iteration: str) -> Sources:
    """What an iteration has produced so far. Raises NotMaterialized when it has no rollouts."""
    refs = {spec.name: read_ref(store, experiment, spec.name, iteration) for spec in REPORTED}
    if refs["rollouts"] is None:
        raise NotMaterialized(
            f"{experiment} iteration {iteration} has no rollouts in {store.url}: `triplane status -e {experiment}`"
            " lists what there is"
        )
    return open_sources(store, experiment, iteration, {asset: ref for asset, ref in refs.items() if ref is not None})
