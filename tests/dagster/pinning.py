"""Iterations that are pinned by the real asset, on a base that is made up: nothing is trained or sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg

from assets.naming import key_of
from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter
from contracts.digests import digest_of
from contracts.store import LocalStore, Store
from ops.deploy_decision import Decision, Verdict
from ops.inputs import PromptsDrawn
from ops.iteration_keys import iteration_key
from resources.experiment import Experiment
from resources.refs import write_ref
from triplane_dagster.assembly import definitions_for
from triplane_dagster.jobs import iteration_job_name

SPLITS = {"train": 24, "gate": 4, "held_out": 4, "unseen": 3}
"""Tasks of a suite that is made up."""


def commit(store: Store, kind: str, key: str, **parents: ArtifactRef) -> Artifact:
    with ArtifactWriter(store, kind, key, parents=parents, config={}, code_version="1") as out:
        out.add_json("content.json", {"kind": kind, "key": key})
        if kind == "checkpoint":
            out.add_json("config.json", {})
        return out.commit(meta={"splits": SPLITS} if kind == "task_suite" else {})


def make_base(store: Store, experiment: Experiment) -> None:
    """What `NAME_base` leaves, without its content."""
    key = digest_of("base")
    commit(store, "trainer_state", key)
    for asset, kind in (("task_suite", "task_suite"), ("base_policy", "checkpoint")):
        write_ref(store, experiment.name, asset, None, commit(store, kind, key).ref)


def sample(store: Store, experiment: Experiment, iteration: str) -> None:
    """Let an iteration have drawn its prompts and have a dataset."""
    key = digest_of([experiment.name, iteration])
    with ArtifactWriter(store, "prompts", key, parents={}, config={}, code_version="1") as out:
        out.add_json("prompts.json", PromptsDrawn(groups=[], reserve=[], cursor_after=4).model_dump(mode="json"))
        write_ref(store, experiment.name, "prompts", iteration, out.commit(meta={}).ref)
    write_ref(store, experiment.name, "dataset", iteration, commit(store, "dataset", key).ref)


def decide(
    store: Store, experiment: Experiment, iteration: str, decision: Verdict = "live", policy: str = "0" * 64
) -> None:
    """Let an iteration have come to a decision about the policy of this digest, and have a report."""
    ref = ArtifactRef(kind="checkpoint", key="0" * 64, digest=policy)
    made = Decision(decision=decision, reasons=[], candidate=ref, parent=ref, pointer_number=None)
    key = digest_of([experiment.name, iteration])
    with ArtifactWriter(
        store, "sampler", digest_of([key, policy, decision]), parents={}, config={}, code_version="1"
    ) as out:
        out.add_json("decision.json", made.model_dump(mode="json"))
        meta = {"decision": decision, "iteration": iteration, "policy": policy}
        write_ref(store, experiment.name, "sampler", iteration, out.commit(meta=meta).ref)
    write_ref(store, experiment.name, "report", iteration, commit(store, "report", key).ref)


def pin(experiment: Experiment, instance: dg.DagsterInstance, iteration: str | None) -> None:
    """Materialize iteration_inputs of $TRIPLANE_STORE as the UI does; raises what its step raises."""
    if iteration is not None:
        instance.add_dynamic_partitions(experiment.name, [iteration])
    job = definitions_for([experiment]).resolve_job_def(iteration_job_name(experiment))
    wanted = [key_of(experiment, "iteration_inputs")]
    job.execute_in_process(instance=instance, partition_key=iteration, asset_selection=wanted)


class CountingStore(LocalStore):
    """A local store that counts what a remote one would be asked."""

    requests = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("exists", "get", "list", "entries", "folders", "local_path"):
            object.__setattr__(self, "requests", object.__getattribute__(self, "requests") + 1)
        return super().__getattribute__(name)


def counting_store(folder: Path, experiment: Experiment, decided: int) -> CountingStore:
    """A store with this many decided iterations, which has counted nothing yet."""
    store = CountingStore(folder)
    for asset in ("sampler", "report"):
        for number in range(decided - 1):
            place = folder / f"pointers/assets/{experiment.name}/{asset}/{iteration_key(number)}"
            place.mkdir(parents=True)
            (place / "00000001.json").write_text("{}")
    decide(store, experiment, iteration_key(decided - 1))
    store.requests = 0
    return store
