"""Learning curves of an experiment, read from its store and Dagster records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.errors import ArtifactMissing
from contracts.store import Store
from contracts.tasks import Split
from curation.measures import MEASURES
from triplane_dagster.cli.history import IterationSummary, base_measures, summaries
from triplane_dagster.cli.timings import experiment_seconds

Scores = Mapping[str, float]
"""Name in MEASURES -> rate, 0 to 1."""


@dataclass(frozen=True)
class SplitCurve:
    """Scores on one split: of the base policy, and of the live policy after each iteration's decision."""

    base: Scores
    live: tuple[Scores, ...]

    def gains(self, measure: str = "greedy") -> list[float]:
        """Gain over the base policy after each iteration, in points."""
        return [100 * (scores[measure] - self.base[measure]) for scores in self.live]

    def final_gain(self, measure: str = "greedy") -> float:
        """Gain after the last iteration: a single comparison, not the largest of many."""
        return self.gains(measure)[-1]

    def over_majority(self) -> list[float]:
        """Lead of the live policy's greedy pass rate over the base policy's maj@k after each iteration, in points."""
        return [100 * (scores["greedy"] - self.base["majority"]) for scores in self.live]

    def reached(self, gain: float, over_majority: float) -> int | None:
        """Iterations until greedy gained `gain` points and led the base's maj@k by `over_majority`, or None."""
        both = zip(self.gains(), self.over_majority(), strict=True)
        return next(
            (index + 1 for index, (own, over) in enumerate(both) if own >= gain and over >= over_majority), None
        )

    def ends_above(self, gain: float, over_majority: float) -> bool:
        """Whether both conditions hold after the last iteration."""
        return self.final_gain() >= gain and self.over_majority()[-1] >= over_majority


@dataclass(frozen=True)
class Curve:
    """Curves of one experiment."""

    experiment: str
    held_out: SplitCurve
    unseen: SplitCurve
    base_seconds: float
    """Seconds for task suite and base policy."""
    seconds: tuple[float, ...]
    """Seconds of each iteration."""

    def row(self, gain: float, over_majority: float) -> dict[str, Any]:
        """A row of the benchmark's table, in percent and points."""
        reached = self.held_out.reached(gain, over_majority)
        return {
            "experiment": self.experiment,
            "base greedy, T=1, maj, pass": _four(self.held_out.base),
            "last greedy, T=1, maj, pass": _four(self.held_out.live[-1]),
            "greedy after each iteration": " ".join(f"{100 * scores['greedy']:.1f}" for scores in self.held_out.live),
            "greedy gain": round(self.held_out.final_gain(), 1),
            "T=1 gain": round(self.held_out.final_gain("sampled"), 1),
            "over base maj": round(self.held_out.over_majority()[-1], 1),
            "unseen base": _four(self.unseen.base),
            "unseen last": _four(self.unseen.live[-1]),
            "iterations to target": reached if reached is not None else "-",
            "seconds to target": round(sum(self.seconds[:reached])) if reached is not None else "-",
            "base seconds": round(self.base_seconds),
        }


def read_curve(store: Store, experiment: str, iterations: int) -> Curve:
    """The first `iterations` of an experiment.

    Raises ArtifactMissing if they were not measured on held-out and unseen tasks.
    """
    history = [each for each in summaries(store, experiment) if each.decision][:iterations]
    spent = experiment_seconds(experiment)
    return Curve(
        experiment=experiment,
        held_out=_split_curve(history, Split.HELD_OUT, experiment),
        unseen=_split_curve(history, Split.UNSEEN, experiment),
        base_seconds=sum(spent.get(None, {}).values()),
        seconds=tuple(sum(spent.get(each.iteration, {}).values()) for each in history),
    )


def _split_curve(history: list[IterationSummary], split: Split, experiment: str) -> SplitCurve:
    base = _scores(base_measures(history, split), split, experiment)
    live = [_scores(each.measured(split, each.live_after), split, experiment) for each in history]
    return SplitCurve(base, tuple(live))


def _scores(found: Mapping[str, Any] | None, split: Split, experiment: str) -> Scores:
    if found is None or any(found[name]["rate"] is None for name in MEASURES):
        raise ArtifactMissing(
            f"{experiment} lacks a measure on {split.value} tasks: set evaluation.{split.value}_samples to 1 or more"
            " and evaluation.greedy to true"
        )
    return {name: found[name]["rate"] for name in MEASURES}


def _four(scores: Scores) -> str:
    return " ".join(f"{100 * scores[name]:.1f}" for name in MEASURES)
