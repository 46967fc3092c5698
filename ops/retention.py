"""What a store may lose without changing an answer: trainer states that nothing starts from, merged groups,
rows between stages of data pipelines, and snapshots of trainings that were given up.

Manifests of everything else stay, with all checkpoints and episodes, so that lineage, recall and reports answer as
before. An iteration whose trainer state is gone can't be trained again, and its policy can't be rolled back to.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator
from dataclasses import dataclass

from contracts.artifacts import Artifact, ArtifactRef, artifact_exists, discard_artifact, find_artifact, list_artifacts
from contracts.store import Store
from curation.pipeline.plan import KEPT_ROWS, ROWS
from inference.rollouts.groups import GROUP
from ops.graph import CHECKPOINT, DATASET, EVALUATION, ITERATION_INPUTS, PER_ITERATION, ROLLOUTS, SAMPLER
from ops.iteration_keys import next_iteration
from ops.readings import EVALUATION_RUN
from ops.state import read_inputs
from resources.refs import earlier_refs, experiments_in, partitions, read_artifact, read_ref
from resources.registry import Registry
from trainer.config import SNAPSHOT

TRAINER_STATE = "trainer_state"
SHOWN_ITERATIONS = 3
"""Iterations whose mean size foretells the next ones'."""
SNAPSHOT_S = 7 * 86400.0
"""Minimum age of a snapshot, in seconds: which trainings somebody will continue is not in the store."""


@dataclass(frozen=True)
class Removable:
    """An artifact that may be removed."""

    ref: ArtifactRef
    size: int
    """Bytes of its files."""
    why: str


def removable(store: Store, keep_last: int, older_than_s: float) -> list[Removable]:
    """Artifacts that no policy, no pinned iteration and no question needs.

    keep_last: iterations, and promotions below the live policy that it builds on, whose trainer states stay beside
    those of iterations without a decision; at least 1.
    older_than_s: minimum age, since a run may have made what nothing names yet; of snapshots at least SNAPSHOT_S.
    """
    now = time.time()
    old, abandoned = now - older_than_s, now - max(older_than_s, SNAPSHOT_S)
    needed = {key for experiment in experiments_in(store) for key in _needed_by(store, experiment, keep_last)}
    snapshots = [each for each in list_artifacts(store, SNAPSHOT) if each.manifest.created_unix < abandoned]
    states = [each for each in list_artifacts(store, TRAINER_STATE) if each.ref.key not in needed]
    trainings = snapshots or states
    trains = {digest for each in experiments_in(store) for digest in _trains_on(store, each)} if trainings else set()
    found = [
        *(each for each in snapshots if _dataset_of(each) not in trains | {None}),
        *(each for each in states if not _was_trained_on(each, trains)),
        *(each for each in list_artifacts(store, GROUP) if _is_merged(store, each)),
        *(each for kind in (KEPT_ROWS, ROWS) for each in list_artifacts(store, kind)),
    ]
    why = {
        TRAINER_STATE: "nothing starts from it",
        GROUP: "merged into its rollouts",
        ROWS: "rows between stages of a data pipeline",
        KEPT_ROWS: "rows between stages of a data pipeline",
        SNAPSHOT: f"older than {SNAPSHOT_S / 86400:g} days, and no iteration waits to train on its dataset",
    }
    return [Removable(each.ref, _size(each), why[each.ref.kind]) for each in found if each.manifest.created_unix < old]


def remove(store: Store, each: Removable) -> None:
    """Remove an artifact, its manifest first: `store gc` removes what an interruption leaves."""
    discard_artifact(store, each.ref)


def _is_merged(store: Store, group: Artifact) -> bool:
    return artifact_exists(store, ROLLOUTS.writes, group.manifest.config["rollouts"])


def _needed_by(store: Store, experiment: str, keep_last: int) -> Iterator[str]:
    """Keys of trainer states that an experiment keeps. A trainer state has the key of its checkpoint."""
    base = read_ref(store, experiment, "base_policy")
    if base is not None:
        yield from (each.key for each in (base, *earlier_refs(store, experiment, "base_policy", None, base)))
    registry = Registry(store, experiment)
    history = registry.history()
    live = [history[-1]] if history else []
    for entry in (*live, *(history[number - 1] for number in registry.standing()[-keep_last - 1 :])):  # with its own
        yield entry.trainer_state.key
    pinned, undecided = partitions(store, experiment, ITERATION_INPUTS.name), next_iteration(store, experiment)
    for iteration in {*pinned[-keep_last:], *(each for each in pinned if int(each) >= undecided)}:
        inputs = read_ref(store, experiment, ITERATION_INPUTS.name, iteration)
        start = read_inputs(store, inputs).start if inputs else None
        if start is not None:
            yield start.trainer_state.key
        made = read_ref(store, experiment, CHECKPOINT.name, iteration)
        if made is not None:
            yield from (each.key for each in (made, *earlier_refs(store, experiment, CHECKPOINT.name, iteration, made)))


def _was_trained_on(state: Artifact, datasets: Container[str]) -> bool:
    """Whether a trainer state was trained on one of these datasets: a killed run may not have referred to its
    checkpoint yet.
    """
    dataset = state.manifest.parents.get(DATASET.name)
    return dataset is not None and dataset.digest in datasets


def _dataset_of(snapshot: Artifact) -> str | None:
    """Digest of the dataset of the interrupted training; None for a warm start."""
    found: str | None = snapshot.manifest.config.get("inputs", {}).get("dataset")
    return found


def _trains_on(store: Store, experiment: str) -> Iterator[str]:
    """Digests of the datasets whose training may go on: of iterations without a decision, and of those whose checkpoint
    was made from another one.
    """
    undecided = next_iteration(store, experiment)
    for iteration in partitions(store, experiment, DATASET.name):
        dataset = read_ref(store, experiment, DATASET.name, iteration)
        if dataset is None:
            continue
        made = read_artifact(store, experiment, CHECKPOINT.name, iteration) if int(iteration) < undecided else None
        if made is None or made.manifest.parents.get(DATASET.name) != dataset:
            yield dataset.digest


def iteration_bytes(store: Store, experiment: str) -> float | None:
    """Mean bytes that an experiment's last iterations with a decision added; None if there is none."""
    sizes = [
        _iteration_size(store, experiment, each)
        for each in partitions(store, experiment, SAMPLER.name)[-SHOWN_ITERATIONS:]
    ]
    return sum(sizes) / len(sizes) if sizes else None


def _iteration_size(store: Store, experiment: str, iteration: str) -> int:
    made = {name: read_artifact(store, experiment, name, iteration) for name in PER_ITERATION}
    evaluation, candidate, rollouts = (made[spec.name] for spec in (EVALUATION, CHECKPOINT, ROLLOUTS))
    parts = [each for each in made.values() if each]
    runs = evaluation.manifest.parents.items() if evaluation else ()
    refs = [ref for role, ref in runs if ref.kind == EVALUATION_RUN and role.startswith("candidate_")]
    refs += [candidate.ref.model_copy(update={"kind": TRAINER_STATE})] if candidate else []
    parts += [part for ref in refs if (part := find_artifact(store, ref.kind, ref.key))]
    parts += [rollouts] if rollouts else []  # its groups hold the same rows
    return sum(map(_size, parts))


def _size(artifact: Artifact) -> int:
    return sum(entry.size for entry in artifact.manifest.files)
