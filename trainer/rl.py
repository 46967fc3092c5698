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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from contracts.artifacts import Artifact, open_artifact
from contracts.failpoints import failpoint
from contracts.store import Store
from trainer.algorithms.advantages import generalized_advantages
from trainer.algorithms.base import Tokens
from trainer.algorithms.ppo import Ppo
from trainer.config import RL_VERSION, RlConfig, RlJob
from trainer.critic import Critic
from trainer.data import ScoredSequence, cut_by_tokens, make_batch, shuffled
from trainer.errors import TrainingDiverged
from trainer.experience import Experience, read_experience
from trainer.export import load_checkpoint, publish_checkpoint
from trainer.losses import balance_loss, first_not_finite, policy_loss, value_loss
from trainer.metrics import Metrics, Watcher
from trainer.mismatch import mismatch_metrics
from trainer.model import Batch, Scores, score
from trainer.optimizers import AdamW
from trainer.parameters import Parameters
from trainer.ranks import ALONE, Ranks
from trainer.result import TrainResult
from trainer.resume import resume_parameters
from trainer.rl_metrics import Totals, summarize
from trainer.state import TrainerState, capture_state, load_state, publish_state


@dataclass
class Learner:
    """What training changes."""

    parameters: Parameters
    optimizer: AdamW
    critic: Critic | None
    """None unless the algorithm has a value head."""

    @property
    def gradients(self) -> list[Tensor]:
        """All gradients, of policy and critic."""
        return [buffer.gradient for buffer in self.parameters.buffers] + ([self.critic.gradient] if self.critic else [])


@dataclass
class Start:
    """Numbers of every row under the iteration's starting weights: float32 [policy tokens] each."""

    logprobs: list[Tensor]
    advantages: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    """Empty without a critic, as are `returns`."""
    returns: list[Tensor] = field(default_factory=list)


def train_rl(job: RlJob, store: Store, watchers: Iterable[Watcher] = (), ranks: Ranks = ALONE) -> TrainResult | None:
    """Run `job` and publish its checkpoint and trainer state. Returns None on ranks that do not publish.

    Without any row to train on, publish the same weights again, marked as skipped.
    """
    begin, dataset = open_artifact(store, job.checkpoint), open_artifact(store, job.dataset)
    saved = open_artifact(store, job.trainer_state)
    loaded = load_checkpoint(begin.directory())
    state = load_state(saved, loaded.config)
    learner = _open_learner(job.config, resume_parameters(loaded, state, begin.ref, saved.ref), state)
    experience = read_experience(dataset, loaded.config, job.config, job.seed)
    metrics = Metrics(watchers)
    taken = _train(job, learner, experience, state.step, metrics, ranks) if experience else 0
    if not ranks.leads:
        return None
    summary = summarize(experience, metrics.records, state.step + taken)
    return _publish(job, store, learner, begin, state.step + taken, summary, metrics)


def _open_learner(config: RlConfig, parameters: Parameters, state: TrainerState) -> Learner:
    """Weights and optimizers as `state` left them; a critic that the state lacks is fresh."""
    optimizer = AdamW(parameters.buffers, config.beta1, config.beta2, config.weight_decay)
    if state.optimizer_name == "adamw":
        optimizer.load(state.optimizer)
    critic = None
    if isinstance(config.algorithm, Ppo):
        width = parameters.config["hidden_size"]
        critic = Critic(config.algorithm, width, config.beta1, config.beta2, state.optimizer)
    return Learner(parameters, optimizer, critic)


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
def score_start(
    parameters: Parameters,
    experience: Experience,
    config: RlConfig,
    critic: Critic | None = None,
    ranks: Ranks = ALONE,
) -> Start:
    """Score every row under the initial weights, at the rollouts' temperature, and derive its advantages.

    Raises TrainingDiverged.
    """
    sizes = [len(sequence.scored) for sequence in experience.sequences]
    start = Start([torch.zeros(size) for size in sizes], values=[torch.zeros(size) for size in sizes if critic])
    own = ranks.share(range(len(sizes)))
    for part in cut_by_tokens([experience.sequences[row] for row in own], config.microbatch_tokens):
        rows = [own[index] for index in part]
        batch = make_batch([experience.sequences[row] for row in rows])
        scores = score(parameters.leaves, parameters.config, batch, config.temperature)
        _require_finite(scores.logprobs, batch, experience, rows, "the log probability under the starting weights")
        _put(start.logprobs, rows, scores.logprobs)
        if critic is not None:
            _put(start.values, rows, critic.values(scores.hidden))
    start.logprobs, start.values = _from_ranks(start.logprobs, ranks), _from_ranks(start.values, ranks)
    _add_advantages(start, experience, config)
    return start


def _put(into: list[Tensor], rows: Sequence[int], values: Tensor) -> None:
    """Set the entries of `rows`. values: theirs, end to end."""
    for row, own in zip(rows, torch.split(values, [len(into[row]) for row in rows]), strict=True):
        into[row] = own


def _from_ranks(values: list[Tensor], ranks: Ranks) -> list[Tensor]:
    """The entries of all ranks, each of which has zeros where another one has values."""
    if ranks.count == 1 or not values:
        return values
    every = torch.cat(values)
    ranks.add(every)
    return list(torch.split(every, [len(each) for each in values]))


def _add_advantages(start: Start, experience: Experience, config: RlConfig) -> None:
    if experience.advantages is not None:
        pairs = zip(experience.advantages, start.logprobs, strict=True)
        start.advantages = [advantage.expand(len(logprobs)) for advantage, logprobs in pairs]
        return
    algorithm = config.algorithm
    assert isinstance(algorithm, Ppo)
    for values, reward in zip(start.values, experience.rewards.tolist(), strict=True):
        found = generalized_advantages(values.double().numpy(), reward, algorithm.gamma, algorithm.gae_lambda)
        advantages, returns = (torch.from_numpy(each).float() for each in found)
        start.advantages.append(advantages)
        start.returns.append(returns)


def _train(job: RlJob, learner: Learner, experience: Experience, before: int, metrics: Metrics, ranks: Ranks) -> int:
    """Train one epoch. Returns the number of optimizer steps, without skipped ones."""
    config = job.config
    start = score_start(learner.parameters, experience, config, learner.critic, ranks)
    metrics.add(
        before,
        **mismatch_metrics(start.logprobs, experience.sampler_logprobs),
        reward_mean=experience.reward_mean,
        rows=len(start.logprobs),
        members=experience.members,
    )
    taken = 0
    for rows in minibatches(experience.groups, config.optimizer_steps, job.seed):
        learner.parameters.clear_gradients()
        if learner.critic is not None:
            learner.critic.clear_gradients()
        own = ranks.share(rows)
        parts = cut_by_tokens([experience.sequences[row] for row in own], config.microbatch_tokens)
        cut = [[own[index] for index in part] for part in parts]
        totals = accumulate(config, learner.parameters, experience, start, cut, learner.critic, ranks)
        counted = {"tokens": totals.tokens, "rows": len(rows)}
        if totals.all_masked:
            metrics.add(before + taken, skipped_step=True, **counted, **totals.metrics())
            continue
        taken += 1
        ranks.add(*learner.gradients)
        norm = _step(config, learner, before + taken)
        extra = {"balance": totals.balance} if config.router_balance else {}
        extra |= {"value_loss": totals.value_loss} if learner.critic is not None else {}
        shown = {"loss": totals.loss, "grad_norm": norm, "lr": config.learning_rate}
        metrics.add(before + taken, **shown, **counted, **totals.metrics(), **extra)
    return taken


def _step(config: RlConfig, learner: Learner, number: int) -> float:
    """Apply the gradients. Returns the global norm of the policy's before clipping. Raises TrainingDiverged."""
    norm = learner.parameters.clip_gradients(config.max_gradient_norm)
    if not torch.isfinite(norm):
        raise TrainingDiverged(
            f"the gradient is not finite at optimizer step {number}: lower learning_rate {config.learning_rate}"
        )
    learner.optimizer.step(config.learning_rate)
    learner.parameters.requantize()
    if learner.critic is not None:
        learner.critic.step()
    return float(norm)


def accumulate(
    config: RlConfig,
    parameters: Parameters,
    experience: Experience,
    start: Start,
    parts: Sequence[Sequence[int]],
    critic: Critic | None = None,
    ranks: Ranks = ALONE,
) -> Totals:
    """Add the gradient of this rank's part of a minibatch's loss, microbatch by microbatch. Returns the minibatch's
    sums.

    The division into microbatches and among ranks does not change the gradient.

    start: numbers of every row before the first step. parts: rows of each microbatch. Raises TrainingDiverged.
    """
    own = [row for part in parts for row in part]
    tokens, members = map(int, ranks.total(sum(len(start.logprobs[row]) for row in own), len(own)))
    totals = Totals(tokens, config.algorithm.divisor(tokens, members, parameters.config["max_position_embeddings"]))
    counts = None
    if config.router_balance:
        counts = expert_counts(parameters, ([experience.sequences[row] for row in part] for part in parts))
        ranks.add(counts)
    for rows in parts:
        batch = make_batch([experience.sequences[row] for row in rows])
        scores = score(parameters.leaves, parameters.config, batch, config.temperature, routing=counts is not None)
        seen = _tokens(scores, batch, experience, start, rows)
        loss = policy_loss(config.algorithm, config.corrections, seen)
        _require_finite(scores.logprobs, batch, experience, rows, "the log probability")
        _require_finite(loss.tokens, batch, experience, rows, "the loss")
        whole = loss.loss / totals.divisor
        if counts is not None and scores.routing is not None:
            balance = balance_loss(scores.routing.probabilities, counts, parameters.config["num_experts_per_tok"])
            totals.balance += float(balance.detach())
            whole = whole + config.router_balance * balance
        if critic is not None:
            fit = _value_loss(config, critic, scores, start, rows) / tokens
            totals.value_loss += float(fit.detach())
            whole = whole + fit
        whole.backward()  # type: ignore[no-untyped-call]
        totals.add(loss, scores)
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


def _value_loss(config: RlConfig, critic: Critic, scores: Scores, start: Start, rows: Sequence[int]) -> Tensor:
    assert isinstance(config.algorithm, Ppo)
    before, returns = (torch.cat([found[row] for row in rows]) for found in (start.values, start.returns))
    return value_loss(critic.values(scores.hidden), before, returns, config.algorithm.value_clip)


@torch.no_grad()
def expert_counts(parameters: Parameters, microbatches: Iterable[Sequence[ScoredSequence]]) -> Tensor:
    """Tokens routed to each expert, float32 [layers, experts], over all `microbatches` under the present weights."""
    counts = torch.zeros(parameters.config["num_hidden_layers"], parameters.config["num_experts"])
    for members in microbatches:
        routing = score(parameters.leaves, parameters.config, make_batch(members), routing=True).routing
        assert routing is not None
        counts += routing.counts
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
) -> TrainResult:
    """Commit the trainer state, then the checkpoint, whose existence implies that both exist."""
    parents = {"dataset": job.dataset, "checkpoint": job.checkpoint, "trainer_state": job.trainer_state}
    config = {"rl": job.config.model_dump(), "seed": job.seed, "numerics": job.numerics}
    tensors = learner.optimizer.state() | (learner.critic.state() if learner.critic is not None else {})
    state: TrainerState = capture_state(learner.parameters, tensors, "adamw", step, {})
    saved = publish_state(
        store, "trainer_state", job.key, state, parents=parents, config=config, code_version=RL_VERSION
    )
    failpoint("state-committed")
    checkpoint = publish_checkpoint(
        store,
        job.key,
        learner.parameters,
        start,
        parents=parents,
        config=config,
        code_version=RL_VERSION,
        meta=summary,
        metrics=metrics.jsonl(),
    )
    return TrainResult(checkpoint.ref, saved.ref, summary)
