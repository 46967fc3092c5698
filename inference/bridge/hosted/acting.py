"""The environment's side of hosted episodes, and their sandboxes.

    a turn ends -> calls -> sandbox -> answers -> observation                      each arrow is in the journal before
                     '-> episode over -> final state -> sandbox closed -> grade    the next one is taken

Whatever is killed goes on from the journal. Calls are sent with an idempotency key and the deadline that the journal
has, so that envd answers repeated ones and executes none twice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from contracts.chat import ParsedTurn
from contracts.episodes import Outcome
from contracts.errors import InfraFault, TriplaneError
from contracts.failpoints import failpoint
from contracts.pb import bridge_pb2 as pb
from contracts.tasks import Task
from envd.client import Handle
from inference.bridge import record
from inference.bridge.episode import Episode, bytes_of, ids_of
from inference.bridge.errors import GradingFailed
from inference.bridge.hosted.hosting import Hosting
from inference.bridge.hosted.state import Final, Hosted, Sent, call_records
from inference.bridge.replay import Kind
from inference.errors import SandboxBroken
from inference.rollouts.blame import is_agents_fault
from inference.rollouts.environment import EpisodeEnvironment
from inference.rollouts.turn import unparsed_reply
from inference.rollouts.workspace import LIFETIME_MARGIN_S, Workspace

ANSWERS_KEPT_S = 570.0
"""How long after sending calls they may be sent again, in seconds: envd keeps answers for 600 s."""
_OUTCOMES = {
    pb.LENGTH: Outcome.TRUNCATED,
    pb.CONTEXT: Outcome.TRUNCATED,
    pb.DEADLINE: Outcome.TIMED_OUT,
    pb.CANCELLED: Outcome.ABORTED,
    pb.STALE: Outcome.INFRA_ERROR,
    pb.ENGINE_LOST: Outcome.INFRA_ERROR,
}
"""Outcomes of episodes whose turn did not end with a stop token."""
_log = logging.getLogger(__name__)
Log = Callable[[Kind, Episode, bytes], None]


class Acting:
    """Plays the environment of the hosted episodes of one bridge."""

    def __init__(self, hosting: Hosting, log: Log) -> None:
        """log: writes to the journal, if there is one. Raises JournalError."""
        self.hosting, self._log = hosting, log
        self._workspaces: dict[int, Workspace] = {}
        """By the episode's handle."""
        self._closing: dict[int, asyncio.Task[None]] = {}

    def seconds_left(self, hosted: Hosted) -> float:
        """Seconds until the episode's time is over."""
        return hosted.place.begun_unix + self.hosting.config.episode_timeout_s - time.time()

    async def reply(self, episode: Episode, hosted: Hosted) -> None:
        """Answer the last turn, whose tokens are complete: its observation, or the end of the episode and its grade.

        Raises GradingFailed, UnknownTask and JournalError; called again, it goes on where it stopped.
        """
        task, turn = self._task(hosted), episode.turns[-1]
        if hosted.final is None:
            end = await self._played(episode, hosted, task)
            if not end.done:
                self._log(Kind.REPLY, episode, end.SerializeToString())
                turn.reply = end
                hosted.replied()
                return
        failpoint("hosted-over")
        await self._closed(episode, hosted)
        assert hosted.final is not None
        end = pb.StepEnd()
        end.CopyFrom(hosted.final.end)
        await self._grade(episode, task, end)
        self._log(Kind.REPLY, episode, end.SerializeToString())
        turn.reply = end
        hosted.replied()

    def close(self, episode: Episode, hosted: Hosted, then: Callable[[Episode], None]) -> None:
        """Destroy the sandbox of an episode that was ended or has expired, in the background. then: is called later."""
        if not hosted.place.held or episode.handle in self._closing:
            return

        async def work() -> None:
            try:
                failpoint("hosted-closing")
                await self._closed(episode, hosted)
                then(episode)
            except TriplaneError as error:
                _log.warning(
                    "episode %s: its sandbox was not closed, its lifetime ends it: %s", episode.identity, error
                )
            finally:
                del self._closing[episode.handle]

        self._closing[episode.handle] = asyncio.create_task(work())

    async def end(self, *, durable: bool) -> None:
        """Wait for sandboxes that are being destroyed. durable: those of open episodes stay, for the next bridge."""
        await asyncio.gather(*self._closing.values(), return_exceptions=True)
        if not durable:
            await asyncio.gather(*(workspace.close() for workspace in self._workspaces.values()))

    async def _played(self, episode: Episode, hosted: Hosted, task: Task) -> pb.StepEnd:
        """Reply to the last turn. With `done`, the final state is in the journal."""
        turn = episode.turns[-1]
        end = pb.StepEnd(finish=turn.finish, tokens=turn.tokens)  # type: ignore[arg-type]
        environment, state = self._environment(episode, hosted, task), b""
        try:
            outcome = await self._step(episode, hosted, environment, end)
            if outcome is None:
                return end
            state = await self._final_state(episode, hosted, environment)
        except SandboxBroken as fault:
            workspace = self._workspaces[episode.handle]
            agents = await is_agents_fault(workspace, self.hosting.workspaces, task)
            outcome = Outcome.FAILED if agents else Outcome.INFRA_ERROR
            end.failure = workspace.for_record(fault)
        except InfraFault as fault:
            outcome, end.failure = Outcome.INFRA_ERROR, str(fault)
        end.done, end.outcome, end.observation_ids = True, outcome.value, b""
        final = Final(end, state, task.final_state.kind)
        self._log(Kind.FINAL, episode, final.payload())
        hosted.final = final
        return end

    async def _step(
        self, episode: Episode, hosted: Hosted, environment: EpisodeEnvironment, end: pb.StepEnd
    ) -> Outcome | None:
        """Fill in the reply to the last turn; an outcome if the episode is over. Raises InfraFault."""
        turn = episode.turns[-1]
        if turn.finish != pb.STOP:
            return _OUTCOMES[turn.finish]  # type: ignore[index]
        asked = environment.read(ids_of(episode.policy_ids(turn)))
        end.format_error = environment.format_error
        if isinstance(asked, Outcome):
            return asked
        answers = [unparsed_reply(asked)]
        if asked.error is None:
            if hosted.answers is None:
                if self.seconds_left(hosted) <= 0:
                    return Outcome.TIMED_OUT
                await self._call(episode, hosted, environment, asked)
            assert hosted.answers is not None
            end.results.extend(hosted.answers.results)
            answers = [each.text for each in end.results]
        if self.seconds_left(hosted) <= 0:
            return Outcome.TIMED_OUT
        observed = environment.observe(answers, episode.tokens)
        if observed is None:
            return Outcome.TRUNCATED
        end.observation_ids = bytes_of(observed)
        return None

    async def _call(self, episode: Episode, hosted: Hosted, environment: EpisodeEnvironment, asked: ParsedTurn) -> None:
        """Execute the calls of the last turn, or get their answers if they were sent before. Raises InfraFault."""
        workspace = await self._ready(episode, hosted, environment.task)
        if hosted.sent is None:
            sent = Sent(environment.tool_seconds(self.seconds_left(hosted)), time.time())
            self._log(Kind.CALLS, episode, sent.payload())
            hosted.sent = sent
        age = time.time() - hosted.sent.unix
        if not 0 <= age <= ANSWERS_KEPT_S:
            raise InfraFault(
                f"calls were sent {age:.0f} s ago, and their answers are kept for {ANSWERS_KEPT_S:g} s: they are not"
                " sent again, since that could execute them twice"
            )
        failpoint("hosted-sending")
        before, key = len(environment.calls), f"turn-{len(episode.turns)}"
        await environment.answer(asked, workspace, timeout_s=hosted.sent.timeout_s, key=key)
        failpoint("hosted-answered")
        found = pb.StepEnd()
        for each in environment.calls[before:]:
            found.results.add(name=each.name, arguments=each.arguments, ok=each.ok, text=each.result)
        self._log(Kind.ANSWERS, episode, found.SerializeToString())
        hosted.answers = found

    async def _ready(self, episode: Episode, hosted: Hosted, task: Task) -> Workspace:
        """Workspace whose sandbox lives, and is in the journal. Raises InfraFault."""
        place, workspace = hosted.place, self._workspaces.get(episode.handle)
        if workspace is None:
            if place.sandbox:
                workspace = self.hosting.workspaces.reopen(task, Handle(place.sandbox, place.token), place.server)
            else:
                if not place.key:
                    place = replace(place, key=secrets.token_hex(16))
                    self._log(Kind.PLACE, episode, place.payload())
                    hosted.place = place
                workspace = self.hosting.workspaces.open(task, key=place.key)
            self._workspaces[episode.handle] = workspace
        failpoint("hosted-asked")
        sandbox = await workspace.started()
        found = replace(place, sandbox=sandbox.id, token=sandbox.handle.token, server=sandbox.server.address)
        if found != place:
            failpoint("hosted-made")
            self._log(Kind.PLACE, episode, found.payload())
            hosted.place = found
        return workspace

    async def _final_state(self, episode: Episode, hosted: Hosted, environment: EpisodeEnvironment) -> bytes:
        """Bytes of the final state. Raises InfraFault."""
        place = hosted.place
        if place.held:
            workspace = await self._ready(episode, hosted, environment.task)
        else:
            workspace = self.hosting.workspaces.open(environment.task)
        try:
            state = await environment.final_state(workspace, "final" if place.held else None)
        except SandboxBroken as fault:
            # now and not before: it may have ended meanwhile. The call fails after half the margin, so that no agent
            # outlives its sandbox by a slow final state
            if self.seconds_left(hosted) >= -LIFETIME_MARGIN_S:
                raise
            raise InfraFault(f"its sandbox has ended with its lifetime, before it was taken: {fault}") from fault
        failpoint("hosted-taken")
        return state

    async def _closed(self, episode: Episode, hosted: Hosted) -> None:
        """Destroy the sandbox of an episode, if there is one. Raises InfraFault, UnknownTask, JournalError."""
        if not hosted.place.held:
            return
        workspace = self._workspaces.get(episode.handle)
        if workspace is None:
            workspace = await self._ready(episode, hosted, self._task(hosted))
        await workspace.close()
        self._workspaces.pop(episode.handle, None)
        closed = replace(hosted.place, closed=True)
        self._log(Kind.PLACE, episode, closed.payload())
        hosted.place = closed

    async def _grade(self, episode: Episode, task: Task, end: pb.StepEnd) -> None:
        """Fill in the grade. Raises GradingFailed."""
        if self.hosting.grader is None:
            return
        try:
            grade = await self.hosting.grader.grade(task, record.row(episode))
        except InfraFault as fault:
            raise GradingFailed(
                f"episode {episode.identity} is over and can't be graded now: {fault}; ask for its last step again"
            ) from fault
        failpoint("hosted-graded")
        if grade.reward is not None:
            end.reward = grade.reward
        end.components.update(grade.components)
        end.verdict = grade.verdict

    def _task(self, hosted: Hosted) -> Task:
        return self.hosting.task(hosted.task_id, hosted.task_digest)

    def _environment(self, episode: Episode, hosted: Hosted, task: Task) -> EpisodeEnvironment:
        """The environment as the last turn of the policy finds it, with the answers to that turn if they are known."""
        replies = [turn.reply for turn in episode.turns[:-1] if turn.reply is not None]
        errors = sum(bool(reply.format_error) for reply in replies)
        answered = [] if hosted.answers is None else [hosted.answers]
        return EpisodeEnvironment(
            *(task, self.hosting.config, self.hosting.tokenizer, len(episode.turns), errors),
            call_records([*replies, *answered]),
        )
