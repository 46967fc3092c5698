"""Where the pods of an experiment run on Kubernetes. No action key depends on it; elsewhere it has no effect."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from resources.section import Section

_PREFIX, _LOCAL = r"[a-z0-9A-Z]([-a-z0-9A-Z.]{0,251}[a-z0-9A-Z])?/", r"[a-zA-Z0-9]([-a-zA-Z0-9_.]{0,61}[a-zA-Z0-9])?"
_LABEL, _RESOURCE = f"^({_PREFIX})?{_LOCAL}$", f"^{_PREFIX}{_LOCAL}$"
_NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
_VALUE = r"^([a-zA-Z0-9]([-a-zA-Z0-9_.]{0,61}[a-zA-Z0-9])?)?$"

Label = Annotated[str, Field(pattern=_LABEL)]
LabelValue = Annotated[str, Field(pattern=_VALUE)]
Memory = Annotated[str, Field(pattern=r"^[1-9][0-9]*(Mi|Gi|Ti)$")]


class Toleration(Section):
    """A taint of nodes that the pods accept."""

    key: str = Field(pattern=_LABEL)
    """Key of the taint."""
    value: str | None = Field(default=None, pattern=_VALUE)
    """Value of the taint; null: any."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; null: all."""

    def manifest(self) -> dict[str, str]:
        """Kubernetes' form of it."""
        operator = {"operator": "Exists"} if self.value is None else {"operator": "Equal", "value": self.value}
        return {"key": self.key, **operator, **({"effect": self.effect} if self.effect else {})}


class PodPlacement(Section):
    """Resources and nodes of a kind of pods."""

    cpu: float = Field(default=1.0, gt=0, le=1024)
    """CPU cores that are requested. Pods may use more if a node has them."""
    memory: Memory = "4Gi"
    """Memory, requested and limit, such as 512Mi or 64Gi. A pod that needs more is killed."""
    node_selector: dict[Label, LabelValue] = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that the pods accept."""
    priority_class: str | None = Field(default=None, pattern=_NAME)
    """PriorityClass of the cluster; null: the cluster's default."""

    def resources(self) -> dict[str, dict[str, str]]:
        """Requests and limits of the pod's container."""
        requests = {"cpu": f"{max(1, round(self.cpu * 1000))}m", "memory": self.memory}
        return {"requests": requests, "limits": {"memory": self.memory}}

    def pod_fields(self) -> dict[str, Any]:
        """Fields of the pod's specification that choose its nodes, in Kubernetes' spelling."""
        fields = {
            "nodeSelector": dict(self.node_selector),
            "tolerations": [each.manifest() for each in self.tolerations],
            "priorityClassName": self.priority_class,
        }
        return {name: value for name, value in fields.items() if value}


class StepPlacement(PodPlacement):
    """Resources and nodes of run and step pods, which never hold GPUs: they are clients of engines, sandboxes and
    trainers.
    """

    cpu: float = Field(default=0.25, gt=0, le=1024)
    """CPU cores that are requested. Pods may use more if a node has them."""
    memory: Memory = "2Gi"
    """Memory, requested and limit, such as 512Mi or 64Gi. A pod that needs more is killed."""


class TrainerPlacement(PodPlacement):
    """Resources and nodes of a trainer's pods, one for each of `trainer.launcher.nodes`."""

    gpu_resource: str = Field(default="nvidia.com/gpu", pattern=_RESOURCE)
    """Resource that counts `trainer.launcher.gpus`, such as nvidia.com/gpu or nvidia.com/mig-3g.40gb."""
    workload: Literal["job", "jobset"] = "job"
    """Kind of the object that holds the pods: a Job, or a JobSet (jobset.x-k8s.io/v1alpha2) where the cluster has its
    controller and the deployment the right to make them."""
    queue: str | None = Field(default=None, pattern=_NAME)
    """Kueue's LocalQueue that admits all pods of a training together; null: the scheduler places each pod."""
    start_timeout_s: float = Field(default=600.0, gt=0, le=1_000_000_000)
    """Seconds in which all pods must have started, images and waiting for free nodes included."""

    def resources_with(self, gpus: int) -> dict[str, dict[str, str]]:
        """Requests and limits of a pod with `gpus` GPUs."""
        found = self.resources()
        if gpus:
            found["limits"][self.gpu_resource] = found["requests"][self.gpu_resource] = str(gpus)
        return found


class PlacementConfig(Section):
    """Where the pods of an experiment run on Kubernetes."""

    steps: StepPlacement = StepPlacement()
    """Run and step pods."""
    trainer: TrainerPlacement = TrainerPlacement()
    """The trainer's pods."""
