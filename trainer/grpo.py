"""One iteration of group-relative policy optimization on a committed dataset.

    members.parquet (every graded episode) -> advantages --+
    train.parquet (kept sequences) -> old logprobs --------+-> minibatches of groups -> clipped loss -> AdamW ->
    requantize
                                                                 | each in microbatches: expert counts first, then
                                                                 gradients

One epoch: the iteration's groups, shuffled by the seed, are cut into `optimizer_steps` minibatches. Old logprobs are
the trainer's own, taken once before the first step; the sampler's correct them by truncated importance sampling.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor

from contracts.artifacts import Artifact, open_artifact
from contracts.failpoints import failpoint
from contracts.store import Store
from trainer.config import GRPO_VERSION, GrpoConfig, GrpoJob
from trainer.data import ScoredSequence, cut_by_tokens, make_batch, shuffled
from trainer.errors import TrainingDiverged
from trainer.experience import Experience, read_experience
from trainer.export import load_checkpoint, publish_checkpoint
from trainer.losses import PolicyLoss, balance_loss, first_not_finite, policy_loss
from trainer.metrics import Metrics, Watcher
from trainer.model import Batch, Replay, score
from trainer.optimizers import AdamW
from trainer.parameters import Parameters
from trainer.result import TrainResult
from trainer.resume import resume_parameters
from trainer.state import TrainerState, capture_state, load_state, publish_state


def train_grpo(job: GrpoJob, store: Store, watchers: Iterable[Watcher] = ()) -> TrainResult:
    """Run `job` and publish its checkpoint and trainer state.

    For an empty dataset, publish the same weights again, marked as skipped.
    """
    start, dataset = open_artifact(store, job.checkpoint), open_artifact(store, job.dataset)
    saved = open_artifact(store, job.trainer_state)
    loaded = load_checkpoint(start.directory())
    state = load_state(saved, loaded.config)
    parameters = resume_parameters(loaded, state, start.ref, saved.ref)
    optimizer = AdamW(parameters.buffers, job.config.beta1, job.config.beta2, job.config.weight_decay)
    if state.optimizer_name == "adamw":
        optimizer.load(state.optimizer)
    experience = read_experience(dataset, parameters.config, job.config, job.seed)
    metrics = Metrics(watchers)
    taken = _train(job, parameters, optimizer, experience, state.step, metrics) if experience else 0
    summary = _summary(experience, metrics, state.step + taken, skipped=taken == 0)
    return _publish(job, store, parameters, optimizer, start, state.step + taken, summary, metrics)


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
def trainer_logprobs(parameters: Parameters, experience: Experience, config: GrpoConfig) -> list[Tensor]:
    """Log probabilities of every row's policy tokens under the initial weights, at the rollouts' temperature.

    Raises TrainingDiverged.
    """
    found: list[Tensor] = [torch.empty(0)] * len(experience.sequences)
    for part in cut_by_tokens(experience.sequences, config.microbatch_tokens):
        members = [experience.sequences[index] for index in part]
        batch = make_batch(members)
        logprobs = score(parameters.leaves, parameters.config, batch, config.temperature).logprobs
        _require_finite(logprobs, batch, experience, part, "the log probability under the starting weights")
        for index, own in zip(part, torch.split(logprobs, [len(m.scored) for m in members]), strict=True):
            found[index] = own
    return found


@dataclass
class Totals:
    """Sums over the tokens of one minibatch."""

    tokens: int
    loss: float = 0.0
    clipped: float = 0.0
    dual_clipped: float = 0.0
    bounded: float = 0.0
    correction: float = 0.0
    divergence: float = 0.0
    entropy: float = 0.0
    balance: float = 0.0
    replays: list[Replay] = field(default_factory=list)

    def add(self, loss: PolicyLoss, entropy: Tensor) -> None:
        """Count one microbatch."""
        self.loss += float(loss.loss.detach()) / self.tokens
        self.clipped += float(loss.clipped)
        self.dual_clipped += float(loss.dual_clipped)
        self.bounded += float(loss.bounded)
        self.correction += float(loss.correction)
        self.divergence += float(loss.divergence)
        self.entropy += float(entropy.sum())

    def replay_metrics(self) -> dict[str, float]:
        """Replayed and unrecorded tokens, and the share of replayed ones that the routers would send elsewhere."""
        if not self.replays:
            return {}
        replayed, unrecorded, rerouted = map(sum, zip(*map(astuple, self.replays), strict=True))
        return {
            "replayed_tokens": replayed,
            "unrecorded_tokens": unrecorded,
            "rerouted_fraction": rerouted / max(1, replayed),
        }


def _train(
    job: GrpoJob, parameters: Parameters, optimizer: AdamW, experience: Experience, before: int, metrics: Metrics
) -> int:
    config = job.config
    old = trainer_logprobs(parameters, experience, config)
    mismatch = max(float((o - s).abs().max()) for o, s in zip(old, experience.sampler_logprobs, strict=True))
    metrics.add(
        before,
        sampler_mismatch_max=mismatch,
        reward_mean=experience.reward_mean,
        rows=len(old),
        members=experience.members,
    )
    cuts = minibatches(experience.groups, config.optimizer_steps, job.seed)
    for number, rows in enumerate(cuts, start=1):
        parameters.clear_gradients()
        parts = cut_by_tokens([experience.sequences[row] for row in rows], config.microbatch_tokens)
        totals = accumulate(config, parameters, experience, old, [[rows[index] for index in part] for part in parts])
        norm = parameters.clip_gradients(config.max_gradient_norm)
        if not torch.isfinite(norm):
            raise TrainingDiverged(
                f"the gradient is not finite at optimizer step {number}: lower learning_rate {config.learning_rate}"
            )
        optimizer.step(config.learning_rate)
        parameters.requantize()
        tokens = totals.tokens
        metrics.add(
            before + number,
            loss=totals.loss,
            grad_norm=float(norm),
            lr=config.learning_rate,
            tokens=tokens,
            rows=len(rows),
            clip_fraction=totals.clipped / tokens,
            dual_clip_fraction=totals.dual_clipped / tokens,
            bounded_fraction=totals.bounded / tokens,
            tis_mean=totals.correction / tokens,
            old_kl=totals.divergence / tokens,
            entropy=totals.entropy / tokens,
            **({"balance": totals.balance} if config.router_balance else {}),
            **totals.replay_metrics(),
        )
    return len(cuts)


def accumulate(
    config: GrpoConfig,
    parameters: Parameters,
    experience: Experience,
    old: Sequence[Tensor],
    parts: Sequence[Sequence[int]],
) -> Totals:
    """Add the gradient of one minibatch's loss, microbatch by microbatch. Returns its sums.

    The division into microbatches does not change the gradient.

    old: log probabilities of every row before the first step. parts: rows of each microbatch. Raises TrainingDiverged.
    """
    totals = Totals(sum(len(experience.sequences[row].scored) for part in parts for row in part))
    counts = None
    if config.router_balance:
        counts = expert_counts(parameters, ([experience.sequences[row] for row in part] for part in parts))
    for rows in parts:
        batch = make_batch([experience.sequences[row] for row in rows])
        scores = score(parameters.leaves, parameters.config, batch, config.temperature, routing=counts is not None)
        loss = policy_loss(
            scores.logprobs,
            torch.cat([old[row] for row in rows]),
            torch.cat([experience.sampler_logprobs[row] for row in rows]),
            experience.advantages[list(rows)][batch.owners],
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            cap=config.importance_cap,
        )
        _require_finite(scores.logprobs, batch, experience, rows, "the log probability")
        _require_finite(loss.tokens, batch, experience, rows, "the loss")
        whole = loss.loss / totals.tokens
        if counts is not None and scores.routing is not None:
            balance = balance_loss(scores.routing.probabilities, counts, parameters.config["num_experts_per_tok"])
            totals.balance += float(balance.detach())
            whole = whole + config.router_balance * balance
        whole.backward()  # type: ignore[no-untyped-call]
        totals.add(loss, scores.entropy)
        totals.replays += [scores.replay] if scores.replay else []
    return totals


@torch.no_grad()
def expert_counts(parameters: Parameters, microbatches: Iterable[Sequence[ScoredSequence]]) -> Tensor:
    """Tokens routed to each expert, float32 [layers, experts], over all `microbatches` under the present weights."""
    found: list[Tensor] = []
    for members in microbatches:
        routing = score(parameters.leaves, parameters.config, make_batch(members), routing=True).routing
        assert routing is not None
        found.append(routing.counts)
    return torch.stack(found).sum(0)


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
        " trainer.grpo.learning_rate, or start from an earlier policy (`triplane rollback`)"
    )


def _summary(experience: Experience | None, metrics: Metrics, step: int, *, skipped: bool) -> dict[str, object]:
    summary: dict[str, object] = {"step": step, "skipped": skipped}
    if experience is None:
        return summary
    steps = [record for record in metrics.records if "loss" in record]
    for name in ("loss", "grad_norm", "clip_fraction", "dual_clip_fraction", "bounded_fraction", "tis_mean", "entropy"):
        summary[name] = sum(record[name] for record in steps) / len(steps)
    summary |= {"reward_mean": experience.reward_mean, "rows": len(experience.sequences), "members": experience.members}
    summary["sampler_mismatch_max"] = metrics.records[0]["sampler_mismatch_max"]
    return summary


def _publish(
    job: GrpoJob,
    store: Store,
    parameters: Parameters,
    optimizer: AdamW,
    start: Artifact,
    step: int,
    summary: dict[str, object],
    metrics: Metrics,
) -> TrainResult:
    """Commit the trainer state, then the checkpoint, whose existence implies that both exist."""
    parents = {"dataset": job.dataset, "checkpoint": job.checkpoint, "trainer_state": job.trainer_state}
    config = {"grpo": job.config.model_dump(), "seed": job.seed, "numerics": job.numerics}
    state: TrainerState = capture_state(parameters, optimizer.state(), "adamw", step, {})
    saved = publish_state(
        store, "trainer_state", job.key, state, parents=parents, config=config, code_version=GRPO_VERSION
    )
    failpoint("state-committed")
    checkpoint = publish_checkpoint(
        store,
        job.key,
        parameters,
        start,
        parents=parents,
        config=config,
        code_version=GRPO_VERSION,
        meta=summary,
        metrics=metrics.jsonl(),
    )
    return TrainResult(checkpoint.ref, saved.ref, summary)
