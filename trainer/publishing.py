"""Commit what a job trained: its trainer state, then the checkpoint of the same weights.

The first state that is committed under a key stays. A job that was killed before it committed its checkpoint, or that
runs twice, may train other weights the second time: on a GPU, or on another CPU. So the checkpoint is made of the state
that is in the store, and the two belong together whichever run commits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contracts.adapters import Adapter
from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, find_artifact
from contracts.failpoints import failpoint
from contracts.store import Store
from trainer.backends.base import Backend
from trainer.export import follow_checkpoint, publish_checkpoint
from trainer.metrics import Metrics
from trainer.result import TrainResult
from trainer.state import TrainerState, commit_state, follow_state, load_state

_STATE = "trainer_state"


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
    """
    ranks, together = backend.ranks, state.staged is not None
    saved, foreign = None, False
    if ranks.leads:
        with ArtifactWriter(store, _STATE, key, parents=parents, config=config, code_version=code_version) as out:
            saved = commit_state(out, state)
        failpoint("state-committed")
        foreign = saved.ref.digest != out.digest
    elif together:
        follow_state(state)
    else:
        return None  # rank 0 has all weights
    if ranks.largest(foreign) if together else foreign:
        saved = saved or find_artifact(store, _STATE, key)
        assert saved is not None, "rank 0 has read it"
        backend.load_weights(load_state(saved, backend.config, adapter, lazily=True).masters).result()
    weights = backend.get_weights().result()
    if not ranks.leads or saved is None:
        follow_checkpoint(weights)
        return None
    summary = {**summary, "step": saved.meta["step"]}
    if foreign:
        metrics.add(
            summary["step"],
            warning=f"another run of this job has committed {saved.ref.uri}: the checkpoint has its weights, the"
            " metrics are those of this run",
        )
    checkpoint = publish_checkpoint(
        store,
        key,
        weights,
        tokenizer,
        parents=parents,
        config=config,
        code_version=code_version,
        meta=summary,
        metrics=metrics.jsonl(),
    )
    return TrainResult(checkpoint.ref, saved.ref, dict(summary))
