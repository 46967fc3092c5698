"""Whether a server may be sent requests, as `/ready` answers.

the served policy is the live one, as far as this process has seen    ready
another policy went live, and is being fetched                        ready for GRACE_S, since the old one serves on
withdrawn, draining, or no policy yet                                 not ready, with the reason
"""

from __future__ import annotations

import time

GRACE_S = 120.0
"""Seconds in which a server stays ready with the previous policy while it fetches the live one. All replicas see a
promotion at once: without it, every one would be taken out of service at the same time.
"""


class Readiness:
    """What a server's readiness depends on, besides the served policy."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.live: str | None = None
        """Version of the policy that was last seen live. None: not looked yet, or the server follows none."""
        self.waiting: str | None = None
        """Why there is no policy yet."""
        self.withdrawn: str | None = None
        """Reason of a withdrawal, or None."""
        self.draining = False
        """Whether the server ends soon. It never becomes ready again."""
        self._grace_s = grace_s
        self._seen = 0.0

    def see(self, version: str) -> None:
        """Take note of the live policy."""
        if version != self.live:
            self.live, self._seen = version, time.monotonic()

    def reason(self, served: str | None) -> str | None:
        """Why the server should not be sent requests; None if it is ready. served: version of the served policy."""
        if self.draining:
            return "draining: this server ends as soon as its requests are answered"
        if served is None:
            return self.waiting or "no policy is loaded yet"
        if self.withdrawn is not None:
            return f"withdrawn: {self.withdrawn}"
        behind_s = time.monotonic() - self._seen
        if self.live not in (None, served) and behind_s > self._grace_s:
            return f"policy {str(self.live)[:12]} is live, but {served[:12]} is served since {behind_s:.0f} s"
        return None
