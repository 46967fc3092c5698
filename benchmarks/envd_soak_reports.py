"""Judges what the soak's clients report: a sandbox may be lost to a kill of its server or spawner, and to nothing else.

Times are those of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections import Counter

from envd.errors import EnvdError, SandboxGone

KINDS = ("done", "late", "wrong", "lost", "away")
"""First words of reports. `lost`: a sandbox, to an error; `away`: there was no sandbox yet."""


def report_error(kind: str, since: float, error: EnvdError, lifetime_s: float) -> str:
    """Report of a client whose attempt began at `since` and just ended with this error.

    A sandbox that is gone is only `late` if its lifetime has passed.
    """
    now = time.monotonic()
    if isinstance(error, SandboxGone) and now - since > lifetime_s:
        return "late"
    return f"{kind} {since} {now} {' '.join(repr(error)[:300].split())}"


class Reports:
    """Reports of all clients, and the intervals in which a killed server or spawner was unavailable."""

    def __init__(self) -> None:
        self.said: Counter[str] = Counter()
        self.wrong: list[str] = []
        """Wrong answers, and errors outside these intervals."""
        self._away: list[tuple[float, float]] = []
        """From each kill of a server or spawner until the next server serves."""

    def kill(self) -> None:
        """Note that a server or its spawner is killed now."""
        self._away.append((time.monotonic(), math.inf))

    def serve(self) -> None:
        """Note that a server serves now."""
        self._away = [(began, min(ended, time.monotonic())) for began, ended in self._away]

    @property
    def killed(self) -> bool:
        """Whether a server or spawner was killed, and no server has served since."""
        return any(ended == math.inf for _, ended in self._away)

    def listen(self, client: subprocess.Popen[str]) -> None:
        """Count what a client says until it ends, and whether it ended otherwise than by SIGKILL."""
        assert client.stdout is not None
        last = "nothing"
        with client.stdout as lines:
            for line in lines:
                self.hear(line)
                last = line.strip() or last
        if client.wait() != -signal.SIGKILL:
            self.fault(f"a client ended by itself with code {client.returncode}; it said last: {last}")

    def hear(self, line: str) -> None:
        """Count one line of a client. Lines of other kinds are ignored."""
        kind, _, words = line.strip().partition(" ")
        if kind not in KINDS:
            return
        if kind in ("lost", "away"):
            since, now, error = words.split(" ", 2)
            if not any(began <= float(now) and float(since) <= ended for began, ended in self._away):
                kind, words = "wrong", f"{kind} without a kill: {error}"
        self.said[kind] += 1
        if kind == "wrong":
            self.wrong.append(words[:300])

    def fault(self, words: str) -> None:
        """Count something wrong that no client reports."""
        self.said["wrong"] += 1
        self.wrong.append(words[:300])
