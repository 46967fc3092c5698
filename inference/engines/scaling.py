"""Scale the StatefulSet of a fleet to zero and back through the Kubernetes API.

Rights needed: get and patch of statefulsets/scale; list of pods and events for the words of a failure (left out where
the account may not).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from contracts.kubernetes_client import TIMEOUT_S, ClusterError, connect, explain, namespace
from contracts.retries import backoff_s

T = TypeVar("T")
PATIENCE_S = 60.0
"""Seconds for which a call is repeated while the API server is away."""
PASSING = {None, 0, 408, 429, 500, 502, 503, 504}
"""HTTP statuses of faults that pass; None: no reply."""
_SHOWN = 3
_log = logging.getLogger(__name__)


class Scale:
    """Number of replicas of one StatefulSet. Blocking: call it in a thread."""

    def __init__(self, name: str) -> None:
        self._name, self._namespace = name, namespace()

    def set(self, replicas: int) -> int:
        """Scale, and return the previous number of replicas asked for. Raises ClusterError, ConfigError."""
        what = f"scale statefulset {self._namespace}/{self._name} to {replicas}"
        place = {"name": self._name, "namespace": self._namespace, "_request_timeout": TIMEOUT_S}

        def scale(client: Any, api: Any) -> int:
            apps = client.AppsV1Api(api)
            before = int(apps.read_namespaced_stateful_set_scale(**place).spec.replicas or 0)
            if before != replicas:
                apps.patch_namespaced_stateful_set_scale(body={"spec": {"replicas": replicas}}, **place)
                _log.info("statefulset %s/%s: %d -> %d replicas", self._namespace, self._name, before, replicas)
            return before

        return self._call(what, scale)

    def words(self) -> str:
        """What the cluster says about the pods that are not ready; empty if it says nothing."""

        def said(client: Any, api: Any) -> str:
            core = client.CoreV1Api(api)
            place = {"namespace": self._namespace, "_request_timeout": TIMEOUT_S}
            pods = [each for each in core.list_namespaced_pod(**place).items if _is_owned(each, self._name)]
            faults = [fault for pod in pods if (fault := _pod_fault(pod))]
            names = {self._name, *(pod.metadata.name for pod in pods)}
            events = sorted(
                (
                    each
                    for each in core.list_namespaced_event(field_selector="type=Warning", **place).items
                    if each.involved_object.name in names
                ),
                key=lambda each: str(each.last_timestamp or each.event_time or ""),
            )
            faults += [f"{each.involved_object.name}: {each.reason}: {each.message}" for each in events[-_SHOWN:]]
            return "; ".join(dict.fromkeys(" ".join(fault.split()) for fault in faults))

        try:
            return self._call(f"list the pods and events of {self._namespace}", said)
        except ClusterError as error:
            return f"its pods are unknown ({error})"

    def _call(self, what: str, work: Callable[[Any, Any], T]) -> T:
        """Result of work(kubernetes.client, connection)."""
        api = connect()
        from kubernetes import client
        from urllib3.exceptions import HTTPError

        until, failures = time.monotonic() + PATIENCE_S, 0
        try:
            while True:
                try:
                    return work(client, api)
                except (client.ApiException, HTTPError) as error:
                    failures += 1
                    passing = getattr(error, "status", None) in PASSING
                    if not passing or time.monotonic() > until:
                        raise explain(error, what) from None
                time.sleep(backoff_s(failures, 1.0, 10.0))
        finally:
            api.close()


def _is_owned(pod: Any, name: str) -> bool:
    """Whether the StatefulSet `name` made this pod."""
    return any(each.kind == "StatefulSet" and each.name == name for each in pod.metadata.owner_references or [])


def _pod_fault(pod: Any) -> str:
    """Why a pod does not run, or an empty string."""
    status = pod.status
    for condition in status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{pod.metadata.name}: {condition.reason}: {condition.message}"
    for container in [*(status.init_container_statuses or []), *(status.container_statuses or [])]:
        state = container.state
        if state and state.waiting and state.waiting.reason not in (None, "ContainerCreating", "PodInitializing"):
            return f"{pod.metadata.name}/{container.name}: {state.waiting.reason}: {state.waiting.message or ''}"
        if state and state.terminated and state.terminated.exit_code:
            return f"{pod.metadata.name}/{container.name}: {state.terminated.reason} ({state.terminated.exit_code})"
    return ""
