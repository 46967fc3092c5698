"""Cache of the replies of judges and reward models: no request is sent twice, even after a kill.

    ask(question) -> store (judgements/) -> the endpoint, once for equal questions in flight
                           ^-----------------' created exclusively: the first answer counts for everyone

A question is the request (model, prompt, sampling) with the model's revision. It contains no weights, bounds or
addresses, so grading again with other weights sends no request. The cache keeps the reply's text, which is parsed again
each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from pydantic import ValidationError

from contracts.artifacts import Frozen
from contracts.digests import canonical_json, digest_of
from contracts.errors import ArtifactCorrupt, ArtifactMissing
from contracts.store import Store

ANSWERS_VERSION = "1"
"""Bump if the wording of the same question may change."""


class Answer(Frozen):
    """Reply of an endpoint."""

    text: str
    """Text of the reply."""
    served: str
    """Model name that the endpoint returned; empty if it returned none."""


def question_key(question: Mapping[str, Any]) -> str:
    """Store key of the reply to a request."""
    key = digest_of({"question": dict(question), "version": ANSWERS_VERSION})
    return f"judgements/{key[:2]}/{key}.json"


class Answers:
    """Cached replies in one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def ask(
        self, question: Mapping[str, Any], slots: asyncio.Semaphore, asking: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """Cached reply to a request; if there is none, the result of `asking`, which is cached.

        slots: one is held until the reply is stored.
        """
        key = question_key(question)
        lock = self._asking.setdefault(key, asyncio.Lock())
        async with lock:
            known = await asyncio.to_thread(self._recall, key)
            if known is not None:
                return known
            async with slots:
                return await asyncio.to_thread(self._keep, key, await asking())

    def _recall(self, key: str) -> Answer | None:
        try:
            return Answer.model_validate_json(self._store.get(key))
        except ArtifactMissing:
            return None
        except ValidationError:
            raise ArtifactCorrupt(
                f"judgement {key} in {self._store.url} is not readable: delete that file; the next run asks again"
            ) from None

    def _keep(self, key: str, answer: Answer) -> Answer:
        """Store a reply. Returns the stored one, which may be another process's."""
        if self._store.create(key, canonical_json(answer.model_dump())):
            return answer
        return self._recall(key) or answer
