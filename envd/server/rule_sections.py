"""Sections of sandbox rules, with the unit and bounds of each field."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

from envd.server.destinations import means_reserved, network_of
from envd.tools import ALL_TOOLS
from envd.types import Limits

MAX_CPU, MAX_LIFETIME_S = 1024.0, 365 * 24 * 3600.0
_NAME = re.compile(r"(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class Section(BaseModel):
    """Base of the sections of sandbox rules: immutable, no unknown keys, no value of another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Destination(Section):
    """One destination that sandboxes may open connections to."""

    host: str
    """A name, `*.` and a name for all below it, an address, or a network as 10.0.0.0/8."""
    ports: tuple[int, ...] = Field(default=(), strict=False)
    """1 to 65535; empty: any."""

    @field_validator("host")
    @classmethod
    def _known_form(cls, host: str) -> str:
        if network_of(host) is None and (len(host) > 253 or not _NAME.fullmatch(host)):
            raise ValueError("write a lower-case name, *.name, an address, or a network as 10.0.0.0/8")
        return host

    @field_validator("ports")
    @classmethod
    def _real_ports(cls, ports: tuple[int, ...]) -> tuple[int, ...]:
        if any(isinstance(port, bool) or not 1 <= port <= 65535 for port in ports):
            raise ValueError("ports are numbers from 1 to 65535")
        return ports

    def covers(self, other: Destination) -> bool:
        """Whether this destination allows everything that `other` allows."""
        if self.ports and not (other.ports and set(other.ports) <= set(self.ports)):
            return False
        ours, theirs = network_of(self.host), network_of(other.host)
        if ours is not None and theirs is not None:
            if ours.version != theirs.version or (means_reserved(theirs) and not means_reserved(ours)):
                return False  # 0.0.0.0/0 does not include private addresses, so a rule for these allows more
            return theirs.subnet_of(ours)  # type: ignore[arg-type]
        return self.host == other.host or (self.host.startswith("*.") and other.host.endswith(self.host[1:]))


class NetworkRules(Section):
    """Destinations that sandboxes may connect to."""

    allow: tuple[Destination, ...] = Field(default=(), max_length=64, strict=False)
    """Empty: nowhere; a sandbox has a loopback of its own and nothing else."""


class Ceilings(Section):
    """Maximum values that a request may ask for. Absent: no bound."""

    memory_mb: int | None = Field(default=None, gt=0)
    """MiB."""
    pids: int | None = Field(default=None, gt=0)
    """Processes and threads alive at once."""
    cpu: float | None = Field(default=None, gt=0, le=MAX_CPU)
    """Cores."""
    disk_mb: int | None = Field(default=None, gt=0)
    """MiB that may be written."""
    lifetime_s: float | None = Field(default=None, gt=0, le=MAX_LIFETIME_S)
    """Seconds."""
    live: int | None = Field(default=None, ge=0)
    """Sandboxes that exist at once on the server."""

    def within(self, other: Ceilings) -> Ceilings:
        """Lower value of both for each limit."""
        values: dict[str, float] = {}
        for name in Ceilings.model_fields:
            said = [value for value in (getattr(self, name), getattr(other, name)) if value is not None]
            if said:
                values[name] = min(said)
        return Ceilings.model_validate(values)


class Defaults(Section):
    """Values for a request that names none."""

    memory_mb: int = Field(default=Limits.memory_mb, gt=0)
    """MiB."""
    pids: int = Field(default=Limits.pids, gt=0)
    """Processes and threads alive at once."""
    cpu: float = Field(default=Limits.cpu, gt=0, le=MAX_CPU)
    """Cores."""
    disk_mb: int = Field(default=Limits.disk_mb, gt=0)
    """MiB that may be written."""
    lifetime_s: float = Field(default=Limits.lifetime_s, gt=0, le=MAX_LIFETIME_S)
    """Seconds."""


class ResourceRules(Section):
    """Ceilings and defaults. A default above its ceiling is lowered to it."""

    maximum: Ceilings = Ceilings()
    default: Defaults = Defaults()


class QuotaRules(Section):
    """Quotas of all clients of one key together; without keys, of all clients.

    Only the server's rules may have this section.
    """

    templates: int = Field(default=8192, ge=1)
    """Templates that are kept. Beyond it, and beyond `template_mb`, those used least recently that no sandbox uses are
    removed.
    """
    template_mb: int = Field(default=512, ge=1)
    """MiB of disk that templates may take: twice their files, which git keeps too."""
    sandboxes: int = Field(default=4096, ge=1)
    """Sandboxes that exist at once."""
    snapshot_mb: int = Field(default=16384, ge=1)
    """MiB of disk that snapshots may take; each is charged at least 1 MiB."""
    memory_mb: int | None = Field(default=None, ge=1)
    """MiB that the limits of these sandboxes may add up to. Absent: 32 times the machine's memory."""


class FilesystemRules(Section):
    """Access of a sandbox to its workspace and the template's files."""

    read_only: bool = False
    """The workspace can't be written."""
    hidden: tuple[str, ...] = Field(default=(), max_length=64, strict=False)
    """Globs of workspace paths that are left out of the workspace, so that no tool and no program can read them. `*`
    also matches `/`; a directory that matches is left out with all that is in it.
    """

    @field_validator("hidden")
    @classmethod
    def _relative(cls, globs: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [glob for glob in globs if not glob or glob.startswith(("/", "../")) or len(glob) > 256]:
            raise ValueError(f"{bad[0]!r} must be relative to the workspace, of 1 to 256 characters")
        return globs


class ToolRules(Section):
    """Tools that may be called."""

    allow: tuple[str, ...] | None = Field(default=None, strict=False)
    """Names; absent: all. Without `exec` the Processes service is closed too."""

    @field_validator("allow")
    @classmethod
    def _known(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        known = list(ALL_TOOLS)
        if unknown := sorted(set(names or ()) - set(known)):
            raise ValueError(f"unknown tool {unknown[0]!r}: choose from {', '.join(known)}")
        return names
