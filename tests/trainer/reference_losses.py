"""Losses and gradients of every algorithm and correction in float64 numpy, written from the papers, token by token.

Imports nothing of the trainer. A sequence is a dict of float64 arrays of one length: `new`, `old`, `sampler` (log
probabilities), `advantage`. `evaluate` returns the loss of a batch of sequences and its derivative by each `new`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, fsum, log
from typing import Any

import numpy as np

BOUND = 20.0
"""Log ratios are cut here."""
Rows = Sequence[dict[str, np.ndarray]]


def evaluate(
    kind: str, rows: Rows, settings: dict[str, Any], corrections: dict[str, Any]
) -> tuple[float, list[np.ndarray]]:
    """Loss and gradients; a dropped token has none. settings: as the experiment writes them, with every value of the
    algorithm.
    """
    total, gradients, losses = divisor(rows, settings), [], []
    for row in rows:
        values, slopes = OBJECTIVES[kind](row, settings)
        weights = token_weights(row, corrections)
        if settings.get("kl_coefficient"):
            values, slopes = with_kl(row, values, slopes, weights, settings["kl_coefficient"])
        share = 1.0 / len(row["new"]) if settings["aggregation"] == "sequence" else 1.0
        losses += [-weight * value * share / total for weight, value in zip(weights, values, strict=True)]
        slope = -(weights @ slopes) * share / total
        gradients.append(np.where(weights > 0, slope, 0.0))
    return fsum(losses), gradients


def divisor(rows: Rows, settings: dict[str, Any]) -> float:
    """Tokens, sequences, or sequences times a constant length."""
    if settings["aggregation"] == "token":
        return float(sum(len(row["new"]) for row in rows))
    return float(len(rows)) * (settings["aggregation_length"] if settings["aggregation"] == "constant" else 1.0)


def token_weights(row: dict[str, np.ndarray], corrections: dict[str, Any]) -> np.ndarray:
    """Weight of each token's objective; 0 if a correction drops it."""
    count = len(row["new"])
    mismatch = [old - sampler for old, sampler in zip(row["old"], row["sampler"], strict=True)]
    weights = np.ones(count)
    cap, mask, gap = (corrections.get(name) for name in ("importance_cap", "ratio_mask", "probability_gap"))
    if cap is not None:
        weights = np.asarray([cap if value > log(cap) else exp(value) for value in mismatch])
    for token in range(count):
        if mask is not None and not log(mask["low"]) <= mismatch[token] <= log(mask["high"]):
            weights[token] = 0.0
        if gap is not None:
            moved = exp(row["new"][token]) - exp(row["sampler"][token])
            up, down = row["advantage"][token] > 0, row["advantage"][token] < 0
            if (up and moved > gap["high"]) or (down and -moved > gap["low"]):
                weights[token] = 0.0
    bounds = corrections.get("sequence_rejection")
    if bounds is not None:
        whole = fsum(mismatch) / (count if bounds["ratio"] == "geometric" else 1)
        if not log(bounds["low"]) <= whole <= log(bounds["high"]):
            weights[:] = 0.0
    if corrections.get("veto") is not None and any(value < log(corrections["veto"]) for value in mismatch):
        weights[:] = 0.0
    return weights


def with_kl(
    row: dict[str, np.ndarray], values: np.ndarray, slopes: np.ndarray, weights: np.ndarray, coefficient: float
) -> tuple[np.ndarray, np.ndarray]:
    """DeepSeekMath, equation 4, with the old policy as reference, outside the importance weight."""
    values, slopes = values.copy(), slopes.copy()
    for token in range(len(values)):
        away = row["old"][token] - row["new"][token]
        near = min(max(away, -BOUND), BOUND)
        if weights[token]:
            values[token] -= coefficient * (exp(near) - near - 1) / weights[token]
            if near == away:
                slopes[token, token] -= coefficient * (1 - exp(near)) / weights[token]
    return values, slopes


def surrogate(log_ratio: float, advantage: float, settings: dict[str, Any]) -> tuple[float, float]:
    """PPO's equation 7 with dual clip (arXiv:1912.09729, equation 3), and its derivative by the log ratio."""
    near = min(max(log_ratio, -BOUND), BOUND)
    ratio = exp(near)
    low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
    plain, clipped = ratio * advantage, min(max(ratio, low), high) * advantage
    value, slope = (plain, plain) if plain <= clipped else (clipped, 0.0)
    dual = settings.get("dual_clip")
    if dual is not None and advantage < 0 and value < dual * advantage:
        value, slope = dual * advantage, 0.0
    return value, slope if near == log_ratio else 0.0


def token_objective(row: dict[str, np.ndarray], settings: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """GRPO (arXiv:2402.03300, equation 3), Dr. GRPO, DAPO, REINFORCE++, PPO: one clipped ratio for each token."""
    pairs = [
        surrogate(new - old, advantage, settings)
        for new, old, advantage in zip(row["new"], row["old"], row["advantage"], strict=True)
    ]
    return np.asarray([value for value, _ in pairs]), np.diag([slope for _, slope in pairs])


def gspo_objective(row: dict[str, np.ndarray], settings: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """GSPO (arXiv:2507.18071, equations 5 and 7): the clipped geometric mean of the token ratios."""
    return sequence_objective(row, settings, 1.0 / len(row["new"]))


def rloo_objective(row: dict[str, np.ndarray], settings: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """RLOO (arXiv:2402.14740): the clipped ratio of the whole sequence."""
    return sequence_objective(row, settings, 1.0)


def sequence_objective(
    row: dict[str, np.ndarray], settings: dict[str, Any], scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Each token carries its sequence's term, whose derivative reaches every token of the sequence."""
    count = len(row["new"])
    value, slope = surrogate(scale * fsum(row["new"] - row["old"]), float(row["advantage"][0]), settings)
    return np.full(count, value), np.full((count, count), slope * scale)


def cispo_objective(row: dict[str, np.ndarray], settings: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """CISPO (arXiv:2506.13585, equations 4 and 5): a clipped weight, constant for the gradient, times A log p."""
    values, slopes = [], []
    for new, old, advantage in zip(row["new"], row["old"], row["advantage"], strict=True):
        ratio = exp(min(max(new - old, -BOUND), BOUND))
        weight = min(max(ratio, 1 - settings["clip_low"]), 1 + settings["clip_high"])
        values.append(weight * advantage * new)
        slopes.append(weight * advantage)
    return np.asarray(values), np.diag(slopes)


OBJECTIVES = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "reinforce_pp", "ppo"), token_objective),
    "gspo": gspo_objective,
    "rloo": rloo_objective,
    "cispo": cispo_objective,
}


def advantages(kind: str, groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Advantages of groups of rewards, by the definitions of the papers."""
    everyone = [reward for group in groups for reward in group]
    centered = [reward - mean(group) for group in groups for reward in group]
    found = []
    for group in groups:
        found.append([])
        for index, reward in enumerate(group):
            others = [other for place, other in enumerate(group) if place != index]
            if kind == "group_mean":
                value = reward - mean(group)
            elif kind == "group_mean_std":
                value = (reward - mean(group)) / (deviation(group) + 1e-6)
            elif kind == "leave_one_out":
                value = reward - mean(others)
            elif kind == "batch_normalized":
                value = (reward - mean(everyone)) / (deviation(everyone) + 1e-6)
            else:
                value = (reward - mean(group) - mean(centered)) / (deviation(centered) + 1e-6)
            found[-1].append(value)
    return found


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample; 0 for one value."""
    return (
        (fsum((value - mean(values)) ** 2 for value in values) / (len(values) - 1)) ** 0.5 if len(values) > 1 else 0.0
    )


def gae(values: Sequence[float], reward: float, gamma: float, lam: float) -> list[float]:
    """Equation 16 of arXiv:1506.02438 as the double sum over temporal differences."""
    count = len(values)
    rewards = [0.0] * (count - 1) + [reward]
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(count)]
    return [fsum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, count)) for t in range(count)]


def value_loss(
    values: Sequence[float], start: Sequence[float], returns: Sequence[float], clip: float | None
) -> tuple[float, list[float]]:
    """Half the larger of the squared errors of the value and of the clipped value, summed, and its derivatives."""
    total, slopes = [], []
    for value, before, target in zip(values, start, returns, strict=True):
        plain, slope = (value - target) ** 2 / 2, value - target
        if clip is not None:
            near = before + min(max(value - before, -clip), clip)
            if (near - target) ** 2 / 2 > plain:
                plain, slope = (near - target) ** 2 / 2, (near - target if abs(value - before) < clip else 0.0)
        total.append(plain)
        slopes.append(slope)
    return fsum(total), slopes
