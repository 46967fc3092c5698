"""Advantages as pure functions of rewards, in float64."""

from __future__ import annotations

import numpy as np

from trainer.algorithms.base import Advantage

EPSILON = 1e-6
"""Added to standard deviations: equal rewards give advantage 0, and rounding is not magnified to 1."""


def reward_advantages(rewards: np.ndarray, groups: np.ndarray, means: np.ndarray, kind: Advantage) -> np.ndarray:
    """Advantage of each member, float64 [members]. groups: number of each member's group, from 0 on.
    means: the mean reward of each member's group.

    Standard deviations are those of a sample (divisor n - 1), and 0 for one member. NaN for `leave_one_out` in a group
    of one.

    group_mean_std: GRPO (arXiv:2402.03300, section 4.1.2). group_mean: Dr. GRPO (arXiv:2503.20783). leave_one_out: RLOO
    (arXiv:2402.14740, section 3.2). batch_normalized and group_mean_batch_std: REINFORCE++ (arXiv:2501.03262).
    """
    if kind == "group_mean" or not len(rewards):
        return np.asarray(rewards - means)
    sizes = np.bincount(groups)[groups].astype(np.float64)
    # not `means`, which may be rounded otherwise: a tiny deviation would magnify the difference
    centered = rewards - np.bincount(groups, rewards)[groups] / sizes
    if kind == "leave_one_out":
        return np.asarray(centered * (sizes / np.where(sizes > 1, sizes - 1, np.nan)))
    if kind == "group_mean_std":
        deviations = np.asarray([_deviation(rewards[groups == group]) for group in range(groups.max() + 1)])
        return np.asarray(centered / (deviations[groups] + EPSILON))
    values = rewards if kind == "batch_normalized" else centered
    return np.asarray((values - values.mean()) / (_deviation(values) + EPSILON))


def generalized_advantages(
    values: np.ndarray, reward: float, gamma: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """GAE's advantages and the returns that values are trained towards, float64 [tokens] each.

    Equation 16 of arXiv:1506.02438, delta_t = r_t + gamma V(t + 1) - V(t); the reward arrives at the last token, after
    which the value is 0.
    """
    advantages = np.zeros(len(values))
    following, carried = 0.0, 0.0
    for token in reversed(range(len(values))):
        gain = reward if token == len(values) - 1 else 0.0
        carried = gain + gamma * following - values[token] + gamma * gae_lambda * carried
        advantages[token], following = carried, values[token]
    return advantages, advantages + values


def _deviation(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
