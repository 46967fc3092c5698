"""Tasks that a mixture must not train on: those of a suite's splits gate, held_out and unseen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from contracts.digests import sha256
from contracts.tasks import Split, Task


@dataclass(frozen=True)
class Reserved:
    """Tasks of a suite by id, and the digests of their instructions."""

    splits: dict[str, str]
    """Split of each task of the suite."""
    prompts: dict[str, str]
    """Id of a reserved task, by the digest of its instruction."""

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> Self:
        """The reserved tasks of a suite."""
        every = list(tasks)
        own = [task for task in every if task.split is not Split.TRAIN]
        return cls(
            {task.task_id: str(task.split) for task in every}, {_digest(task.instruction): task.task_id for task in own}
        )

    def task_of(self, task_id: str | None, prompts: Iterable[str]) -> str | None:
        """The reserved task that a row belongs to, in words; None: to none. prompts: texts of the user's messages
        before the first turn of the policy, by which a row is recognized whose id is no task of the suite.
        """
        split = self.splits.get(task_id or "")
        if split is None:
            found = (self.prompts.get(_digest(prompt)) for prompt in prompts)
            task_id = next((each for each in found if each is not None), None)
            split = self.splits.get(task_id or "", Split.TRAIN)
        return None if split == Split.TRAIN else f"task {task_id} of the split {split}"


def _digest(text: str) -> str:
    """Digest of a text, whatever its blanks and line ends."""
    return sha256(" ".join(text.split()).encode())
