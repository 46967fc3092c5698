"""Connection to the API server of a Kubernetes cluster, with the official Python client (extra `pods`).

In a pod: the service account's token. Elsewhere: $KUBECONFIG, else ~/.kube/config. The package is imported on use only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError, InfraFault

NAMESPACE_VARIABLE = "TRIPLANE_KUBERNETES_NAMESPACE"
"""Namespace of our objects; default: this pod's own, else that of the kubeconfig's context."""
TIMEOUT_S = 30.0
"""Timeout of one call, in seconds, as `_request_timeout`."""
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ClusterError(InfraFault):
    """The API server can't be reached or refuses a call."""


def connect() -> Any:
    """Client of the cluster's API server (`kubernetes.client.ApiClient`). Raises ConfigError."""
    try:
        from kubernetes import client, config
        from kubernetes.config.config_exception import ConfigException
        from yaml import YAMLError
    except ImportError:
        raise ConfigError("the package kubernetes is missing: pip install 'triplane[pods]'") from None
    settings = client.Configuration()
    settings.retries = False  # callers retry, with pauses
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and (_ACCOUNT / "token").is_file():
            config.load_incluster_config(client_configuration=settings)
        else:
            config.load_kube_config(_kubeconfig(), client_configuration=settings, persist_config=False)
    except (ConfigException, OSError, ValueError, KeyError, AttributeError, TypeError, YAMLError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"no Kubernetes cluster is configured ({said}): set KUBECONFIG, or run in a pod") from None
    return client.ApiClient(settings)


def namespace() -> str:
    """Namespace of our objects: $TRIPLANE_KUBERNETES_NAMESPACE, else this pod's, else kubeconfig's, else `default`."""
    chosen = os.environ.get(NAMESPACE_VARIABLE)
    if chosen:
        return chosen
    try:
        return (_ACCOUNT / "namespace").read_text().strip()
    except OSError:
        pass
    try:
        from kubernetes import config
        from kubernetes.config.config_exception import ConfigException

        return str(config.list_kube_config_contexts(_kubeconfig())[1]["context"].get("namespace") or "default")
    except (ImportError, ConfigException, OSError, KeyError, TypeError):
        return "default"


def _kubeconfig() -> str:
    """Path of the kubeconfig file; the package reads the variable only when it is imported."""
    return os.environ.get("KUBECONFIG") or str(Path.home() / ".kube/config")


def explain(error: Exception, what: str) -> ClusterError:
    """One line for a failed call. what: the call in words, e.g. `scale statefulset engines`."""
    status, reason = getattr(error, "status", None), getattr(error, "reason", None)
    if not status:
        said = " ".join(str(getattr(error, "reason", None) or error).split())
        return ClusterError(f"can't {what}: the API server can't be reached ({said[:200]}): check it and the network")
    try:
        said = str(json.loads(getattr(error, "body", None) or "")["message"])
    except (ValueError, KeyError, TypeError):
        said = str(reason)
    fix = {401: "check the token", 403: "grant the right to the service account", 404: "create it, or correct its name"}
    return ClusterError(f"can't {what}: {said} ({status}): {fix.get(int(status), 'retry, or correct the request')}")
