"""A small PPO trainer with a value head of its own. Of Triplane it knows the bridge's client alone.

policy --publish--> bridge <--episodes-- hosted tasks    log-probabilities of sampling --> clipped ratio, GAE
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from inference.bridge.client import Bridge
from tests.trainers import hosted
from tests.trainers.hosted import GROUP, ITERATIONS, PROMPTS, RATE, STEPS, Played
from tests.trainers.publishing import PolicyServer

CLIP = 0.2
LAMBDA = 1.0
"""Of GAE: episodes are rewarded at their end alone."""
EPOCHS = 1
MINIBATCH = PROMPTS * GROUP // STEPS
"""Episodes of an optimizer step."""
VALUE_RATE = 3e-3
VALUE_WEIGHT = 0.5
_MAX_NORM = 1.0
_PAD = 0


@dataclass(frozen=True)
class Batch:
    """Episodes as rows. Places of policy tokens have mask 1."""

    ids: Tensor
    """[rows, tokens] int64, padded"""
    mask: Tensor
    """[rows, tokens] float32"""
    logprobs: Tensor
    """[rows, tokens] of sampling; 0 elsewhere"""
    rewards: Tensor
    """[rows, tokens]: the episode's, at its last policy token"""


class PolicyAndValue(nn.Module):
    """A policy, and the value of each place as a linear function of its last hidden state."""

    def __init__(self, start: str) -> None:
        """start: checkpoint of the policy."""
        super().__init__()
        self.policy = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
        self.value = nn.Linear(self.policy.config.hidden_size, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, tokens] logprob of each token given those before (0 at the first), and the value of the state before
        it.
        """
        hidden = self.policy.model(ids).last_hidden_state[:, :-1]
        every = F.log_softmax(self.policy.lm_head(hidden), -1)
        chosen = every.gather(-1, ids[:, 1:, None])[..., 0]
        values = self.value(hidden.detach())[..., 0]
        return F.pad(chosen, (1, 0)), F.pad(values, (1, 0))


def batch_of(played: Sequence[Played]) -> Batch:
    """Episodes as a batch."""
    rows = [(each.prompt, *each.tokens()) for each in played]
    longest = max(len(prompt) + len(ids) for prompt, ids, _, _ in rows)
    ids = np.full((len(played), longest), _PAD, np.int64)
    mask, logprobs, rewards = (np.zeros((len(played), longest), np.float32) for _ in range(3))
    for row, (prompt, tokens, sampled, own) in enumerate(rows):
        after = slice(len(prompt), len(prompt) + len(tokens))
        ids[row, : len(prompt)], ids[row, after] = prompt, tokens
        logprobs[row, after], mask[row, after] = sampled, own
        rewards[row, len(prompt) + np.flatnonzero(own)[-1]] = played[row].reward
    return Batch(*(torch.from_numpy(each) for each in (ids, mask, logprobs, rewards)))


def update(model: PolicyAndValue, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One iteration of PPO. Returns the largest difference between the bridge's log-probabilities and the model's."""
    with torch.no_grad():
        parts = [model(rows) for rows in batch.ids.split(MINIBATCH)]
        before, values = (torch.cat(each) for each in zip(*parts, strict=True))
    difference = float(((before - batch.logprobs) * batch.mask).abs().max())
    advantages, returns = _advantages(batch, values)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(batch.ids)).split(MINIBATCH):
            loss = _loss(model, batch, rows, advantages, returns)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
            optimizer.step()
    return difference


def _shuffled(played: Sequence[Played]) -> list[Played]:
    return [played[place] for place in torch.randperm(len(played)).tolist()]


def _loss(model: PolicyAndValue, batch: Batch, rows: Tensor, advantages: Tensor, returns: Tensor) -> Tensor:
    """PPO's loss of some episodes: clipped ratio (arXiv:1707.06347, equation 7), and value."""
    logprobs, values = model(batch.ids[rows])
    mask, gain = batch.mask[rows], advantages[rows]
    ratio = torch.exp((logprobs - batch.logprobs[rows]) * mask)
    clipped = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    errors = (values - returns[rows]).square()
    return ((VALUE_WEIGHT * errors - clipped) * mask).sum() / mask.sum()


def _advantages(batch: Batch, values: Tensor) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimates over policy tokens (arXiv:1506.02438), normalized, and returns."""
    advantages = torch.zeros_like(values)
    following = torch.zeros(len(values))
    value_after = torch.zeros(len(values))
    for place in reversed(range(values.shape[1])):
        mask = batch.mask[:, place]
        delta = batch.rewards[:, place] + value_after - values[:, place]
        advantages[:, place] = mask * (delta + LAMBDA * following)
        following = torch.where(mask > 0, advantages[:, place], following)
        value_after = torch.where(mask > 0, values[:, place], value_after)
    returns = advantages + values
    chosen = advantages[batch.mask > 0]
    return (advantages - chosen.mean()) / (chosen.std() + 1e-6), returns


def train(
    server: PolicyServer, start: str, task_ids: Sequence[str], held_out: Sequence[str], permute: bool
) -> dict[str, list[float]]:
    """Train a policy. Returns held-out solving before and after, and by iteration the solving of the trained tasks and
    the difference of log-probabilities.

    permute: give the rewards to other episodes, a control that must not learn.
    """
    torch.manual_seed(1)
    model, drawn = PolicyAndValue(start), np.random.default_rng(1)
    rates = [(model.policy, RATE), (model.value, VALUE_RATE)]
    optimizer = torch.optim.AdamW(
        [{"params": part.parameters(), "lr": rate} for part, rate in rates], betas=(0.0, 0.95), weight_decay=0.0
    )
    server.publish(model.policy)
    found: dict[str, list[float]] = {"held_out": [], "trained": [], "difference": []}
    with Bridge(server.address) as bridge:
        found["held_out"].append(bridge.run(partial(hosted.solving, task_ids=held_out, seed=0)))
        for iteration in range(ITERATIONS):
            wanted = drawn.choice(task_ids, PROMPTS, replace=False).tolist()
            played = bridge.run(partial(hosted.play, task_ids=wanted, seed=1 + iteration, group=GROUP))
            versions = {span.version for each in played for turn in each.turns for span in turn.spans}
            assert versions == {server.version}
            found["trained"].append(100 * sum(each.solved for each in played) / len(played))
            if permute:
                others = _shuffled(played)
                played = [replace(each, reward=other.reward) for each, other in zip(played, others, strict=True)]
            found["difference"].append(update(model, optimizer, batch_of(played)))
            server.publish(model.policy)
        found["held_out"].append(bridge.run(partial(hosted.solving, task_ids=held_out, seed=1_000)))
    return found
