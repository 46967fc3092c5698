"""What a dataset is made of beside rollouts and rewards, each in its action key only if there is any.

quarantined episodes                  marks in force
ratings of components                 rules that read them; the evidence of rewards is outside their digest
task suite, for families of tasks     rules that read them; families are outside the digests of tasks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactRef, open_artifact
from contracts.store import Store
from curation.dataset import DatasetConfig, ratings_of
from ops.derived import commit_derived, derived_ref
from ops.quarantine.members import commit_quarantined, quarantined_ref
from resources.quarantine import Mark, Quarantine

RATINGS = "ratings"
"""Kind of the artifact with the ratings, and its role among the parents of a dataset."""
_FILE = "ratings.json"
_SUITE = "task_suite"


@dataclass(frozen=True)
class DatasetInputs:
    """Inputs of one dataset."""

    store: Store
    config: DatasetConfig
    given: Mapping[str, ArtifactRef]
    """Rollouts and rewards, by role."""

    @cached_property
    def marks(self) -> dict[str, list[Mark]]:
        """Marks by quarantined episode."""
        return Quarantine(self.store).episodes(self.given["rollouts"], self.given["rewards"])

    @cached_property
    def ratings(self) -> pa.Table | None:
        """RATINGS that rules read; None if none does. Raises RewardsMismatch if the rewards lack a component."""
        return ratings_of(self._rewards, self.config.components) if self.config.components else None

    @cached_property
    def families(self) -> dict[str, str] | None:
        """Family by task, of the suite that the rewards were made with; None if no rule reads them."""
        if not self.config.by_family:
            return None
        tasks = open_artifact(self.store, self._rewards.manifest.parents[_SUITE]).table(
            "tasks.parquet", ["task_id", "family"]
        )
        return dict(zip(tasks["task_id"].to_pylist(), tasks["family"].to_pylist(), strict=True))

    @property
    def refs(self) -> dict[str, ArtifactRef]:
        """All inputs in the action key, by role."""
        found = {**self.given, **quarantined_ref(self.marks)}
        if self.ratings is not None:
            found[RATINGS] = derived_ref(RATINGS, _FILE, self.ratings.to_pylist())
        if self.config.by_family:
            found[_SUITE] = self._rewards.manifest.parents[_SUITE]
        return found

    def commit(self) -> None:
        """Make those of `refs` that no step makes."""
        commit_quarantined(self.store, self.marks)
        if self.ratings is not None:
            commit_derived(self.store, RATINGS, _FILE, self.ratings.to_pylist())

    @cached_property
    def _rewards(self) -> Artifact:
        return open_artifact(self.store, self.given["rewards"])
