"""Play one episode: query the policy and execute its calls until it stops.

    play_episode -> attempt -> run -> step -> query, execute

An episode that another iteration began is continued after its calls are replayed.
Only infrastructure faults are retried: with the same seed, as a new attempt. Whatever a policy does ends in an outcome,
also what it does to its own sandbox (inference.rollouts.blame).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from contracts import tracing
from contracts.chat import ChatTokenizer
from contracts.episodes import Episode, Outcome, Slot, episode_id
from contracts.errors import InfraFault
from contracts.final_states import RequestsState
from contracts.retries import backoff_s
from contracts.store import Store
from contracts.tasks import Task
from envd.client import EnvdError, Limits, SandboxClient
from inference.engines.base import Completion, Engine, SamplingParams, check_sampled
from inference.engines.spans import completed, request_span
from inference.errors import (
    EngineError,
    EngineStopped,
    EngineUnreachable,
    ReplayDiffers,
    RequestTooLong,
    SandboxBroken,
    StaleVersion,
)
from inference.rollouts import ledger
from inference.rollouts.blame import is_agents_fault
from inference.rollouts.config import RolloutConfig
from inference.rollouts.environment import EpisodeEnvironment
from inference.rollouts.replay import replay_turns
from inference.rollouts.transcript import Transcript
from inference.rollouts.workspace import Workspace, Workspaces

BACKOFF_S = 0.2
_HOST = socket.gethostname()
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Player:
    """Resources shared by the episodes of one policy."""

    engine: Engine
    workspaces: Workspaces
    tokenizer: ChatTokenizer
    config: RolloutConfig
    policy_version: str
    """Digest of the acting checkpoint. Under the deterministic profile no other version may sample."""
    key: str
    """Action key of the work that the episodes belong to."""
    gate: asyncio.Semaphore
    """Bounds the episodes in flight."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the others are to be carried over: episodes then end UNFINISHED before their next turn."""
    vocabulary: int = 0
    """Token ids of the policy are below it; 0: unknown."""

    @classmethod
    def of(
        cls,
        engine: Engine,
        sandboxes: SandboxClient,
        tokenizer: ChatTokenizer,
        config: RolloutConfig,
        *,
        policy_version: str,
        key: str,
        limits: Limits = Limits(),
        store: Store | None = None,
        vocabulary: int = 0,
    ) -> Player:
        """Player with `config.concurrency` episodes in flight. limits: of each sandbox. store: has tasks' runtimes.
        vocabulary: see Player.vocabulary.
        """
        workspaces = Workspaces(sandboxes, limits, config.episode_timeout_s, store)
        gate = asyncio.Semaphore(config.concurrency)
        return cls(engine, workspaces, tokenizer, config, policy_version, key, gate, vocabulary=vocabulary)


async def play_episode(
    player: Player,
    task: Task,
    slot: Slot,
    group_id: str,
    begun: Callable[[Attempt], None] = lambda attempt: None,
    before: Episode | None = None,
) -> Episode:
    """Play `slot` until it has an outcome. begun: called for every attempt as it begins. before: an UNFINISHED episode
    of this slot, which is continued; it begins anew if its calls are not answered as they were.

    Faults of the engine or the server are retried with the same seed, then recorded as INFRA_ERROR. A sandbox that its
    agent broke makes the episode FAILED: at once under the throughput profile, where a second attempt would be a second
    chance; under the deterministic profile when the same tokens break it again, since there a repetition is what tells.

    Under the deterministic profile it raises StaleVersion when the engine serves another policy, and InfraFault when
    engine or envd can't be reached at all: how many episodes such an outage meets is chance, and no part of their
    content.
    """
    attempts, broken = player.config.max_attempts, 0
    deterministic = player.config.profile == "deterministic"
    async with player.gate:
        for attempt in range(attempts):
            play = Attempt(player, task, slot, group_id, attempt, before)
            begun(play)
            try:
                with tracing.span("episode", play.about) as span:
                    ended = await play.to_end()
                    span.set({"triplane.outcome": ended.outcome.value, "triplane.turns": ended.turns})
                    return ended
            except InfraFault as fault:
                before = None if isinstance(fault, ReplayDiffers) else before
                if play.broken_by_agent:
                    broken += 1
                    if not deterministic or broken == 2 or attempt + 1 == attempts:
                        return play.failed(fault)
                _log.warning("episode %s, attempt %d of %d: %s", play.episode_id, attempt + 1, attempts, fault)
                if attempt + 1 == attempts and deterministic and _is_outage(fault):
                    raise InfraFault(
                        f"{fault}; gave up after {attempts} attempts: repair it, then run the same step again;"
                        " committed groups stay"
                    ) from fault
            if attempt + 1 < attempts:
                await asyncio.sleep(backoff_s(attempt + 1, BACKOFF_S))
        return play.episode(Outcome.INFRA_ERROR, b"")


def _is_outage(fault: InfraFault) -> bool:
    """Whether a whole server failed, not just one request.

    A sandbox that broke by no fault of its agent tells of its server.
    """
    return isinstance(fault, SandboxBroken) or isinstance(
        fault.__cause__, (EnvdError, EngineStopped, EngineUnreachable)
    )


class Attempt:
    """One attempt at an episode with its tokens, calls and costs."""

    def __init__(
        self, player: Player, task: Task, slot: Slot, group_id: str, attempt: int, before: Episode | None = None
    ) -> None:
        # under the deterministic profile all attempts come to the same episode: which of them it was is telemetry
        self._numbered = 0 if player.config.profile == "deterministic" else attempt
        self.episode_id = episode_id(slot, player.key, self._numbered)
        self._player, self._task, self._slot = player, task, slot
        self._group_id, self._attempt = group_id, attempt
        self._workspace: Workspace = player.workspaces.open(task)
        self._environment = EpisodeEnvironment(task, player.config, player.tokenizer)
        self._transcript = Transcript(self._environment.prompt())
        self._sampled = 0
        self._begun, self._started = time.time(), time.perf_counter()
        self._sampling_seconds = self._tool_seconds = 0.0
        self._before = before
        if before is not None:
            self._continue(before)
        self.broken_by_agent = False
        """Whether the sandbox failed, and a control showed that it was not our fault."""

    def _continue(self, before: Episode) -> None:
        """Take over tokens, counts and costs of an unfinished episode."""
        (sequence,) = before.sequences
        self.episode_id, self._numbered = before.episode_id, before.attempt
        self._transcript = Transcript.of(sequence)
        self._environment.turns, self._environment.format_errors = before.turns, before.format_errors
        self._environment.calls = list(before.tool_calls)
        costs = before.telemetry
        self._sampled = int(costs["engine_tokens"])
        self._sampling_seconds, self._tool_seconds = costs["sampling_seconds"], costs["tool_seconds"]
        self._started -= costs["seconds"]

    @property
    def about(self) -> tracing.Attributes:
        """What its span tells."""
        slot = self._slot
        return {
            "triplane.experiment": slot.experiment,
            "triplane.iteration": slot.iteration,
            "triplane.group": self._group_id,
            "triplane.episode": self.episode_id,
            "triplane.attempt": self._attempt,
        }

    async def to_end(self) -> Episode:
        """Run until an outcome and take the final state. Raises InfraFault; the sandbox is gone in either case."""
        try:
            if self._before is not None and not self._stops():
                await self._replay(self._before)
            outcome = await self._run()
            if outcome is Outcome.UNFINISHED:
                return self.episode(outcome, b"")
            if outcome is Outcome.TIMED_OUT:
                self._require_own_time()
            return self.episode(outcome, await self._environment.final_state(self._workspace))
        except SandboxBroken:
            self.broken_by_agent = await is_agents_fault(self._workspace, self._player.workspaces, self._task)
            raise
        finally:
            await self._workspace.close()

    def _require_own_time(self) -> None:
        """Raise InfraFault if the clock decided bits that count, unless the agent's own calls took most of the time in
        every attempt.
        """
        config = self._player.config
        if config.profile != "deterministic":
            return
        own = self._tool_seconds > config.episode_timeout_s / 2
        if not own or self._attempt + 1 < config.max_attempts:
            raise InfraFault(
                f"attempt took over {config.episode_timeout_s:g} s: raise episode_timeout_s, the deterministic profile"
                " has no outcome by the clock"
            )

    def _stops(self) -> bool:
        """Whether to end UNFINISHED. A task that is graded by its requests goes on: a replay would make them again."""
        begun = isinstance(self._task.final_state, RequestsState) and self._environment.turns > 0
        return self._player.stopping.is_set() and not begun

    async def _replay(self, before: Episode) -> None:
        """Bring a fresh sandbox to the state that the unfinished episode left; this takes none of its time.

        Raises ReplayDiffers when a call is answered otherwise than it was.
        """
        began = time.perf_counter()
        (sequence,) = before.sequences
        config, tokenizer = self._player.config, self._player.tokenizer
        turns = await replay_turns(sequence, self._workspace, tokenizer, config.tool_timeout_s)
        if turns.differing is not None:
            raise ReplayDiffers(
                f"the calls of turn {turns.differing + 1} are not answered as they were: the episode begins anew, and"
                f" its {self._sampled} tokens are lost"
            )
        self._started += time.perf_counter() - began

    async def _run(self) -> Outcome:
        while self._environment.turns < self._player.config.max_turns:
            if self._stops():
                return Outcome.UNFINISHED
            outcome = await self._step()
            if outcome is not None:
                return outcome
        return Outcome.TRUNCATED

    async def _step(self) -> Outcome | None:
        """Run one turn of the policy and the environment. Returns an outcome if the episode is over."""
        with tracing.span("turn", {"triplane.turn": self._environment.turns}):
            try:
                async with asyncio.timeout(self._seconds_left()):
                    completion = await self._query()
            except TimeoutError:
                return Outcome.TIMED_OUT
            if completion is None or completion.finish_reason == "length":
                return Outcome.TRUNCATED
            return await self._execute(completion)

    async def _query(self) -> Completion | None:
        """Sample a turn of the policy; None if the context has no room for a token."""
        config = self._player.config
        room = min(config.max_turn_tokens, config.max_tokens - len(self._transcript))
        if room < 1:
            return None
        routing_from = self._transcript.routed if config.record_routing else None
        params = SamplingParams(
            *(config.temperature, room, self._slot.token_seed, self._environment.stops, routing_from, self._group_id),
            top_p=config.top_p,
            grammar=self._environment.grammar,
        )
        began = time.perf_counter()
        try:
            with request_span(len(self._transcript), params) as span:
                completion = await self._player.engine.generate(self._transcript.token_ids, params)
                span.set(completed(len(completion.token_ids), completion.finish_reason, completion.spans))
            check_sampled(completion, room, self._player.vocabulary, params.stop_token_ids)
        except RequestTooLong:
            return None
        except StaleVersion:
            raise
        except EngineError as error:
            raise InfraFault(f"engine failed: {error}") from error
        finally:
            self._sampling_seconds += time.perf_counter() - began
        if completion.finish_reason == "abort":
            raise InfraFault("engine aborted the request")
        self._check_version(completion)
        if config.record_routing:
            self._check_routing(completion)
        self._transcript.add_policy(completion)
        self._environment.turns += 1
        self._sampled += len(completion.token_ids)
        ledger.record(
            *(self._player.key, self._group_id, self.episode_id, self._attempt),
            *(self._environment.turns, len(completion.token_ids), self._begun),
        )
        return completion

    async def _execute(self, completion: Completion) -> Outcome | None:
        """Execute the calls of the policy."""
        environment = self._environment
        turn = environment.read(completion.token_ids)
        if isinstance(turn, Outcome):
            return turn
        began = time.perf_counter()
        seconds = environment.tool_seconds(self._seconds_left())
        answers = await environment.answer(turn, self._workspace, timeout_s=seconds)
        self._tool_seconds += time.perf_counter() - began
        if self._seconds_left() <= 0:
            return Outcome.TIMED_OUT
        observed = environment.observe(answers, len(self._transcript))
        if observed is None:
            return Outcome.TRUNCATED
        self._transcript.add_environment(observed)
        return None

    def _seconds_left(self) -> float:
        return self._started + self._player.config.episode_timeout_s - time.perf_counter()

    def _check_version(self, completion: Completion) -> None:
        expected = self._player.policy_version
        other = sorted({version for version, _, _ in completion.spans} - {expected})
        if other and self._player.config.profile == "deterministic":
            raise StaleVersion(
                f"engine sampled with policy {other[0][:12]}, the plan asks for {expected[:12]}: load that checkpoint,"
                " or use the throughput profile"
            )

    def _check_routing(self, completion: Completion) -> None:
        """Raise InfraFault unless the engine returned the routing of every position it was fed since the last turn."""
        missing = len(self._transcript) + len(completion.token_ids) - 1 - self._transcript.routed
        found = 0 if completion.routed_experts is None else len(completion.routed_experts)
        if found != missing:
            raise InfraFault(f"engine returned the routed experts of {found} positions, {missing} were expected")

    def failed(self, fault: InfraFault) -> Episode:
        """Record of this attempt, whose agent broke its sandbox."""
        return self.episode(Outcome.FAILED, b"", failure=self._workspace.for_record(fault))

    def episode(self, outcome: Outcome, final_diff: bytes, failure: str | None = None) -> Episode:
        """Record of this attempt with `outcome`. failure: reason of a FAILED one."""
        config = self._player.config
        return Episode(
            episode_id=self.episode_id,
            group_id=self._group_id,
            task_id=self._task.task_id,
            task_digest=self._task.digest,
            files_digest=self._task.files_digest,
            sample=self._slot.sample,
            attempt=self._numbered,
            seed=self._slot.token_seed,
            policy_version=self._player.policy_version,
            temperature=config.temperature,
            max_tokens=config.max_tokens,
            outcome=outcome,
            turns=self._environment.turns,
            tool_calls=self._environment.calls,
            format_errors=self._environment.format_errors,
            final_diff=final_diff,
            sequences=[self._transcript.sequence()],
            failure=failure,
            final_kind=self._task.final_state.kind,
            telemetry={
                "seconds": time.perf_counter() - self._started,
                "sampling_seconds": self._sampling_seconds,
                "tool_seconds": self._tool_seconds,
                "host": _HOST,
                "engine_tokens": self._sampled,
                "retries": self._attempt,
            },
        )
