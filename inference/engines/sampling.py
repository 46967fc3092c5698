"""Random numbers by counter, and sampling of a token from logits with bits that do not depend on the batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SEED_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) of 40 bits for each (seed, absolute position).

    Source: the finalizer of SplitMix64 (Steele et al., 2014).
    """
    mixed = _mix(_mix(seeds + _GOLDEN) ^ (positions.astype(np.uint64) * _GOLDEN))
    return (mixed >> np.uint64(24)).astype(np.float64) * 2.0**-40


def sample(
    logits: Tensor, temperatures: npt.NDArray[np.float32], numbers: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Sample one token for each row by inverting the distribution function in order of token id.

    logits: [N, V] float32. temperatures: [N], 0 is greedy. numbers: [N] in [0, 1). Returns tokens [N] int64 and their
    logprobs [N] float32.
    """
    greedy = temperatures == 0
    logprobs = scaled_logprobs(logits, temperatures)
    total = logprobs.exp().cumsum(-1, dtype=torch.float64)
    wanted = torch.from_numpy(numbers)[:, None] * total[:, -1:]
    tokens = torch.searchsorted(total, wanted, right=True)[:, 0]
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy), logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def scaled_logprobs(logits: Tensor, temperatures: npt.NDArray[np.float32]) -> Tensor:
    """Log-probabilities [N, V] after temperature; rows of temperature 0 are reported at temperature 1."""
    return torch.log_softmax(divided(logits, temperatures), -1)


def divided(logits: Tensor, temperatures: npt.NDArray[np.float32]) -> Tensor:
    """Logits [N, V] over the temperature of each row; rows of temperature 0 are those of temperature 1."""
    divisors = np.where(temperatures == 0, np.float32(1), temperatures)
    if (divisors == 1).all():
        return logits
    return logits / torch.from_numpy(divisors)[:, None]


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> _SHIFTS[0])) * _MULTIPLY[0]
    value = (value ^ (value >> _SHIFTS[1])) * _MULTIPLY[1]
    return value ^ (value >> _SHIFTS[2])
