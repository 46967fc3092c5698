"""Weights that a supervised job trains: a fresh model, those of a checkpoint, or adapters beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contracts.adapters import Adapter
from contracts.artifacts import Artifact, open_artifact
from contracts.chat import ChatTokenizer
from contracts.store import Store
from trainer.adapters import AdaptedBase, AdaptedParameters
from trainer.backends.base import Backend, Rule
from trainer.backends.choose import open_backend
from trainer.backends.torch import TorchBackend
from trainer.config import BackendConfig, SftJob
from trainer.errors import TrainingConfigError
from trainer.parameters import Parameters, draw_masters
from trainer.precision import precision_of, with_precision
from trainer.ranks import Ranks
from trainer.resume import open_parameters, with_masters
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
    given: Parameters | None = None
    """Its weights."""

    def backend(self, snapshot: TrainerState | None, rule: Rule, ranks: Ranks, store: Store) -> Backend:
        """Backend with the weights of the snapshot to resume from, or of the begin; its optimizer is fresh."""
        if self.given is None or self.kind.backend != "torch":
            given = dict(self.given.masters()) if self.given else None
            masters = snapshot.masters if snapshot else given or draw_masters(self.model, self.seed)
            base = AdaptedBase(self.begin, self.adapter) if self.begin and self.adapter else None
            return open_backend(self.kind, self.model, masters, rule, ranks, store, base)
        if snapshot is None:
            return TorchBackend(self.given, rule, ranks)
        whole = self.given.base if isinstance(self.given, AdaptedParameters) else self.given
        return TorchBackend(with_masters(whole, self.adapter, snapshot), rule, ranks)


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
    adapter = job.lora.adapter if job.lora else None
    parameters, _ = open_parameters(begin, open_artifact(store, job.trainer_state), adapter, job.seed)
    if precision_of(parameters.config) != job.precision:
        raise TrainingConfigError(
            f"job field precision is {job.precision.kind}, but checkpoint {begin.ref.short} is made by"
            f" {precision_of(parameters.config)}: set precision to that"
        )
    return SftStart(parameters.config, job.seed, job, adapter, begin, parameters)
