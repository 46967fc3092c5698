"""Client of the API server: objects as dictionaries in Kubernetes' spelling, with timeouts and retries."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from contracts import kubernetes_client
from contracts.errors import ConfigError
from contracts.retries import backoff_s
from resources.errors import LaunchFailed
from resources.kubernetes.manifests import JOBSETS

Object = dict[str, Any]
Kind = Literal["Job", "JobSet"]

_TIMEOUT_S = (5.0, 30.0)
"""Seconds to wait for a connection, and for the next byte."""
_RETRIED = {0, 408, 429, 500, 502, 503, 504}
_PATIENCE_S = 60.0
_CHUNK = 1 << 16


class ApiFault(LaunchFailed):
    """The API server refused a request."""

    def __init__(self, words: str, status: int) -> None:
        super().__init__(words)
        self.status = status


class ApiUnreachable(ApiFault):
    """The API server did not answer, or had an internal error, for a while."""


def connect() -> Api:
    """Client of the cluster that this process runs in, else of the kubeconfig's. Raises LaunchFailed."""
    try:
        return Api(kubernetes_client.connect(), kubernetes_client.namespace())
    except ConfigError as error:
        raise LaunchFailed(f"trainer.launcher on kubernetes: {error}; or set TRIPLANE_LAUNCHER to local") from None


@dataclass(frozen=True)
class _Calls:
    """Functions of the official client for one kind of objects."""

    plural: str
    create: Callable[..., Any]
    read: Callable[..., Any]
    list: Callable[..., Any]
    delete: Callable[..., Any]


class Api:
    """Requests for the objects of one namespace. Each raises ApiFault, or ApiUnreachable after `patience_s`.

    A training is a Job or a JobSet; those that are returned have their `kind`.
    """

    def __init__(self, connection: Any, namespace: str) -> None:
        from kubernetes import client

        self.namespace = namespace
        self._core, batch = client.CoreV1Api(connection), client.BatchV1Api(connection)
        self._trainings = {
            "Job": _Calls(
                "jobs",
                batch.create_namespaced_job,
                batch.read_namespaced_job,
                batch.list_namespaced_job,
                batch.delete_namespaced_job,
            ),
            "JobSet": _jobset_calls(client.CustomObjectsApi(connection)),
        }

    def create_training(self, body: Object) -> Object | None:
        """The created Job or JobSet, or None if its name is taken."""
        calls = self._trainings[body["kind"]]
        return self._create(calls.plural, calls.create, body)

    def create_service(self, body: Object) -> Object | None:
        """The created Service, or None if its name is taken."""
        return self._create("services", self._core.create_namespaced_service, body)

    def training(self, kind: Kind, name: str, patience_s: float = _PATIENCE_S) -> Object | None:
        """A Job or JobSet, or None."""
        calls = self._trainings[kind]
        found = self._get(calls.plural, calls.read, name, patience_s)
        return found and {**found, "kind": kind}

    def service(self, name: str) -> Object | None:
        """A Service, or None."""
        return self._get("services", self._core.read_namespaced_service, name, _PATIENCE_S)

    def trainings(self, kind: Kind, labels: str, patience_s: float = _PATIENCE_S) -> list[Object]:
        """Jobs or JobSets that match a label selector."""
        calls = self._trainings[kind]
        found = self._list(calls.plural, calls.list, patience_s, label_selector=labels)
        return [{**each, "kind": kind} for each in found]

    def pods(self, labels: str, patience_s: float = _PATIENCE_S) -> list[Object]:
        """Pods that match a label selector."""
        return self._list("pods", self._core.list_namespaced_pod, patience_s, label_selector=labels)

    def events(self, fields: str, patience_s: float = _PATIENCE_S) -> list[Object]:
        """Events that match a field selector, oldest first."""
        found = self._list("events", self._core.list_namespaced_event, patience_s, field_selector=fields)
        return sorted(found, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))

    def delete_training(self, training: Object, patience_s: float = _PATIENCE_S) -> None:
        """Delete this very Job or JobSet, and not another one of its name; one that is gone is ignored.

        It goes after its pods.
        """
        meta, calls = training["metadata"], self._trainings[training["kind"]]
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": meta["uid"]}}
        self._delete(calls.plural, calls.delete, meta["name"], body, patience_s)

    def delete_service(self, service: Object) -> None:
        """Delete this very Service; one that is gone is ignored."""
        body = {"preconditions": {"uid": service["metadata"]["uid"]}}
        self._delete("services", self._core.delete_namespaced_service, service["metadata"]["name"], body, _PATIENCE_S)

    def force_delete_pod(self, pod: Object) -> None:
        """Remove a pod whose node does not answer; one that is gone is ignored."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        self._delete("pods", self._core.delete_namespaced_pod, pod["metadata"]["name"], body, _PATIENCE_S)

    def log(self, pod: str, limit: int, patience_s: float = _PATIENCE_S) -> bytes:
        """The end of a pod's log: at most `limit` bytes."""

        def read(**options: Any) -> bytes:
            response = self._core.read_namespaced_pod_log(pod, self.namespace, tail_lines=20_000, **options)
            kept = b""
            for chunk in response.stream(_CHUNK):
                kept = (kept + chunk)[-limit:]
            return kept

        found: bytes = self._call("get", "pods/log", read, patience_s)
        return found

    def _create(self, kind: str, function: Callable[..., Any], body: Object) -> Object | None:
        try:
            made: Object = self._json("create", kind, function, _PATIENCE_S, self.namespace, body)
        except ApiFault as fault:
            if fault.status == 409:
                return None
            raise
        return made

    def _get(self, kind: str, function: Callable[..., Any], name: str, patience_s: float) -> Object | None:
        try:
            found: Object = self._json("get", kind, function, patience_s, name, self.namespace)
        except ApiFault as fault:
            if fault.status == 404:
                return None
            raise
        return found

    def _list(self, kind: str, function: Callable[..., Any], patience_s: float, **options: str) -> list[Object]:
        found: list[Object] = self._json("list", kind, function, patience_s, self.namespace, **options)["items"]
        return found

    def _delete(
        self, kind: str, function: Callable[..., Any], name: str, body: Mapping[str, Any], patience_s: float
    ) -> None:
        try:
            self._json("delete", kind, function, patience_s, name, self.namespace, body=body)
        except ApiFault as fault:
            if fault.status not in (404, 409):  # gone, or another object has its name
                raise

    def _json(
        self, verb: str, kind: str, function: Callable[..., Any], patience_s: float, *names: Any, **options: Any
    ) -> Any:
        return json.loads(
            self._call(verb, kind, lambda **more: function(*names, **options, **more).data, patience_s) or b"{}"
        )

    def _call(self, verb: str, kind: str, function: Callable[..., Any], patience_s: float) -> Any:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        failures, until = 0, time.monotonic() + patience_s
        while True:
            try:
                return function(_preload_content=False, _request_timeout=_TIMEOUT_S)
            except ApiException as error:
                if error.status not in _RETRIED:
                    raise _refusal(verb, kind, self.namespace, error) from None
                said = _words(error)
            except (HTTPError, OSError) as error:
                said = " ".join(str(error).split())
            failures += 1
            pause = backoff_s(failures, 0.5, 10.0)
            if time.monotonic() + pause > until:
                raise ApiUnreachable(
                    f"the Kubernetes API server does not answer ({said:.200}): check it; the same command continues", 0
                )
            time.sleep(pause)


def _jobset_calls(custom: Any) -> _Calls:
    """Calls for JobSets, with the arguments of those for Jobs."""
    group, version = JOBSETS.split("/")

    def create(namespace: str, body: Object, **options: Any) -> Any:
        return custom.create_namespaced_custom_object(group, version, namespace, "jobsets", body, **options)

    def read(name: str, namespace: str, **options: Any) -> Any:
        return custom.get_namespaced_custom_object(group, version, namespace, "jobsets", name, **options)

    def list_(namespace: str, **options: Any) -> Any:
        return custom.list_namespaced_custom_object(group, version, namespace, "jobsets", **options)

    def delete(name: str, namespace: str, **options: Any) -> Any:
        return custom.delete_namespaced_custom_object(group, version, namespace, "jobsets", name, **options)

    return _Calls("jobsets", create, read, list_, delete)


def _refusal(verb: str, kind: str, namespace: str, error: Any) -> ApiFault:
    words, status = _words(error), int(error.status)
    if status == 404 and kind == "jobsets":
        fix = "install the JobSet controller, or set placement.trainer.workload to job"
        return ApiFault(f"the cluster does not know {JOBSETS} ({words}): {fix}", status)
    if status in (401, 403) and "quota" not in words:
        fix = f"grant the verb {verb} on {kind} in the namespace {namespace}, or check the credentials"
        return ApiFault(f"the Kubernetes API server refuses to {verb} {kind} ({words}): {fix}", status)
    return ApiFault(f"the Kubernetes API server refuses to {verb} {kind} ({status}): {words}", status)


def _words(error: Any) -> str:
    """What the API server said, in one line."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        said = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        said = body or error.reason
    return " ".join(str(said).split())[:500]
