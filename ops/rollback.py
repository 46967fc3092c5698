"""Roll back to a policy that was live: append an entry to the registry, then update every server.

Whoever dies between the two left a rollback that is done and servers that are behind: `bring_servers` alone is to be
repeated, by `roll_back_once` for a request that can be told from others, by naming the live policy otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dagster as dg

from contracts.artifacts import open_artifact
from contracts.errors import ConfigError
from contracts.store import Store
from ops.deploy import bring_servers, server_metadata
from ops.inputs import trainer_state_of
from resources.deployment import ServerState
from resources.experiment import Experiment
from resources.refs import read_ref, require_ref
from resources.registry import BASE, BasePolicy, LivePolicy, Registry, Restorable


@dataclass(frozen=True)
class RollbackPlan:
    """Effects of a rollback that has not been carried out."""

    live: LivePolicy
    """What is live now, and so what the change is conditional on."""
    target: Restorable
    """What will be live."""
    undone: tuple[str, ...]
    """Iterations whose promotion the restored policy does not build on."""
    redone: tuple[str, ...]
    """Iterations that were undone by an earlier rollback and count again."""


@dataclass(frozen=True)
class RolledBack:
    """Result of a rollback."""

    plan: RollbackPlan
    entry: LivePolicy
    servers: list[ServerState]
    before: bool = False
    """Whether the change was made by an earlier attempt, and only servers were brought now."""


def plan_rollback(store: Store, experiment: str, to: str | None) -> RollbackPlan:
    """Plan a rollback to `to` (see Registry.restorable).

    Raises RegistryError, AlreadyLive among them, and ArtifactCorrupt or ArtifactMissing for a target that can't be
    served any more; changes nothing.
    """
    registry = Registry(store, experiment)
    target = registry.restorable(to, base_of(store, experiment))
    live = registry.live()
    assert live is not None, "restorable refuses where nothing was promoted"
    open_artifact(store, target.policy).directory()
    open_artifact(store, target.trainer_state)
    return _plan(registry, live, target)


def _plan(registry: Registry, live: LivePolicy, target: Restorable) -> RollbackPlan:
    now, then = set(registry.standing(live.origin)), set(registry.standing(target.number))
    made = {entry.number: entry.iteration for entry in registry.history()}
    return RollbackPlan(
        live,
        target,
        tuple(made[number] for number in sorted(now - then)),
        tuple(made[number] for number in sorted(then - now)),
    )


def roll_back(store: Store, experiment: Experiment, plan: RollbackPlan, reason: str) -> RolledBack:
    """Carry out a plan. Raises RegistryError if another change came first; nothing is changed then."""
    entry = change_live(store, experiment.name, plan, reason)
    return RolledBack(plan, entry, bring_live(store, experiment))


def roll_back_once(store: Store, experiment: Experiment, to: str | None, reason: str, request: str) -> RolledBack:
    """Roll back for a request that may be repeated after a crash: the registry changes once, servers are updated each
    time.

    Raises what `plan_rollback` and `roll_back` raise.
    """
    registry = Registry(store, experiment.name)
    entry = registry.rollback_of(request)
    before = entry is not None
    if entry is None:
        entry = change_live(store, experiment.name, plan_rollback(store, experiment.name, to), reason, request)
    return RolledBack(_plan_of(registry, entry), entry, bring_live(store, experiment), before)


def change_live(
    store: Store, experiment: str, plan: RollbackPlan, reason: str, request: str | None = None
) -> LivePolicy:
    """Change the registry without updating the servers.

    Raises RegistryError when another change came first: nothing was changed.
    """
    if not reason.strip():
        raise ConfigError("the reason of the rollback is empty: give a few words; the registry keeps them")
    return Registry(store, experiment).rollback(plan.target, reason.strip(), expected=plan.live.number, request=request)


def bring_live(store: Store, experiment: Experiment) -> list[ServerState]:
    """Update every server to the live policy. Idempotent."""
    return bring_servers(store, experiment, require_ref(store, experiment.name, "base_policy"))


def _plan_of(registry: Registry, entry: LivePolicy) -> RollbackPlan:
    """Plan of a rollback that is in the registry."""
    assert entry.rollback is not None, "only rollbacks carry a request"
    target = Restorable(
        number=entry.rollback.to, policy=entry.policy, trainer_state=entry.trainer_state, iteration=entry.iteration
    )
    return _plan(registry, registry.history()[entry.number - 2], target)


def base_of(store: Store, experiment: str) -> BasePolicy | None:
    """Base policy as the target of a rollback, or None if there is none yet."""
    base = read_ref(store, experiment, "base_policy")
    return BasePolicy(base, lambda: trainer_state_of(store, base)) if base else None


def observation(experiment: str, done: RolledBack) -> dg.AssetObservation:
    """Observation of the rollback for the sampler's page, at the iteration that is live again."""
    plan, entry, rollback = done.plan, done.entry, done.entry.rollback
    metadata: dict[str, Any] = {
        "rolled back": f"{plan.live.policy.short} -> {entry.policy.short}",
        "from": f"change {plan.live.number}, {plan.live.made_by}",
        "to": f"{entry.made_by}" + (f", change {plan.target.number}" if plan.target.number else ""),
        "reason": rollback.reason if rollback else "",
        "iterations undone": ", ".join(plan.undone) or "none",
        "iterations counting again": ", ".join(plan.redone) or "none",
        "live number": entry.number,
        "live policy": entry.policy.digest,
        **server_metadata(done.servers),
    }
    partition = None if entry.iteration == BASE else entry.iteration
    return dg.AssetObservation(dg.AssetKey([experiment, "sampler"]), partition=partition, metadata=metadata)
