"""Sources of a report: the latest artifacts of one iteration's assets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from contracts.artifacts import Artifact, ArtifactRef, open_artifact
from contracts.store import Store
from contracts.tasks import Task
from ops.graph import REPORTED
from ops.loading import load_tasks
from resources.errors import NotMaterialized
from resources.refs import read_ref


@dataclass(frozen=True)
class Sources:
    """Artifacts of one iteration by asset, as far as they exist."""

    store: Store
    experiment: str
    iteration: str
    artifacts: Mapping[str, Artifact]
    _parents: dict[ArtifactRef, Artifact] = field(default_factory=dict, repr=False)
    """Opened parents, which several parts of a report read."""

    def get(self, asset: str) -> Artifact | None:
        """Artifact of an asset, or None."""
        return self.artifacts.get(asset)

    def parent(self, asset: str, role: str) -> Artifact | None:
        """Input of an asset's artifact by role, or None."""
        child = self.get(asset)
        ref = child.manifest.parents.get(role) if child else None
        if ref is not None and ref not in self._parents:
            self._parents[ref] = open_artifact(self.store, ref)
        return self._parents[ref] if ref else None

    def tasks(self) -> Mapping[str, Task]:
        """Tasks of the suite by id; empty if no artifact names the suite."""
        suite = self.parent("rollouts", "task_suite") or self.parent("iteration_inputs", "task_suite")
        return load_tasks(self.store, suite.ref) if suite else {}


def open_sources(store: Store, experiment: str, iteration: str, refs: Mapping[str, ArtifactRef]) -> Sources:
    """The artifacts behind `refs`, by asset."""
    return Sources(store, experiment, iteration, {asset: open_artifact(store, ref) for asset, ref in refs.items()})


def find_sources(store: Store, experiment: str, iteration: str) -> Sources:
    """Artifacts that an iteration has produced so far. Raises NotMaterialized if it has no rollouts."""
    refs = {spec.name: read_ref(store, experiment, spec.name, iteration) for spec in REPORTED}
    if refs["rollouts"] is None:
        raise NotMaterialized(
            f"{experiment} iteration {iteration} has no rollouts in {store.url}: `triplane status -e {experiment}`"
            " lists its iterations"
        )
    return open_sources(store, experiment, iteration, {asset: ref for asset, ref in refs.items() if ref is not None})
