"""Targets: which iterations of an experiment were asked for, by `triplane iterate` or by the job `NAME_train`.

pointers/targets/<experiment>/<number>.json     a Target; the highest number counts

Kept in the store, so that a repeated command, a restarted daemon or an edited run adds and loses no iteration.
"""

from __future__ import annotations

import math
import time
from typing import Literal

from contracts.artifacts import Frozen, open_artifact
from contracts.pointers import Pointer
from contracts.store import Store
from ops.inputs import find_inputs, resolve_start
from ops.iteration_keys import iteration_key, next_iteration
from resources.errors import TargetRefused
from resources.experiment import Experiment
from resources.refs import read_ref, require_ref
from triplane_dagster.iterations import is_complete, is_finished, next_partition

_seen: dict[tuple[str, str], int] = {}
"""Number of the latest target, by store and experiment, as last seen by this process: the sensor reads it every few
seconds, and listing S3 is slow.
"""


class Target(Frozen):
    """Sequence of iterations that was requested."""

    first: int
    """Number of the first iteration."""
    count: int
    """Number of requested iterations."""
    done: bool = False
    """Whether the target ended; `ended` says why."""
    by: Literal["command", "dagster"] = "command"
    """command: a process runs the iterations. dagster: the sensor `NAME_sequence` requests their runs."""
    from_policy: str = "live"
    """Policy that the first iteration starts from: live, base or a digest prefix."""
    reason: str = ""
    """Reason that the operator gave."""
    deadline_unix: float | None = None
    """Time after which no further iteration starts, in seconds since 1970."""
    night: str | None = None
    """Date of the night whose schedule requested it."""
    request: str | None = None
    """Id of the Dagster run that set it."""
    asked_unix: float | None = None
    """When that run was launched, in seconds since 1970; None also for targets of earlier versions."""
    ended: str = ""
    """Why the target ended."""
    ended_unix: float | None = None
    """When, in seconds since 1970; None also for one that was ended by hand."""

    @property
    def last(self) -> int:
        """Number of the last iteration."""
        return self.first + self.count - 1

    def iterations(self) -> list[str]:
        """Partition keys of the target, in order."""
        return [iteration_key(number) for number in range(self.first, self.first + self.count)]

    def __str__(self) -> str:
        """Iterations as text, e.g. iterations 0003 to 0005."""
        first, last = iteration_key(self.first), iteration_key(self.last)
        return f"iteration {first}" if first == last else f"iterations {first} to {last}"


def _pointer(store: Store, experiment: Experiment) -> Pointer:
    return Pointer(store, f"targets/{experiment.name}")


def last_target(store: Store, experiment: Experiment) -> Target | None:
    """The latest target, ended or not."""
    place = (store.url, experiment.name)
    entry = _pointer(store, experiment).current_since(_seen.get(place, 0))
    if entry is None:
        return None
    _seen[place] = entry.number
    return Target.model_validate(entry.value)


def unfinished_target(store: Store, experiment: Experiment) -> Target | None:
    """The target that has not ended."""
    last = last_target(store, experiment)
    return None if last is None or last.done else last


def how_to_end(experiment: Experiment, target: Target) -> str:
    """Description of an unfinished target and of what ends it."""
    asked = f"a command asked for {target}, and has not finished"
    finish = f"run `triplane iterate -e {experiment.name} -n {target.count}` to finish them, or "
    if target.by == "dagster":
        one = target.count == 1
        asked = f"{target} {'is' if one else 'are'} under way ({target.reason})"
        finish = f"wait for {'it' if one else 'them'} (see the sensor {experiment.name}_sequence), or "
    return f"{asked}: {finish}launch {experiment.name}_train with iterations: 0 to end that request"


def begin_target(store: Store, experiment: Experiment, count: int) -> Target:
    """The command's unfinished target of this size, or a new one that starts at the next iteration.

    An unfinished target whose iterations all have a decision belongs to a command killed before `end_target`; the
    repeated command adds no iterations. A target of `NAME_train` is replaced.
    """
    pointer = _pointer(store, experiment)
    entry = pointer.current()
    if entry is not None:
        last = Target.model_validate(entry.value)
        if not last.done and last.count == count and last.by == "command":
            return last
    target = Target(first=int(next_partition(store, experiment)), count=count)
    pointer.advance(target.model_dump(), entry.number if entry else 0)
    return target


def request_target(
    store: Store,
    experiment: Experiment,
    count: int,
    *,
    request: str,
    from_policy: str = "live",
    reason: str = "",
    deadline_unix: float | None = None,
    night: str | None = None,
    asked_unix: float = math.inf,
    repeats: bool = False,
) -> Target:
    """Ask for further iterations, which the sensor then requests one by one; repeating a request changes nothing.

    asked_unix: when the request was made, which may have waited in a queue. repeats: whether this may be the repetition
    of a killed run, after which others may have asked.

    Raises TargetRefused if another target was unfinished then or the next iteration has begun from another policy,
    RegistryError for an unknown policy.
    """
    pointer = _pointer(store, experiment)
    entry = pointer.current()
    last = Target.model_validate(entry.value) if entry else None
    if last is not None and last.request == request:
        return last
    if repeats and (before := _asked_before(pointer, request)) is not None:
        return before
    if last is not None:
        _require_over(store, experiment, last, asked_unix)
    first = next_iteration(store, experiment.name)
    _require_policy(store, experiment, iteration_key(first), from_policy)
    target = Target(
        first=first,
        count=count,
        by="dagster",
        from_policy=from_policy,
        reason=reason,
        deadline_unix=deadline_unix,
        night=night,
        request=request,
        asked_unix=asked_unix if math.isfinite(asked_unix) else None,
    )
    if not pointer.advance(target.model_dump(), entry.number if entry else 0):
        raise TargetRefused(f"{experiment.name}: somebody else asked for iterations at the same time: retry")
    return target


def _asked_before(pointer: Pointer, request: str) -> Target | None:
    """The latest target of this request, however many followed it."""
    targets = [Target.model_validate(entry.value) for entry in pointer.history()]
    return next((each for each in reversed(targets) if each.request == request), None)


def _require_over(store: Store, experiment: Experiment, last: Target, asked_unix: float) -> None:
    """Raise if a target was unfinished when further iterations were asked for: a second click would train twice."""
    if not last.done and not is_complete(store, experiment, iteration_key(last.last)):
        raise TargetRefused(f"{experiment.name}: {how_to_end(experiment, last)}")
    ended = last.ended_unix
    if not last.done:  # its end is not recorded yet
        report = require_ref(store, experiment.name, "report", iteration_key(last.last))
        ended = open_artifact(store, report).manifest.created_unix
    if ended is not None and asked_unix < ended <= time.time():  # a clock may have been set back since
        was = f"{last} {'was' if last.count == 1 else 'were'} under way ({last.reason or last.by})"
        raise TargetRefused(
            f"{experiment.name}: {was} when this was launched: launch it again if more iterations are wanted"
        )


def _require_policy(store: Store, experiment: Experiment, first: str, policy: str) -> None:
    """Raise unless the first iteration can start from this policy."""
    if policy != "live" and find_inputs(store, experiment, first) is not None:
        raise TargetRefused(
            f"iteration {first} of {experiment.name} has begun, its inputs are pinned: give from_policy live to finish"
            f" it, or take them back by `triplane unpin {experiment.name}/{first}`"
        )
    base = read_ref(store, experiment.name, "base_policy")
    if base is not None and policy not in ("live", "base"):
        resolve_start(store, experiment.name, base, policy)


def decided_target(store: Store, experiment: Experiment) -> Target | None:
    """Target of a command that was killed between its last decision and `end_target`."""
    target = unfinished_target(store, experiment)
    if target is None or target.by != "command":
        return None
    return target if all(is_finished(store, experiment, iteration) for iteration in target.iterations()) else None


def end_target(store: Store, experiment: Experiment, target: Target, why: str = "", *, by_hand: bool = False) -> None:
    """Record that the target ended, unless a newer one was set in the meantime. by_hand: a request that waits with this
    one in a queue may follow.
    """
    pointer = _pointer(store, experiment)
    entry = pointer.current()
    if entry is not None and Target.model_validate(entry.value) == target:
        over = {"done": True, "ended": why, "ended_unix": None if by_hand else time.time()}
        pointer.advance(target.model_copy(update=over).model_dump(), entry.number)
