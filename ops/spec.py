"""What a step of the graph is, declared once. Everything that speaks of a step reads its declaration:

    StepSpec + IterationState -> Work: the action key, the parents by role, the recorded config
        running        Work.find, Work.writer       `iterate --dry-run`   triplane_dagster.dry_run
        the asset      assets.naming.define         changed settings      triplane_dagster.settings
        jobs           triplane_dagster.jobs        changed versions      triplane_dagster.staleness

The declarations are in `ops.graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, find_artifact
from contracts.digests import action_key
from contracts.store import Store
from ops.state import IterationState
from ops.where import WHERE
from resources.experiment import Experiment

Slice = dict[str, Any]
"""The part of an experiment that decides what a step makes, JSON-like."""
Refs = Mapping[str, ArtifactRef]
"""Artifacts by role."""


@dataclass(frozen=True)
class Work:
    """One piece of work of a step: same key, same work."""

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
        """Commits the artifact, with its lineage. further: parents that are known only when the work is done."""
        parents = {**self.parents, **(further or {})}
        return ArtifactWriter(
            self.store, self.kind, self.key, parents=parents, config=self.config, code_version=self.version
        )


@dataclass(frozen=True)
class StepSpec:
    """One step of the graph, which is one asset of every experiment."""

    name: str
    """Of the asset, and of the step in its action key."""
    version: str
    """Code version, bumped by hand when the meaning of the step changes."""
    slice: Callable[[IterationState], Slice]
    """The part of the experiment that decides the step beside its inputs."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Role in the lineage -> where it comes from: an asset, or a field of the pinned inputs."""
    kind: str = ""
    """Kind of the artifact that it writes; empty: the name."""
    plane: str | None = None
    """The plane that does the work; None for a step that only joins planes."""
    needs: tuple[str, ...] = ()
    """Dagster resources that it can't run without, the one that does the work first; see `ops.where`."""
    once: bool = False
    """Made once for an experiment, not in every iteration."""
    where: Callable[[Experiment], str] | None = None
    """Where it runs, for people; None: where its first resource is."""
    note: Callable[[IterationState], str] | None = None
    """What to know before it runs."""
    config: Callable[[IterationState], Slice] | None = None
    """The slice in its own key, where its parts hold the rest; None: the whole slice."""
    key_inputs: Callable[[IterationState], Refs | None] | None = None
    """Artifacts in its key in place of its inputs, by role; they are further parents. None while one is missing."""
    key_of: Callable[[IterationState], str | None] | None = None
    """The key itself, where it is not made of inputs and slice. None while it can't be known."""
    recorded_by: str | None = ""
    """Kind of the artifact of the same key whose manifest records the config; empty: its own; None: none does."""
    part_versions: Mapping[str, str] = field(default_factory=dict)
    """Code versions of the parents that the step makes itself, by kind."""
    part_slices: Callable[[IterationState, Artifact], Iterable[tuple[Any, Any]]] | None = None
    """(slice as recorded, slice now) of the parents that it makes itself. Takes the artifact of the step."""

    @property
    def writes(self) -> str:
        """Kind of the artifact that it writes."""
        return self.kind or self.name

    @property
    def upstream(self) -> list[str]:
        """The assets whose references the step is given, in order."""
        return list(dict.fromkeys(source.partition(".")[0] for source in self.inputs.values()))

    def own_config(self, state: IterationState) -> Slice:
        """The slice in the step's own key and manifest."""
        return (self.config or self.slice)(state)

    def parents(self, state: IterationState) -> Refs | None:
        """The declared inputs by role, or None while one is missing."""
        found = {role: state.find(source) for role, source in self.inputs.items()}
        parents = {role: ref for role, ref in found.items() if ref is not None}
        return parents if len(parents) == len(found) else None

    def work(self, state: IterationState) -> Work | None:
        """The work of the step in this state, or None while something that its key holds is missing."""
        keyed = (self.key_inputs or self.parents)(state)
        return None if keyed is None else self.work_on(state, keyed)

    def work_on(self, state: IterationState, keyed: Refs) -> Work:
        """The work on the inputs `keyed`, by role. The declared inputs are parents too, without being in the key."""
        return self.work_with(state.store, keyed, self.own_config(state), self.parents(state) or {})

    def work_with(self, store: Store, keyed: Refs, config: Slice, further: Refs | None = None) -> Work:
        """The work on the inputs `keyed` with this config. further: parents that are not in the key."""
        key = action_key(self.name, {role: ref.digest for role, ref in keyed.items()}, config, self.version)
        return Work(store, self.writes, key, {**keyed, **(further or {})}, config, self.version)

    def key(self, state: IterationState) -> str | None:
        """The action key, or None while it can't be known."""
        if self.key_of is not None:
            return self.key_of(state)
        work = self.work(state)
        return work.key if work else None

    def place(self, experiment: Experiment) -> str:
        """Where the step runs, for people."""
        if self.where is not None:
            return self.where(experiment)
        return WHERE[self.needs[0]](experiment) if self.needs else "this process"
