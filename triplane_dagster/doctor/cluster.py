"""Checks of a Kubernetes cluster for Triplane: from a laptop by kubeconfig, or from inside by the pod's own account.

What an account may not read (nodes, classes: they belong to no namespace) is told as not checked, with the command that
an administrator can run.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from contracts import kubernetes_client
from contracts.addresses import DNS
from contracts.kubernetes_client import namespace
from resources.kubernetes.manifests import JOBSETS
from triplane_dagster.doctor.cluster_rights import JOBSET_RIGHTS, RIGHTS, Right
from triplane_dagster.doctor.findings import Check, Finding, broken, missing, ok, one_line
from triplane_dagster.doctor.services import STORE_S, store

if TYPE_CHECKING:
    from resources.experiment import Experiment

OLDEST = (1, 30)
"""Oldest version of Kubernetes that is supported."""
SKEW_S = 30.0
"""Largest difference of clocks, in seconds; S3 refuses requests from 15 minutes on, and leases hold for 60 s."""
TIMEOUT_S = (5.0, 10.0)
VARIABLES = {
    "TRIPLANE_STORE": "artifacts",
    "TRIPLANE_LOGS_BUCKET": "logs of steps",
    "TRIPLANE_EXECUTOR": "where steps run",
    "TRIPLANE_LAUNCHER": "where trainers run",
    "TRIPLANE_KUBERNETES_IMAGE": "the image of trainers",
    "TRIPLANE_KUBERNETES_SERVICE_ACCOUNT": "trainers without rights",
}
"""Variables that pods need, and for what."""
ADDRESSES = ("DAGSTER_POSTGRES_HOST", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "TRIPLANE_ENVD", "TRIPLANE_STEP_POOL")
"""Variables that name services, as hosts, host:port lists or URLs."""
_ADMIN = "run this with an administrator's kubeconfig"


def checks(experiments: Sequence[Experiment]) -> list[Check]:
    """Checks of the cluster that $KUBECONFIG names, or that this process runs in."""
    return [
        Check("API server", "everything", api_server, required=True),
        Check("rights", "runs, steps, trainers", partial(rights, experiments), required=True),
        Check("settings", "pods", settings, required=True),
        Check("store", "artifacts of all pods", shared_store, required=True, timeout_s=STORE_S),
        Check("clock", "S3, leases", clock, required=True),
        Check("names of services", "pods", names, required=True),
        Check("JobSets", "trainers of experiments", partial(jobsets, experiments)),
        Check("classes", "placement of experiments", partial(classes, experiments)),
        Check("GPUs", "trainers of experiments", partial(gpus, experiments)),
    ]


def api_server() -> Finding:
    """Ask the API server for its version."""
    try:
        from kubernetes import client as kube
    except ImportError:
        return missing("no client (kubernetes)", "`pip install 'triplane[pods]'`")
    connection = kubernetes_client.connect()
    version = kube.VersionApi(connection).get_code(_request_timeout=TIMEOUT_S)
    said = f"{version.git_version} at {connection.configuration.host}, namespace {namespace()}"
    numbers = tuple(int(re.sub(r"\D", "", part) or 0) for part in (version.major, version.minor))
    if numbers < OLDEST:
        return broken(said, f"use Kubernetes {OLDEST[0]}.{OLDEST[1]} or newer")
    return ok(said)


def rights(experiments: Sequence[Experiment]) -> Finding:
    """Ask for each right of the chart's role; name those that lack, with the feature that needs them."""
    from kubernetes import client as kube

    api, place = kube.AuthorizationV1Api(kubernetes_client.connect()), namespace()
    wanted = [*RIGHTS, *(JOBSET_RIGHTS if _with_jobsets(experiments) else ())]
    lacking = [right for right in wanted if not _allowed(api, place, right)]
    if lacking:
        said = "; ".join(f"no right to {right}: {right.feature}" for right in lacking)
        role = "the chart's Role; for jobsets its value trainer.jobset"
        return broken(one_line(said, 1000), f"grant them to this account in the namespace {place} ({role})")
    return ok(f"all {len(wanted)} of the chart's Role in {place}")


def jobsets(experiments: Sequence[Experiment]) -> Finding:
    """Check that the cluster knows JobSets if an experiment trains as one."""
    from kubernetes import client as kube
    from kubernetes.client import ApiException

    named = _with_jobsets(experiments)
    if not named:
        return ok("no experiment asks for them")
    group, version = JOBSETS.split("/")
    try:
        kube.CustomObjectsApi(kubernetes_client.connect()).get_api_resources(group, version, _request_timeout=TIMEOUT_S)
    except ApiException as error:
        if error.status != 404:
            raise
        fix = "install the JobSet controller, or set placement.trainer.workload to job"
        return broken(f"the cluster does not know {JOBSETS}: {', '.join(named)} asks for it", fix)
    return ok(f"{JOBSETS}, for {', '.join(named)}")


def _with_jobsets(experiments: Sequence[Experiment]) -> list[str]:
    return [each.name for each in experiments if each.placement.trainer.workload == "jobset"]


def _allowed(api: Any, place: str, right: Right) -> bool:
    attributes = {
        "namespace": place,
        "verb": right.verb,
        "group": right.group,
        "resource": right.resource,
        "subresource": right.subresource,
    }
    review = {"spec": {"resourceAttributes": {name: value for name, value in attributes.items() if value}}}
    return bool(api.create_self_subject_access_review(review, _request_timeout=TIMEOUT_S).status.allowed)


def settings() -> Finding:
    """Check the variables by which pods find what they need."""
    lacking = [f"{name} ({purpose})" for name, purpose in VARIABLES.items() if not os.environ.get(name)]
    if lacking:
        return broken(f"not set: {', '.join(lacking)}", "set them in the chart's values, or run this in a pod")
    steps, trainers, image = (
        os.environ[name] for name in ("TRIPLANE_EXECUTOR", "TRIPLANE_LAUNCHER", "TRIPLANE_KUBERNETES_IMAGE")
    )
    return ok(f"steps: {steps}; trainers: {trainers}; image {image}")


def shared_store() -> Finding:
    """Check that the store is one that all pods share, and that it keeps writers apart."""
    url = os.environ.get("TRIPLANE_STORE", "")
    if not url.startswith("s3:"):
        return broken(f"TRIPLANE_STORE={url or '(not set)'} is a folder of one machine", "use s3://bucket/prefix")
    return store()


def clock() -> Finding:
    """Compare this machine's clock with the dates in replies of the API server and of S3."""
    apart = [(name, date - time.time()) for name, date in _dates()]
    said = ", ".join(f"{seconds:+.0f} s from {name}" for name, seconds in apart)
    if any(abs(seconds) > SKEW_S for _, seconds in apart):
        return broken(f"{said}: more than {SKEW_S:g} s", "start a time service on every node, e.g. chrony")
    return ok(said)


def _dates() -> Iterator[tuple[str, float]]:
    from kubernetes import client as kube

    _, _, headers = kube.VersionApi(kubernetes_client.connect()).get_code_with_http_info(_request_timeout=TIMEOUT_S)
    yield "the API server", _date(headers)
    url = os.environ.get("TRIPLANE_STORE", "")
    if url.startswith("s3:"):
        from botocore.exceptions import BotoCoreError, ClientError

        from contracts.s3client import connect

        try:
            headers = connect().head_bucket(Bucket=urlsplit(url).netloc)["ResponseMetadata"]["HTTPHeaders"]
        except ClientError as error:
            headers = error.response["ResponseMetadata"]["HTTPHeaders"]
        except BotoCoreError:
            return  # the check of the store tells it
        yield "S3", _date(headers)


def _date(headers: Mapping[str, str]) -> float:
    found = next(value for name, value in headers.items() if name.lower() == "date")
    return parsedate_to_datetime(found).timestamp()


def names() -> Finding:
    """Resolve the hosts of services that the environment names."""
    hosts = sorted({host for name in ADDRESSES for host in _hosts(os.environ.get(name, ""))})
    unknown = [host for host in hosts if not _resolves(host)]
    if unknown:
        fix = "run this in a pod, where the cluster's names exist, or correct the address"
        return broken(f"no such host: {', '.join(unknown)}", fix)
    return ok(", ".join(hosts) or "no service is named")


def _hosts(value: str) -> Iterator[str]:
    for part in filter(None, (each.strip() for each in value.split(","))):
        host = urlsplit(part if "://" in part else f"//{part.removeprefix(DNS)}").hostname
        if host and not part.startswith("unix:"):
            yield host


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def classes(experiments: Sequence[Experiment]) -> Finding:
    """Check that priority classes named by experiments, and runtime classes named by sandboxes, exist."""
    from kubernetes import client as kube

    wanted: dict[str, str] = {}
    for each in experiments:
        for kind in ("steps", "trainer"):
            named = getattr(each.placement, kind).priority_class
            if named:
                wanted[named] = f"{each.name}: placement.{kind}.priority_class"
    listed = _listed(kube.SchedulingV1Api(kubernetes_client.connect()).list_priority_class)
    runtime = os.environ.get("TRIPLANE_ENVD_PODS_RUNTIME_CLASS")
    runtimes = _listed(kube.NodeV1Api(kubernetes_client.connect()).list_runtime_class) if runtime else []
    if listed is None or runtimes is None:
        return missing("not checked: this account may not list classes", f"{_ADMIN}, or `kubectl get priorityclasses`")
    unknown = [f"priority class {name} ({where})" for name, where in wanted.items() if name not in _named(listed)]
    if runtime and runtime not in _named(runtimes):
        unknown.append(f"runtime class {runtime} ($TRIPLANE_ENVD_PODS_RUNTIME_CLASS)")
    if unknown:
        return broken(f"no {', no '.join(unknown)}", "create it, or correct the setting")
    return ok(f"{', '.join([*wanted, *filter(None, [runtime])]) or 'none is named'}")


def gpus(experiments: Sequence[Experiment]) -> Finding:
    """Check that some nodes have the GPUs that a trainer's pods request."""
    from kubernetes import client as kube

    nodes = _listed(kube.CoreV1Api(kubernetes_client.connect()).list_node)
    if nodes is None:
        return missing("not checked: this account may not list nodes", f"{_ADMIN}, or `kubectl describe nodes`")
    told: list[str] = []
    lacking: list[str] = []
    for each in experiments:
        launcher, resource = each.trainer.launcher, each.placement.trainer.gpu_resource
        if not launcher.gpus:
            continue
        fitting = sum(int(node.status.allocatable.get(resource, 0)) >= launcher.gpus for node in nodes)
        said = f"{each.name}: {launcher.nodes} x {launcher.gpus} {resource}, {fitting} nodes have them"
        (told if fitting >= launcher.nodes else lacking).append(said)
    if lacking:
        return broken("; ".join(lacking), "add nodes, or correct placement.trainer.gpu_resource or trainer.launcher")
    return ok("; ".join(told) or "no experiment asks for GPUs")


def _named(objects: Sequence[Any]) -> set[str]:
    return {each.metadata.name for each in objects}


def _listed(read: Callable[..., Any]) -> list[Any] | None:
    """All objects of a kind, or None if this account may not list them."""
    from kubernetes.client import ApiException

    try:
        return list(read(_request_timeout=TIMEOUT_S).items)
    except ApiException as error:
        if error.status in (401, 403):
            return None
        raise
