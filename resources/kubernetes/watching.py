"""State of a training's Job and pods, gathered over many looks: pods that are gone are remembered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from resources.kubernetes.manifests import CONTAINER, node_count

Object = dict[str, Any]
Sign = Literal["disrupted", "killed", "deleted", "gone", "failed", "lost"]

STATUS_OF_LOST = 3
"""Exit status of a trainer that ends since another one did: `trainer.errors.RANKS_LOST_STATUS`."""


@dataclass
class PodRecord:
    """A pod as it was seen last."""

    pod: Object
    gone: bool = False
    """Whether it was in an earlier list, but not in the last one."""

    @property
    def name(self) -> str:
        """Name of the pod."""
        return str(self.pod["metadata"]["name"])

    @property
    def uid(self) -> str:
        """Uid of the pod."""
        return str(self.pod["metadata"]["uid"])

    @property
    def deleting(self) -> bool:
        """Whether somebody deleted it."""
        return "deletionTimestamp" in self.pod["metadata"]

    @property
    def node(self) -> str:
        """Node that it was placed on, or nothing."""
        return str(self.pod["spec"].get("nodeName") or "")

    @property
    def state(self) -> Object:
        """State of the trainer's container: {} or one of waiting, running, terminated."""
        statuses = self.pod.get("status", {}).get("containerStatuses") or []
        found: Object = next((each.get("state") or {} for each in statuses if each["name"] == CONTAINER), {})
        return found

    @property
    def ended(self) -> Object | None:
        """How the container ended, or None."""
        found: Object | None = self.state.get("terminated")
        return found

    @property
    def started(self) -> bool:
        """Whether the container has started."""
        return "running" in self.state or self.ended is not None

    @property
    def status(self) -> int | None:
        """Exit status of the container, or None."""
        return None if self.ended is None else int(self.ended.get("exitCode", 1))

    @property
    def disruption(self) -> Object | None:
        """Condition that says why Kubernetes took the pod away, or None."""
        return condition(self.pod, "DisruptionTarget")

    @property
    def sign(self) -> Sign | None:
        """Why the training can't go on with this pod, or None."""
        if self.disruption is not None:
            return "disrupted"
        if self.status == STATUS_OF_LOST:
            return "lost"
        if (self.status is not None and 0 < self.status <= 128) or self._out_of_memory:
            return "failed"
        if self.status == 0:
            return None
        if self.deleting:
            return "deleted"
        if self.status is not None:
            return "killed"
        if self.pod.get("status", {}).get("phase") == "Failed":
            return "disrupted"  # by its kubelet, before the container started
        return "gone" if self.gone else None

    @property
    def _out_of_memory(self) -> bool:
        return self.ended is not None and self.ended.get("reason") == "OOMKilled"


@dataclass
class Watched:
    """A training, its pods by uid, and the order in which they gave a sign of failure."""

    training: Object
    """The Job or JobSet that the launcher created."""
    job: Object | None = None
    """Job that the pods belong to: the training itself, or the one in the JobSet, once its controller created it."""
    pods: dict[str, PodRecord] = field(default_factory=dict)
    signs: list[str] = field(default_factory=list)

    def update(self, training: Object, job: Object | None, pods: list[Object]) -> None:
        """Take what a look found."""
        self.training, self.job = training, job
        seen = {pod["metadata"]["uid"]: pod for pod in pods}
        for uid, record in self.pods.items():
            record.gone = uid not in seen
        for uid, pod in seen.items():
            self.pods[uid] = PodRecord(pod)
        for uid, record in self.pods.items():
            if record.sign is not None and uid not in self.signs:
                self.signs.append(uid)

    @property
    def records(self) -> list[PodRecord]:
        """Pods by name."""
        return sorted(self.pods.values(), key=lambda record: record.name)

    @property
    def first_signs(self) -> list[PodRecord]:
        """Pods that gave a sign of failure, the first one first."""
        return [self.pods[uid] for uid in self.signs]

    @property
    def all_started(self) -> bool:
        """Whether every pod has started."""
        return sum(record.started for record in self.pods.values()) >= node_count(self.training)

    @property
    def complete(self) -> bool:
        """Whether all pods ended well."""
        return self._condition("Complete", "Completed") is not None

    @property
    def failed(self) -> Object | None:
        """Condition that says why the Job or JobSet fails, or None."""
        return self._condition("Failed", "FailureTarget")

    @property
    def settled(self) -> bool:
        """Whether no container runs any more."""
        return self._condition("Failed") is not None or not any(
            "running" in record.state and not record.gone for record in self.pods.values()
        )

    def _condition(self, *kinds: str) -> Object | None:
        """The first of these conditions that holds; those of the pods' Job, which tell more, before the JobSet's."""
        found = (condition(each, kind) for each in (self.job, self.training) if each for kind in kinds)
        return next(filter(None, found), None)


def condition(whole: Object, kind: str) -> Object | None:
    """Condition of an object that holds, or None."""
    conditions = (whole.get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == kind and each["status"] == "True"), None)
