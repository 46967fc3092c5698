"""Partition keys of iterations: 0000, 0001, ... without gaps."""

from __future__ import annotations

import re

from contracts.store import Store
from resources.errors import IterationRefused
from resources.experiment import Experiment
from resources.refs import has_ref, partitions

_KEY = re.compile(r"[0-9]{4,}", re.ASCII)
_PROBES = 8
"""Iterations to ask for one by one before all of them are listed."""
_decided: dict[tuple[str, str], int] = {}
"""Number of leading iterations with a decision, by store and experiment, as last seen by this process. Decisions are
never removed.
"""


def iteration_key(number: int) -> str:
    """Partition key of the iteration with this number, from 0."""
    return f"{number:04d}"


def iteration_number(key: str) -> int | None:
    """Number of the iteration with this partition key, or None if no iteration has it."""
    return int(key) if _KEY.fullmatch(key) and iteration_key(int(key)) == key else None


def next_iteration(store: Store, experiment: str) -> int:
    """Number of the first iteration without a decision.

    Usually takes two requests, whatever the number of iterations; the first call in a process lists them.
    """
    place = (store.url, experiment)
    number = _decided.get(place, 0)
    if number and not _is_decided(store, experiment, number - 1):
        number = 0  # another store is at this URL now
    for _ in range(_PROBES):
        if not _is_decided(store, experiment, number):
            break
        number += 1
    else:
        there = set(partitions(store, experiment, "sampler"))
        while iteration_key(number) in there:
            number += 1
    _decided[place] = number
    return number


def may_sample_ahead(store: Store, experiment: Experiment, undecided: int) -> bool:
    """Whether the iteration after the first undecided one may begin: with overlap, once the latter has its dataset."""
    return experiment.off_policy.overlap and has_ref(store, experiment.name, "dataset", iteration_key(undecided))


def require_key(store: Store, experiment: Experiment, key: str) -> None:
    """Raise IterationRefused unless `key` names an iteration with a decision, the next one, or one that may be sampled
    ahead.
    """
    name, number, following = experiment.name, iteration_number(key), next_iteration(store, experiment.name)
    if number is not None and number <= following:
        return
    if number == following + 1 and may_sample_ahead(store, experiment, following):
        return
    fault = "is not the key of an iteration" if number is None else "is ahead of the next iteration"
    raise IterationRefused(
        f"partition {key!r} of {name} {fault}: nothing was made; materialize {iteration_key(following)} instead, and"
        f" remove {key!r} in the UI (page of {name}/iteration_inputs, the menu beside Materialize, Delete partitions)"
    )


def _is_decided(store: Store, experiment: str, number: int) -> bool:
    return has_ref(store, experiment, "sampler", iteration_key(number))
