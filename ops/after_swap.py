"""Bring the servers to the live policy; if a new one can be served nowhere, make the previous policy live again.

promoted -> servers swapped -> all fail because of the policy? -> rollback (a registry entry) -> servers swapped

A kill between any two of them is repaired when the same step runs again: the promotion and the rollback are entries of
the registry, found by iteration and by request, and swapping servers is idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contracts.artifacts import ArtifactRef, open_artifact
from contracts.store import Store
from ops.deploy import bring_servers
from ops.rollback import RolledBack, bring_live, change_live, plan_rollback
from ops.weights_fault import fault_behind
from resources.deployment import ServerState
from resources.errors import RegistryError
from resources.experiment import Experiment
from resources.registry import LivePolicy, Registry

AUTOMATIC = "automatic/"
"""Start of the request ids of automatic rollbacks."""


@dataclass(frozen=True)
class Swapped:
    """Result of swapping the servers after a decision."""

    servers: list[ServerState]
    rolled_back: RolledBack | None = None
    """The automatic rollback that this call carried out."""


def swap_or_roll_back(
    store: Store, experiment: Experiment, base: ArtifactRef, candidate: ArtifactRef, iteration: str
) -> Swapped:
    """Update every server to the live policy, and return to the previous one if all fail because of `candidate`.

    Happens once for a candidate of an iteration: an operator who rolls forward to it again is not overruled.
    """
    servers = bring_servers(store, experiment, base)
    if not servers:
        return Swapped(servers)
    request, registry = f"{AUTOMATIC}{iteration}/{candidate.digest}", Registry(store, experiment.name)
    live = registry.live()
    if live is None or live.policy.digest != candidate.digest or registry.rollback_of(request) is not None:
        return Swapped(servers)
    fault = _fault_on_all(store, servers, candidate)
    if fault is None:
        return Swapped(servers)
    try:
        plan = plan_rollback(store, experiment.name, None)
        if plan.live.number != live.number:
            return Swapped(servers)
        entry = change_live(store, experiment.name, plan, f"no server can serve it: {fault}", request)
    except RegistryError:  # another change came first: the servers follow whatever is live now
        return Swapped(bring_live(store, experiment))
    done = RolledBack(plan, entry, bring_live(store, experiment))
    return Swapped(done.servers, done)


def is_automatic(entry: LivePolicy) -> bool:
    """Whether a registry entry is an automatic rollback."""
    return entry.rollback is not None and (entry.rollback.request or "").startswith(AUTOMATIC)


def _fault_on_all(store: Store, servers: Sequence[ServerState], candidate: ArtifactRef) -> str | None:
    """Fault of the policy that every server shows; None if one serves it, or fails for another reason."""
    artifact = open_artifact(store, candidate)
    found = [fault_behind(each.error, artifact) if each.error is not None else None for each in servers]
    faults = [fault for fault in found if fault is not None]
    return faults[0] if faults and len(faults) == len(servers) else None
