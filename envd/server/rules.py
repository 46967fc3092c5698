"""Sandbox rules in YAML: limits, network, tools and isolation of sandboxes; docs/sandboxes-rules.md shows an example.

    server's rules --\
                      under() -> the rules that hold -> check() at Create -> Decisions -> BoxSpec, limits, tools
    request's rules -/

A request's rules can only tighten the server's: the lower ceiling, the smaller set of tools and the stronger isolation
of the two hold, and a destination that the server's rules do not allow is a denial.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from envd.backends.base import IsolationLevel, NetworkRule
from envd.errors import EnvdError
from envd.server.rule_sections import (
    FilesystemRules,
    NetworkRules,
    QuotaRules,
    ResourceRules,
    Section,
    ToolRules,
)
from envd.server.strict_yaml import load_strictly
from envd.types import Limits

MAX_BYTES = 16 * 1024
"""Maximum length of the rules, in characters."""
_LIMITED = ("memory_mb", "pids", "cpu", "disk_mb", "lifetime_s")
_BACKENDS_DUTY = {"memory_mb": "memory", "pids": "pids", "cpu": "cpu", "disk_mb": "disk"}
"""Ceilings that hold only if the backend enforces the limit. The server itself enforces lifetimes and the number of
sandboxes.
"""


class RulesError(EnvdError):
    """Sandbox rules are not valid."""


@dataclass(frozen=True)
class Denial:
    """One request that the rules do not allow."""

    rule: str
    """Field of the rules, for example `network.allow`."""
    asked: str
    allowed: str

    def __str__(self) -> str:
        return f"sandbox rule {self.rule} allows {self.allowed}, not {self.asked}"


@dataclass(frozen=True)
class Decisions:
    """Result of checking one Create against the rules. The other fields hold only if `denials` is empty."""

    denials: tuple[Denial, ...]
    limits: Limits
    network: tuple[NetworkRule, ...] = ()
    read_only: bool = False
    hidden: tuple[str, ...] = ()
    tools: frozenset[str] | None = None
    """Allowed tools; None: all."""
    least: IsolationLevel = IsolationLevel.NONE

    def allows(self, tool: str) -> bool:
        """Whether the rules allow a tool; `exec` also covers the Processes service."""
        return self.tools is None or tool in self.tools


class Rules(Section):
    """Rules of a sandbox. The default is that of a server without rules."""

    version: Literal[1] = 1
    network: NetworkRules = NetworkRules()
    resources: ResourceRules = ResourceRules()
    filesystem: FilesystemRules = FilesystemRules()
    tools: ToolRules = ToolRules()
    quotas: QuotaRules = QuotaRules()
    isolation: Literal["none", "process", "kernel", "machine"] = "none"
    """The least wall that is accepted: none (any backend), process (namespaces), kernel (gVisor), machine (a virtual
    machine).
    """

    @model_validator(mode="before")
    @classmethod
    def _sections_may_be_empty(cls, data: Any) -> Any:
        """Replace null sections by empty ones: YAML parses `tools:` without a value as null."""
        return {key: {} if value is None else value for key, value in data.items()} if isinstance(data, dict) else data

    @property
    def least(self) -> IsolationLevel:
        """Minimum isolation level that is accepted."""
        return IsolationLevel[self.isolation.upper()]

    def under(self, outer: Rules) -> tuple[Rules, tuple[Denial, ...]]:
        """Merge these rules, of a request, with the server's (`outer`): the stricter of both, and a denial for each
        part that exceeds the server's.
        """
        hosts = [rule for rule in self.network.allow if not any(ours.covers(rule) for ours in outer.network.allow)]
        allowed = ", ".join(rule.host for rule in outer.network.allow) or "no destination"
        denials = [Denial("network.allow", rule.host, allowed) for rule in hosts]
        if "quotas" in self.model_fields_set:
            denials.append(Denial("quotas", "those of a request", "those of the server's own rules"))
        tools, outer_tools = self.tools.allow, outer.tools.allow
        if tools is not None and outer_tools is not None:
            extra = [name for name in tools if name not in outer_tools]
            denials += [Denial("tools.allow", name, ", ".join(outer_tools) or "no tool") for name in extra]
        merged = Rules(
            network=self.network,
            resources=ResourceRules(
                maximum=self.resources.maximum.within(outer.resources.maximum),
                default=self.resources.default if self._says("resources", "default") else outer.resources.default,
            ),
            filesystem=FilesystemRules(
                read_only=self.filesystem.read_only or outer.filesystem.read_only,
                hidden=tuple(dict.fromkeys((*outer.filesystem.hidden, *self.filesystem.hidden))),
            ),
            tools=self.tools if tools is not None else outer.tools,
            isolation=self.isolation if self.least >= outer.least else outer.isolation,
        )
        return merged, tuple(denials)

    def check(
        self,
        asked: Mapping[str, float],
        *,
        backend: str,
        isolation: IsolationLevel,
        can: frozenset[str],
        enforced: Sequence[str],
        live: int,
    ) -> Decisions:
        """Check one Create on a backend against these rules.

        asked: limits by the names of `envd.types.Limits`; 0 or absent takes the default. can, enforced: the backend's
        `Features`. live: sandboxes that exist now.
        """
        ceilings, denials = self.resources.maximum, []
        chosen: dict[str, float] = {}
        for name in _LIMITED:
            ceiling, wanted = getattr(ceilings, name), asked.get(name, 0)
            default = getattr(self.resources.default, name)
            chosen[name] = wanted or (default if ceiling is None else min(default, ceiling))
            if not 0 < chosen[name] < math.inf:  # false for NaN, too
                denials.append(Denial(f"resources.default.{name}", f"{wanted:g}", "finite numbers above 0"))
            elif ceiling is not None and wanted > ceiling:
                denials.append(Denial(f"resources.maximum.{name}", f"{wanted:g}", f"at most {ceiling:g}"))
            elif ceiling is not None and _BACKENDS_DUTY.get(name, "lifetime") not in (*enforced, "lifetime"):
                limit = _BACKENDS_DUTY[name]
                denials.append(Denial(f"resources.maximum.{name}", backend, f"backends that limit {limit}"))
        if ceilings.live is not None and live >= ceilings.live:
            denials.append(Denial("resources.maximum.live", "one more", f"{ceilings.live} sandboxes at once"))
        if isolation < self.least:
            denials.append(Denial("isolation", f"{backend} ({isolation.name.lower()})", f"{self.isolation} or more"))
        if self.network.allow and "network" not in can:
            denials.append(Denial("network.allow", backend, "backends with a network"))
        return Decisions(
            denials=tuple(denials),
            limits=(
                Limits(
                    memory_mb=int(chosen["memory_mb"]),
                    pids=int(chosen["pids"]),
                    cpu=chosen["cpu"],
                    disk_mb=int(chosen["disk_mb"]),
                    lifetime_s=chosen["lifetime_s"],
                )
                if not denials
                else Limits()
            ),
            network=tuple(NetworkRule(rule.host, rule.ports) for rule in self.network.allow),
            read_only=self.filesystem.read_only,
            hidden=self.filesystem.hidden,
            tools=None if self.tools.allow is None else frozenset(self.tools.allow),
            least=self.least,
        )

    def _says(self, section: str, name: str) -> bool:
        return name in getattr(self, section).model_fields_set


DEFAULT = Rules()
"""Rules of a server without a rules file."""


@functools.lru_cache(maxsize=256)
def load_rules(text: str) -> Rules:
    """Parse rules from YAML; an empty text gives the default rules.

    Raises RulesError naming the field, the value and the fix.
    """
    if len(text) > MAX_BYTES:
        raise RulesError(f"the sandbox rules have {len(text)} characters: write at most {MAX_BYTES}")
    try:
        found = load_strictly(text)
    except ValueError as error:
        raise RulesError(f"the sandbox rules are not YAML ({error}): correct it") from None
    if not isinstance(found, (dict, type(None))):
        raise RulesError(
            f"the sandbox rules are a {type(found).__name__}: write a mapping, as docs/sandboxes-rules.md shows"
        )
    try:
        return Rules.model_validate(found or {})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "version"
        raise RulesError(
            f"sandbox rules, field {where}: {_plain(first['type'], first['msg'])} (got {first.get('input')!r:.80})"
        ) from None


def hides(globs: Sequence[str], path: str) -> bool:
    """Whether these globs of `filesystem.hidden` match this workspace path or a directory above it."""
    parts = path.split("/")
    above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    return any(fnmatchcase(each, glob.rstrip("/")) for each in above for glob in globs)


def _plain(kind: str, said: str) -> str:
    if kind == "extra_forbidden":
        return "there is no such field; docs/sandboxes-rules.md lists them"
    return said.removeprefix("Value error, ")
