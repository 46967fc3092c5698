"""A small PPO trainer with a value head of its own. Of Triplane it knows the bridge's client alone.

policy --publish--> bridge <--episodes-- guessing    log-probabilities of sampling --> clipped ratio, GAE
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from inference.bridge.client import Bridge
from tests.trainers import guessing
from tests.trainers.guessing import Played, Task
from tests.trainers.publishing import PolicyServer

CLIP = 0.2
LAMBDA = 0.95
EPOCHS = 4
MINIBATCH = 128
VALUE_WEIGHT = 0.5
ENTROPY_WEIGHT = 0.003
_MAX_NORM = 1.0


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
    """[rows, tokens]: 1 at the last policy token of a solved episode"""


class PolicyAndValue(nn.Module):
    """A policy, and the value of each place as a linear function of its last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        config = Qwen3Config(
            vocab_size=guessing.VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            pad_token_id=guessing.PAD,
            bos_token_id=guessing.BEGIN,
            eos_token_id=guessing.END,
        )
        self.policy = Qwen3ForCausalLM(config).float()
        self.value = nn.Linear(64, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, tokens] logprob of each token given those before (0 at the first), the entropy there, and the value of
        the state before it.
        """
        hidden = self.policy.model(ids).last_hidden_state[:, :-1]
        every = F.log_softmax(self.policy.lm_head(hidden), -1)
        chosen = every.gather(-1, ids[:, 1:, None])[..., 0]
        entropy = -(every.exp() * every).sum(-1)
        values = self.value(hidden)[..., 0]
        return tuple(F.pad(each, (1, 0)) for each in (chosen, entropy, values))  # type: ignore[return-value]


def batch_of(played: Sequence[Played]) -> Batch:
    """Episodes as a batch."""
    longest = 3 + 2 * guessing.GUESSES
    ids = np.full((len(played), longest), guessing.PAD, np.int64)
    mask, logprobs, rewards = (np.zeros((len(played), longest), np.float32) for _ in range(3))
    for row, episode in enumerate(played):
        place = len(episode.task.prompt)
        ids[row, :place] = episode.task.prompt
        for turn in episode.turns:
            for token in turn.observation_ids:
                ids[row, place] = token
                place += 1
            ids[row, place], logprobs[row, place], mask[row, place] = turn.token_ids[0], turn.logprobs[0], 1
            place += 1
        rewards[row, place - 1] = episode.solved
    return Batch(*(torch.from_numpy(each) for each in (ids, mask, logprobs, rewards)))


def warm_start(model: PolicyAndValue, steps: int, seed: int) -> None:
    """Learn to guess within the range."""
    rows = guessing.demonstrations(4096, seed)
    longest = max(map(len, rows))
    ids = torch.tensor([row + [guessing.PAD] * (longest - len(row)) for row in rows])
    guesses = ids >= guessing.FIRST
    guesses[:, :3] = False
    optimizer = torch.optim.AdamW(model.policy.parameters(), 2e-3, weight_decay=0.0)
    for step in range(steps):
        chosen = slice(step * 128 % 4096, step * 128 % 4096 + 128)
        logprobs, _, _ = model(ids[chosen])
        loss = -(logprobs * guesses[chosen]).sum() / guesses[chosen].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def update(model: PolicyAndValue, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One iteration of PPO. Returns the largest difference between the bridge's log-probabilities and the model's."""
    with torch.no_grad():
        before, _, values = model(batch.ids)
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
    """PPO's loss of some episodes: clipped ratio (arXiv:1707.06347, equation 7), value and entropy."""
    logprobs, entropy, values = model(batch.ids[rows])
    mask, gain = batch.mask[rows], advantages[rows]
    ratio = torch.exp((logprobs - batch.logprobs[rows]) * mask)
    clipped = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    errors = (values - returns[rows]).square()
    return ((VALUE_WEIGHT * errors - clipped - ENTROPY_WEIGHT * entropy) * mask).sum() / mask.sum()


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


def solving(bridge: Bridge, wanted: Sequence[Task], seed: int, group: int = 4) -> float:
    """Percent of episodes that are solved, at temperature 1."""
    played = bridge.run(lambda client: guessing.play(client, wanted, seed, group))
    return 100 * sum(each.solved for each in played) / len(played)


def train(
    server: PolicyServer, iterations: int, episodes: int, seed: int, permute: bool = False
) -> dict[str, list[float]]:
    """Train a policy from a warm start. Returns held-out solving before and after, and by iteration the solving of
    the trained tasks and the difference of log-probabilities.

    permute: give the rewards to other episodes, a control that must not learn.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    held_out = guessing.tasks(100, seed, held_out=True)
    model = PolicyAndValue()
    warm_start(model, 200, seed)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.0)
    server.publish(model.policy)
    found: dict[str, list[float]] = {"held_out": [], "trained": [], "difference": []}
    with Bridge(server.address) as bridge:
        found["held_out"].append(solving(bridge, held_out, seed))
        for iteration in range(iterations):
            wanted = guessing.tasks(episodes, seed + 1 + iteration)
            played = bridge.run(lambda client, w=wanted, i=iteration: guessing.play(client, w, seed + 1 + i))
            versions = {span.version for each in played for turn in each.turns for span in turn.spans}
            assert versions == {server.version}
            found["trained"].append(100 * sum(each.solved for each in played) / len(played))
            if permute:
                played = [
                    replace(each, solved=other.solved) for each, other in zip(played, _shuffled(played), strict=True)
                ]
            found["difference"].append(update(model, optimizer, batch_of(played)))
            server.publish(model.policy)
        found["held_out"].append(solving(bridge, held_out, seed + 1_000))
    return found
