"""Determine the next iteration and whether a sequence continues."""

from __future__ import annotations

from contracts.artifacts import open_artifact
from contracts.store import Store
from ops.deploy_decision import Decision, read_decision, why_stale
from ops.iteration_keys import iteration_key, next_iteration
from resources.experiment import Experiment
from resources.refs import has_ref, read_ref
from resources.registry import Registry


def is_finished(store: Store, experiment: Experiment, iteration: str) -> bool:
    """Whether the iteration has a decision."""
    return has_ref(store, experiment.name, "sampler", iteration)


def is_complete(store: Store, experiment: Experiment, iteration: str) -> bool:
    """Whether the iteration has a decision and a report."""
    return is_finished(store, experiment, iteration) and has_ref(store, experiment.name, "report", iteration)


def next_partition(store: Store, experiment: Experiment) -> str:
    """First iteration without a decision: an interrupted one is finished before the next begins."""
    return iteration_key(next_iteration(store, experiment.name))


def decision_of(store: Store, experiment: Experiment, iteration: str) -> Decision | None:
    """Decision of an iteration, or None if there is none yet."""
    ref = read_ref(store, experiment.name, "sampler", iteration)
    return read_decision(open_artifact(store, ref)) if ref else None


def standing_decision(store: Store, experiment: Experiment, iteration: str) -> Decision | None:
    """Like `decision_of`, but stale for a candidate that went live and is not live now. Weights that equal those of a
    policy that was rolled back have its decision.
    """
    decision, registry = decision_of(store, experiment, iteration), Registry(store, experiment.name)
    live = registry.live()
    if decision is None or decision.decision != "live" or (live and live.policy.digest == decision.candidate.digest):
        return decision
    why = why_stale(registry, decision.candidate, decision.parent)
    return decision.model_copy(update={"decision": "stale", "reasons": [why]})


def may_continue(store: Store, experiment: Experiment, iteration: str) -> bool:
    """Whether a sequence continues after this iteration: promotion.on_refusal decides if the candidate did not go
    live.
    """
    decision = decision_of(store, experiment, iteration)
    live = decision is not None and decision.decision == "live"
    return live or experiment.promotion.on_refusal == "retry_from_live"
