"""One iteration of group-relative policy optimization on a committed dataset.

    members.parquet (every graded episode) -> advantages --+
    train.parquet (kept sequences) -> old logprobs --------+-> minibatches of groups -> clipped loss -> AdamW -> requantize

One epoch: the iteration's groups, shuffled by the seed, are cut into `optimizer_steps` minibatches. Old logprobs are the trainer's own,
taken once before the first step; the sampler's correct them by truncated importance sampling.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contracts.artifacts import Artifact, open_artifact
from contracts.failpoints import failpoint
from contracts.store import Store
from trainer.config import GRPO_VERSION, GrpoConfig, GrpoJob
from trainer.data import cut_by_length, make_batch, shuffled
from trainer.errors import TrainingDiverged
from trainer.experience import Experience, read_experience
from trainer.export import load_checkpoint, publish_checkpoint
from trainer.losses import policy_loss
from trainer.metrics import Metrics, Watcher
from trainer.model import score
from trainer.optimizers import AdamW
from trainer.parameters import Parameters
from trainer.result import TrainResult
from trainer.resume import resume_parameters
from trainer.state import TrainerState, capture_state, load_state, publish_state


def train_grpo(job: GrpoJob, store: Store, watchers: Iterable[Watcher] = ()) -> TrainResult:
    """Run `job` and publish its checkpoint and trainer state. An empty dataset publishes the same weights anew, marked as skipped."""
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
    """Row indices in at most `count` minibatches. groups: group number of each row; whole groups are dealt, shuffled by `seed`, evenly."""
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
    """Log probabilities of every row's policy tokens under the starting weights, at the rollouts' temperature."""
    found: list[Tensor] = [torch.empty(0)] * len(experience.sequences)
    for part in cut_by_length(experience.sequences, config.microbatch_tokens):
        members = [experience.sequences[index] for index in part]
        logprobs = score(parameters.leaves, parameters.config, make_batch(members), config.temperature).logprobs
        for index, own in zip(part, torch.split(logprobs, [len(m.scored) for m in members]), strict=True):
            found[index] = own
    return found


@dataclass
class _Totals:
    """Sums over the tokens of one minibatch."""

    tokens: int
    loss: float = 0.0
    clipped: float = 0.0
    correction: float = 0.0
    divergence: float = 0.0
    entropy: float = 0.0


def _train(
    job: GrpoJob, parameters: Parameters, optimizer: AdamW, experience: Experience, before: int, metrics: Metrics
) -> int:
    config = job.config
    old = trainer_logprobs(parameters, experience, config)
    mismatch = max(float((o - s).abs().max()) for o, s in zip(old, experience.sampler_logprobs, strict=True))
    metrics.add(
        before, sampler_mismatch_max=mismatch, reward_mean=experience.reward_mean, rows=len(old),
        members=experience.members,
    )  # fmt: skip
    cuts = minibatches(experience.groups, config.optimizer_steps, job.seed)
    for number, rows in enumerate(cuts, start=1):
        parameters.clear_gradients()
        totals = _accumulate(config, parameters, experience, old, rows)
        norm = parameters.clip_gradients(config.max_gradient_norm)
        if not torch.isfinite(norm):
            raise TrainingDiverged(
                f"the gradient is not finite at optimizer step {number}: lower learning_rate {config.learning_rate}"
            )
        optimizer.step(config.learning_rate)
        parameters.requantize()
        tokens = totals.tokens
        metrics.add(
            before + number, loss=totals.loss, grad_norm=float(norm), lr=config.learning_rate, tokens=tokens,
            rows=len(rows), clip_fraction=totals.clipped / tokens, tis_mean=totals.correction / tokens,
            old_kl=totals.divergence / tokens, entropy=totals.entropy / tokens,
        )  # fmt: skip
    return len(cuts)


def _accumulate(
    config: GrpoConfig, parameters: Parameters, experience: Experience, old: Sequence[Tensor], rows: Sequence[int]
) -> _Totals:
    """Add the gradient of one minibatch's loss, microbatch by microbatch."""
    sequences = [experience.sequences[row] for row in rows]
    totals = _Totals(sum(len(sequence.scored) for sequence in sequences))
    for part in cut_by_length(sequences, config.microbatch_tokens):
        batch = make_batch([sequences[index] for index in part])
        own = [rows[index] for index in part]
        scores = score(
            parameters.leaves, parameters.config, batch, config.temperature, balance=config.router_balance > 0
        )
        loss = policy_loss(
            scores.logprobs, torch.cat([old[row] for row in own]),
            torch.cat([experience.sampler_logprobs[row] for row in own]), experience.advantages[own][batch.owners],
            clip_low=config.clip_low, clip_high=config.clip_high, cap=config.importance_cap,
        )  # fmt: skip
        share = len(batch.targets) / totals.tokens
        whole = loss.loss / totals.tokens + config.router_balance * share * scores.balance
        whole.backward()  # type: ignore[no-untyped-call]
        totals.loss += float(loss.loss.detach()) / totals.tokens
        totals.clipped += float(loss.clipped)
        totals.correction += float(loss.correction)
        totals.divergence += float(loss.divergence)
        totals.entropy += float(scores.entropy.sum())
    return totals


def _summary(experience: Experience | None, metrics: Metrics, step: int, *, skipped: bool) -> dict[str, object]:
    summary: dict[str, object] = {"step": step, "skipped": skipped}
    if experience is None:
        return summary
    steps = [record for record in metrics.records if "loss" in record]
    for name in ("loss", "grad_norm", "clip_fraction", "tis_mean", "entropy"):
        summary[name] = sum(record[name] for record in steps) / len(steps)
    summary |= {"reward_mean": experience.reward_mean, "rows": len(experience.sequences), "members": experience.members}
    summary["sampler_mismatch_max"] = metrics.records[0]["sampler_mismatch_max"]
    return summary


def _publish(
    job: GrpoJob, store: Store, parameters: Parameters, optimizer: AdamW, start: Artifact, step: int,
    summary: dict[str, object], metrics: Metrics,
) -> TrainResult:  # fmt: skip
    """Commit the trainer state, then the checkpoint, whose existence says that both are there."""
    parents = {"dataset": job.dataset, "checkpoint": job.checkpoint, "trainer_state": job.trainer_state}
    config = {"grpo": job.config.model_dump(), "seed": job.seed, "numerics": job.numerics}
    state: TrainerState = capture_state(parameters, optimizer.state(), "adamw", step, {})
    saved = publish_state(
        store, "trainer_state", job.key, state, parents=parents, config=config, code_version=GRPO_VERSION
    )
    failpoint("state-committed")
    checkpoint = publish_checkpoint(
        store, job.key, parameters, start, parents=parents, config=config, code_version=GRPO_VERSION, meta=summary,
        metrics=metrics.jsonl(),
    )  # fmt: skip
    return TrainResult(checkpoint.ref, saved.ref, summary)
