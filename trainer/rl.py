"""One iteration of policy-gradient training on a committed dataset, by any algorithm.

    members.parquet (every graded episode) -> advantages --+
    train.parquet (kept sequences) -> old logprobs --------+-> minibatches of groups -> policy loss -> AdamW ->
    requantize
                                                                 | each in microbatches: expert counts first, then
                                                                 gradients

One epoch: the iteration's groups, shuffled by the seed, are cut into `optimizer_steps` minibatches. Old logprobs are
the trainer's own, taken once before the first step; `trainer.algorithms` says how the sampler's correct them. With PPO
a value head is trained beside the policy, on the same minibatches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contracts import tracing
from contracts.artifacts import Artifact, open_artifact
from contracts.checkpoints import check_checkpoint
from contracts.store import Store
from trainer.algorithms.advantages import generalized_advantages
from trainer.algorithms.base import Tokens
from trainer.algorithms.ppo import Ppo
from trainer.backends.base import AdamWRule, Backend
from trainer.backends.choose import continue_backend
from trainer.config import RL_VERSION, RlConfig, RlJob
from trainer.continuing import require_precision
from trainer.critic import Critic
from trainer.data import Parts, ScoredSequence, cut_by_lengths, lengths_of, scored_of, shuffled
from trainer.errors import OffPolicyRefused, TrainingDiverged
from trainer.experience import Experience, read_experience
from trainer.flat import Ragged, Repeated
from trainer.losses import balance_loss, first_not_finite, policy_loss, value_loss, z_loss
from trainer.metrics import Metrics, Watcher
from trainer.mismatch import mismatch_metrics
from trainer.model import Batch, Routing, Scores
from trainer.publishing import publish_result
from trainer.ranks import ALONE, Ranks
from trainer.result import TrainResult
from trainer.rl_metrics import Totals, summarize
from trainer.rl_progress import Progress, Start, open_snapshots
from trainer.routing import require_experts
from trainer.snapshots import Snapshots
from trainer.state import NONE, TrainerState


@dataclass
class Learner:
    """What training changes."""

    backend: Backend
    critic: Critic | None
    """None unless the algorithm has a value head, of which every rank has a copy."""

    def save(self, step: int, extra: dict[str, Any], loop: Mapping[str, Tensor] = NONE) -> TrainerState:
        """Trainer state, complete on rank 0. Every rank must call this. loop: tensors of the loop, for a snapshot."""
        critic = self.critic.state() if self.critic is not None else {}
        return self.backend.save(step, extra, critic, loop=loop).result()


def train_rl(job: RlJob, store: Store, watchers: Iterable[Watcher] = (), ranks: Ranks = ALONE) -> TrainResult | None:
    """Run `job` and publish its checkpoint and trainer state. Returns None on ranks that do not publish.

    A killed job continues from its last snapshot. Without any row to train on, publish the same weights again, marked
    as skipped.
    """
    begin, dataset = open_artifact(store, job.checkpoint), open_artifact(store, job.dataset)
    saved = open_artifact(store, job.trainer_state)
    model = check_checkpoint(begin.directory())
    require_precision(begin, model, job.config.precision)
    require_experts(model, job.config.of_experts())
    rule = AdamWRule(job.config.beta1, job.config.beta2, job.config.weight_decay)
    with open_snapshots(job, store, ranks) as snapshots:
        backend, state = continue_backend(job, begin, saved, rule, ranks, store, snapshots)
        learner, progress = Learner(backend, _open_critic(job.config, model, state)), Progress.of(state)
        experience = read_experience(dataset, model, job.config, job.seed, store.scratch)
        metrics = Metrics(watchers, progress.records)
        if experience is not None:
            _train(job, learner, experience, progress, snapshots, metrics)
        snapshots.wait()
        summary = summarize(experience, metrics.records, progress.step) if ranks.leads else {}
        result = _publish(job, store, learner, begin, progress.step, summary, metrics)
        if ranks.leads:
            snapshots.clear()
    return result


def _open_critic(config: RlConfig, model: Mapping[str, Any], state: TrainerState) -> Critic | None:
    """The value head as `state` left it; one that the state lacks is fresh."""
    if not isinstance(config.algorithm, Ppo):
        return None
    return Critic(config.algorithm, model["hidden_size"], config.beta1, config.beta2, state.optimizer)


def minibatches(groups: Sequence[int], count: int, seed: int) -> list[list[int]]:
    """Row indices in at most `count` minibatches. groups: group number of each row; whole groups are assigned, shuffled
    by `seed`.
    """
    distinct = sorted(set(groups))
    rows: dict[int, list[int]] = {group: [] for group in distinct}
    for row, group in enumerate(groups):
        rows[group].append(row)
    order = [distinct[index] for index in shuffled(len(distinct), seed)]
    count = min(count, len(order))
    cuts = [len(order) * index // count for index in range(count + 1)] if count else []
    return [[row for group in order[a:b] for row in rows[group]] for a, b in itertools.pairwise(cuts)]


@torch.no_grad()
def score_start(backend: Backend, experience: Experience, config: RlConfig, critic: Critic | None = None) -> Start:
    """Score every row under the initial weights, at the rollouts' temperature, and derive its advantages.

    Raises TrainingDiverged.
    """
    sizes = scored_of(experience.sequences)
    start = Start.empty(sizes, experience.folder, critic=critic is not None)
    parts = _cut(experience, backend.ranks.share(range(len(sizes))), config)

    def read(number: int, batch: Batch, scores: Scores) -> None:
        rows, what = parts[number], "the log probability under the starting weights"
        _require_finite(scores.logprobs, batch, experience, rows, what)
        _put(start.logprobs, rows, scores.logprobs)
        if critic is not None:
            _put(start.values, rows, critic.values(scores.hidden))

    backend.forward(Parts(experience.sequences, parts), read, config.temperature).result()
    backend.ranks.add(*start.tensors().values())  # each has zeros where another one has numbers
    _add_advantages(start, experience, config)
    return start


def _cut(experience: Experience, rows: Sequence[int], config: RlConfig) -> list[list[int]]:
    """Rows of each microbatch."""
    parts = cut_by_lengths(lengths_of(experience.sequences)[rows], config.microbatch_tokens)
    return [[rows[index] for index in part] for part in parts]


def _put(into: Sequence[Tensor], rows: Sequence[int], values: Tensor) -> None:
    """Set the entries of `rows`. values: theirs, end to end."""
    for row, own in zip(rows, torch.split(values, [len(into[row]) for row in rows]), strict=True):
        into[row].copy_(own)


def _add_advantages(start: Start, experience: Experience, config: RlConfig) -> None:
    sizes = scored_of(experience.sequences)
    if experience.advantages is not None:
        start.advantages = Repeated(experience.advantages, sizes)
        return
    algorithm = config.algorithm
    assert isinstance(algorithm, Ppo)
    start.advantages, start.returns = (Ragged.zeros(sizes, experience.folder) for _ in range(2))
    for row, (values, reward) in enumerate(zip(start.values, experience.rewards.tolist(), strict=True)):
        found = generalized_advantages(values.double().numpy(), reward, algorithm.gamma, algorithm.gae_lambda)
        for into, each in zip((start.advantages, start.returns), found, strict=True):
            into[row].copy_(torch.from_numpy(each))


def _start(job: RlJob, learner: Learner, experience: Experience, progress: Progress, metrics: Metrics) -> Start:
    """Numbers under the starting weights: those of the snapshot, or computed and reported."""
    if progress.start:
        start = Start.restored(progress.start, scored_of(experience.sequences))
        _add_advantages(start, experience, job.config)
        return start
    start = score_start(learner.backend, experience, job.config, learner.critic)
    mismatch = mismatch_metrics(start.logprobs, experience.sampler_logprobs)
    _require_overlap(job, mismatch["effective_sample_size"])
    metrics.add(
        progress.step,
        **mismatch,
        reward_mean=experience.reward_mean,
        rows=len(start.logprobs),
        members=experience.members,
    )
    return start


def _require_overlap(job: RlJob, found: float) -> None:
    """Raise OffPolicyRefused if the effective sample size, in 0 to 1, is below the job's bound or not a number."""
    least = job.min_effective_sample_size
    if not found >= least:
        raise OffPolicyRefused(
            f"the effective sample size of the episodes under checkpoint {job.checkpoint.short} is {found:.3f} of their"
            f" tokens, at least {least:g} is required (off_policy.min_effective_sample_size): nothing was trained;"
            " lower that bound, or train on episodes of a newer policy"
        )


def _train(
    job: RlJob,
    learner: Learner,
    experience: Experience,
    progress: Progress,
    snapshots: Snapshots,
    metrics: Metrics,
) -> None:
    """Train the rest of one epoch, and count minibatches and optimizer steps in `progress`."""
    start = _start(job, learner, experience, progress, metrics)
    batches = minibatches(experience.groups, job.config.optimizer_steps, job.seed)
    for rows in batches[progress.done :]:
        taken, numbers = _minibatch(job.config, learner, experience, start, rows, progress)
        progress.done, progress.taken = progress.done + 1, progress.taken + taken
        metrics.add(progress.step, **numbers)
        if snapshots.due(progress.done) and progress.done < len(batches):
            state = learner.save(progress.step, progress.extra(metrics.records), start.tensors())
            snapshots.save(state, progress.done)


def _minibatch(
    config: RlConfig,
    learner: Learner,
    experience: Experience,
    start: Start,
    rows: Sequence[int],
    progress: Progress,
) -> tuple[int, dict[str, float]]:
    """Take one optimizer step on `rows`, unless corrections drop every token. progress: that before the step.

    Returns the number of optimizer steps, 0 or 1, and the metrics.
    """
    learner.backend.clear_gradients()
    if learner.critic is not None:
        learner.critic.clear_gradients()
    cut = _cut(experience, learner.backend.ranks.share(rows), config)
    totals = accumulate(config, learner.backend, experience, start, cut, learner.critic)
    counted = {"tokens": totals.tokens, "rows": len(rows)}
    if totals.all_masked:
        return 0, {"skipped_step": True, **counted, **totals.metrics()}
    rate = progress.learning_rate(config)
    norm = _step(config, learner, rate, progress.step + 1)
    extra = {"balance": totals.balance} if config.router_balance else {}
    extra |= {"router_z": totals.router_z} if config.router_z else {}
    extra |= {"value_loss": totals.value_loss} if learner.critic is not None else {}
    shown = {"loss": totals.loss, "grad_norm": norm, "lr": rate}
    return 1, {**shown, **counted, **totals.metrics(), **extra}


def _step(config: RlConfig, learner: Learner, rate: float, number: int) -> float:
    """Apply the gradients. Returns the global norm of the policy's before clipping. Raises TrainingDiverged."""
    with tracing.span("optim_step", {"triplane.step": number}):
        norm = learner.backend.optim_step(rate, config.max_gradient_norm).result()
    if not math.isfinite(norm):
        raise TrainingDiverged(
            f"the gradient is not finite at optimizer step {number}: lower learning_rate {config.learning_rate}"
        )
    if learner.critic is not None:
        learner.backend.ranks.add(learner.critic.gradient)
        learner.critic.step()
    return norm


def accumulate(
    config: RlConfig,
    backend: Backend,
    experience: Experience,
    start: Start,
    parts: Sequence[Sequence[int]],
    critic: Critic | None = None,
) -> Totals:
    """Add the gradient of this rank's part of a minibatch's loss, microbatch by microbatch. Returns the minibatch's
    sums.

    The division into microbatches and among ranks does not change the gradient.

    start: numbers of every row before the first step. parts: rows of each microbatch. Raises TrainingDiverged.
    """
    own, ranks = [row for part in parts for row in part], backend.ranks
    tokens, members = map(int, ranks.total(sum(len(start.logprobs[row]) for row in own), len(own)))
    totals = Totals(tokens, config.algorithm.divisor(tokens, members, backend.config["max_position_embeddings"]))
    microbatches = Parts(experience.sequences, parts)
    counts = None
    if config.router_balance or config.router_z:
        counts = expert_counts(backend, microbatches)
        ranks.add(counts)

    def loss_of(number: int, batch: Batch, scores: Scores) -> Tensor:
        rows = parts[number]
        seen = _tokens(scores, batch, experience, start, rows)
        loss = policy_loss(config.algorithm, config.corrections, seen)
        _require_finite(scores.logprobs, batch, experience, rows, "the log probability")
        _require_finite(loss.tokens, batch, experience, rows, "the loss")
        whole = loss.loss / totals.divisor
        if counts is not None and scores.routing is not None:
            whole = whole + _routing_loss(config, scores.routing, counts, backend.config, totals)
        if critic is not None:
            fit = _value_loss(config, critic, scores, start, rows) / tokens
            totals.value_loss += float(fit.detach())
            fit.backward()  # type: ignore[no-untyped-call]
        totals.add(loss, scores)
        return whole

    with tracing.span("forward_backward", {"triplane.rows": len(own), "triplane.tokens": tokens}):
        backend.forward_backward(microbatches, loss_of, config.temperature, routing=counts is not None).result()
    totals.add_ranks(ranks)
    return totals


def _tokens(scores: Scores, batch: Batch, experience: Experience, start: Start, rows: Sequence[int]) -> Tokens:
    """Scored tokens of the microbatch of `rows`."""
    return Tokens(
        logprobs=scores.logprobs,
        old=torch.cat([start.logprobs[row] for row in rows]),
        sampler=torch.cat([experience.sampler_logprobs[row] for row in rows]),
        advantages=torch.cat([start.advantages[row] for row in rows]),
        owners=batch.owners,
        lengths=torch.tensor([float(len(start.logprobs[row])) for row in rows]),
    )


def _routing_loss(
    config: RlConfig, routing: Routing, counts: Tensor, model: Mapping[str, Any], totals: Totals
) -> Tensor:
    """Weighted losses of the routers. counts: of the whole minibatch."""
    picks = model["num_experts_per_tok"]
    loss = counts.new_zeros(())
    if config.router_balance:
        balance = balance_loss(routing.probabilities, counts, picks)
        totals.balance += float(balance.detach())
        loss = loss + config.router_balance * balance
    if config.router_z:
        z = z_loss(routing.squares, counts, picks)
        totals.router_z += float(z.detach())
        loss = loss + config.router_z * z
    return loss


def _value_loss(config: RlConfig, critic: Critic, scores: Scores, start: Start, rows: Sequence[int]) -> Tensor:
    assert isinstance(config.algorithm, Ppo)
    before, returns = (torch.cat([found[row] for row in rows]) for found in (start.values, start.returns))
    return value_loss(critic.values(scores.hidden), before, returns, config.algorithm.value_clip)


def expert_counts(backend: Backend, microbatches: Sequence[Sequence[ScoredSequence]]) -> Tensor:
    """Tokens routed to each expert, float32 [layers, experts], over all `microbatches` under the present weights."""
    counts = torch.zeros(backend.config["num_hidden_layers"], backend.config["num_experts"])

    def read(number: int, batch: Batch, scores: Scores) -> None:
        assert scores.routing is not None
        counts.add_(scores.routing.counts)

    backend.forward(microbatches, read, routing=True).result()
    return counts


def _require_finite(values: Tensor, batch: Batch, experience: Experience, rows: Sequence[int], what: str) -> None:
    """Raise TrainingDiverged with the first row that has a value (one for each scored token) that is not finite."""
    token = first_not_finite(values)
    if token is None:
        return
    row = rows[int(batch.owners[token])]
    raise TrainingDiverged(
        f"{what} of token {int(batch.targets[token])} of episode {experience.episodes[row]} (row {row} of"
        f" train.parquet, group {experience.group_names[row]}) is {float(values[token].detach())};"
        f" {int((~torch.isfinite(values)).sum())} of {len(values)} tokens of its microbatch are not finite: lower"
        " trainer.learning_rate, or start from an earlier policy (`triplane rollback`)"
    )


def _publish(
    job: RlJob,
    store: Store,
    learner: Learner,
    start: Artifact,
    step: int,
    summary: dict[str, object],
    metrics: Metrics,
) -> TrainResult | None:
    """See `publish_result`. Every rank must call this."""
    with tracing.span("export"):
        return publish_result(
            store,
            job.key,
            learner.backend,
            learner.save(step, {}),
            start,
            adapter=job.config.lora.adapter if job.config.lora else None,
            parents={"dataset": job.dataset, "checkpoint": job.checkpoint, "trainer_state": job.trainer_state},
            config={"rl": job.config.model_dump(), "seed": job.seed, "numerics": job.numerics},
            code_version=RL_VERSION,
            summary=summary,
            metrics=metrics,
        )
