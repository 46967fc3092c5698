"""Rate an episode by every component: shapers compute at once; judges and reward models reply, or the cache does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from contracts.store import Store
from contracts.tasks import Task
from curation.errors import RequestRefused, RewardsMismatch
from curation.rewards.answers import Answer, Answers
from curation.rewards.component import Component
from curation.rewards.config import Asked, JudgeComponent, RewardConfig, RewardModelComponent
from curation.rewards.endpoint import EndpointClient
from curation.rewards.judges import (
    judge_answer,
    judge_question,
    judge_value,
    read_judgement,
    read_score,
    score_answer,
    score_question,
)
from curation.rewards.prompt import places_of
from curation.rewards.traces import Rating
from curation.rewards.transcripts import Transcripts, parts_of


class Raters:
    """Endpoints of a configuration; a context manager that closes their connections.

        async with Raters(config, store, transcripts) as raters:
            rating = await raters.ask(component, episode, task)

    store: caches the replies. transcripts: of the episodes to rate. Both may be None if no component uses an endpoint.
    """

    def __init__(self, config: RewardConfig, store: Store | None, transcripts: Transcripts | None) -> None:
        """Raise CurationError if the key of an endpoint is not in the environment."""
        if config.asked and (store is None or transcripts is None):
            raise RewardsMismatch(
                f"component {config.asked[0].name} asks an endpoint about transcripts, which bare episodes lack: grade"
                " a rollouts artifact"
            )
        self._transcripts = transcripts
        self._answers = Answers(store) if store is not None else None
        self._clients = {each.name: EndpointClient(f"component {each.name}", each.endpoint) for each in config.asked}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            await client.close()

    @property
    def requests(self) -> int:
        """Number of requests sent, over all endpoints."""
        return sum(client.requests for client in self._clients.values())

    async def ask(self, component: Asked, episode: Mapping[str, Any], task: Task) -> Rating:
        """Rating of an episode by a judge or a reward model.

        Raises InfraFault if it can't be reached, CurationError if it is misconfigured.
        """
        try:
            if isinstance(component, JudgeComponent):
                return await self._judge(component, episode, task)
            return await self._score(component, episode, task)
        except RequestRefused as refusal:
            return Rating(None, str(refusal))

    async def _judge(self, component: JudgeComponent, episode: Mapping[str, Any], task: Task) -> Rating:
        parts = parts_of(episode, task, self._known_transcripts, places_of(component.template))
        questions = [judge_question(component, parts, sample) for sample in range(component.samples)]
        answers = await together(*(self._answer(component, question) for question in questions))
        read = [read_judgement(component, answer) for answer in answers]
        scores = [score for score, _ in read if score is not None]
        texts = tuple(answer.text for answer in answers)
        if len(scores) < len(read):
            fault = next(reason for score, reason in read if score is None)
            return Rating(None, f"component {component.name}: {fault}", texts)
        return Rating(judge_value(component, scores), " / ".join(reason for _, reason in read), texts)

    async def _score(self, component: RewardModelComponent, episode: Mapping[str, Any], task: Task) -> Rating:
        transcripts = self._known_transcripts
        tokens = transcripts.tokens(episode["episode_id"]) if component.input == "tokens" else []
        wanted = places_of(component.template) | {"task"}
        question = score_question(component, parts_of(episode, task, transcripts, wanted), tokens)
        answer = await self._answer(component, question)
        value, reason = read_score(component, answer)
        said = reason if value is not None else f"component {component.name}: {reason}"
        return Rating(value, said, (answer.text,))

    async def _answer(self, component: Asked, question: dict[str, Any]) -> Answer:
        assert self._answers is not None, "checked at construction"
        client = self._clients[component.name]
        named = {"kind": component.kind, "revision": component.revision, "request": question}
        path: str
        read: Callable[[Any], Answer]
        if isinstance(component, JudgeComponent):
            path, read = "/chat/completions", judge_answer
        else:
            named["api"] = component.api
            path, read = "", partial(score_answer, component)
        return await self._answers.ask(named, client.slots, lambda: client.post(path, question, read))

    @property
    def _known_transcripts(self) -> Transcripts:
        assert self._transcripts is not None, "checked at construction"
        return self._transcripts


async def together(*work: Any) -> list[Any]:
    """Results in order. Every awaitable ends before the first error is raised, so that none keeps running."""
    done = await asyncio.gather(*work, return_exceptions=True)
    for each in done:
        if isinstance(each, BaseException):
            raise each
    return list(done)


def contribution(component: Component, rating: Rating) -> float | None:
    """weight * clip(value), or None if there is no value."""
    return None if rating.value is None else component.weight * component.clip(rating.value)
