"""Supervised warm start: a fresh model learns demonstrations until a target quality is reached.

demonstrations -> batches (order: a function of seed and step) -> loss over policy tokens -> Muon + AdamW -> requantize
when the target is met: `average_steps` more, and the mean of the weights over these is published
every `evaluate_every` steps: look at clean validation demonstrations; every `snapshot_every`: a mark to resume from
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from contracts import tracing
from contracts.artifacts import Artifact, open_artifact
from contracts.store import Store
from trainer.backends.base import Backend, MuonRule
from trainer.config import SFT_VERSION, SftConfig, SftJob
from trainer.data import Parts, Rows, ScoredSequence, cut_by_lengths, cut_by_tokens
from trainer.demonstrations import read_demonstrations, read_other_validation
from trainer.errors import TrainingConfigError, TrainingDiverged
from trainer.losses import balance_loss, first_not_finite, z_loss
from trainer.metrics import Metrics, Watcher
from trainer.model import Batch, Scores
from trainer.order import Order, Source, apportion
from trainer.precision import DEFAULT
from trainer.publishing import publish_result
from trainer.ranks import ALONE, Ranks
from trainer.result import TrainResult
from trainer.rl import expert_counts
from trainer.routing import require_experts
from trainer.schedule import rate_factor
from trainer.sft_start import SftStart, read_start
from trainer.snapshots import Snapshots
from trainer.state import TrainerState


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
        """Whether the result satisfies the stopping criterion. `expected_solve` 1 turns it off: float32 rounds a
        probability near 1 to 1.
        """
        return self.solve >= config.expected_solve < 1 and self.form >= config.expected_form


def look(backend: Backend, sequences: Sequence[ScoredSequence], tokens: int = 8192) -> Look:
    """Score `sequences`, which all ranks have. tokens: maximum per forward pass."""
    sums = [0.0, 0.0, 0.0]
    own = backend.ranks.share(sequences)
    microbatches = Parts(own, cut_by_tokens(own, tokens))

    def read(number: int, batch: Batch, scores: Scores) -> None:
        members = microbatches[number]
        logprobs = torch.split(scores.logprobs.double(), [len(member.scored) for member in members])
        for sequence, found in zip(members, logprobs, strict=True):
            sums[0] += float(found.sum().exp())
            sums[1] += float(found[: sequence.first_turn].sum().exp())
            sums[2] -= float(found.sum())

    backend.forward(microbatches, read).result()
    solve, form, loss = backend.ranks.total(*sums)
    scored = sum(len(sequence.scored) for sequence in sequences)
    return Look(solve / len(sequences), form / len(sequences), loss / scored, len(sequences))


def train_sft(job: SftJob, store: Store, watchers: Iterable[Watcher] = (), ranks: Ranks = ALONE) -> TrainResult | None:
    """Run `job` and publish its checkpoint and trainer state. Returns None on ranks that do not publish.

    A killed job continues from its last snapshot.
    """
    tokenizer = open_artifact(store, job.tokenizer)
    start = read_start(job, store, tokenizer)
    require_experts(start.model, job.config.of_experts())
    vocabulary, longest = start.model["vocab_size"], start.model["max_position_embeddings"]
    train, sources, validation = read_demonstrations(job, store, vocabulary, longest)
    others = read_other_validation(job, store, vocabulary, longest)
    size = min(job.config.batch_size, len(train))
    if size < ranks.count and job.config.batch_tokens is None:
        raise TrainingConfigError(
            f"job field ranks is {ranks.count}, but a batch has {size} demonstrations: lower ranks or raise"
            " config.batch_size"
        )
    run = _Run(job, store, start, train, sources, others, watchers, ranks)
    with run.snapshots:
        while not run.finished:
            run.step()
            if run.taken % job.config.evaluate_every == 0 or run.finished:
                run.evaluate(validation)
            if run.snapshots.due(run.taken) and not run.finished:
                run.snapshots.save(run.capture(), run.taken)
        return run.publish(tokenizer)


class _Run:
    """State of the loop: weights and optimizer, steps taken, consecutive evaluations that met the criterion, and the
    step at which they were enough.
    """

    def __init__(
        self,
        job: SftJob,
        store: Store,
        start: SftStart,
        train: Rows,
        sources: Sequence[Source],
        others: Sequence[Sequence[ScoredSequence]],
        watchers: Iterable[Watcher],
        ranks: Ranks,
    ) -> None:
        self._job, self._store, self._model, self._ranks = job, store, start.model, ranks
        self._config, self._train, self._others = job.config, train, others
        size = job.config.batch_size
        if job.sources and job.config.batch_tokens is None:
            counts = apportion(job.config.max_steps * size, [source.weight for source in sources])
            if 0 in counts:
                raise TrainingConfigError(
                    f"source {job.sources[counts.index(0)]} gets none of the {sum(counts)} rows of all steps: raise its"
                    " weight or base.sft.max_steps, or leave it out"
                )
            sources = [replace(source, weight=count) for source, count in zip(sources, counts, strict=True)]
        self._sources = sources
        self._order = Order(sources, train.lengths, size, job.config.batch_tokens, job.seed)
        described = {
            **job.config.model_dump(mode="json"),
            **({"lora": job.lora.model_dump(mode="json")} if job.lora else {}),
            "inputs": {
                "tokenizer": job.tokenizer.digest,
                "demonstrations": [ref.digest for ref in job.data.values()],
                **{role: ref.digest for role, ref in job.start.items()},
            },
        }
        self.snapshots = Snapshots(
            store, job.key, job.config.snapshot_every, job.config.max_steps, described, SFT_VERSION, ranks
        )
        self.taken, self._met, self._last = 0, 0, Look(0.0, 0.0, 0.0, 0)
        self._converged_at: int | None = None
        state = self.snapshots.latest(start.model, start.adapter, lazily=job.backend != "torch")
        muon, adamw = job.config.learning_rate, job.config.adamw_learning_rate
        self._rate = muon or adamw or 1.0
        rule = MuonRule(adamw_share=adamw / self._rate, muon_share=muon / self._rate)
        self._backend = start.backend(state, rule, ranks, store)
        self._metrics = Metrics(watchers, state.extra["metrics"] if state else ())
        if state:
            self._backend.restore(state).result()
            self.taken, self._met, self._converged_at = state.step, state.extra["met"], state.extra["converged_at"]
            whole = min(job.config.batch_size, len(train)) * self.taken  # snapshots of older versions lack the counts
            self._order.drawn = list(state.extra.get("drawn", [whole]))

    @property
    def finished(self) -> bool:
        """Whether the weights of enough steps are averaged, or the maximum of steps is reached."""
        return self.taken >= self._end

    @property
    def _end(self) -> int:
        limit = self._config.max_steps
        return limit if self._converged_at is None else min(limit, self._converged_at + self._config.average_steps)

    def step(self) -> None:
        """Take one optimizer step."""
        config, train = self._config, self._train
        every = self._order.next()
        factor = rate_factor(config.schedule, self.taken, config.warmup_steps, config.max_steps, config.final_rate)
        self._backend.clear_gradients()
        loss, entropy, *losses = self._backward(self._ranks.share(every), int(train.scored[every].sum()))
        with tracing.span("optim_step", {"triplane.step": self.taken + 1}):
            norm = self._backend.optim_step(self._rate * factor, config.max_gradient_norm).result()
        if not math.isfinite(norm):
            raise TrainingDiverged(
                f"the gradient is not finite at step {self.taken}: lower learning_rate {config.learning_rate}"
            )
        self.taken += 1
        if self._converged_at is not None:
            self._backend.average_weights().result()
            if self.finished:
                self._backend.use_average().result()
        loss, entropy, *losses = self._ranks.total(loss, entropy, *losses)
        self._metrics.add(
            self.taken,
            loss=loss,
            grad_norm=norm,
            lr=config.learning_rate * factor,
            tokens=int(train.lengths[every].sum()),
            entropy=entropy,
            **self._by_source(every, losses),
        )

    def _by_source(self, every: Sequence[int], losses: Sequence[float]) -> dict[str, float]:
        """Mean loss of a policy token, nats, of each named source in the batch. losses: their sums."""
        owners = self._source_of(every)
        scored = np.bincount(owners, self._train.scored[every], len(self._sources))
        named = zip(self._job.sources, losses, scored.tolist(), strict=False)
        return {f"loss/{name}": loss / tokens for name, loss, tokens in named if tokens}

    def _source_of(self, rows: Sequence[int]) -> np.ndarray:
        """int64 [rows]: number of the source of each row."""
        return np.searchsorted([source.first for source in self._sources], rows, side="right") - 1

    def _backward(self, rows: Sequence[int], scored: int) -> list[float]:
        """Add the gradient of this rank's rows, microbatch by microbatch. scored: scored tokens of the batch.

        Returns this rank's contributions to the batch's mean loss and mean entropy, and to the sum of the losses of
        each named source.
        """
        config, train = self._config, self._train
        limit = config.microbatch_tokens
        parts = [list(rows)]
        if limit is not None or not rows:
            parts = [[rows[index] for index in part] for part in cut_by_lengths(train.lengths[rows], limit or 1)]
        apart = limit is not None or config.batch_tokens is not None
        counts = self._expert_counts(parts) if config.routing_losses and apart else None
        sums = [0.0, 0.0, *(0.0 for _ in self._job.sources)]

        def loss_of(number: int, batch: Batch, scores: Scores) -> Tensor:
            self._require_finite(scores, batch, parts[number])
            loss = -scores.logprobs.sum() / scored
            sums[0] += float(loss.detach())
            sums[1] += float(scores.entropy.sum()) / scored
            if self._job.sources:
                owners = self._source_of(parts[number])[batch.owners.cpu().numpy()]
                values = scores.logprobs.detach().double().cpu().numpy()
                for place, value in enumerate(np.bincount(owners, values, len(self._sources)).tolist(), 2):
                    sums[place] -= value
            if scores.routing is None:
                return loss
            if counts is None:
                self._ranks.add(scores.routing.counts)
            used = scores.routing.counts if counts is None else counts
            picks, whole = self._backend.config["num_experts_per_tok"], loss
            if config.router_balance:
                whole = whole + config.router_balance * balance_loss(scores.routing.probabilities, used, picks)
            if config.router_z:
                whole = whole + config.router_z * z_loss(scores.routing.squares, used, picks)
            return whole

        with tracing.span("forward_backward", {"triplane.rows": len(rows), "triplane.tokens": scored}):
            self._backend.forward_backward(Parts(train, parts), loss_of, routing=config.routing_losses).result()
        return sums

    def _expert_counts(self, parts: Sequence[Sequence[int]]) -> Tensor:
        """Tokens that the batch routes to each expert, float32 [layers, experts], over all microbatches and ranks."""
        counts = expert_counts(self._backend, Parts(self._train, parts))
        self._ranks.add(counts)
        return counts

    def _require_finite(self, scores: Scores, batch: Batch, rows: Sequence[int]) -> None:
        token = first_not_finite(scores.logprobs)
        if token is not None:
            raise TrainingDiverged(
                f"{self._train.place(rows[int(batch.owners[token])])} has log probability"
                f" {float(scores.logprobs[token].detach())} at step {self.taken}: lower learning_rate"
                f" {self._config.learning_rate} or adamw_learning_rate {self._config.adamw_learning_rate}; the last"
                " snapshot is kept"
            )

    def evaluate(self, validation: Sequence[ScoredSequence]) -> None:
        """Score a few demonstrations while the criterion is far, all of them when it is near; and a few of each further
        source.
        """
        config = self._config
        seen = look(self._backend, validation[: config.probe_episodes])
        if seen.solve >= 0.8 * config.expected_solve and seen.episodes < len(validation):
            seen = look(self._backend, validation)
        decisive = seen.episodes == len(validation)
        self._met = self._met + 1 if decisive and seen.meets(config) else 0
        if self._converged_at is None and self._met >= config.consecutive:
            self._converged_at = self.taken
        self._last = seen
        looks = [seen, *(look(self._backend, each[: config.probe_episodes]) if each else None for each in self._others)]
        named = zip(self._job.sources, looks, strict=False)
        self._metrics.add(
            self.taken,
            expected_solve=seen.solve,
            expected_form=seen.form,
            validation_loss=seen.loss,
            validation_episodes=seen.episodes,
            met=self._met,
            **{f"validation_loss/{name}": each.loss for name, each in named if each is not None},
        )

    def capture(self) -> TrainerState:
        """State that a resumed run needs. Every rank must call this."""
        extra = {
            "met": self._met,
            "converged_at": self._converged_at,
            "metrics": self._metrics.records,
            "drawn": self._order.drawn,
        }
        return self._backend.save(self.taken, extra, {}).result()

    def _drawn(self) -> dict[str, dict[str, float]]:
        """Rows that each named source has, rows drawn of it, and the epochs that these are."""
        places = zip(self._job.sources, self._sources, self._order.drawn, strict=True)
        return {
            name: {"rows": source.count, "drawn": drawn, "epochs": drawn / source.count}
            for name, source, drawn in places
        }

    def publish(self, tokenizer: Artifact) -> TrainResult | None:
        """See `publish_result`; then remove the snapshots. Every rank must call this."""
        self.snapshots.wait()
        job, converged = self._job, self._converged_at is not None
        parents = {"tokenizer": job.tokenizer, **job.data, **job.start}
        config = {
            **({} if job.start else {"model": job.model.model_dump()}),
            **({"lora": job.lora.model_dump()} if job.lora else {}),
            **({"mixture": job.shares} if job.sources else {}),
            "sft": job.config.model_dump(),
            "seed": job.seed,
            "numerics": job.numerics,
            **({"precision": job.precision.model_dump()} if job.precision != DEFAULT else {}),
        }
        summary = {
            "step": self.taken,
            "expected_solve": self._last.solve,
            "expected_form": self._last.form,
            "converged": converged,
            **({"sources": self._drawn()} if job.sources else {}),
        }
        if not converged:
            self._metrics.add(self.taken, warning=f"max_steps {self._config.max_steps} reached before the criterion")
        with tracing.span("export"):
            result = publish_result(
                self._store,
                job.key,
                self._backend,
                self._backend.save(self.taken, {}, {}, optimizer=False).result(),
                tokenizer,
                adapter=job.lora.adapter if job.lora else None,
                parents=parents,
                config=config,
                code_version=SFT_VERSION,
                summary=summary,
                metrics=self._metrics,
            )
        if self._ranks.leads:
            self.snapshots.clear()
        return result
