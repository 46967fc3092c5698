"""Determine the next iteration and whether a sequence continues."""

from __future__ import annotations

from contracts.artifacts import open_artifact
from contracts.store import Store
from ops.deploy_decision import Decision, read_decision
from ops.inputs import iteration_key
from resources.experiment import Experiment
from resources.refs import read_ref


def is_finished(store: Store, experiment: Experiment, iteration: str) -> bool:
    """Whether the iteration has a decision."""
    return read_ref(store, experiment.name, "sampler", iteration) is not None


def is_complete(store: Store, experiment: Experiment, iteration: str) -> bool:
    """Whether the iteration has a decision and a report."""
    return (
        is_finished(store, experiment, iteration) and read_ref(store, experiment.name, "report", iteration) is not None
    )


def next_partition(store: Store, experiment: Experiment) -> str:
    """First iteration without a decision: an interrupted one is finished before the next begins."""
    number = 0
    while is_finished(store, experiment, iteration_key(number)):
        number += 1
    return iteration_key(number)


def decision_of(store: Store, experiment: Experiment, iteration: str) -> Decision | None:
    """Decision of an iteration, or None if there is none yet."""
    ref = read_ref(store, experiment.name, "sampler", iteration)
    return read_decision(open_artifact(store, ref)) if ref else None


def may_continue(store: Store, experiment: Experiment, iteration: str) -> bool:
    """Whether a sequence continues after this iteration: promotion.on_refusal decides if the candidate did not go
    live.
    """
    decision = decision_of(store, experiment, iteration)
    live = decision is not None and decision.decision == "live"
    return live or experiment.promotion.on_refusal == "retry_from_live"
