"""Weights that a supervised job trains: a fresh model, those of a checkpoint, or adapters beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contracts.adapters import Adapter
from contracts.artifacts import Artifact, open_artifact
from contracts.chat import ChatTokenizer
from contracts.checkpoints import check_checkpoint
from contracts.store import Store
from trainer.adapters import AdaptedBase
from trainer.backends.base import Backend, Rule
from trainer.backends.choose import open_backend, open_masters
from trainer.backends.torch import TorchBackend
from trainer.config import BackendConfig, SftJob
from trainer.errors import TrainingConfigError
from trainer.export import load_checkpoint
from trainer.parameters import draw_masters
from trainer.precision import precision_of, with_precision
from trainer.ranks import Ranks
from trainer.resume import open_parameters, require_adaptable, with_masters
from trainer.state import TrainerState

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class SftStart:
    """Begin of a supervised job."""

    model: dict[str, Any]
    """config.json of the weights."""
    seed: int
    """Of a fresh model's weights."""
    kind: BackendConfig
    """Backend that trains."""
    adapter: Adapter | None = None
    """What is trained in place of the weights."""
    begin: Artifact | None = None
    """Checkpoint that the job starts from; None for a fresh model."""
    saved: Artifact | None = None
    """Its trainer state."""

    def backend(self, snapshot: TrainerState | None, rule: Rule, ranks: Ranks, store: Store) -> Backend:
        """Backend with the weights of the snapshot to resume from, or of the begin; its optimizer is fresh. Every rank
        must call this. Raises TrainingConfigError, TrainingDataError.
        """
        begin, saved, adapter = self.begin, self.saved, self.adapter
        if begin is None or saved is None:
            masters = snapshot.masters if snapshot else draw_masters(self.model, self.seed)
            return open_backend(self.kind, self.model, masters, rule, ranks, store)
        if self.kind.backend == "torch":
            if snapshot is None:
                parameters, _ = open_parameters(begin, saved, adapter, self.seed)
            else:
                parameters = with_masters(load_checkpoint(begin.directory()), adapter, snapshot)
            return TorchBackend(parameters, rule, ranks)
        if snapshot is None:
            found, _ = open_masters(self.kind, begin, saved, self.model, adapter, self.seed, ranks)
        else:
            found = snapshot.masters
        base = AdaptedBase(begin, adapter) if adapter is not None else None
        return open_backend(self.kind, self.model, found, rule, ranks, store, base)


def read_start(job: SftJob, store: Store, tokenizer: Artifact) -> SftStart:
    """Begin of `job`. Raises TrainingConfigError if the checkpoint to start from has another tokenizer than the job."""
    if job.checkpoint is None or job.trainer_state is None:
        chat = ChatTokenizer.from_directory(tokenizer.directory())
        model = job.model.hf_config(chat.vocabulary_size, chat.end_of_turn)
        return SftStart(with_precision(model, job.precision), job.seed, job)
    begin = open_artifact(store, job.checkpoint)
    if begin.path(_TOKENIZER).read_bytes() != tokenizer.path(_TOKENIZER).read_bytes():
        raise TrainingConfigError(
            f"job field tokenizer {job.tokenizer.short} is not the tokenizer of checkpoint {begin.ref.short}: encode"
            " the demonstrations with the checkpoint's own"
        )
    adapter, model = job.lora.adapter if job.lora else None, check_checkpoint(begin.directory())
    require_adaptable(begin, model, adapter)
    if precision_of(model) != job.precision:
        raise TrainingConfigError(
            f"job field precision is {job.precision.kind}, but checkpoint {begin.ref.short} is made by"
            f" {precision_of(model)}: set precision to that"
        )
    return SftStart(model, job.seed, job, adapter, begin, open_artifact(store, job.trainer_state))
