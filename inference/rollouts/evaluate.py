"""Groups of an evaluation: every task of a split, with seeds that do not depend on the policy."""

from __future__ import annotations

from collections.abc import Iterable

from contracts.digests import digest_of
from contracts.episodes import Slot
from contracts.tasks import Split, Task
from inference.rollouts.oversampling import Group


def evaluation_slot(experiment: str, split: Split, task_id: str, sample: int, seed: int) -> Slot:
    """Slot, and therefore seed, of an evaluation's episode.

    It names no policy: candidate and parent meet the same random numbers.
    """
    return Slot(experiment, f"eval-{split.value}", task_id, task_id, sample, seed)


def evaluation_groups(
    tasks: Iterable[Task], samples: int, *, experiment: str, split: Split, seed: int, key: str
) -> list[Group]:
    """One group a task, of `samples` episodes, all kept. key: action key of the evaluation run."""
    return [
        Group(
            digest_of([key, task.task_id])[:32],
            task,
            [evaluation_slot(experiment, split, task.task_id, sample, seed) for sample in range(samples)],
            samples,
        )
        for task in tasks
    ]
