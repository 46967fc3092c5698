"""S3 requests of a store, by verb and subject."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.s3server import Request


@dataclass(frozen=True)
class Traffic:
    """Requests of a period."""

    verbs: Mapping[str, int]
    """GET, PUT, ... -> requests, most first."""
    subjects: Mapping[str, int]
    """E.g. "GET group/manifest.json" -> requests, most first."""
    received: int
    """Bytes sent to the server."""
    sent: int
    """Bytes sent by the server."""

    @property
    def requests(self) -> int:
        """Total number of requests."""
        return sum(self.verbs.values())


def traffic_of(requests: Sequence[Request]) -> Traffic:
    """Count requests."""
    return Traffic(
        verbs=dict(Counter(each.verb for each in requests).most_common()),
        subjects=dict(Counter(_subject(each) for each in requests).most_common()),
        received=sum(each.received for each in requests),
        sent=sum(each.sent for each in requests),
    )


def _subject(request: Request) -> str:
    """Verb, part of the store, and the status if it is notable."""
    parts = request.key.split("/")[2:]
    match parts:
        case ["artifacts", kind, *rest]:
            subject = f"{kind}/{rest[-1] if len(rest) > 1 and request.verb != 'LIST' else ''}"
        case ["pointers", name, *_]:
            subject = f"pointers/{name}/"
        case [first, *_]:
            subject = f"{first}/"
        case _:
            subject = "the store"
    ending = {404: " (not there)", 412: " (exists already)"}.get(request.status, "")
    return f"{request.verb} {subject}{ending}"
