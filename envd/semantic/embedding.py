"""Vectors of texts: from an OpenAI-compatible endpoint, or hashed identifier n-grams, which need no model and are the
same everywhere.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

import httpx

from contracts.replies import bounded_client
from envd.errors import EnvdError

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|\d+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_BATCH = 64
_MAX_TEXT = 8000
"""Characters of a text that are embedded."""
_REPLY_BYTES = 64 << 20
"""Longest reply: vectors of a batch have a few MB."""


class Embedder(Protocol):
    """Makes vectors of one length."""

    @property
    def dimensions(self) -> int:
        """Length of a vector."""
        ...

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """One vector a text. Raises EnvdError."""
        ...


class HashedNgrams:
    """Identifiers, their parts, and the parts' trigrams, hashed into signed buckets; long repetitions count little."""

    dimensions = 512

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """One vector of length 1 a text."""
        return [self._one(text[:_MAX_TEXT]) for text in texts]

    def _one(self, text: str) -> list[float]:
        vector = [0.0] * self.dimensions
        for token, count in Counter(_tokens(text)).items():
            digest = hashlib.blake2b(token.encode(), digest_size=8).digest()
            weight = (1 + math.log(count)) * (0.3 if token.startswith("#") else 1.0)
            vector[int.from_bytes(digest[:4], "little") % self.dimensions] += weight if digest[4] & 1 else -weight
        length = math.sqrt(sum(value * value for value in vector))
        return [value / length for value in vector] if length else vector


def _tokens(text: str) -> Iterator[str]:
    for word in _WORD.findall(text):
        parts = [part.lower() for part in _PART.findall(word)]
        if len(parts) > 1:
            yield word.lower()
        for part in parts:
            yield part
            padded = f"<{part}>"
            yield from (f"#{padded[at : at + 3]}" for at in range(len(padded) - 2))


class Endpoint:
    """An OpenAI-compatible `POST {url}/embeddings`."""

    def __init__(self, url: str, model: str, key: str | None = None, timeout_s: float = 30.0) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._url, self._model = url.rstrip("/") + "/embeddings", model
        self._client = bounded_client(_REPLY_BYTES, headers=headers, timeout=timeout_s)
        self._dimensions: int | None = None

    @property
    def dimensions(self) -> int:
        """Length of a vector, as the endpoint has it."""
        if self._dimensions is None:
            self._dimensions = len(self.embed(["dimensions"])[0])
        return self._dimensions

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """One vector a text, in batches."""
        found: list[list[float]] = []
        for at in range(0, len(texts), _BATCH):
            found += self._batch([text[:_MAX_TEXT] for text in texts[at : at + _BATCH]])
        return found

    def _batch(self, texts: list[str]) -> list[list[float]]:
        try:
            reply = self._client.post(self._url, json={"model": self._model, "input": texts})
            reply.raise_for_status()
            rows = sorted(reply.json()["data"], key=lambda row: row["index"])
            vectors = [[float(value) for value in row["embedding"]] for row in rows]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise EnvdError(f"the embeddings endpoint {self._url} failed: {type(error).__name__}: {error}") from error
        if len(vectors) != len(texts) or len({len(vector) for vector in vectors}) != 1:
            raise EnvdError(
                f"the embeddings endpoint {self._url} returned {len(vectors)} vectors for {len(texts)} texts"
            )
        return vectors
