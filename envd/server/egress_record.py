"""Record of the plain HTTP requests that a sandbox made through its proxy, for graders of what an agent did elsewhere.

The proxy writes it from what it forwards, so that nothing in the sandbox can add to it but a request. Its size is
bounded: beyond the bounds it says that it is not complete.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from envd.server.egress_http import Target

MOST_REQUESTS, MOST_BODY = 1000, 64 * 1024
"""Requests of a sandbox, and bytes of a request's body, that are kept."""


@dataclass
class RecordedRequest:
    """One request, from its head on."""

    method: str
    host: str
    port: int
    path: str
    """With its query, as it was sent."""
    body: bytearray = field(default_factory=bytearray)
    whole: bool = False
    """Whether all of it was forwarded, and `body` is all of its body."""
    status: int = 0
    """Of the destination's answer; 0: none came."""

    def feed(self, data: bytes) -> None:
        """Add a piece of the body."""
        self.body += data[: MOST_BODY + 1 - len(self.body)]

    def end(self) -> None:
        """Note that all of the request was forwarded."""
        self.whole = len(self.body) <= MOST_BODY


class RequestRecord:
    """Requests of one sandbox, in the order in which their heads were read."""

    def __init__(self) -> None:
        self._requests: list[RecordedRequest] = []
        self._complete = True

    def begin(self, method: bytes, target: Target) -> RecordedRequest:
        """Note a request that is about to be forwarded."""
        made = RecordedRequest(method.decode("latin-1"), target.host, target.port, target.path.decode("latin-1"))
        if len(self._requests) < MOST_REQUESTS:
            self._requests.append(made)
        else:
            self._complete = False
        return made

    def to_json(self) -> bytes:
        """Canonical JSON: {"complete": bool, "requests": [{method, host, port, path, body, whole, status}]}."""
        rows = [
            vars(each) | {"body": bytes(each.body[:MOST_BODY]).decode("utf-8", "backslashreplace")}
            for each in self._requests
        ]
        return json.dumps(
            {"complete": self._complete, "requests": rows}, sort_keys=True, separators=(",", ":")
        ).encode()
