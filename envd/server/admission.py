"""Admission: check a request for a sandbox against fixed bounds and the rules, and choose its backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from contracts.pb import envd_pb2 as pb
from envd.backends.base import Backend
from envd.errors import EnvdError, RulesDenied
from envd.messages import named_limits
from envd.server.audit import AuditLog
from envd.server.rules import Decisions, Denial, Rules
from envd.tools import toolset_named
from envd.types import Limits

_MOST = Limits(memory_mb=1 << 22, pids=1 << 22, cpu=1024, disk_mb=1 << 24, lifetime_s=365 * 24 * 3600.0)
"""Maximum limits that a request may name, whatever the rules allow."""
_MAX_ENV_BYTES = 128 * 1024
_MAX_LABELS, _MAX_LABEL = 32, 256


@dataclass(frozen=True)
class Wanted:
    """A request for a sandbox. Limits of 0 take the rules' defaults."""

    template: str
    limits: Mapping[str, float] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""
    rules_yaml: str = ""
    runtime: str = ""
    toolset: str = ""
    record_requests: bool = False

    @classmethod
    def of(cls, request: Any) -> Wanted:
        """Convert a CreateRequest or a ReceiveHeader. Raises EnvdError for values beyond the fixed bounds."""
        wanted = cls(
            request.template,
            named_limits(request.limits),
            dict(request.env),
            dict(request.labels),
            request.backend,
            request.policy_yaml,
            request.runtime,
            request.toolset,
            # a ReceiveHeader has none: what is restored elsewhere records nothing
            getattr(request, "record_requests", False),
        )
        _check_numbers(wanted.limits)
        check_env(wanted.env)
        toolset_named(wanted.toolset)
        _check_labels(wanted.labels)
        return wanted

    def with_limits(self, limits: pb.Limits) -> Wanted:
        """Copy of this request with the non-zero limits replaced. Raises EnvdError for invalid limits."""
        named = {name: value for name, value in named_limits(limits).items() if value}
        wanted = replace(self, limits={**self.limits, **named})
        _check_numbers(wanted.limits)
        return wanted


def decide(
    wanted: Wanted,
    backends: Mapping[str, Backend],
    rules: tuple[Rules, tuple[Denial, ...]],
    audit: AuditLog,
    live: int,
) -> tuple[Backend, Decisions]:
    """Choose a sandbox's backend and check the request against the rules. Raises RulesDenied, which is recorded.

    rules: the request's merged with the server's, and the denials of that merge. live: number of existing sandboxes,
    -1 if the request is for no sandbox.
    """
    merged, denials = rules
    backend = _choose(wanted.backend, backends, merged)
    features = backend.features
    decisions = merged.check(
        wanted.limits,
        backend=backend.name,
        isolation=features.isolation,
        can=features.can,
        enforced=features.limits_enforced,
        live=live,
    )
    refused = (*denials, *decisions.denials)
    if refused:
        reason = "; ".join(str(each) for each in refused)
        audit.record("policy.denied", "", reason=reason, backend=backend.name, labels=list(wanted.labels.items()))
        raise RulesDenied(reason)
    return backend, decisions


def _choose(name: str, backends: Mapping[str, Backend], rules: Rules) -> Backend:
    if name:
        if name not in backends:
            raise EnvdError(f"backend {name[:40]!r} does not run here: this server has {', '.join(backends)}")
        return backends[name]
    high = [each for each in backends.values() if each.features.isolation >= rules.least] or list(backends.values())
    fits = (each for each in high if not rules.network.allow or "network" in each.features.can)
    return next(fits, high[0])


def _check_numbers(limits: Mapping[str, float]) -> None:
    for name, value in limits.items():
        if not value >= 0:  # true for NaN, too
            raise EnvdError(f"limits must be positive: {name} is {value:g}")
        if value > getattr(_MOST, name):
            raise EnvdError(f"limits.{name} is {value:g}: it must be at most {getattr(_MOST, name):g}")


def check_env(env: Mapping[str, str]) -> None:
    """Raise EnvdError for environment variables that are too large in total or that no process can have."""
    if sum(len(key) + len(value) for key, value in env.items()) > _MAX_ENV_BYTES:
        raise EnvdError(f"the environment is larger than {_MAX_ENV_BYTES} characters: write a file instead")
    for key, value in env.items():
        if not key or "=" in key or "\0" in key + value:
            raise EnvdError(
                f"environment variable {key[:40]!r} can't be set: a name must not contain '=', and neither name nor"
                " value a null character"
            )


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > _MAX_LABELS or any(len(each) > _MAX_LABEL for pair in labels.items() for each in pair):
        raise EnvdError(f"a sandbox has at most {_MAX_LABELS} labels of at most {_MAX_LABEL} characters")
