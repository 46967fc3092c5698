"""Open the backend that a job names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from contracts.adapters import Adapter
from contracts.architectures import parameter_shapes
from contracts.artifacts import Artifact
from contracts.checkpoints import check_checkpoint
from contracts.precision import exported_forward
from contracts.store import Store
from trainer.adapters import AdaptedBase
from trainer.backends.base import Backend, Rule
from trainer.backends.torch import TorchBackend
from trainer.config import BackendConfig, RlJob
from trainer.errors import TrainingConfigError
from trainer.export import StoredLeaves
from trainer.parameters import Parameters
from trainer.ranks import Ranks
from trainer.resume import open_factors, open_parameters, refuse, require_adaptable
from trainer.snapshots import Snapshots
from trainer.state import TrainerState, load_state
from trainer.together import together


def open_backend(
    kind: BackendConfig,
    config: Mapping[str, Any],
    masters: Mapping[str, Tensor],
    rule: Rule,
    ranks: Ranks,
    store: Store,
    base: AdaptedBase | None = None,
) -> Backend:
    """A backend with these weights and a fresh optimizer. base: see `AdaptedBase`, then masters are the factors; not
    for backend torch. Raises TrainingConfigError if its library is missing.
    """
    if kind.backend == "torch":
        assert base is None, "adapters of this backend are `AdaptedParameters`"
        return TorchBackend(Parameters.from_masters(dict(config), masters), rule, ranks)
    recompute, experts = kind.activation_checkpointing, kind.expert_ranks
    if kind.backend == "fsdp2":
        # Imported here: it takes a second, and the default backend never needs it.
        from trainer.backends.fsdp2 import Fsdp2Backend

        return Fsdp2Backend(config, masters, rule, ranks, store, base=base, recompute=recompute, expert_ranks=experts)
    from trainer.backends.deepspeed import DeepSpeedBackend

    return DeepSpeedBackend(
        config, masters, rule, ranks, store, stage=kind.stage, base=base, recompute=recompute, expert_ranks=experts
    )


def continue_backend(
    job: RlJob, begin: Artifact, saved: Artifact, rule: Rule, ranks: Ranks, store: Store, snapshots: Snapshots
) -> tuple[Backend, TrainerState]:
    """A backend with weights and optimizer of the latest snapshot, or of checkpoint `begin` and its state `saved`.

    Raises TrainingConfigError, TrainingDataError unless the masters quantize exactly to the checkpoint, and
    SnapshotRefused.
    """
    adapter = job.config.lora.adapter if job.config.lora else None
    if job.backend == "torch":
        parameters, state = open_parameters(begin, saved, adapter, job.seed, snapshots)
        backend: Backend = TorchBackend(parameters, rule, ranks)
        backend.restore(state).result()
        return backend, state
    model = check_checkpoint(begin.directory())
    require_adaptable(begin, model, adapter)
    snapshot = snapshots.latest(model, adapter, lazily=True)
    base = AdaptedBase(begin, adapter) if adapter is not None else None
    if snapshot is not None:
        masters, state = snapshot.masters, snapshot
    else:
        masters, state = open_masters(job, begin, saved, model, adapter, job.seed, ranks)
    backend = open_backend(job, model, masters, rule, ranks, store, base)
    backend.restore(state).result()
    return backend, state


def open_masters(
    kind: BackendConfig,
    begin: Artifact,
    saved: Artifact,
    model: Mapping[str, Any],
    adapter: Adapter | None,
    seed: int,
    ranks: Ranks,
) -> tuple[Mapping[str, Tensor], TrainerState]:
    """What a sharded backend trains on from checkpoint `begin`, which has this config.json, and its state `saved`:
    factors of `adapter`, or all weights, each read when it is used. Every rank must call this.

    Raises TrainingDataError unless the weights quantize exactly to the checkpoint, TrainingConfigError for those of an
    FP8 original with other scales.
    """
    if adapter is not None:
        return open_factors(begin, saved, model, adapter, seed)
    state = load_state(saved, model, lazily=True)
    masters, own = state.masters, _dealt(model, ranks)
    with together(ranks):
        same = _quantize_to(begin, model, masters, own)
    if ranks.largest(not same):
        leaves = StoredLeaves(begin.directory(), model)
        with together(ranks):
            other = any(not torch.equal(leaves[name], masters[name]) for name in own)
        if ranks.largest(other):
            raise refuse(begin.ref, saved.ref)
        raise TrainingConfigError(
            f"checkpoint {begin.ref.short} has the scales of an FP8 original, which are not the largest value over 448:"
            f" backend {kind.backend} quantizes with those scales alone; set trainer.launcher.backend to torch, or"
            " import the bfloat16 original"
        )
    return masters, state


def _dealt(model: Mapping[str, Any], ranks: Ranks) -> list[str]:
    """Parameters that this rank compares, of about as many elements as those of the others."""
    shapes = parameter_shapes(model)
    owners = ranks.deal([math.prod(shape) for shape in shapes.values()])
    return [name for name, owner in zip(shapes, owners, strict=True) if owner == ranks.rank]


def _quantize_to(begin: Artifact, model: Mapping[str, Any], masters: Mapping[str, Tensor], names: list[str]) -> bool:
    """Whether the masters `names` give what the checkpoint stores."""
    from trainer.backends.policy import leaf_of

    forward, leaves = exported_forward(dict(model)), StoredLeaves(begin.directory(), model)
    return all(torch.equal(leaves[name], leaf_of(name, masters[name], forward)) for name in names)
