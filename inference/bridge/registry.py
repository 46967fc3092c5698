"""All episodes of a bridge by owner and id: their leases, how long closed ones are kept, and their journal."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from contracts.pb import bridge_pb2 as pb
from inference.bridge import replay
from inference.bridge.checks import Sampling, check_episode_id
from inference.bridge.episode import Episode
from inference.bridge.errors import EpisodeEnded, EpisodeExpired, JournalError, TooManyEpisodes, UnknownEpisode
from inference.bridge.journal import Journal
from inference.bridge.metrics import Counts
from inference.bridge.replay import Kind

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bounds:
    """What a bridge holds at most."""

    max_episodes: int = 10_000
    """Open episodes of all keys."""
    lease_s: float = 600.0
    """Longest lease in seconds, and the default."""
    credits: int = 1024
    """Steps that one Connect stream, and Step calls that one key, may have in flight."""
    kept_s: float = 600.0
    """Seconds in which an ended episode's record can be asked for again, and an expired one is known as such. At most
    `max_episodes` are kept.
    """


class Registry:
    """Episodes, open and closed. What it changes is in the journal first."""

    def __init__(
        self, bounds: Bounds, journal: Journal | None, release: Callable[[Episode], bool], counts: Counts
    ) -> None:
        """journal: the episodes that it tells of are there again. release: stops what an episode does whose lease has
        ended; False: somebody waits for it, so its lease is prolonged. counts: to be kept. Raises JournalError.
        """
        self.bounds = bounds
        self.open = 0
        """Number of episodes that are neither ended nor expired."""
        self._journal, self._release, self._counts = journal, release, counts
        self._episodes: dict[tuple[str, str], Episode] = {}
        self._handles: dict[int, Episode] = {}
        self._closed: deque[tuple[float, Episode]] = deque()
        """Ended and expired episodes, with the times when they are forgotten."""
        self._next_handle = 1
        if journal is not None:
            self._restore(journal)

    def __len__(self) -> int:
        return len(self._episodes)

    def values(self) -> Iterable[Episode]:
        """All episodes."""
        return self._episodes.values()

    @property
    def durable(self) -> bool:
        """Whether episodes survive this process."""
        return self._journal is not None

    def get(self, owner: str, episode_id: str) -> Episode | None:
        """The episode, whatever its phase."""
        return self._episodes.get((owner, episode_id))

    def check_open(self) -> None:
        """Raise TooManyEpisodes if none may be added."""
        if self.open >= self.bounds.max_episodes:
            raise TooManyEpisodes(
                f"{self.open} episodes are open, as many as the bridge holds: end some, or raise --max-episodes"
            )

    def add(
        self, owner: str, start: pb.StartEpisodeRequest, sampling: Sampling, version: str, started_as: bytes
    ) -> Episode:
        """Add a new episode. started_as: digest of the request for it. Raises TooManyEpisodes, JournalError."""
        self.check_open()
        lease_s = min(start.lease_s or self.bounds.lease_s, self.bounds.lease_s)
        episode = Episode(owner, start, sampling, version, lease_s, self._next_handle)
        episode.started_as = started_as
        # one frame, so that a full disk leaves no part of it
        self._append(Journal.SNAPSHOT, episode, *replay.snapshot(episode))
        self._next_handle += 1
        self._take(episode)
        return episode

    def find(self, owner: str, episode_id: str) -> Episode:
        """The episode, whatever its phase. Raises BadMessage, UnknownEpisode."""
        check_episode_id(episode_id)
        episode = self.get(owner, episode_id)
        if episode is None:
            raise UnknownEpisode(
                f"episode {episode_id} is unknown to this key: it was never started here, or ended long ago"
            )
        if episode.is_open and episode.expires < time.monotonic():
            self._expire(episode)
        return episode

    def kept(self, owner: str, episode_id: str) -> Episode:
        """The episode, open or ended, with its lease prolonged. Raises EpisodeExpired and what `find` raises."""
        episode = self.find(owner, episode_id)
        if episode.expired:
            raise EpisodeExpired(
                f"the lease of episode {episode_id}, {episode.lease_s:g} s, has ended: start another one, and renew in"
                " time"
            )
        self.renew(episode)
        return episode

    def live(self, owner: str, episode_id: str) -> Episode:
        """The open episode, with its lease prolonged. Raises EpisodeEnded and what `kept` raises."""
        episode = self.kept(owner, episode_id)
        if episode.ended is not None:
            raise EpisodeEnded(f"episode {episode_id} was ended: start another one")
        return episode

    def renew(self, episode: Episode) -> None:
        """Prolong a lease."""
        episode.expires = time.monotonic() + episode.lease_s

    def close(self, episode: Episode, how: str | None) -> None:
        """Note that an episode has ended or expired. how: to be counted, if it did so here."""
        self.open -= 1
        self._closed.append((time.monotonic() + self.bounds.kept_s, episode))
        if how is not None:
            self._counts.closed[how] += 1

    def log(self, kind: Kind, episode: Episode, payload: bytes = b"") -> None:
        """Write to the journal, if there is one and the episode is not forgotten. Raises JournalError."""
        if self._handles.get(episode.handle) is episode:
            self._append(kind, episode, payload)

    def sweep(self) -> None:
        """Expire episodes whose lease has ended, forget closed ones in time, and clean the journal."""
        now = time.monotonic()
        for episode in [each for each in self._episodes.values() if each.is_open and each.expires < now]:
            self._expire(episode)
        while self._closed and (self._closed[0][0] < now or len(self._closed) > self.bounds.max_episodes):
            _, episode = self._closed.popleft()
            if not episode.expired or episode.holds_sandbox:
                self._forget(episode)
            del self._episodes[episode.owner, episode.identity]
            del self._handles[episode.handle]
        if self._journal is not None:
            try:
                self._journal.clean(lambda handle: list(replay.snapshot(self._handles[handle])))
            except JournalError as error:
                _log.warning("the journal can't be cleaned, and grows: %s", error)

    def _expire(self, episode: Episode) -> None:
        if not self._release(episode):
            self.renew(episode)
            return
        if not episode.holds_sandbox:
            self._forget(episode)
        episode.expire()
        self.close(episode, "expired")

    def sandbox_closed(self, episode: Episode) -> None:
        """Note that the sandbox of a closed episode is gone: the journal need not remember an expired one for it."""
        if episode.expired and self._handles.get(episode.handle) is episode:
            self._forget(episode)

    def _forget(self, episode: Episode) -> None:
        """Let the journal forget an episode. If it can't be told, the next bridge lets the episode expire again."""
        if self._journal is not None:
            try:
                self.log(Kind.FORGET, episode)
            except JournalError as error:
                _log.warning("episode %s: %s", episode.identity, error)
            self._journal.forget(episode.handle)

    def _append(self, kind: int, episode: Episode, *parts: bytes) -> None:
        if self._journal is not None:
            self._journal.append(kind, episode.handle, *parts)
            self._counts.journal_bytes += sum(map(len, parts))

    def _take(self, episode: Episode) -> None:
        self._episodes[episode.owner, episode.identity] = self._handles[episode.handle] = episode
        self.open += 1
        self.renew(episode)

    def _restore(self, journal: Journal) -> None:
        found = replay.replay(journal.read())
        journal.forget_others(found)
        for handle, episode in found.items():
            self._next_handle = max(self._next_handle, handle + 1)
            self._take(episode)
            if episode.ended is not None:
                self.close(episode, None)
