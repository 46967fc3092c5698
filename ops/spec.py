"""Declaration of a step of the graph, and the users of declarations:

    StepSpec + IterationState -> Work: the action key, the parents by role, the recorded config
        running        Work.find, Work.writer       `iterate --dry-run`   triplane_dagster.dry_run
        the asset      assets.naming.define         changed settings      triplane_dagster.settings
        jobs           triplane_dagster.jobs        changed versions      triplane_dagster.staleness

The declarations are in `ops.graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, find_artifact
from contracts.digests import action_key, digest_of
from contracts.store import Store
from ops.state import IterationState
from ops.where import WHERE
from resources.experiment import Experiment

Slice = dict[str, Any]
"""JSON-like part of an experiment that affects a step's result."""
Refs = Mapping[str, ArtifactRef]
"""Artifacts by role."""
FIRST = "0000"
"""Key of the first iteration. Settings affect every iteration alike, so this one stands for all."""


@dataclass(frozen=True)
class Work:
    """One artifact for a step to make, identified by its key."""

    store: Store
    kind: str
    key: str
    parents: Refs
    config: Slice
    version: str

    def find(self) -> Artifact | None:
        """The committed artifact, or None."""
        return find_artifact(self.store, self.kind, self.key)

    def writer(self, further: Refs | None = None) -> ArtifactWriter:
        """Writer that commits the artifact with its lineage. further: parents that are known only after the work."""
        parents = {**self.parents, **(further or {})}
        return ArtifactWriter(
            self.store, self.kind, self.key, parents=parents, config=self.config, code_version=self.version
        )


@dataclass(frozen=True)
class StepSpec:
    """One step of the graph; one asset in each experiment."""

    name: str
    """Name of the asset, and of the step in its action key."""
    version: str
    """Code version; raised by hand if the step computes something else."""
    slice: Callable[[IterationState], Slice]
    """Part of the experiment that affects the step's result."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Role in the lineage -> source: an asset, or a field of the pinned inputs."""
    kind: str = ""
    """Kind of the written artifact; empty: the step's name."""
    plane: str | None = None
    """Plane that executes the step; None if the step only connects planes."""
    needs: tuple[str, ...] = ()
    """Required Dagster resources; the first one does the main work. See `ops.where`."""
    once: bool = False
    """Whether the step runs once per experiment instead of once per iteration."""
    where: Callable[[Experiment], str] | None = None
    """Location where the step runs, for display; None: that of the first resource."""
    note: Callable[[IterationState], str | None] | None = None
    """Note for dry runs; it may raise what the run would."""
    config: Callable[[IterationState], Slice] | None = None
    """Part of the slice in the step's own key, if the keys of its parts contain the rest; None: the whole slice."""
    key_inputs: Callable[[IterationState], Refs | None] | None = None
    """Artifacts, by role, that replace the inputs in the key and become further parents. Returns None while one is
    missing.
    """
    key_of: Callable[[IterationState], str | None] | None = None
    """The action key, if inputs and slice don't define it. Returns None while it is unknown."""
    recorded_by: str | None = ""
    """Kind of the artifact of the same key whose manifest records the config; empty: `writes`; None: no artifact."""
    part_versions: Mapping[str, str] = field(default_factory=dict)
    """Code versions, by kind, of the parents that the step makes itself."""
    part_configs: Callable[[Experiment], Slice] | None = None
    """Settings, by kind, of the parents that the step makes itself, if the slice does not contain them."""
    part_slices: Callable[[IterationState, Artifact], Iterable[tuple[Any, Any]]] | None = None
    """(recorded slice, current slice) of the parents that the step makes itself, from the step's artifact."""

    @property
    def writes(self) -> str:
        """Kind of the written artifact."""
        return self.kind or self.name

    @property
    def upstream(self) -> list[str]:
        """Assets whose references the step receives, in order."""
        return list(dict.fromkeys(source.partition(".")[0] for source in self.inputs.values()))

    def own_config(self, state: IterationState) -> Slice:
        """The slice in the step's own key and manifest."""
        return (self.config or self.slice)(state)

    def settings_digest(self, experiment: Experiment) -> str:
        """Digest of all settings and part versions that affect the step's key, for equal inputs. Reads no store."""
        no_store = cast(Store, None)  # a slice that reads the store fails here, when definitions are loaded
        state = IterationState(experiment, no_store, None if self.once else FIRST)
        parts = self.part_configs(experiment) if self.part_configs else {}
        return digest_of([self.slice(state), self.own_config(state), parts, dict(self.part_versions)])

    def parents(self, state: IterationState) -> Refs | None:
        """The declared inputs by role, or None while one is missing."""
        found = {role: state.find(source) for role, source in self.inputs.items()}
        parents = {role: ref for role, ref in found.items() if ref is not None}
        return parents if len(parents) == len(found) else None

    def work(self, state: IterationState) -> Work | None:
        """Work of the step in this state, or None while a part of its key is missing."""
        keyed = (self.key_inputs or self.parents)(state)
        if keyed is None:
            return None
        work, replayed = self.work_on(state, keyed), state.replayed(self.name)
        return replace(work, key=replayed.key) if replayed else work

    def work_on(self, state: IterationState, keyed: Refs) -> Work:
        """Work with the inputs `keyed`, by role, in the key. The declared inputs are parents, but not in the key."""
        return self.work_with(state.store, keyed, self.own_config(state), self.parents(state) or {})

    def work_with(self, store: Store, keyed: Refs, config: Slice, further: Refs | None = None) -> Work:
        """Work with the inputs `keyed` and this config. further: parents that are not in the key."""
        key = action_key(self.name, {role: ref.digest for role, ref in keyed.items()}, config, self.version)
        return Work(store, self.writes, key, {**keyed, **(further or {})}, config, self.version)

    def key(self, state: IterationState) -> str | None:
        """The action key, or None while it is unknown."""
        if self.key_of is not None:
            return self.key_of(state)
        work = self.work(state)
        return work.key if work else None

    def place(self, experiment: Experiment) -> str:
        """Location where the step runs, for display."""
        if self.where is not None:
            return self.where(experiment)
        return WHERE[self.needs[0]](experiment) if self.needs else "this process"
