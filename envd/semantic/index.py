"""A workspace's chunks in Qdrant: only files whose content changed are chunked and embedded again."""

from __future__ import annotations

import hashlib
import os
import secrets
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

from qdrant_client import QdrantClient, models

from envd.errors import EnvdError
from envd.semantic.chunks import chunks_of
from envd.semantic.embedding import Embedder, Endpoint, HashedNgrams

T = TypeVar("T")
MAX_CHUNKS = 20_000
"""Of one workspace."""
_UPSERT = 256


class Hit(NamedTuple):
    """A chunk that was found."""

    path: str
    start: int
    end: int
    name: str
    text: str
    score: float


@dataclass(frozen=True)
class SemanticConfig:
    """Where vectors come from and are kept."""

    qdrant: str = ":memory:"
    """`:memory:`, a directory, or a server's URL."""
    qdrant_key: str | None = None
    endpoint: str | None = None
    """An OpenAI-compatible base URL; None: hashed n-grams."""
    model: str = "text-embedding-3-small"
    key: str | None = None

    @classmethod
    def from_environment(cls) -> SemanticConfig:
        """TRIPLANE_ENVD_QDRANT[_KEY], TRIPLANE_ENVD_EMBEDDINGS, _EMBEDDINGS_MODEL, _EMBEDDINGS_KEY."""
        read = os.environ.get
        return cls(
            read("TRIPLANE_ENVD_QDRANT") or cls.qdrant,
            read("TRIPLANE_ENVD_QDRANT_KEY"),
            read("TRIPLANE_ENVD_EMBEDDINGS"),
            read("TRIPLANE_ENVD_EMBEDDINGS_MODEL") or cls.model,
            read("TRIPLANE_ENVD_EMBEDDINGS_KEY"),
        )


class WorkspaceIndex:
    """One workspace. Not for several threads at once. Raises EnvdError where Qdrant or the endpoint fails."""

    def __init__(self, config: SemanticConfig | None = None) -> None:
        config = config or SemanticConfig.from_environment()
        self._embedder: Embedder = (
            HashedNgrams() if config.endpoint is None else Endpoint(config.endpoint, config.model, config.key)
        )
        self._client = _client(config)
        self._collection = f"envd-{secrets.token_hex(8)}"
        self._digests: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        vectors = models.VectorParams(size=self._embedder.dimensions, distance=models.Distance.COSINE)
        self._asked(lambda: self._client.create_collection(self._collection, vectors_config=vectors))
        self.embedded = 0
        """Chunks that were embedded so far."""

    def update(self, contents: Mapping[str, bytes], gone: Iterable[str]) -> None:
        """Take files in as they are now, and forget those that are gone."""
        digests = {path: hashlib.sha256(data).digest() for path, data in contents.items()}
        changed = sorted(path for path, digest in digests.items() if self._digests.get(path) != digest)
        self._forget([*gone, *changed])
        points: list[tuple[str, dict[str, object]]] = []
        room = MAX_CHUNKS - sum(self._counts.values())
        for path in changed:
            for chunk in chunks_of(path, contents[path])[:room]:
                head = f"{path} {chunk.name}\n"
                points.append((head + chunk.text, {"path": path, **chunk._asdict()}))
                self._counts[path] = self._counts.get(path, 0) + 1
                room -= 1
        for at in range(0, len(points), _UPSERT):
            self._store(points[at : at + _UPSERT])
        self._digests |= {path: digests[path] for path in changed}

    def search(self, query: str, below: str = "", limit: int = 5) -> list[Hit]:
        """The chunks nearest to the query, best first; of equal ones the first path and line."""
        (vector,) = self._embedder.embed([query])
        only = [path for path in self._counts if not below or path == below or path.startswith(below + "/")]
        if not only:
            return []
        wanted = models.Filter(must=[models.FieldCondition(key="path", match=models.MatchAny(any=only))])
        reply = self._asked(
            lambda: self._client.query_points(
                self._collection, query=vector, query_filter=wanted if below else None, limit=limit, with_payload=True
            )
        )
        hits = [Hit(**(point.payload or {}), score=point.score) for point in reply.points if point.score > 0]
        return sorted(hits, key=lambda hit: (-round(hit.score, 6), hit.path, hit.start))

    def close(self) -> None:
        """Forget everything."""
        self._asked(lambda: self._client.delete_collection(self._collection))

    def _store(self, points: list[tuple[str, dict[str, object]]]) -> None:
        vectors = self._embedder.embed([text for text, _ in points])
        self.embedded += len(points)
        rows = [
            models.PointStruct(
                id=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{about['path']}:{about['start']}:{about['name']}")),
                vector=vector,
                payload=about,
            )
            for vector, (_, about) in zip(vectors, points, strict=True)
        ]
        self._asked(lambda: self._client.upsert(self._collection, rows))

    def _forget(self, paths: list[str]) -> None:
        known = [path for path in paths if self._counts.pop(path, 0)]
        for path in paths:
            self._digests.pop(path, None)
        if known:
            match = models.FieldCondition(key="path", match=models.MatchAny(any=known))
            chosen = models.FilterSelector(filter=models.Filter(must=[match]))
            self._asked(lambda: self._client.delete(self._collection, chosen))

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except Exception as error:  # the client has a class of its own a transport; all of them mean that Qdrant failed
            raise EnvdError(f"Qdrant failed: {type(error).__name__}: {str(error)[:200]}") from error


@cache
def _client(config: SemanticConfig) -> QdrantClient:
    """One a process: an embedded Qdrant has one owner."""
    if config.qdrant == ":memory:":
        return QdrantClient(":memory:")
    if "://" in config.qdrant:
        return QdrantClient(url=config.qdrant, api_key=config.qdrant_key, timeout=30)
    return QdrantClient(path=config.qdrant, force_disable_check_same_thread=True)
