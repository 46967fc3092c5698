"""Targets of `triplane iterate`, stored so that repeating the command after a kill adds no iterations."""

from __future__ import annotations

from contracts.artifacts import Frozen
from contracts.pointers import Pointer
from contracts.store import Store
from ops.iteration_keys import iteration_key
from resources.experiment import Experiment
from triplane_dagster.iterations import is_finished, next_partition


class Target(Frozen):
    """Sequence of iterations that was requested."""

    first: int
    """Number of the first iteration."""
    count: int
    """Number of requested iterations."""
    done: bool = False
    """Whether the target ended: all iterations were made, or one was refused and promotion.on_refusal is stop."""

    def iterations(self) -> list[str]:
        """Partition keys of the target, in order."""
        return [iteration_key(number) for number in range(self.first, self.first + self.count)]


def _pointer(store: Store, experiment: Experiment) -> Pointer:
    return Pointer(store, f"targets/{experiment.name}")


def begin_target(store: Store, experiment: Experiment, count: int) -> Target:
    """The unfinished target of this size, or a new one that starts at the next iteration.

    An unfinished target whose iterations all have a decision belongs to a command killed before `end_target`; the
    repeated command adds no iterations.
    """
    pointer = _pointer(store, experiment)
    entry = pointer.current()
    if entry is not None:
        last = Target.model_validate(entry.value)
        if not last.done and last.count == count:
            return last
    target = Target(first=int(next_partition(store, experiment)), count=count)
    pointer.advance(target.model_dump(), entry.number if entry else 0)
    return target


def decided_target(store: Store, experiment: Experiment) -> Target | None:
    """Target of a command that was killed between its last decision and `end_target`."""
    entry = _pointer(store, experiment).current()
    target = Target.model_validate(entry.value) if entry else None
    if target is None or target.done:
        return None
    return target if all(is_finished(store, experiment, iteration) for iteration in target.iterations()) else None


def end_target(store: Store, experiment: Experiment, target: Target) -> None:
    """Record that the target ended, unless a newer one was set in the meantime."""
    pointer = _pointer(store, experiment)
    entry = pointer.current()
    if entry is not None and Target.model_validate(entry.value) == target:
        pointer.advance(target.model_copy(update={"done": True}).model_dump(), entry.number)
