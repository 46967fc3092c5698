"""Progress of a worker: counts for bars and observations, never part of an artifact."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from contracts.episodes import Episode


@dataclass(frozen=True)
class ShardProgress:
    """Counts so far. Totals grow when groups are refilled."""

    shard: int
    groups_done: int
    groups_total: int
    episodes_done: int
    episodes_total: int
    tokens: int
    """Sampled by the policy in this run."""
    tokens_per_second: float
    """Over this run so far."""


Progress = Callable[[ShardProgress], None]


def no_progress(_: ShardProgress) -> None:
    """Progress callback that does nothing."""


class Meter:
    """Counts one worker's run and calls `progress` after every episode and group."""

    def __init__(self, shard: int, progress: Progress) -> None:
        self._shard, self._progress = shard, progress
        self._started = time.perf_counter()
        self.groups_done = self.groups_found = self.groups_total = 0
        self.episodes_done = self.episodes_total = self.episodes_played = 0
        self.tokens = 0

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    def expect(self, groups: int, episodes: int) -> None:
        """Raise the totals."""
        self.groups_total += groups
        self.episodes_total += episodes

    def episode(self, episode: Episode, tokens_before: int = 0) -> None:
        """Count one episode that was played. tokens_before: sampled by an earlier iteration."""
        self.episodes_done += 1
        self.episodes_played += 1
        self.tokens += int(episode.telemetry["engine_tokens"]) - tokens_before
        self._tell()

    def group(self, found_episodes: int = 0) -> None:
        """Count one committed group. found_episodes: number in a group that was committed before or by another."""
        self.groups_done += 1
        self.groups_found += found_episodes > 0
        self.episodes_done += found_episodes
        self._tell()

    def _tell(self) -> None:
        self._progress(
            ShardProgress(
                self._shard,
                self.groups_done,
                self.groups_total,
                self.episodes_done,
                self.episodes_total,
                self.tokens,
                self.tokens / max(self.seconds, 1e-9),
            )
        )
