"""The experiment's sandboxes: where episodes and verdicts run, and within which limits."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field

from envd.backends import BackendName
from envd.types import Limits
from resources.section import Section

ENVD_VARIABLE = "TRIPLANE_ENVD"
"""Address of a running envd server, e.g. of a deployment, for experiments that name none: `unix:/path`, `host:port`,
`dns:NAME:PORT` for every address behind a name, or several of them with commas between.
"""


class LimitsConfig(Section):
    """Resource limits of one episode's sandbox; their bounds are those of a sandbox server."""

    memory_mb: int = Field(default=512, ge=16, le=1 << 22)
    """Memory of all processes and files together, in MiB."""
    pids: int = Field(default=64, ge=4, le=1 << 22)
    """Processes and threads alive at once."""
    cpu: float = Field(default=1.0, gt=0, le=1024)
    """CPU cores."""
    disk_mb: int = Field(default=64, ge=1, le=1 << 24)
    """Disk space for all written files, in MiB."""
    lifetime_s: float = Field(default=600.0, gt=0, le=31_536_000)
    """Part of the keys of rollouts and evaluations, without effect: an episode's sandbox lives for
    `rollouts.episode_timeout_s` and a minute.
    """

    def limits(self) -> Limits:
        """Limits in the environment plane's type."""
        return Limits(**self.model_dump())


class SandboxesConfig(Section):
    """Where episodes and verifications run."""

    backend: Literal["auto", BackendName] = "auto"
    """Backend of the sandboxes of agents and verdicts. A running server refuses them if it lacks that backend. auto:
    the running server chooses; a server that the run starts uses namespaces, else gvisor, never plain, which isolates
    nothing.
    """
    address: str | None = None
    """`unix:/path` or `host:port` of a running envd server, whose key is in $TRIPLANE_ENVD_KEY_FILE. Several with
    commas between them, or `dns:NAME:PORT` for every address behind a name, share the episodes. null: use
    $TRIPLANE_ENVD, or start a server for the run.
    """
    limits: LimitsConfig = LimitsConfig()
    """Resource limits of one episode's sandbox."""

    @property
    def server(self) -> str | None:
        """Address of the running server. None: the run starts one."""
        return self.address or os.environ.get(ENVD_VARIABLE)

    @property
    def asked_backend(self) -> str:
        """Backend that the server is asked for. Empty: the server chooses."""
        return "" if self.backend == "auto" else self.backend
