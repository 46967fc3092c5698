"""Supervised warm start: a fresh model learns demonstrations until a target quality is reached.

demonstrations -> batches (order: a function of seed and step) -> loss over policy tokens -> Muon + AdamW -> requantize
every `evaluate_every` steps: look at clean validation demonstrations; every `snapshot_every`: a mark to resume from
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import torch

from contracts.artifacts import Artifact, open_artifact
from contracts.chat import ChatTokenizer
from contracts.failpoints import failpoint
from contracts.store import Store
from trainer.config import SFT_VERSION, SftConfig, SftJob
from trainer.data import ScoredSequence, cut_by_tokens, make_batch, read_sequences, shuffled
from trainer.errors import TrainingConfigError, TrainingDataError, TrainingDiverged
from trainer.export import publish_checkpoint
from trainer.losses import balance_loss, first_not_finite
from trainer.metrics import Metrics, Watcher
from trainer.model import Batch, Scores, score
from trainer.optimizers import MuonWithAdamW
from trainer.parameters import Parameters, draw_masters
from trainer.ranks import ALONE, Ranks
from trainer.result import TrainResult
from trainer.schedule import decay, warmup
from trainer.state import Snapshots, TrainerState, capture_state, load_state, publish_state


@dataclass(frozen=True)
class Look:
    """Result of scoring the validation demonstrations."""

    solve: float
    """Mean probability that an episode sampled at temperature 1 equals the clean expert's, which solves its task."""
    form: float
    """The same probability for the first turn alone."""
    loss: float
    """Mean negative log probability of a policy token, nats."""
    episodes: int

    def meets(self, config: SftConfig) -> bool:
        """Whether the result satisfies the stopping criterion."""
        return self.solve >= config.expected_solve and self.form >= config.expected_form


@torch.no_grad()
def look(parameters: Parameters, sequences: Sequence[ScoredSequence], tokens: int = 8192, ranks: Ranks = ALONE) -> Look:
    """Score `sequences`, which all ranks have, with `parameters`. tokens: maximum per forward pass."""
    solve = form = loss = 0.0
    own = ranks.share(sequences)
    for part in cut_by_tokens(own, tokens):
        members = [own[index] for index in part]
        batch = make_batch(members)
        logprobs = score(parameters.leaves, parameters.config, batch).logprobs.double()
        for sequence, found in zip(members, torch.split(logprobs, [len(m.scored) for m in members]), strict=True):
            solve += float(found.sum().exp())
            form += float(found[: sequence.first_turn].sum().exp())
            loss -= float(found.sum())
    solve, form, loss = ranks.total(solve, form, loss)
    scored = sum(len(sequence.scored) for sequence in sequences)
    return Look(solve / len(sequences), form / len(sequences), loss / scored, len(sequences))


def train_sft(job: SftJob, store: Store, watchers: Iterable[Watcher] = (), ranks: Ranks = ALONE) -> TrainResult | None:
    """Run `job` and publish its checkpoint and trainer state. Returns None on ranks that do not publish.

    A killed job continues from its last snapshot.
    """
    tokenizer, demonstrations = open_artifact(store, job.tokenizer), open_artifact(store, job.demonstrations)
    chat = ChatTokenizer.from_directory(tokenizer.directory())
    model = job.model.hf_config(chat.vocabulary_size, chat.end_of_turn)
    train, validation = _demonstrations(demonstrations, job, chat.vocabulary_size)
    size = min(job.config.batch_size, len(train))
    if size < ranks.count:
        raise TrainingConfigError(
            f"job field ranks is {ranks.count}, but a batch has {size} demonstrations: lower ranks or raise"
            " config.batch_size"
        )
    run = _Run(job, store, model, watchers, ranks)
    while not run.finished:
        run.step(train)
        if run.taken % job.config.evaluate_every == 0 or run.finished:
            run.evaluate(validation)
        if ranks.leads and run.snapshots.due(run.taken) and not run.finished:
            run.snapshots.save(run.capture(), job.config.model_dump(), SFT_VERSION)
    return run.publish(tokenizer) if ranks.leads else None


class _Run:
    """State of the loop: parameters, optimizer, steps taken, consecutive evaluations that met the criterion, and the
    step at which they were enough.
    """

    def __init__(
        self, job: SftJob, store: Store, model: dict[str, object], watchers: Iterable[Watcher], ranks: Ranks
    ) -> None:
        self._job, self._store, self._model, self._ranks = job, store, model, ranks
        self._config = job.config
        self.snapshots = Snapshots(store, job.key, job.config.snapshot_every, job.config.max_steps)
        self.taken, self._met, self._last = 0, 0, Look(0.0, 0.0, 0.0, 0)
        self._converged_at: int | None = None
        found = self.snapshots.latest()
        state = load_state(found, model) if found else None
        masters = state.masters if state else draw_masters(model, job.seed)
        self._parameters = Parameters.from_masters(model, masters)
        share = self._config.adamw_learning_rate / self._config.learning_rate if self._config.learning_rate else 0.0
        self._optimizer = MuonWithAdamW(self._parameters, share)
        self._metrics = Metrics(watchers, state.extra["metrics"] if state else ())
        if state:
            self._optimizer.load(state.optimizer)
            self.taken, self._met, self._converged_at = state.step, state.extra["met"], state.extra["converged_at"]

    @property
    def finished(self) -> bool:
        """Whether the learning rate is 0 or the maximum of steps is reached."""
        return self.taken >= self._end

    @property
    def _end(self) -> int:
        limit = self._config.max_steps
        return limit if self._converged_at is None else min(limit, self._converged_at + self._config.decay_steps)

    def step(self, train: Sequence[ScoredSequence]) -> None:
        """Take one optimizer step."""
        config = self._config
        every = batch_members(len(train), config.batch_size, self._job.seed, self.taken)
        rows = self._ranks.share(every)
        scored = sum(len(train[index].scored) for index in every)
        self._parameters.clear_gradients()
        loss, entropy = self._backward(train, rows, scored)
        self._ranks.add(*(buffer.gradient for buffer in self._parameters.buffers))
        norm = self._parameters.clip_gradients(config.max_gradient_norm)
        if not torch.isfinite(norm):
            raise TrainingDiverged(
                f"the gradient is not finite at step {self.taken}: lower learning_rate {config.learning_rate}"
            )
        rate = config.learning_rate * warmup(self.taken, config.warmup_steps)
        if self._converged_at is not None:
            rate *= decay(self.taken, self._converged_at, self._end)
        self._optimizer.step(rate)
        self._parameters.requantize()
        self.taken += 1
        loss, entropy = self._ranks.total(loss, entropy)
        self._metrics.add(
            self.taken,
            loss=loss,
            grad_norm=float(norm),
            lr=rate,
            tokens=sum(train[index].length for index in every),
            entropy=entropy,
        )

    def _backward(self, train: Sequence[ScoredSequence], rows: Sequence[int], scored: int) -> tuple[float, float]:
        """Add the gradient of this rank's rows. scored: scored tokens of the batch.

        Returns this rank's contributions to the batch's mean loss and mean entropy.
        """
        config = self._config
        batch = make_batch([train[index] for index in rows])
        scores = score(self._parameters.leaves, self._model, batch, routing=config.router_balance > 0)
        self._require_finite(scores, batch, rows)
        loss = -scores.logprobs.sum() / scored
        whole = loss
        if scores.routing is not None:
            picks = self._parameters.config["num_experts_per_tok"]
            self._ranks.add(scores.routing.counts)
            balance = balance_loss(scores.routing.probabilities, scores.routing.counts, picks)
            whole = loss + config.router_balance * balance
        whole.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), float(scores.entropy.sum()) / scored

    def _require_finite(self, scores: Scores, batch: Batch, rows: Sequence[int]) -> None:
        token = first_not_finite(scores.logprobs)
        if token is not None:
            raise TrainingDiverged(
                f"row {rows[int(batch.owners[token])]} of the demonstrations' train.parquet has log probability"
                f" {float(scores.logprobs[token].detach())} at step {self.taken}: lower learning_rate"
                f" {self._config.learning_rate} or adamw_learning_rate {self._config.adamw_learning_rate}"
            )

    def evaluate(self, validation: Sequence[ScoredSequence]) -> None:
        """Score a few demonstrations while the criterion is far, all of them when it is near."""
        config = self._config
        seen = look(self._parameters, validation[: config.probe_episodes], ranks=self._ranks)
        if seen.solve >= 0.8 * config.expected_solve and seen.episodes < len(validation):
            seen = look(self._parameters, validation, ranks=self._ranks)
        decisive = seen.episodes == len(validation)
        self._met = self._met + 1 if decisive and seen.meets(config) else 0
        if self._converged_at is None and self._met >= config.consecutive:
            self._converged_at = self.taken
        self._last = seen
        self._metrics.add(
            self.taken,
            expected_solve=seen.solve,
            expected_form=seen.form,
            validation_loss=seen.loss,
            validation_episodes=seen.episodes,
            met=self._met,
        )

    def capture(self) -> TrainerState:
        """State that a resumed run needs."""
        extra = {"met": self._met, "converged_at": self._converged_at, "metrics": self._metrics.records}
        return capture_state(self._parameters, self._optimizer.state(), "muon", self.taken, extra)

    def publish(self, tokenizer: Artifact) -> TrainResult:
        """Commit the trainer state, then the checkpoint, whose existence implies that both exist; then remove the
        snapshots.
        """
        job, converged = self._job, self._converged_at is not None
        parents = {"tokenizer": job.tokenizer, "demonstrations": job.demonstrations}
        config = {
            "model": job.model.model_dump(),
            "sft": job.config.model_dump(),
            "seed": job.seed,
            "numerics": job.numerics,
        }
        state = capture_state(self._parameters, {}, "none", self.taken, {})
        saved = publish_state(
            self._store, "trainer_state", job.key, state, parents=parents, config=config, code_version=SFT_VERSION
        )
        failpoint("state-committed")
        summary = {
            "step": self.taken,
            "expected_solve": self._last.solve,
            "expected_form": self._last.form,
            "converged": converged,
        }
        if not converged:
            self._metrics.add(self.taken, warning=f"max_steps {self._config.max_steps} reached before the criterion")
        checkpoint = publish_checkpoint(
            self._store,
            job.key,
            self._parameters,
            tokenizer,
            parents=parents,
            config=config,
            code_version=SFT_VERSION,
            meta=summary,
            metrics=self._metrics.jsonl(),
        )
        self.snapshots.clear()
        return TrainResult(checkpoint.ref, saved.ref, summary)


def batch_members(count: int, batch_size: int, seed: int, step: int) -> list[int]:
    """Rows of the batch at `step` (from 0): consecutive parts of one permutation per epoch, without a shorter last
    part.
    """
    size = min(batch_size, count)
    per_epoch = count // size
    epoch, cut = divmod(step, per_epoch)
    return shuffled(count, seed, epoch)[cut * size : (cut + 1) * size]


def _demonstrations(
    demonstrations: Artifact, job: SftJob, vocabulary: int
) -> tuple[list[ScoredSequence], list[ScoredSequence]]:
    train = demonstrations.table("train.parquet", ["token_ids", "token_role"])
    validation: pa.Table = demonstrations.table("validation.parquet", ["token_ids", "token_role", "clean"])
    clean = validation.filter(pc.field("clean")).slice(0, job.config.evaluation_episodes)
    if not train.num_rows or not clean.num_rows:
        raise TrainingDataError(
            f"{demonstrations.ref.uri} has {train.num_rows} demonstrations and {clean.num_rows} clean validation ones:"
            " both must be above 0"
        )
    longest = job.model.max_positions
    return (
        read_sequences(train, f"{demonstrations.ref.uri}/train.parquet", vocabulary, longest),
        read_sequences(clean, f"{demonstrations.ref.uri}/validation.parquet", vocabulary, longest),
    )
