"""Find artifacts whose step has changed its code version.

Stale artifacts stay readable and in use. Materializing the step again makes a new artifact under another key, as do the
steps that depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from contracts.artifacts import Artifact, find_artifact
from contracts.store import Store
from ops.graph import GRAPH, REPORT, spec_behind
from ops.spec import StepSpec
from resources.refs import partitions, read_artifact


@dataclass(frozen=True)
class StaleStep:
    """One step whose code version has changed."""

    step: str
    iterations: tuple[str, ...]
    """Affected iterations, in order; empty for an unpartitioned step."""
    version: str
    """Version that made the artifact."""
    now: str
    """Version of the installed Triplane."""

    def __str__(self) -> str:
        first, last = (self.iterations or ("",))[0], (self.iterations or ("",))[-1]
        where = f" of {first}" + (f" to {last}" if last != first else "") if self.iterations else ""
        return f"{self.step}{where}: made by version {self.version} of the step, which is {self.now} now"


def stale_steps(store: Store, experiment: str, *, newest: bool = False) -> list[StaleStep]:
    """Steps of the experiment's latest artifacts whose version has changed, in graph order.

    newest: read only the newest iteration of each step, in constant time.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for step, iteration, version, now in _versions(store, experiment, newest):
        if version != now:
            iterations = found.setdefault((step, version, now), [])
            if iteration is not None and iteration not in iterations:
                iterations.append(iteration)
    return [StaleStep(step, tuple(iterations), version, now) for (step, version, now), iterations in found.items()]


def _versions(store: Store, experiment: str, newest: bool) -> Iterator[tuple[str, str | None, str, str]]:
    """(step, iteration, version that made it, current version) of each materialized asset."""
    for spec in GRAPH:
        if spec is REPORT:  # no step reads reports, so they are never stale
            continue
        iterations: list[str | None] = [None] if spec.once else [*partitions(store, experiment, spec.name)]
        for iteration in iterations[-1:] if newest else iterations:
            made = read_artifact(store, experiment, spec.name, iteration)
            if made is not None:
                now = spec_behind(spec, made.manifest)
                yield from _of_parents(store, now, iteration, made)
                yield spec.name, iteration, made.manifest.code_version, now.version


def _of_parents(
    store: Store, spec: StepSpec, iteration: str | None, made: Artifact
) -> Iterator[tuple[str, str | None, str, str]]:
    """Versions of the parts of a step that are separate artifacts; parts of one kind share a version."""
    for ref in {ref.kind: ref for ref in made.manifest.parents.values()}.values():
        part = find_artifact(store, ref.kind, ref.key) if ref.kind in spec.part_versions else None
        if part is not None:
            yield f"{spec.name} ({ref.kind})", iteration, part.manifest.code_version, spec.part_versions[ref.kind]
