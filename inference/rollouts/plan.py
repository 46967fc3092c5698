"""Plan of an iteration's rollouts: which groups, in which order, by how many workers. Made before any token is
sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from contracts.artifacts import ArtifactRef, Frozen
from contracts.digests import digest_of
from contracts.episodes import Slot
from inference.errors import PlanError
from inference.rollouts.config import RolloutConfig

CARRIED_OVER = "carried_over"
"""Role, among the inputs, of what the iteration before left unfinished."""


class Carried(Frozen):
    """Where a group that an iteration left unfinished comes from."""

    iteration: str
    """Iteration that drew it; decides its seeds."""
    times: int = Field(ge=1)
    """How often it was carried over."""


class GroupPlan(Frozen):
    """One prompt, sampled `group_size` times."""

    group_id: str
    index: int = Field(ge=0)
    """Place in the iteration: planned groups first, then the reserve. Decides the worker and the order of rows."""
    task_id: str
    carried: Carried | None = None
    """Set for a group that an earlier iteration began."""

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Dump the fields, without `carried` if unset, so that digests stay as they are without it."""
        return _without_none(dump(self), "carried")


class RolloutPlan(Frozen):
    """Everything that a worker needs. Groups and reserve share one numbering."""

    experiment: str
    iteration: str
    """Partition key such as "0003"."""
    seed: int
    """The experiment's seed."""
    key: str
    """Action key of the rollouts."""
    policy: ArtifactRef
    """The checkpoint that acts; its digest is the policy version."""
    groups: list[GroupPlan]
    reserve: list[GroupPlan]
    """Drawn from, in order, when a group shows no variance."""
    workers: int = Field(ge=1)
    config: RolloutConfig
    inputs: dict[str, ArtifactRef] = Field(default_factory=dict)
    """Further artifacts the plan was made from, by role (prompts, task_suite): recorded as parents."""
    needed: int | None = Field(default=None, ge=1)
    """Number of complete groups after which the others stop, to be carried over; None: all are completed."""

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Dump the fields, without `needed` if unset, so that digests stay as they are without it."""
        return _without_none(dump(self), "needed")

    @model_validator(mode="after")
    def _groups_are_distinct(self) -> RolloutPlan:
        ids = [group.group_id for group in (*self.groups, *self.reserve)]
        if not self.groups:
            raise ValueError("the plan has no groups: draw at least one prompt")
        if len(set(ids)) != len(ids):
            raise ValueError("a group_id occurs twice: draw groups and reserve in one call of draw_prompts")
        if len({group.index for group in (*self.groups, *self.reserve)}) != len(ids):
            raise ValueError("an index occurs twice: groups and reserve share one numbering")
        return self

    def shard(self, shard: int) -> tuple[list[GroupPlan], list[GroupPlan]]:
        """Groups and reserve of worker `shard` of `workers`, in order.

        Raises PlanError for an unknown shard.
        """
        if not 0 <= shard < self.workers:
            raise PlanError(f"shard {shard} does not exist: the plan has shards 0 to {self.workers - 1}")
        return (
            [group for group in self.groups if group.index % self.workers == shard],
            [group for group in self.reserve if group.index % self.workers == shard],
        )

    def needed_of(self, shard: int) -> int | None:
        """Share of `needed` of worker `shard`."""
        return None if self.needed is None else len(range(shard, self.needed, self.workers))

    def slot(self, group: GroupPlan, sample: int) -> Slot:
        """Slot, and therefore seed, of one sample of `group`."""
        drawn_by = group.carried.iteration if group.carried else self.iteration
        return Slot(self.experiment, drawn_by, group.group_id, group.task_id, sample, self.seed)


def _without_none(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name or value is not None}


def draw_prompts(
    task_ids: Sequence[str],
    *,
    count: int,
    reserve: int,
    cursor: int,
    seed: int,
    iteration: str,
    carried: Sequence[GroupPlan] = (),
) -> tuple[list[GroupPlan], list[GroupPlan], int]:
    """Draw `count` groups and a reserve, and return them with the cursor of the next iteration.

    The stream of prompts is one seeded permutation of `task_ids` an epoch after the other; `cursor` counts its places
    used so far, reserve included. Where an epoch's end would bring a task back into the same draw, that place is passed
    over, so no task comes twice unless the suite is smaller than the draw. Depends on the set of `task_ids`, not on
    their order. carried: groups that come first and count; with them at least one is drawn.
    """
    suite = sorted(set(task_ids))
    if carried:
        count = max(1, count - len(carried))
    wanted = count + reserve
    if not suite:
        raise PlanError("the task suite has no training task: build it with a larger train split")
    if count < 1 or reserve < 0 or cursor < 0:
        raise PlanError(
            f"can't draw {count} groups and {reserve} in reserve at cursor {cursor}: draw at least one group"
        )
    drawn: list[str] = []
    orders: dict[int, list[str]] = {}
    while len(drawn) < wanted:
        epoch, place = divmod(cursor, len(suite))
        if epoch not in orders:
            orders[epoch] = _epoch_order(suite, epoch, seed)
        task_id = orders[epoch][place]
        cursor += 1
        if wanted > len(suite) or task_id not in drawn:
            drawn.append(task_id)
    groups = [
        GroupPlan(group_id=digest_of([seed, iteration, index, task_id])[:32], index=index, task_id=task_id)
        for index, task_id in enumerate(drawn, len(carried))
    ]
    return [*carried, *groups[:count]], groups[count:], cursor


def _epoch_order(suite: Sequence[str], epoch: int, seed: int) -> list[str]:
    """One epoch's permutation: the tasks by their digest under (seed, epoch), the same on every Python version."""
    return sorted(suite, key=lambda task_id: digest_of([seed, epoch, task_id]))
