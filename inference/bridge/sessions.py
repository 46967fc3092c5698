"""The state machine of episodes: who may do what, when.

    start -> open <- step / its end -> stepping        open, stepping -> ended (end) or expired (lease)

Whatever a client may see is in the journal first. Belongs to one event loop; nothing here blocks but writes to the
journal.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from contracts.pb import bridge_pb2 as pb
from inference.bridge import checks, replay
from inference.bridge.checks import Limits, Sampling
from inference.bridge.episode import TOKEN_BYTES, Episode, Turn, content_of
from inference.bridge.errors import (
    BadMessage,
    BridgeError,
    Draining,
    EpisodeConflict,
    EpisodeDone,
    EpisodeEnded,
    WrongStep,
)
from inference.bridge.hosted.acting import Acting
from inference.bridge.hosted.hosting import Hosting
from inference.bridge.journal import Journal
from inference.bridge.metrics import Counts
from inference.bridge.registry import Bounds, Registry
from inference.bridge.replay import Kind
from inference.bridge.turns import Part, Running, Subscription
from inference.engines.base import Engine, SamplingParams
from inference.errors import EngineError, EngineStopped, EngineUnreachable, RequestTooLong, StaleVersion

__all__ = ["Bounds", "Sessions"]
SWEEP_S = 1.0
"""Longest time between two looks at the leases, in seconds."""
MOST_FOLLOWED = 1024
"""Grammars that the engine is known to follow at most; others are probed at each start."""
MOST_TURNS = 16_384
"""Turns of an episode at most: those that end without a token take none of its context."""
_SHORTEST_S = 1e-3
"""Time limit of a turn whose episode's time is over, in seconds."""
_log = logging.getLogger(__name__)


class Sessions:
    """All episodes of a bridge."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        bounds: Bounds,
        journal: Journal | None = None,
        hosting: Hosting | None = None,
    ) -> None:
        """journal: what it tells of is there again. hosting: for hosted episodes. Raises JournalError."""
        self.engine, self.limits, self.bounds = engine, limits, bounds
        self.draining = False
        """Whether nothing new is started."""
        self._closing = False
        self.counts = Counts()
        """What was done so far."""
        self._episodes = Registry(bounds, journal, self._release, self.counts)
        self._acting = None if hosting is None else Acting(hosting, self._episodes.log)
        self._followed: set[tuple[checks.Restricted, tuple[int, ...]]] = set()
        """Grammars and nuclei that the engine has sampled from."""
        self._running: dict[int, Running] = {}
        """Handle -> the turn of it that is being sampled."""

    @property
    def running(self) -> int:
        """Number of turns that are being sampled."""
        return len(self._running)

    @property
    def hosting(self) -> Hosting | None:
        """What hosted episodes are played with."""
        return None if self._acting is None else self._acting.hosting

    @property
    def open(self) -> int:
        """Number of episodes that are neither ended nor expired."""
        return self._episodes.open

    @property
    def durable(self) -> bool:
        """Whether episodes survive this process."""
        return self._episodes.durable

    def phases(self) -> dict[str, int]:
        """Number of episodes that wait for their client, and that are in a turn."""
        running = self.running
        return {"open": max(0, self.open - running), "stepping": running}

    async def start(self, owner: str, message: pb.StartEpisodeRequest) -> pb.EpisodeState:
        """Start an episode, or return the state of the one that was started with the same message.

        owner: name of the caller's key. Raises BadMessage, RequestTooLong, EpisodeConflict, TooManyEpisodes,
        UnknownTask, StaleVersion, Draining, JournalError.
        """
        known = self._episodes.get(owner, message.episode_id) or await self._started(owner, message)
        if known.started_as != content_of(message):
            raise EpisodeConflict(
                f"episode {message.episode_id} was started with other content: draw a new id for another episode"
            )
        self._episodes.renew(known)
        return self._state(known)

    def step(self, owner: str, message: pb.StepRequest, wake: Callable[[Subscription], None]) -> Subscription:
        """Begin a turn, or join or replay the last one, and return a reader of it, which is woken by `wake`.

        Raises BadMessage, RequestTooLong, UnknownEpisode, EpisodeExpired, EpisodeEnded, EpisodeDone, WrongStep,
        UnknownTask, Draining, JournalError.
        """
        episode = self._episodes.live(owner, message.episode_id)
        checks.check_seconds(message.turn_s, "turn_s")
        self._check_hosted(episode, message)
        if message.from_token < 0:
            raise BadMessage(f"from_token={message.from_token}: must be 0 or more")
        last = len(episode.turns)
        if message.step == last and last:
            turn = self._repeated(episode, message)
        elif message.step == last + 1 and episode.is_settled:
            turn = self._begin(episode, message)
        else:
            raise WrongStep(_expected(episode, message.step))
        reader = Subscription(episode, turn, message.step, message.from_token, wake)
        if not episode.is_over(turn):
            running = self._running.get(episode.handle) or self._sample(episode, message.turn_s)
            running.readers.add(reader)
        reader.notify()
        return reader

    def leave(self, reader: Subscription) -> None:
        """Let go of a reader that takes no more. Its turn goes on."""
        running = self._running.get(reader.handle)
        if running is not None:
            running.readers.discard(reader)

    def cancel(self, owner: str, episode_id: str, step: int) -> pb.EpisodeState:
        """End the last turn as CANCELLED if it has not ended yet. Raises as `step`."""
        episode = self._episodes.live(owner, episode_id)
        if not step or step != len(episode.turns):
            raise WrongStep(
                f"step {step} of episode {episode_id} can't be cancelled: {len(episode.turns)} is its last one"
            )
        self._stop(episode, pb.CANCELLED)
        return self._state(episode)

    def end(self, owner: str, message: pb.EndEpisodeRequest) -> Episode:
        """End an episode, and a turn of it that runs as CANCELLED, and return it. Idempotent: what the first call said
        stays. The sandbox of a hosted episode is destroyed soon afterwards. Raises BadMessage, UnknownEpisode,
        EpisodeExpired, JournalError.
        """
        checks.check_end(message)
        episode = self._episodes.kept(owner, message.episode_id)
        if episode.hosted is not None and message.HasField("reward"):
            raise BadMessage("reward of a hosted episode is its verdict's: leave it out")
        if episode.ended is None:
            self._stop(episode, pb.CANCELLED)
            acting = self._running.pop(episode.handle, None)
            if acting is not None:
                acting.stop()
                acting.fail(EpisodeEnded(f"episode {episode.identity} was ended before its environment replied"))
            said = pb.EndEpisodeRequest()
            said.CopyFrom(message)
            self._episodes.log(Kind.END, episode, said.SerializeToString())
            episode.ended = said
            self._episodes.close(episode, "aborted" if said.aborted else "ended")
            self._close_sandbox(episode)
        return episode

    def state(self, owner: str, episode_id: str) -> pb.EpisodeState:
        """State of an episode, also of one that is ended or expired. Raises UnknownEpisode."""
        episode = self._episodes.find(owner, episode_id)
        self._episodes.renew(episode)
        return self._state(episode)

    def renew(self, owner: str, episode_ids: Sequence[str]) -> list[str]:
        """Prolong leases, and return the ids of those episodes that are not open any more, or never were.

        Raises BadMessage for more ids than there can be episodes.
        """
        if len(episode_ids) > self.bounds.max_episodes:
            raise BadMessage(f"{len(episode_ids)} episode_ids: at most {self.bounds.max_episodes} episodes are open")
        lost = []
        for episode_id in episode_ids:
            try:
                self._episodes.live(owner, episode_id)
            except BridgeError:
                lost.append(episode_id)
        return lost

    def sweep(self) -> None:
        """Expire episodes whose lease has ended, forget closed ones in time, and clean the journal."""
        self._episodes.sweep()
        for episode in [each for each in self._episodes.values() if not each.is_open and each.holds_sandbox]:
            self._close_sandbox(episode)

    async def sweeping(self) -> None:
        """Call `sweep` again and again, until cancelled. An error is logged; the next call tries again."""
        while True:
            await asyncio.sleep(min(SWEEP_S, self.bounds.lease_s / 4))
            try:
                self.sweep()
            except Exception:  # noqa: BLE001 (logged: without sweeps no lease ends)
                _log.exception("a sweep of the leases failed")

    async def close(self) -> None:
        """Stop all turns without ending them: with a journal they go on when the next bridge is asked for them."""
        self._closing = True
        stopped = list(self._running.values())
        for running in stopped:
            running.stop()
        await asyncio.gather(*(running.task for running in stopped), return_exceptions=True)
        if self._acting is not None:
            await self._acting.end(durable=self.durable)

    async def _started(self, owner: str, message: pb.StartEpisodeRequest) -> Episode:
        if self.draining:
            raise Draining("the bridge ends soon and starts no more episodes: use another one")
        self._episodes.check_open()  # before the engine is asked, and a prompt made
        filled, sampling = message, checks.check_start(message, self.limits)
        if message.HasField("hosted"):
            filled = self._host().hosting.start(message, self.limits)
            sampling = checks.sampling_of(filled.sampling, self.limits, hosted=True)
        await self._probe(filled, sampling)
        served = await self.engine.version()
        known = self._episodes.get(owner, message.episode_id)  # started while the engine was asked
        if known is not None:
            return known
        if message.version and message.version != served:
            raise StaleVersion(f"version {message.version[:80]} is asked for, but {served} is served: start with that")
        return self._episodes.add(owner, filled, sampling, served, content_of(message))

    async def _probe(self, start: pb.StartEpisodeRequest, sampling: Sampling) -> None:
        """Sample one token, so that a grammar which can't be followed, or an engine without supports, is refused at the
        start of an episode. Raises BadMessage.
        """
        drawn = checks.Restricted.of(start)
        if drawn is None or (drawn, sampling.stop_token_ids) in self._followed:
            return
        prompt = np.frombuffer(start.prompt_ids, "<i4").tolist()
        params = SamplingParams(1.0, 1, 0, sampling.stop_token_ids, top_p=drawn.top_p, grammar=drawn.grammar)
        try:
            completion = await self.engine.generate(prompt, params)
        except (EngineUnreachable, EngineStopped, StaleVersion, RequestTooLong):
            raise
        except EngineError as error:
            raise BadMessage(f"{'grammar' if drawn.grammar else 'top_p'}: {error}") from error
        if completion.supports is None:
            raise BadMessage("grammar and top_p: the engine of this bridge does not tell what tokens are drawn from")
        if len(self._followed) < MOST_FOLLOWED:
            self._followed.add((drawn, sampling.stop_token_ids))

    def _host(self) -> Acting:
        """Plays the environment of hosted episodes. Raises BadMessage if this bridge hosts none."""
        if self._acting is None:
            raise BadMessage(
                "this bridge hosts no tasks: start it with `triplane bridge -e EXPERIMENT`, or send prompt_ids instead"
                " of a hosted task"
            )
        return self._acting

    def _check_hosted(self, episode: Episode, message: pb.StepRequest) -> None:
        """Raise for a step that a hosted episode, or this bridge, can't take."""
        if episode.hosted is None:
            return
        host = self._host()
        if message.observation_ids:
            raise BadMessage("observation_ids of a hosted episode must be empty: the bridge plays its environment")
        if message.step == len(episode.turns) + 1 and episode.hosted.final is not None:
            raise EpisodeDone(
                f"episode {episode.identity} is over ({episode.hosted.final.end.outcome}) after {len(episode.turns)}"
                " steps: end it, or ask for its last step again"
            )
        host.hosting.task(episode.hosted.task_id, episode.hosted.task_digest)

    def _sampling(self, episode: Episode, message: pb.StepRequest) -> Sampling | None:
        """Sampling parameters of one turn; None: as at the start. Raises BadMessage."""
        if not message.HasField("sampling"):
            return None
        if episode.hosted is None:
            return checks.sampling_of(message.sampling, self.limits)
        return checks.sampling_of(self._host().hosting.sampling(message.sampling), self.limits, hosted=True)

    def _close_sandbox(self, episode: Episode) -> None:
        if self._acting is not None and episode.hosted is not None:
            self._acting.close(episode, episode.hosted, self._episodes.sandbox_closed)

    def _begin(self, episode: Episode, message: pb.StepRequest) -> Turn:
        """Begin the next turn."""
        if self.draining and self.durable:
            raise Draining("the bridge ends soon and begins no more turns: ask again, its successor has this episode")
        if message.from_token:
            raise BadMessage(f"from_token={message.from_token} of a step that begins: must be 0")
        if message.step > MOST_TURNS:
            raise BadMessage(f"episode {episode.identity} has {MOST_TURNS} steps, as many as one may: end it")
        if message.step == 1 and message.observation_ids:
            raise BadMessage("observation_ids of step 1 must be empty: put its tokens into the prompt")
        said = pb.StepRequest(step=message.step, observation_ids=message.observation_ids)
        if episode.hosted is not None and episode.turns and episode.turns[-1].reply is not None:
            said.observation_ids = episode.turns[-1].reply.observation_ids
        observed = self.limits.check_ids(said.observation_ids, "observation_ids")
        if episode.hosted is None:
            self.limits.check_room(episode.tokens + observed, "observation_ids")
        sampling = self._sampling(episode, message)
        if sampling is not None:
            said.sampling.CopyFrom(replay.sampling_message(sampling))
        self._episodes.log(Kind.TURN, episode, said.SerializeToString())
        return episode.begin_turn(said.observation_ids, sampling)

    def _repeated(self, episode: Episode, message: pb.StepRequest) -> Turn:
        """The last turn, if the message is that which began it."""
        turn = episode.turns[-1]
        sampling = self._sampling(episode, message)
        observed = message.observation_ids if episode.hosted is None else episode.observation_of(turn)
        if observed != episode.observation_of(turn) or sampling != turn.sampling:
            raise WrongStep(
                f"step {message.step} of episode {episode.identity} was begun with other"
                f" {'sampling' if sampling != turn.sampling else 'observation_ids'}: {_expected(episode, message.step)}"
            )
        if turn.finish is not None and message.from_token > turn.tokens:
            raise BadMessage(f"from_token={message.from_token}: step {message.step} has {turn.tokens} tokens")
        return turn

    def _sample(self, episode: Episode, turn_s: float) -> Running:
        limits, act = self.limits, None
        if episode.hosted is not None:
            host, hosted = self._host(), episode.hosted
            limits, act = limits.within(host.hosting.config.max_tokens), partial(host.reply, episode, hosted)
            turn_s = max(min(turn_s or math.inf, host.seconds_left(hosted)), _SHORTEST_S)
        running = Running(
            self.engine,
            episode,
            limits,
            turn_s,
            add=self._add,
            end=self._end,
            act=act,
            over=self._over,
            fail=self._fail,
        )
        self._running[episode.handle] = running
        return running

    def _add(self, running: Running, parts: list[Part]) -> None:
        for version, ids, logprobs, drawn in parts:
            self._episodes.log(Kind.TOKENS, running.episode, replay.tokens_payload(version, ids, logprobs, drawn))
            running.episode.add_tokens(version, ids, logprobs, drawn)
            self.counts.tokens += len(ids) // TOKEN_BYTES
        if not running.answered:
            running.answered = True
            self.counts.first_token.add(time.monotonic() - running.begun)
        running.wake_readers()

    def _end(self, running: Running, finish: int) -> None:
        if finish == pb.ENGINE_LOST and self._closing:
            return
        self._episodes.log(Kind.FINISH, running.episode, bytes([finish]))
        running.turn.finish = finish

    def _fail(self, running: Running, error: BridgeError) -> None:
        running.fail(error)
        self._over(running)

    def _over(self, running: Running) -> None:
        del self._running[running.episode.handle]
        self._episodes.renew(running.episode)
        if running.turn.finish is not None:
            self.counts.turns[pb.Finish.Name(running.turn.finish)] += 1  # type: ignore[arg-type, unused-ignore]
            self.counts.turn.add(time.monotonic() - running.begun)
        running.wake_readers()

    def _stop(self, episode: Episode, finish: int) -> None:
        """End the last turn as `finish` if it is being sampled. The tools of a hosted episode go on."""
        if not episode.turns or episode.turns[-1].finish is not None:
            return
        running = self._running.get(episode.handle)
        self._episodes.log(Kind.FINISH, episode, bytes([finish]))
        episode.turns[-1].finish = finish
        if running is None:
            return
        running.stop()
        if episode.hosted is None:
            self._over(running)
        else:
            readers = running.readers
            self._sample(episode, 0).readers = readers  # the environment replies to what was sampled

    def _state(self, episode: Episode) -> pb.EpisodeState:
        return pb.EpisodeState(
            episode_id=episode.identity,
            phase=episode.phase,
            steps=len(episode.turns),
            tokens=episode.tokens,
            version=episode.version,
            expires_unix=time.time() + episode.expires - time.monotonic(),
            digest=episode.transcript_digest(),
            prompt_ids=episode.prompt if episode.hosted is not None else b"",
        )

    def _release(self, episode: Episode) -> bool:
        """Stop the turn of an episode whose lease has ended, unless it has a reader."""
        running = self._running.get(episode.handle)
        if running is None:
            return True
        if running.readers:
            return False
        running.stop()
        del self._running[episode.handle]
        return True


def _expected(episode: Episode, step: int) -> str:
    last = len(episode.turns)
    if not last:
        wanted = "step 1"
    elif not episode.is_settled:
        wanted = f"step {last} again with the same content, which has not ended"
    else:
        wanted = f"step {last + 1}, or {last} again with the same content"
    return f"episode {episode.identity} expects {wanted}, not step {step}"
