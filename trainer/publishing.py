"""Commit what a job trained: its trainer state, then the checkpoint of the same weights.

The first state that is committed under a key stays. A job that was killed before it committed its checkpoint, or that
runs twice, may train other weights the second time: on a GPU, or on another CPU. So the checkpoint is made of the state
that is in the store, and the two belong together whichever run commits them.

A job whose checkpoint lost its state is trained again. Its state is kept if the weights are those of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contracts.adapters import Adapter
from contracts.artifacts import (
    Artifact,
    ArtifactRef,
    ArtifactWriter,
    artifact_exists,
    discard_artifact,
    find_artifact,
)
from contracts.failpoints import failpoint
from contracts.store import Store
from trainer.backends.base import Backend
from trainer.errors import TrainingDataError
from trainer.export import commit_checkpoint, follow_checkpoint
from trainer.metrics import Metrics
from trainer.result import TrainResult
from trainer.state import TrainerState, commit_state, follow_state, load_state

_CHECKPOINT, _STATE = "checkpoint", "trainer_state"


def publish_result(
    store: Store,
    key: str,
    backend: Backend,
    state: TrainerState,
    tokenizer: Artifact,
    *,
    adapter: Adapter | None,
    parents: Mapping[str, ArtifactRef],
    config: Mapping[str, Any],
    code_version: str,
    summary: Mapping[str, Any],
    metrics: Metrics,
) -> TrainResult | None:
    """Commit `state`, then the checkpoint, whose existence implies that both exist. Every rank must call this; None on
    those that do not publish.

    If another run of the job has committed its own state, the backend gets the weights of that one. tokenizer: artifact
    with the tokenizer's files. adapter: what is trained in place of the weights. summary: meta of the checkpoint.

    Raises TrainingDataError, and leaves no state, if the store has a checkpoint of other weights without a state.
    """
    ranks, together = backend.ranks, state.staged is not None
    saved, foreign, lone = None, False, False
    if ranks.leads:
        there = artifact_exists(store, _CHECKPOINT, key)
        with ArtifactWriter(store, _STATE, key, parents=parents, config=config, code_version=code_version) as out:
            saved = commit_state(out, state)
        failpoint("state-committed")
        foreign = saved.ref.digest != out.digest
        lone = there and not foreign
    elif together:
        follow_state(state)
    else:
        return None  # rank 0 has all weights
    if together:
        foreign, lone = bool(ranks.largest(foreign)), bool(ranks.largest(lone))
    if foreign:
        saved = saved or find_artifact(store, _STATE, key)
        assert saved is not None, "rank 0 has read it"
        backend.load_weights(load_state(saved, backend.config, adapter, lazily=True).masters).result()
    weights = backend.get_weights().result()
    if not ranks.leads or saved is None:
        follow_checkpoint(weights)
        if lone and ranks.largest(False):
            raise _not_repeated(store, key)
        return None
    summary = {**summary, "step": saved.meta["step"]}
    if foreign:
        metrics.add(
            summary["step"],
            warning=f"another run of this job has committed {saved.ref.uri}: the checkpoint has its weights, the"
            " metrics are those of this run",
        )
    with ArtifactWriter(store, _CHECKPOINT, key, parents=parents, config=config, code_version=code_version) as out:
        checkpoint = commit_checkpoint(out, weights, tokenizer, meta=summary, metrics=metrics.jsonl())
    apart = lone and checkpoint.ref.digest != out.digest
    if apart:
        discard_artifact(store, saved.ref)
    if ranks.largest(apart) if lone and together else apart:
        raise _not_repeated(store, key)
    return TrainResult(checkpoint.ref, saved.ref, dict(summary))


def _not_repeated(store: Store, key: str) -> TrainingDataError:
    return TrainingDataError(
        f"artifacts/{_CHECKPOINT}/{key} has lost its {_STATE}, and training it again gave other weights: train from a"
        f" checkpoint that has its {_STATE}, or delete that folder of {store.url}, and its policy with it, and run the"
        " step again"
    )
