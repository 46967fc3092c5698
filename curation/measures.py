"""Measures of a policy on one split: pass@1 greedy, pass@1 as sampled, maj@k and pass@k. Pure functions.

A high maj@k shows a policy that only needs sharpening: its most frequent answer is right more often than its samples
are. A low pass@k shows a policy that can't find the answer. So the four are always reported together.

Sources: M. Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), for pass@k; X. Wang et
al., "Self-Consistency Improves Chain of Thought Reasoning" (arXiv:2203.11171), for the majority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import pyarrow as pa

from contracts.digests import sha256
from curation.statistics import rate_interval

MEASURES = ("greedy", "sampled", "majority", "any")
"""Keys of what `measures` returns, in the order of tables."""


def measure_names(k: int, temperature: float) -> tuple[str, ...]:
    """Display names of MEASURES."""
    return "greedy", f"T={temperature:g}", f"maj@{k}", f"pass@{k}"


@dataclass(frozen=True)
class Sample:
    """One graded episode."""

    state: str
    """Digest of its final diff. Diffs that differ in any byte are different states."""
    solved: bool


@dataclass(frozen=True)
class Measure:
    """Mean over tasks with its interval by task; all values from 0 to 1."""

    rate: float | None
    """None if nothing was graded."""
    low: float
    high: float
    tasks: int


def majority(samples: Sequence[Sample]) -> float:
    """Whether the most frequent final state is solved: 1 or 0.

    For several states of equal count, the share of solved ones.
    """
    counts = Counter(sample.state for sample in samples)
    most = max(counts.values())
    solved = {sample.state: sample.solved for sample in samples}
    return fmean(solved[state] for state, count in counts.items() if count == most)


def any_solved(samples: Sequence[Sample]) -> float:
    """Whether at least one sample is solved: pass@k of exactly k samples."""
    return float(any(sample.solved for sample in samples))


def measures(
    sampled: Mapping[str, Sequence[Sample]], greedy: Mapping[str, Sequence[Sample]], temperature: float
) -> dict[str, Any]:
    """The four measures, JSON-compatible, with `k` (the most samples of a task) and the `temperature`.

    Both arguments map a task id to its graded samples; tasks without any are left out. greedy: empty if there were no
    greedy runs.
    """
    means = {task: fmean(sample.solved for sample in own) for task, own in sampled.items() if own}
    return {
        "temperature": temperature,
        "k": max((len(own) for own in sampled.values()), default=0),
        "greedy": asdict(_mean([fmean(sample.solved for sample in own) for own in greedy.values() if own])),
        "sampled": asdict(_mean(list(means.values()))),
        "majority": asdict(_mean([majority(own) for own in sampled.values() if own])),
        "any": asdict(_mean([any_solved(own) for own in sampled.values() if own])),
    }


def read_samples(episodes: pa.Table, rewards: pa.Table) -> dict[str, list[Sample]]:
    """Graded samples by task, in row order, from tables with the columns of EPISODES and REWARDS."""
    solved = dict(zip(rewards["episode_id"].to_pylist(), rewards["solved"].to_pylist(), strict=True))
    found: dict[str, list[Sample]] = {}
    columns = (episodes[name].to_pylist() for name in ("episode_id", "task_id", "final_diff"))
    for episode, task, diff in zip(*columns, strict=True):
        if solved.get(episode) is not None:
            found.setdefault(task, []).append(Sample(sha256(diff), bool(solved[episode])))
    return found


def _mean(values: Sequence[float]) -> Measure:
    low, high = rate_interval(values, [1.0] * len(values))
    return Measure(fmean(values) if values else None, low, high, len(values))
