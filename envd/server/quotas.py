"""Quotas of the clients of one key: templates, sandboxes, memory, snapshots; docs/sandboxes-rules.md#quotas.

A claim is made before its sandbox starts and released after the sandbox is removed. A refusal is RESOURCE_EXHAUSTED and
the audit event quota.refused.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from contracts.rpc import caller
from envd.errors import QuotaExceeded
from envd.server.audit import AuditLog
from envd.server.rule_sections import QuotaRules

_MEMORY_SHARE = 32
"""Default maximum of a key's memory limits, as a multiple of the machine's memory: sandboxes rarely reach their limits.
"""


@dataclass(eq=False)
class Claim:
    """One sandbox's share of its key's quotas."""

    key: str
    memory_mb: int
    _undo: Callable[[Claim], None]
    released: bool = False

    def release(self) -> None:
        """Release the claim. Idempotent."""
        if not self.released:
            self.released = True
            self._undo(self)


class Quotas:
    """Quotas of a server, and the usage of each key."""

    def __init__(self, rules: QuotaRules, audit: AuditLog) -> None:
        self.rules, self._audit = rules, audit
        self.memory_mb = rules.memory_mb or _MEMORY_SHARE * _machine_mb()
        self._sandboxes: Counter[str] = Counter()
        self._memory: defaultdict[str, int] = defaultdict(int)

    def claim(self, memory_mb: int) -> Claim:
        """Claim a sandbox's share for the key of the current call. Raises QuotaExceeded."""
        key = caller.key()
        if self._sandboxes[key] >= self.rules.sandboxes:
            self.refuse("sandboxes", f"{self.rules.sandboxes} sandboxes", "end some")
        if self._memory[key] + memory_mb > self.memory_mb:
            have = f"{self._memory[key]} of {self.memory_mb} MiB, and this one asks for {memory_mb}"
            self.refuse("memory_mb", f"sandboxes with {have}", "end some, or ask for less")
        self._sandboxes[key] += 1
        self._memory[key] += memory_mb
        return Claim(key, memory_mb, self._release)

    def refuse(self, quota: str, have: str, fix: str) -> NoReturn:
        """Record a refusal for the key of the current call and raise QuotaExceeded."""
        key = caller.key()
        whose = f"key {key}" if key else "this server's clients"
        reason = f"{whose} hold {have}: {fix}, or raise quotas.{quota} in the server's rules"
        self._audit.record("quota.refused", "", quota=quota, key=key, reason=reason)
        raise QuotaExceeded(reason)

    def _release(self, claim: Claim) -> None:
        self._sandboxes[claim.key] -= 1
        self._memory[claim.key] -= claim.memory_mb
        if not self._sandboxes[claim.key]:
            del self._sandboxes[claim.key], self._memory[claim.key]


def _machine_mb() -> int:
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) >> 20
