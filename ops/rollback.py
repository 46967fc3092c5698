"""Roll back to a policy that was live: append an entry to the registry, then update every server.

A crash between the two leaves outdated servers after a complete rollback. Then repeat only `bring_servers`: call
`roll_back_once` with the same request id, or else roll back to the live policy.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import dagster as dg

from contracts.artifacts import artifact_exists, find_artifact, open_artifact
from contracts.errors import ConfigError
from contracts.failpoints import failpoint
from contracts.store import Store
from ops.deploy import bring_servers, server_metadata
from ops.graph import SAMPLER
from ops.inputs import trainer_state_of
from resources.deployment import ServerState
from resources.errors import RegistryError
from resources.experiment import Experiment
from resources.refs import earlier_refs, read_ref, require_ref
from resources.registry import BASE, BasePolicy, LivePolicy, Registry, Restorable


@dataclass(frozen=True)
class RollbackPlan:
    """Effects of a rollback that has not been carried out."""

    live: LivePolicy
    """Current live policy; the rollback fails if it changes."""
    target: Restorable
    """Policy that will be live."""
    undone: tuple[str, ...]
    """Iterations whose promotion the restored policy does not build on."""
    redone: tuple[str, ...]
    """Iterations that an earlier rollback undid and this one restores."""


@dataclass(frozen=True)
class RolledBack:
    """Result of a rollback."""

    plan: RollbackPlan
    entry: LivePolicy
    servers: list[ServerState]
    before: bool = False
    """Whether an earlier attempt changed the registry, so that only servers were updated now."""


def plan_rollback(store: Store, experiment: str, to: str | None) -> RollbackPlan:
    """Plan a rollback to `to` (see Registry.restorable).

    Changes nothing. Raises RegistryError (AlreadyLive included, and for a target that can't be trained any more), and
    ArtifactCorrupt or ArtifactMissing for one that can no longer be served.
    """
    registry = Registry(store, experiment)
    target = registry.restorable(to, _base(store, registry, to))
    live = registry.live()
    assert live is not None, "restorable raises if nothing was promoted"
    open_artifact(store, target.policy).directory()
    if not artifact_exists(store, target.trainer_state.kind, target.trainer_state.key):
        raise RegistryError(
            f"policy {target.policy.short} can't be made live again, since nothing could be trained from it: its"
            f" trainer state is gone from {store.url}, as after `triplane gc`: choose another one of `triplane rollback"
            f" -e {experiment} --list`, or restore {target.trainer_state.uri} from a backup"
        )
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
    """Carry out a plan. Raises RegistryError, and changes nothing, if another change came first."""
    entry = change_live(store, experiment.name, plan, reason)
    return RolledBack(plan, entry, bring_live(store, experiment))


def roll_back_once(
    store: Store, experiment: Experiment, to: str | None, reason: str, request: str, asked_unix: float
) -> RolledBack:
    """Roll back for a request that may be repeated after a crash: the registry changes once, servers are updated every
    time. asked_unix: when the request was made, which may have waited in a queue, in seconds since 1970.

    Raises the errors of `plan_rollback` and `roll_back`, and RegistryError if `to` is None and another policy went live
    since the request.
    """
    registry = Registry(store, experiment.name)
    entry = registry.rollback_of(request)
    before = entry is not None
    if entry is None:
        plan = plan_rollback(store, experiment.name, to)
        if to is None:
            _require_seen(store, experiment.name, plan, asked_unix)
        entry = change_live(store, experiment.name, plan, reason, request)
    return RolledBack(_plan_of(registry, entry), entry, bring_live(store, experiment), before)


def _require_seen(store: Store, experiment: str, plan: RollbackPlan, asked_unix: float) -> None:
    """Raise unless the live policy was live when "the previous one" was asked for. A promotion has the time of its
    decision, which follows it.
    """
    live = plan.live
    changed = live.rollback.unix if live.rollback else _promoted_unix(store, experiment, live)
    if asked_unix < changed and not time.time() < changed < math.inf:  # a clock may have been set back since
        raise RegistryError(
            f"{live.policy.short} ({live.came_by}) went live after this rollback was launched, nothing was rolled back:"
            f" launch it again with `to`, which is {plan.target.number or BASE} for the policy before that one"
        )


def _promoted_unix(store: Store, experiment: str, live: LivePolicy) -> float:
    """Time of the decision that promoted a policy; infinite until it is recorded. An iteration that was trained again
    has decisions about several policies.
    """
    now = read_ref(store, experiment, SAMPLER.name, live.iteration)
    for ref in (now, *earlier_refs(store, experiment, SAMPLER.name, live.iteration, now)) if now else ():
        decision = find_artifact(store, ref.kind, ref.key)
        if decision and (decision.meta["policy"], decision.meta["decision"]) == (live.policy.digest, "live"):
            return decision.manifest.created_unix
    return math.inf


def change_live(
    store: Store, experiment: str, plan: RollbackPlan, reason: str, request: str | None = None
) -> LivePolicy:
    """Change the registry without updating the servers.

    Raises RegistryError, and changes nothing, if another change came first.
    """
    if not reason.strip():
        raise ConfigError("the reason of the rollback is empty: give a few words, which the registry records")
    registry = Registry(store, experiment)
    entry = registry.rollback(plan.target, reason.strip(), expected=plan.live.number, request=request)
    failpoint("rolled-back")
    return entry


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


def _base(store: Store, registry: Registry, to: str | None) -> BasePolicy | None:
    """Base policy as the target of a rollback, or None if there is none yet. With `to` None the one that acted before
    the first promotion, which is not the present one if that was made since.
    """
    base = read_ref(store, registry.experiment, "base_policy")
    if base is None:
        return None
    if to is None and (history := registry.history()):
        earlier = earlier_refs(store, registry.experiment, "base_policy", None, base)
        base = next((each for each in (base, *earlier) if each.digest == history[0].parent), base)
    return BasePolicy(base, lambda: trainer_state_of(store, base))


def observation(experiment: str, done: RolledBack) -> dg.AssetObservation:
    """Observation of the rollback for the sampler's page, in the partition of the restored iteration."""
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
