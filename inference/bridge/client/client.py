"""The client of a bridge on asyncio.

async with BridgeClient("unix:/run/triplane/bridge.sock") as bridge:
    episode = await bridge.start(prompt_ids, sampling=Sampling(max_tokens=512))
    turn = await episode.step()
    turn = await episode.step(observation_ids)
    record = await episode.end(reward=1.0)
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from contracts.pb import bridge_pb2 as pb
from contracts.pb import bridge_pb2_grpc as rpc
from inference.bridge.client.access import Access
from inference.bridge.client.commands import Ask
from inference.bridge.client.episode import Episode
from inference.bridge.client.errors import TokensChanged
from inference.bridge.client.link import Link
from inference.bridge.client.tokens import AnyIds, Info, Sampling, Score, Turn, ids_bytes, logprobs_of
from inference.bridge.client.unary import ask
from inference.bridge.errors import BridgeError, EpisodeEnded, EpisodeExpired
from inference.errors import InferenceError

GIVE_UP_AFTER_S = 600.0
"""Default of `give_up_after_s`."""
SCORE_S = 600.0
"""Longest time for one `score`, in seconds."""
_ID_BYTES = 16
_RENEWED_AT_ONCE = 4096
_ENDING_S = 10.0
"""Longest that a client's end waits for the ends of its episodes."""


class BridgeClient:
    """A connection to one bridge, for any number of episodes.

    Connects when there is something to ask, waits for a bridge that is still starting, and comes back by itself to one
    that was lost. Renews the leases of its episodes. Leaving its `async with` block ends those that are open as
    aborted.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        key: str | None = None,
        tls_ca: Path | None = None,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
        lease_s: float = 0.0,
        give_up_after_s: float = GIVE_UP_AFTER_S,
    ) -> None:
        """address: `unix:/path` or `host:port`; None: where this user's bridge listens by default. key: bearer key;
        None: the one that this user's own bridge on that port made, if there is one. tls_*: certificates; TLS is spoken
        when `tls_ca` is given. lease_s: of episodes, in seconds; 0: the longest that the bridge grants.
        give_up_after_s: seconds that the bridge may be unreachable before calls raise BridgeUnreachable.

        Raises ConfigError for a file that can't be used.
        """
        self._access = Access.found(address, key, tls_ca, tls_cert, tls_key)
        self._lease_s, self._give_up_after_s = lease_s, give_up_after_s
        self._episodes: dict[str, Episode] = {}
        self._background: set[asyncio.Future[Any]] = set()
        self._stack = contextlib.AsyncExitStack()

    @property
    def address(self) -> str:
        """Address of the bridge."""
        return self._access.address

    async def __aenter__(self) -> Self:
        channel = self._access.channel()
        self._stack.push_async_callback(channel.close)
        self._stub: Any = rpc.BridgeStub(channel)  # type: ignore[no-untyped-call]
        self.link = Link(
            lambda: self._stub.Connect(metadata=self._access.metadata), self.address, self._give_up_after_s
        )
        self._stack.push_async_callback(self.link.close)
        renewing = asyncio.create_task(self._renewing())
        self._stack.push_async_callback(_cancelled, renewing)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            ending = [asyncio.ensure_future(self._abort(each)) for each in self._episodes.values()]
            if ending or self._background:
                await asyncio.wait({*ending, *self._background}, timeout=_ENDING_S)
        finally:
            await self._stack.aclose()

    async def start(
        self,
        prompt_ids: AnyIds,
        *,
        sampling: Sampling = Sampling(),
        top_p: float = 1.0,
        grammar: str = "",
        group_id: str = "",
        version: str = "",
        follow: bool = False,
        labels: Mapping[str, str] | None = None,
        episode_id: str | None = None,
    ) -> Episode:
        """Start an episode.

        top_p: each token is drawn from the most probable ones whose probabilities add up to this. grammar: structural
        tag of xgrammar as JSON text, which each turn follows; `inference.grammar.tools` makes that of tool calls. With
        either, turns have `supports`: their logprobs are those over these sets, and so must the trainer's be.
        group_id: samples of one prompt share it. version: policy to start with; empty: the one served now. follow: go
        on with new versions as they are served; else a turn ends as STALE when the version is not served any more.
        labels: kept with the record. episode_id: 16 to 64 characters of [0-9a-zA-Z_-], different for each episode;
        None: drawn.

        Raises the bridge's errors and BridgeUnreachable.
        """
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        request = pb.StartEpisodeRequest(
            prompt_ids=ids_bytes(prompt_ids, "prompt_ids"),
            sampling=sampling.message(seed),
            top_p=top_p,
            grammar=grammar,
            **self._start(group_id, version, follow, labels, episode_id),
        )
        return await self._started(request, seed)

    async def start_task(
        self,
        task_id: str,
        *,
        task_digest: str = "",
        sampling: Sampling | None = None,
        seed: int | None = None,
        group_id: str = "",
        version: str = "",
        follow: bool = False,
        labels: Mapping[str, str] | None = None,
        episode_id: str | None = None,
    ) -> Episode:
        """Start a hosted episode: the bridge makes the prompt, executes tool calls in a sandbox and grades the result.

        task_digest: refused unless it is the task's; empty: any. sampling: without stop tokens; None: that of the
        bridge's experiment, with `seed`; None: drawn. The rest as in `start`.

        Raises the bridge's errors and BridgeUnreachable.
        """
        drawn = secrets.randbits(63) if seed is None else seed
        drawn = drawn if sampling is None or sampling.seed is None else sampling.seed
        request = pb.StartEpisodeRequest(
            hosted=pb.HostedTask(task_id=task_id, task_digest=task_digest),
            sampling=pb.Sampling(seed=drawn) if sampling is None else sampling.message(drawn),
            **self._start(group_id, version, follow, labels, episode_id),
        )
        return await self._started(request, drawn)

    def _start(
        self, group_id: str, version: str, follow: bool, labels: Mapping[str, str] | None, episode_id: str | None
    ) -> dict[str, Any]:
        """Fields of a start that all kinds of episodes have."""
        return {
            "episode_id": secrets.token_hex(_ID_BYTES) if episode_id is None else episode_id,
            "group_id": group_id,
            "version": version,
            "rule": pb.FOLLOW if follow else pb.PINNED,
            "lease_s": self._lease_s,
            "labels": labels,
        }

    async def _started(self, request: pb.StartEpisodeRequest, seed: int) -> Episode:
        identity, hosted = request.episode_id, request.HasField("hosted")
        asked = asyncio.ensure_future(self._ask(start=request))
        try:
            state = (await asyncio.shield(asked)).state
        except asyncio.CancelledError:
            self._in_background(self._unwanted(asked, identity))
            raise
        if state.steps:
            raise BridgeError(
                f"episode {identity} has {state.steps} steps already: use `attach` with the turns that you have, or"
                " draw another id"
            )
        prompt = state.prompt_ids if hosted else request.prompt_ids
        return self._take(Episode(self, identity, state.version, prompt, seed, hosted=hosted))

    async def attach(
        self, episode_id: str, prompt_ids: AnyIds, turns: Sequence[Turn] = (), *, seed: int = 0
    ) -> Episode:
        """Go on with an episode of this key that another client started, released or left.

        prompt_ids: of a hosted episode (), the bridge has them. turns: all that have ended; a last one that the bridge
        has beyond them is read by `step` with the same observation. seed: of its sampling.

        Raises the bridge's errors, and TokensChanged if its transcript is another one.
        """
        state = await self.state(episode_id)
        if state.phase == "ended":
            raise EpisodeEnded(f"episode {episode_id} was ended: start another one")
        if state.phase == "expired":
            raise EpisodeExpired(f"the lease of episode {episode_id} has ended: start another one")
        prompt = state.prompt_ids or ids_bytes(prompt_ids, "prompt_ids")
        episode = Episode(self, episode_id, state.version, prompt, seed, hosted=bool(state.prompt_ids))
        episode.turns.extend(turns)
        if state.steps not in (len(turns), len(turns) + 1):
            raise BridgeError(
                f"episode {episode_id} has {state.steps} steps at the bridge: attach with all of their turns, or all"
                f" but the last, not with {len(turns)}"
            )
        if state.steps == len(turns) and state.digest != episode.digest():
            raise TokensChanged(
                f"episode {episode_id}: the {state.tokens} tokens at the bridge are not those of the {len(turns)} turns"
                " that were given: attach with the turns of this episode, or abort it"
            )
        return self._take(episode)

    async def state(self, episode_id: str) -> pb.EpisodeState:
        """State of an episode of this key at the bridge, also of one that has ended or expired."""
        reply = await self._unary("GetEpisode", pb.EpisodeName(episode_id=episode_id), self._give_up_after_s)
        return cast(pb.EpisodeState, reply)

    async def score(self, token_ids: AnyIds, *, temperature: float = 1.0, version: str = "") -> Score:
        """Log-probability of each token given the ones before, under the policy served. version: refused unless it is
        the one served; empty: any.
        """
        request = pb.ScoreRequest(ids=ids_bytes(token_ids, "token_ids"), temperature=temperature, version=version)
        reply = await self._unary("Score", request, max(SCORE_S, self._give_up_after_s))
        return Score(logprobs_of(reply.logprobs), reply.version)

    async def info(self) -> Info:
        """What the bridge serves."""
        reply = await self._unary("Info", pb.InfoRequest(), self._give_up_after_s)
        return Info(
            tuple(reply.versions),
            reply.vocabulary,
            reply.context_tokens,
            reply.credits,
            reply.lease_s,
            reply.max_episodes,
            reply.hosted_tasks,
        )

    def let_go(self, episode: Episode) -> None:
        """Renew the lease of an episode no more. For `Episode`."""
        self._episodes.pop(episode.id, None)

    def _take(self, episode: Episode) -> Episode:
        self._episodes[episode.id] = episode
        return episode

    async def _unary(self, name: str, request: Any, give_up_after_s: float) -> Any:
        method, metadata = getattr(self._stub, name), self._access.metadata
        return await ask(
            lambda message, timeout: method(message, timeout=timeout, metadata=metadata),
            request,
            self.address,
            give_up_after_s,
        )

    async def _ask(self, **what: Any) -> pb.Event:
        command = Ask(**what)
        self.link.send(command)
        return await command.answer

    async def _renewing(self) -> None:
        """Renew the leases of all episodes in time, again and again."""
        granted: float | None = None
        while True:
            if granted is None and self._episodes:
                with contextlib.suppress(InferenceError):
                    granted = (await self.info()).lease_s
            lease_s = min(self._lease_s or granted or 1.0, granted or 1.0)
            await asyncio.sleep(lease_s / 4)
            held = list(self._episodes)
            for first in range(0, len(held), _RENEWED_AT_ONCE):
                request = pb.RenewRequest(episode_ids=held[first : first + _RENEWED_AT_ONCE])
                with contextlib.suppress(InferenceError):
                    for lost in (await self._ask(renew=request)).renewed.lost:
                        self._episodes.pop(lost, None)

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _unwanted(self, asked: asyncio.Future[pb.Event], identity: str) -> None:
        """End an episode whose starter has gone."""
        with contextlib.suppress(InferenceError):
            state = (await asked).state
            await self._abort(Episode(self, identity, state.version, b"", 0))

    async def _abort(self, episode: Episode) -> None:
        with contextlib.suppress(InferenceError):
            await episode.end(aborted=True)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
