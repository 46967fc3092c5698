"""Iterations that are pinned by the real asset, on a base that is made up: nothing is trained or sampled."""

from __future__ import annotations

import dagster as dg

from assets.naming import key_of
from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter
from contracts.digests import digest_of
from contracts.store import Store
from resources.experiment import Experiment
from resources.refs import write_ref
from triplane_dagster.assembly import definitions_for
from triplane_dagster.jobs import iteration_job_name


def commit(store: Store, kind: str, key: str, **parents: ArtifactRef) -> Artifact:
    with ArtifactWriter(store, kind, key, parents=parents, config={}, code_version="1") as out:
        out.add_json("content.json", {"kind": kind, "key": key})
        return out.commit(meta={})


def make_base(store: Store, experiment: Experiment) -> None:
    """What `NAME_base` leaves, without its content."""
    key = digest_of("base")
    commit(store, "trainer_state", key)
    for asset, kind in (("task_suite", "task_suite"), ("base_policy", "checkpoint")):
        write_ref(store, experiment.name, asset, None, commit(store, kind, key).ref)


def decide(store: Store, experiment: Experiment, iteration: str) -> None:
    """Let an iteration have come to a decision."""
    write_ref(store, experiment.name, "sampler", iteration, ArtifactRef(kind="sampler", key="0" * 64, digest="0" * 64))


def pin(experiment: Experiment, instance: dg.DagsterInstance, iteration: str) -> None:
    """Materialize iteration_inputs of $TRIPLANE_STORE as the UI does; raises what its step raises."""
    instance.add_dynamic_partitions(experiment.name, [iteration])
    job = definitions_for([experiment]).resolve_job_def(iteration_job_name(experiment))
    wanted = [key_of(experiment, "iteration_inputs")]
    job.execute_in_process(instance=instance, partition_key=iteration, asset_selection=wanted)
