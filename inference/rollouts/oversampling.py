"""Sample one group with over-sampling: start more episodes than are kept, and choose the kept ones (`select`).

The others are stragglers, DROPPED or ABORTED; each leaves a row with its tokens. `straggler_bias` estimates what the
choice does to the solve rate. The rule `spread` needs verdicts, so it chooses when a group is committed (`spread`).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from contracts.episodes import Episode, Outcome, Slot
from contracts.tasks import Task
from inference.rollouts.config import Keep
from inference.rollouts.episode import Attempt, Player, play_episode


@dataclass(frozen=True)
class Group:
    """The episodes of one task, which are played and committed together."""

    group_id: str
    task: Task
    slots: Sequence[Slot]
    """Of the episodes that are started, in order of sample from 0."""
    keep: int
    """Number of episodes to keep; `slots` beyond it are over-sampling."""
    earlier: Mapping[int, Episode] = field(default_factory=dict)
    """Episodes of an earlier iteration by sample, if the group was carried over: ended ones, and some to continue."""

    @property
    def ended(self) -> dict[int, Episode]:
        """Episodes of an earlier iteration that need not be played."""
        again = (Outcome.UNFINISHED, Outcome.INFRA_ERROR)
        return {sample: episode for sample, episode in self.earlier.items() if episode.outcome not in again}

    @property
    def to_play(self) -> int:
        """Number of episodes to play."""
        return len(self.slots) - len(self.ended)


async def sample_group(player: Player, group: Group, played: Callable[[Episode, int], None]) -> list[Episode]:
    """All episodes that were started, in order of sample; those not kept are DROPPED or ABORTED, none of them yet where
    the rule is `spread`; UNFINISHED ones are to be carried over. played: called at the end of each that is played here,
    with the number of tokens that an earlier iteration had sampled for it.
    """
    rule = player.config.kept_by
    attempts: dict[int, Attempt] = {}
    known = group.ended

    async def play(slot: Slot) -> Episode:
        if slot.sample in known:
            return known[slot.sample]
        before = group.earlier.get(slot.sample)
        unfinished = before if before is not None and before.outcome is Outcome.UNFINISHED else None
        episode = await play_episode(
            *(player, group.task, slot, group.group_id),
            begun=lambda attempt: attempts.__setitem__(slot.sample, attempt),
            before=unfinished,
        )
        played(episode, int(unfinished.telemetry["engine_tokens"]) if unfinished else 0)
        return episode

    started = [asyncio.create_task(play(slot)) for slot in group.slots]
    try:
        arrived = await _collect(started, group.keep if rule == "first" else None)
    finally:
        await _cancel(started)
    late = [each.result() for each in started if _has_result(each) and each.result() not in arrived]
    every = [*arrived, *late]
    rows = every if rule == "spread" else mark_dropped(every, select(every, group.keep, rule))
    ended = {episode.sample for episode in rows}
    for slot in group.slots:
        if slot.sample not in ended:
            attempt = attempts.get(slot.sample) or Attempt(player, group.task, slot, group.group_id, 0)
            called_off = attempt.episode(Outcome.ABORTED, b"")
            played(called_off, 0)
            rows.append(called_off)
    return sorted(rows, key=lambda episode: episode.sample)


def mark_dropped(arrived: Sequence[Episode], chosen: Sequence[Episode]) -> list[Episode]:
    """`arrived`, with outcome DROPPED for those that are not chosen.

    An infra error stays one: nothing came of it to drop.
    """
    kept = {episode.sample for episode in chosen}
    return [
        (
            episode
            if episode.sample in kept or episode.outcome is Outcome.INFRA_ERROR
            else dataclasses.replace(episode, outcome=Outcome.DROPPED)
        )
        for episode in arrived
    ]


def select(episodes: Sequence[Episode], group_size: int, rule: Keep) -> list[Episode]:
    """The `group_size` episodes to keep, in order of sample; infra errors only if nothing better arrived.

    episodes: in order of arrival. rule: not `spread`.
    """
    candidates = list(episodes) if rule == "first" else sorted(episodes, key=lambda episode: episode.sample)
    if rule == "shortest":
        candidates.sort(key=lambda episode: episode.policy_tokens)
    candidates.sort(key=lambda episode: episode.outcome is Outcome.INFRA_ERROR)
    return sorted(candidates[:group_size], key=lambda episode: episode.sample)


def spread(episodes: Sequence[Episode], solved: Sequence[bool | None], group_size: int) -> list[Episode]:
    """The `group_size` episodes whose verdicts vary most: as near to one half solved as they can be; ungraded ones only
    if there are no others.

    episodes: in order of sample, which decides among equals. solved: verdict of each. Source: max-variance
    down-sampling, Xu et al., 2025 (arXiv:2504.13818), which is this for verdicts of two values.
    """
    own: dict[bool | None, list[Episode]] = {True: [], False: [], None: []}
    for episode, verdict in zip(episodes, solved, strict=True):
        own[verdict].append(episode)
    wins = min(len(own[True]), max(group_size // 2, group_size - len(own[False])))
    chosen = [*own[True][:wins], *own[False][: group_size - wins]]
    chosen += select(own[None], group_size - len(chosen), "index")
    return sorted(chosen, key=lambda episode: episode.sample)


def _has_result(task: asyncio.Task[Episode]) -> bool:
    return not task.cancelled() and task.exception() is None


async def _collect(started: Sequence[asyncio.Task[Episode]], enough: int | None) -> list[Episode]:
    """Episodes in order of arrival, until `enough` are usable; None: all."""
    arrived: list[Episode] = []
    usable = 0
    for next_one in asyncio.as_completed(started):
        episode = await next_one
        arrived.append(episode)
        usable += episode.outcome is not Outcome.INFRA_ERROR
        if usable == enough:
            break
    return arrived


async def _cancel(tasks: Sequence[asyncio.Task[Episode]]) -> None:
    """Abort running episodes and wait until their sandboxes are released."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
