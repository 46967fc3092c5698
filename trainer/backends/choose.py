"""Open the backend that a job names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from contracts.adapters import Adapter, read_adapter
from contracts.architectures import expert_names
from contracts.artifacts import Artifact
from contracts.checkpoints import WEIGHTS, check_checkpoint, is_quantized
from contracts.precision import exported_forward
from contracts.store import Store
from contracts.tensor_files import TensorFiles
from trainer.adapters import require_same_adapter
from trainer.backends.base import Backend, Rule
from trainer.backends.torch import TorchBackend
from trainer.config import BackendConfig, RlJob
from trainer.errors import TrainingConfigError
from trainer.parameters import Parameters, dequantize_stack
from trainer.ranks import Ranks
from trainer.resume import open_parameters, refuse
from trainer.snapshots import Snapshots
from trainer.state import TrainerState, load_state
from trainer.tensors import read_tensor


def open_backend(
    kind: BackendConfig,
    config: Mapping[str, Any],
    masters: Mapping[str, Tensor],
    rule: Rule,
    ranks: Ranks,
    store: Store,
) -> Backend:
    """A backend with these weights and a fresh optimizer. Raises TrainingConfigError if its library is missing."""
    if kind.backend == "torch":
        return TorchBackend(Parameters.from_masters(dict(config), masters), rule, ranks)
    recompute = kind.activation_checkpointing
    if kind.backend == "fsdp2":
        # Imported here: it takes a second, and the default backend never needs it.
        from trainer.backends.fsdp2 import Fsdp2Backend

        return Fsdp2Backend(config, masters, rule, ranks, store, recompute=recompute, expert_ranks=kind.expert_ranks)
    from trainer.backends.deepspeed import DeepSpeedBackend

    return DeepSpeedBackend(config, masters, rule, ranks, store, stage=kind.stage, recompute=recompute)


def continue_backend(
    job: RlJob, begin: Artifact, saved: Artifact, rule: Rule, ranks: Ranks, store: Store, snapshots: Snapshots
) -> tuple[Backend, TrainerState]:
    """A backend with weights and optimizer of the latest snapshot, or of checkpoint `begin` and its state `saved`.

    Raises TrainingConfigError, TrainingDataError unless the masters quantize exactly to the checkpoint, and
    SnapshotRefused.
    """
    adapter = job.config.lora.adapter if job.config.lora else None
    refuse_sharded_adapters(job, adapter)
    if job.backend == "torch":
        parameters, state = open_parameters(begin, saved, adapter, job.seed, snapshots)
        backend: Backend = TorchBackend(parameters, rule, ranks)
    else:
        model = check_checkpoint(begin.directory())
        require_same_adapter(read_adapter(begin.directory(), model), None, begin.ref)
        found = snapshots.latest(model, lazily=True)
        state = found or load_state(saved, model, lazily=True)
        names = ranks.share(sorted(state.masters))
        if found is None and ranks.largest(not all(_quantizes_to(begin, model, state, name) for name in names)):
            raise refuse(begin.ref, saved.ref)
        backend = open_backend(job, model, state.masters, rule, ranks, store)
    backend.restore(state).result()
    return backend, state


def refuse_sharded_adapters(kind: BackendConfig, adapter: Adapter | None) -> None:
    """Raise TrainingConfigError if a backend that shards weights is to train adapters."""
    if adapter is not None and kind.backend != "torch":
        raise TrainingConfigError(
            f"backend {kind.backend} does not train LoRA adapters: use backend torch, or leave lora out"
        )


def _quantizes_to(begin: Artifact, model: Mapping[str, Any], state: TrainerState, name: str) -> bool:
    """Whether a master gives what the checkpoint stores."""
    from trainer.backends.policy import leaf_of

    forward, files = exported_forward(dict(model)), TensorFiles(begin.directory(), WEIGHTS)
    whole = state.masters[name]
    singles = expert_names(name, tuple(whole.shape))
    stored = torch.stack([read_tensor(files, single) for single in singles])
    if forward.quantized and is_quantized(name):
        stored = dequantize_stack(stored, torch.stack([read_tensor(files, f"{one}_scale_inv") for one in singles]))
    return torch.equal(stored.float().reshape(whole.shape), leaf_of(name, whole, forward))
