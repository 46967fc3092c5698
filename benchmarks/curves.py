"""Learning curves of an experiment, read from its store and Dagster records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contracts.errors import ArtifactMissing
from contracts.store import Store
from contracts.tasks import Split
from triplane_dagster.cli.history import base_rate, summaries
from triplane_dagster.cli.timings import experiment_seconds


@dataclass(frozen=True)
class Curve:
    """Held-out pass rate of the live policy of one experiment."""

    experiment: str
    base: float
    """Of the base policy, 0 to 1."""
    live: tuple[float, ...]
    """After each iteration's decision, 0 to 1."""
    base_seconds: float
    """That task suite and base policy took."""
    seconds: tuple[float, ...]
    """That each iteration took."""

    @property
    def gains(self) -> list[float]:
        """Points over the base policy after each iteration."""
        return [100 * (rate - self.base) for rate in self.live]

    @property
    def best_gain(self) -> float:
        """The largest gain."""
        return max(self.gains)

    @property
    def final_gain(self) -> float:
        """The gain after the last iteration: one comparison, not the largest of many."""
        return self.gains[-1]

    def reached(self, points: float) -> int | None:
        """Iterations it took to gain `points`, or None."""
        return next((index + 1 for index, gain in enumerate(self.gains) if gain >= points), None)

    def row(self, points: float) -> dict[str, Any]:
        """A row of the benchmark's table."""
        iterations = self.reached(points)
        return {
            "experiment": self.experiment,
            "base %": round(100 * self.base, 1),
            "live % after each iteration": " ".join(f"{100 * rate:.1f}" for rate in self.live),
            "best gain": round(self.best_gain, 1),
            "final gain": round(self.final_gain, 1),
            f"iterations to +{points:g}": iterations if iterations is not None else "-",
            f"seconds to +{points:g}": round(sum(self.seconds[:iterations])) if iterations is not None else "-",
            "base seconds": round(self.base_seconds),
        }


def read_curve(store: Store, experiment: str, iterations: int) -> Curve:
    """The first `iterations` of an experiment. Raises ArtifactMissing when it has no pass rate on held-out tasks."""
    history = [each for each in summaries(store, experiment) if each.decision][:iterations]
    base = base_rate(history, Split.HELD_OUT)
    if base is None or base.rate is None:
        raise ArtifactMissing(
            f"{experiment} has no held-out pass rate in {store.url}: set evaluation.held_out_samples to 1 or more"
        )
    live = []
    for each in history:
        rate = each.rate(Split.HELD_OUT, each.live_after)
        if rate is None or rate.rate is None:
            raise ArtifactMissing(
                f"{experiment} has no held-out pass rate of what was live after iteration {each.iteration}"
            )
        live.append(rate.rate)
    spent = experiment_seconds(experiment)
    return Curve(
        experiment=experiment, base=base.rate, live=tuple(live),
        base_seconds=sum(spent.get(None, {}).values()),
        seconds=tuple(sum(spent.get(each.iteration, {}).values()) for each in history),
    )  # fmt: skip
