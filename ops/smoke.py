"""Smoke episode: before a candidate goes live, it plays one gate task through the complete agent loop, on an engine
without traffic.

It asks whether the engine can serve this policy, not whether the policy is good: tokens come back, carry the
candidate's version and a finite logprob. Unparsable calls, running out of turns and wrong edits are the policy's own,
which the gate has judged already.

A refusal is for good, so only what is wrong with the candidate refuses it: its files, its weights, the tokens it makes.
A canary that is away, is something else, or is given another policy meanwhile decides nothing: DeploymentFailed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from contracts.artifacts import Artifact, ArtifactRef, Frozen, open_artifact
from contracts.chat import ChatTokenizer
from contracts.episodes import Episode, Outcome
from contracts.errors import InfraFault, SchemaError, TriplaneError
from contracts.tasks import Split, Task
from envd.client import SandboxClient
from inference.engines.base import Completion, Engine, SamplingParams
from inference.engines.config import BuiltinConfig
from inference.engines.delegating import DelegatingEngine
from inference.errors import EngineError, EngineUnreachable, RequestTooLong, StaleVersion, WeightsDiffer
from inference.rollouts.episode import Player
from inference.rollouts.evaluate import evaluation_slot
from inference.rollouts.oversampling import Group
from inference.rollouts.runner import Uncommitted, play_groups
from ops.loading import load_tasks, load_tokenizer, split_tasks, vocabulary_of
from ops.step import Step
from ops.weights_fault import fault_behind
from resources.deployment import fault_of, open_canary
from resources.errors import DeploymentFailed
from resources.loops import run_async
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource

ATTEMPTS = 2
"""A fault that does not come back was the machine's."""
PAUSE_S = 2.0
"""Between two attempts: a server that is started again needs some time."""
SLOTS = "smoke"
"""Name in the seeds, apart from rollouts and evaluations."""


class Smoke(Frozen):
    """Result of the smoke episode, stored beside the decision and outside its digest."""

    fault: str | None
    """Why the candidate can't be served, or None."""
    task_id: str
    outcome: str | None
    """None where the engine did not get as far as an episode."""
    turns: int = 0
    tool_calls: int = 0
    format_errors: int = 0
    tokens: int = 0
    """Sampled in the attempt that counts."""
    transcript: str = ""
    seconds: float = 0.0


def play_smoke(
    step: Step, sampler: SamplerResource, sandboxes: SandboxesResource, candidate: ArtifactRef, suite: ArtifactRef
) -> Smoke:
    """Play the first gate task with the candidate.

    Raises DeploymentFailed when canary or sandboxes fail, whatever the candidate is.
    """
    return run_async(_play(step, sampler, sandboxes, open_artifact(step.store, candidate), suite))


async def _play(
    step: Step, sampler: SamplerResource, sandboxes: SandboxesResource, candidate: Artifact, suite: ArtifactRef
) -> Smoke:
    task, lost = split_tasks(load_tasks(step.store, suite), Split.GATE)[0], ""
    async with sandboxes.client(step.experiment.sandboxes) as client:
        for attempt in range(ATTEMPTS):
            step.progress.update("smoke episode", attempt, ATTEMPTS)
            if attempt:
                await asyncio.sleep(PAUSE_S)
            try:
                smoke = await _attempt(step, sampler, client, candidate, task)
            except _Lost as error:
                lost = str(error)
                continue
            if smoke.fault is None:
                return smoke
    if lost:
        raise DeploymentFailed(
            f"candidate {candidate.ref.short} could not be tried: {lost}; nothing was decided: check the canary and"
            " envd, then run the same step again"
        )
    return smoke


class _Lost(TriplaneError):
    """Raised for an attempt that says nothing about the candidate."""


async def _attempt(
    step: Step, sampler: SamplerResource, client: SandboxClient, candidate: Artifact, task: Task
) -> Smoke:
    """Play one smoke episode. Raises _Lost for a fault that may not be the candidate's."""
    began, watched = time.perf_counter(), None
    try:
        tokenizer = load_tokenizer(step.experiment, candidate)
        async with _engine(step, sampler, candidate) as engine:
            watched = _Watched(engine, candidate.ref.digest, alone=_is_in_process(step))
            episode = await _episode(step, client, watched, candidate, task, tokenizer)
        fault = watched.fault if episode.outcome is Outcome.INFRA_ERROR else None
        if episode.outcome is Outcome.INFRA_ERROR and fault is None:
            raise _Lost("its sandbox or its engine failed (see the log)")
    except (EngineError, InfraFault, SchemaError) as error:
        fault = watched.fault if watched is not None else None
        fault = fault or await asyncio.to_thread(_fault_behind, error, step, candidate)
        if fault is None:
            raise _Lost(str(error)) from error
    if fault is not None:
        return Smoke(fault=fault, task_id=task.task_id, outcome=None, seconds=time.perf_counter() - began)
    assert watched is not None, "without a fault there was an episode"
    if not watched.tokens and episode.outcome is Outcome.TIMED_OUT:
        raise _Lost("the engine returned no token in time")
    return Smoke(
        fault=None if watched.tokens else "no token came back",
        task_id=task.task_id,
        outcome=episode.outcome.value,
        turns=episode.turns,
        tool_calls=len(episode.tool_calls),
        format_errors=episode.format_errors,
        tokens=watched.tokens,
        transcript=tokenizer.decode(episode.sequences[0].token_ids),
        seconds=time.perf_counter() - began,
    )


def _is_in_process(step: Step) -> bool:
    """Whether the engine runs in this process, so that its errors are the candidate's fault."""
    return step.experiment.deployment.canary is None and isinstance(step.experiment.evaluation_engine, BuiltinConfig)


def _fault_behind(error: TriplaneError, step: Step, candidate: Artifact) -> str | None:
    """See fault_behind. Other errors of an engine in this process are the candidate's fault."""
    elsewhere = isinstance(error, (EngineUnreachable, InfraFault, StaleVersion))
    return str(error) if _is_in_process(step) and not elsewhere else fault_behind(error, candidate)


def _engine(step: Step, sampler: SamplerResource, candidate: Artifact) -> AbstractAsyncContextManager[Engine]:
    deployment = step.experiment.deployment
    if deployment.canary is not None:
        return open_canary(deployment, candidate)
    return sampler.lease(candidate, "evaluation", step.experiment.evaluation_engine)


async def _episode(
    step: Step, client: SandboxClient, engine: Engine, candidate: Artifact, task: Task, tokenizer: ChatTokenizer
) -> Episode:
    config, rollouts = step.experiment, step.experiment.rollouts.model_copy(update={"record_routing": False})
    if config.deployment.canary is not None:  # a server of the completions API, which follows no grammar
        rollouts = rollouts.model_copy(update={"grammar": False, "top_p": 1.0})
    player = Player.of(
        engine,
        client,
        tokenizer,
        rollouts,
        policy_version=candidate.ref.digest,
        key=candidate.ref.key,
        limits=config.sandboxes.limits.limits(),
        vocabulary=vocabulary_of(candidate),
    )
    slot = evaluation_slot(SLOTS, Split.GATE, task.task_id, 0, config.seed)
    ((episode,),) = await play_groups(player, [Group(slot.digest[:32], task, [slot], keep=1)], Uncommitted())
    return episode


class _Watched(DelegatingEngine):
    """Engine wrapper that checks completions before the agent loop sees them."""

    def __init__(self, engine: Engine, version: str, *, alone: bool) -> None:
        """alone: errors of the engine are the policy's fault."""
        super().__init__(engine)
        self._version, self._alone = version, alone
        self.fault: str | None = None
        """The first one that is the policy's."""
        self.tokens = 0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See Engine.generate.

        Raises EngineError also for an answer that no healthy engine gives, StaleVersion for one of another policy.
        """
        try:
            completion = await self.inner.generate(prompt_ids, params)
        except (RequestTooLong, EngineUnreachable, StaleVersion):
            raise
        except EngineError as error:
            if self._alone or isinstance(error, WeightsDiffer):
                self.fault = self.fault or str(error)
            raise
        other = next((version for version, _, _ in completion.spans if version != self._version), None)
        if other is not None:
            raise StaleVersion(f"the engine sampled with policy {other[:12]}: another client loaded a policy meanwhile")
        self.tokens += len(completion.token_ids)
        fault = fault_of(completion, self._version)
        # an aborted request was cut off by who runs the engine, which the episode takes for a fault of the
        # infrastructure
        if fault is not None and completion.finish_reason != "abort":
            self.fault = self.fault or fault
            raise EngineError(fault)
        return completion
