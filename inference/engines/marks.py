"""Versions with which servers of other projects (vLLM, SGLang) mark weights and tokens, for both the same.

"default" (as started) | unproven:<version>:<random> (being loaded and compared) | <version> (proven)
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import Any

from inference.engines.base import cover
from inference.errors import EngineUnreachable, StaleVersion

UNMARKED = "default"
"""Version of unmarked weights, i.e. those that the server was started with."""
UNPROVEN = "unproven:"
"""Prefix of the version of unproven weights, which no client accepts as a policy."""
Spans = list[tuple[str, int, int]]


def unproven(version: str) -> str:
    """Prefix of all marks of unproven weights of a policy."""
    return f"{UNPROVEN}{version}:"


def fresh_mark(version: str) -> str:
    """Mark of one attempt to load a policy."""
    return f"{unproven(version)}{uuid.uuid4().hex}"


def read_spans(
    server: str, marks: list[dict[str, Any]] | None, count: int, policy: str, proven: Collection[str]
) -> Spans:
    """(version, start, end) with which a server marked the `count` tokens of one answer.

    policy: version that it should serve; proven: versions that it was proven to serve. Raises StaleVersion unless the
    marks cover all tokens and are proven, and EngineUnreachable for marks of a server that was restarted.
    """
    spans = [(str(mark["version"]), int(mark["start"]), int(mark["end"])) for mark in marks or []]
    if not cover(spans, count):
        raise StaleVersion(f"{server} marked {spans} of {count} tokens with a version; unmarked tokens are not used")
    versions = {version for version, _, _ in spans}
    if UNMARKED in versions:
        raise EngineUnreachable(f"{server} was restarted: loading policy {policy[:12]} again")
    other = next((version for version, _, _ in spans if version not in proven), None)
    if other is not None:
        raise StaleVersion(
            f"{server} sampled with {other[:24]}, the policy is {policy[:12]}: another client updates this server, use"
            " one server per client"
        )
    return spans
