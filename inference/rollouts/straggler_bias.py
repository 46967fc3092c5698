"""Estimate the bias of over-sampling: episodes that arrive too late differ from those that are kept.

Keeping the first 16 of 18 leaves out the two slowest. Where failing takes longer than solving, the solve rate of those
kept is too high. The rows of stragglers (ABORTED, DROPPED) say how long each had become, which gives a bound and an
estimate. `oversampling` chooses the episodes to keep; its rule `spread` grades all of them, so there the rate is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from contracts.artifacts import Artifact
from contracts.episodes import STRAGGLERS


@dataclass(frozen=True)
class Played:
    """One episode as the estimate uses it."""

    outcome: str
    length: int
    """Tokens the policy had sampled when it ended or was called off."""
    solved: bool | None
    """None: no verdict."""


@dataclass(frozen=True)
class SolveRates:
    """Solve rate of the kept episodes, and an estimate of that with stragglers."""

    kept: float
    lowest: float
    """Of all episodes, if every straggler had failed."""
    highest: float
    """Of all episodes, if every straggler had been solved."""
    estimated: float
    """Of all episodes, with a guess for each straggler: see `solve_rates`."""

    @property
    def bias(self) -> float:
        """Estimated excess of the rate of the kept episodes."""
        return self.kept - self.estimated

    def facts(self) -> dict[str, float]:
        """Values for a manifest's meta."""
        return {
            "solve_rate_kept": self.kept,
            "solve_rate_lowest": self.lowest,
            "solve_rate_highest": self.highest,
            "solve_rate_estimated": self.estimated,
            "solve_rate_bias": self.bias,
        }


def solve_rates(played: Sequence[Played]) -> SolveRates | None:
    """The rates of an iteration's episodes; None without a straggler or without a verdict.

    Infra errors and ungraded ones do not count.

    A straggler without a verdict is guessed to be solved as often as the kept episodes that became at least as long;
    where none did, as often as the longest. The rule `index` drops neither by speed nor by verdict: there the true bias
    is 0, and the estimate noise.
    """
    graded = [each for each in played if each.solved is not None]
    kept = [(each.length, float(bool(each.solved))) for each in graded if each.outcome not in STRAGGLERS]
    stragglers = [each for each in played if each.outcome in STRAGGLERS]
    if not kept or not stragglers:
        return None
    lengths = [each.length for each in stragglers if each.solved is None]
    solved, total = sum(bool(each.solved) for each in graded), len(kept) + len(stragglers)
    longest = max(length for length, _ in kept)
    guesses = [fmean(value for reached, value in kept if reached >= min(length, longest)) for length in lengths]
    return SolveRates(
        kept=fmean(value for _, value in kept),
        lowest=solved / total,
        highest=(solved + len(lengths)) / total,
        estimated=(solved + sum(guesses)) / total,
    )


def played_in(groups: Sequence[Artifact]) -> list[Played]:
    """The episodes of committed groups, in order of group and sample."""
    found = []
    for group in groups:
        rows = group.table("episodes.parquet", columns=["outcome", "policy_tokens"]).to_pylist()
        for row, solved in zip(rows, group.meta["solved"], strict=True):
            found.append(Played(row["outcome"], row["policy_tokens"], solved))
    return found
