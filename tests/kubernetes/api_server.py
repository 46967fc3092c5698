"""Stand-in for a Kubernetes API server, its Job controller and its kubelet, on one port of this machine.

Paths, objects and words are those of Kubernetes 1.36, as far as our launcher and dagster-k8s 0.29 use them: jobs, pods,
pods/log (follow, timestamps), services, events, config maps, secrets and any other kind by name. So are JobSets, where
their controller is installed. Pods run as processes:

    with serving(Cluster(tmp_path)) as cluster:            sets KUBECONFIG, so that every client finds it
        cluster.add("configmaps", {"metadata": {"name": "env"}, "data": {"A": "1"}})
        cluster.pods()                                     what runs
        cluster.kubelet.kill(pod)                          kill -9 in its container
        cluster.down(30)                                   connections are refused for 30 s
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.kubernetes.controllers import Controllers
from tests.kubernetes.jobset_controller import API, admitted
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.objects import Object, Objects, Refused, matches, merge, now

NAMESPACE = "triplane"
KINDS = {"jobs": "Job", "pods": "Pod", "services": "Service", "events": "Event", "configmaps": "ConfigMap"}
VERSION = {
    "major": "1",
    "minor": "36",
    "gitVersion": "v1.36.0",
    "gitCommit": "0" * 40,
    "gitTreeState": "clean",
    "buildDate": "2026-04-22T00:00:00Z",
    "goVersion": "go1.26.0",
    "compiler": "gc",
    "platform": "linux/amd64",
}
_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>v[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+)(?:/(?P<sub>[a-z]+))?)?$"
)
_VERBS = {"POST": "create", "DELETE": "delete", "PATCH": "patch", "PUT": "update"}


class Cluster:
    """A cluster of one node. environment: variables that every pod gets, as from its image."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.objects = folder, Objects()
        self.kubelet = Kubelet(self.objects, folder, environment or {})
        self.controllers = Controllers(self.objects, self.kubelet)
        self.forbidden: set[tuple[str, str]] = set()
        """Verbs and kinds that the client has no right to, such as ("create", "jobs")."""
        self.requests: list[tuple[str, str]] = []
        """Method and path of every request that was answered."""
        self.has_jobsets = False
        """Whether the JobSet controller is installed."""
        self.failing = 0
        """How many of the next requests get a 500."""
        self.url = ""
        self._down_until = 0.0

    def down(self, seconds: float) -> None:
        """Close every connection without an answer for a while."""
        self._down_until = time.monotonic() + seconds

    @property
    def is_down(self) -> bool:
        return time.monotonic() < self._down_until

    def add(self, plural: str, made: Object, namespace: str = NAMESPACE) -> Object:
        """Create an object as an administrator."""
        return self.objects.create(namespace, plural, made)

    def jobs(self) -> list[Object]:
        return self.objects.all("jobs")

    def pods(self, phase: str | None = None) -> list[Object]:
        """Pods in order of their names. phase: only those in it."""
        found = sorted(self.objects.all("pods"), key=lambda pod: str(pod["metadata"]["name"]))
        return [pod for pod in found if phase in (None, pod["status"].get("phase"))]

    def await_pods(self, count: int, phase: str = "Running", timeout_s: float = 60.0) -> list[Object]:
        """Wait until this many pods are in a phase."""
        deadline = time.monotonic() + timeout_s
        while len(found := self.pods(phase)) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} pods are {phase}"
            time.sleep(0.02)
        return found

    def log_of(self, pod: Object) -> str:
        path = self.kubelet.log(pod)
        return path.read_text(errors="replace") if path.exists() else ""

    def sync(self) -> None:
        self.controllers.sync()
        self.kubelet.sync()

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> Object:
        """The object that answers a request. Raises Refused."""
        if path in ("/version", "/version/"):
            return VERSION
        if path == f"/apis/{API}" and self.has_jobsets:
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": API, "resources": []}
        match = _PATH.match(path)
        if match is None:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        namespace, plural, name = match["namespace"] or "", match["plural"], match["name"]
        verb = _VERBS.get(method) or ("get" if name else "list")
        if plural == "jobsets" and not self.has_jobsets:
            raise Refused(404, "NotFound", "404 page not found")
        self._check_right(verb, plural, match["group"] or "", namespace)
        with self.objects.lock:
            if verb == "create":
                return self._create(namespace, plural, body)
            if verb == "list":
                return self._list(namespace, plural, query)
            found = self.objects.get(namespace, plural, name)
            if verb in ("patch", "update"):
                changed = merge(found, body) if verb == "patch" else {**body, "status": found.get("status", {})}
                found.clear()
                found.update(changed)
                self.objects.touch(found)
            elif verb == "delete":
                self._delete(plural, found, query, body or {})
            return found

    def _check_right(self, verb: str, plural: str, group: str, namespace: str) -> None:
        if (verb, plural) in self.forbidden:
            whole = f"{plural}.{group}" if group else plural
            raise Refused(
                403,
                "Forbidden",
                f'{whole} is forbidden: User "system:serviceaccount:{namespace}:runs" cannot {verb} resource'
                f' "{plural}" in API group "{group}" in the namespace "{namespace}"',
            )

    def _create(self, namespace: str, plural: str, body: Object) -> Object:
        if plural == "selfsubjectaccessreviews":
            asked = body["spec"]["resourceAttributes"]
            kind = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
            return {**body, "status": {"allowed": (asked["verb"], kind) not in self.forbidden}}
        meta = body.get("metadata", {})
        for key, value in meta.get("labels", {}).items():
            if len(value) > 63 or not re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", value):
                raise Refused(422, "Invalid", f"metadata.labels: Invalid value: {value!r} of {key}")
        if "name" in meta and (len(meta["name"]) > 63 or not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*)", meta["name"])):
            raise Refused(422, "Invalid", f"metadata.name: Invalid value: {meta['name']!r}")
        if plural == "pods":
            body["status"] = {"phase": "Pending", "conditions": []}
        made = self.objects.create(namespace, plural, admitted(body) if plural == "jobsets" else body)
        if plural == "jobs":
            made["status"] = {}
        return made

    def _list(self, namespace: str, plural: str, query: dict[str, str]) -> Object:
        labels, fields = query.get("labelSelector", ""), query.get("fieldSelector", "")
        found = [each for each in self.objects.all(plural, namespace or None) if matches(each, labels, fields)]
        kind = KINDS.get(plural, plural.capitalize())
        version = "batch/v1" if plural == "jobs" else "v1"
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": {"resourceVersion": "1"}, "items": found}

    def _delete(self, plural: str, found: Object, query: dict[str, str], body: Object) -> None:
        wanted = body.get("preconditions", {}).get("uid")
        if wanted not in (None, found["metadata"]["uid"]):
            raise Refused(409, "Conflict", f"Precondition failed: UID in precondition: {wanted}")
        policy = body.get("propagationPolicy") or query.get("propagationPolicy")
        grace = body.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
        if plural == "pods":
            self.kubelet.delete(found, None if grace is None else float(grace))
        elif policy == "Foreground":
            found["metadata"].setdefault("deletionTimestamp", now())
        else:
            self.objects.remove(found, plural)

    def log_pieces(self, path: str, query: dict[str, str]) -> Iterator[bytes]:
        """A pod's log, in pieces if it is followed. Raises Refused."""
        match = _PATH.match(path)
        assert match is not None
        self._check_right("get", "pods/log", "", match["namespace"])
        pod = self.objects.get(match["namespace"], "pods", match["name"])
        if pod["status"].get("phase") == "Pending":
            container = pod["spec"]["containers"][0]["name"]
            said = f'container "{container}" in pod "{match["name"]}" is waiting to start: ContainerCreating'
            raise Refused(400, "BadRequest", said)
        return self._pieces(pod, query)

    def _pieces(self, pod: Object, query: dict[str, str]) -> Iterator[bytes]:
        place, stamp = 0, f"{pod['status'].get('startTime', now())[:-1]}.000000000Z ".encode()
        stamp = stamp if _is_true(query, "timestamps") else b""
        tail = int(query["tailLines"]) if "tailLines" in query else None
        while True:
            ended = pod["status"].get("phase") != "Running"
            data = self.kubelet.log(pod).read_bytes()[place:]
            place += len(data)
            lines = data.splitlines(keepends=True)[-tail if tail else None :]
            tail = None
            yield b"".join(stamp + line for line in lines)[: int(query.get("limitBytes", 1 << 40))]
            if ended or not _is_true(query, "follow"):
                return
            time.sleep(0.05)


def _is_true(query: dict[str, str], name: str) -> bool:
    """Whether a parameter is true as Go's strconv.ParseBool, which the API server calls, reads it."""
    return query.get(name) in ("1", "t", "T", "true", "TRUE", "True")


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            split = urlsplit(self.path)
            query = {key: values[-1] for key, values in parse_qs(split.query).items()}
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            if cluster.is_down:
                self.close_connection = True
                self.connection.close()
                return
            try:
                if cluster.failing > 0:
                    cluster.failing -= 1
                    raise Refused(500, "InternalError", "etcdserver: request timed out")
                if split.path.endswith("/log"):
                    self._log(cluster.log_pieces(split.path, query))
                else:
                    with cluster.objects.lock:
                        answer = json.dumps(cluster.answer(self.command, split.path, query, body)).encode()
                    self._reply(201 if self.command == "POST" else 200, answer)
                cluster.requests.append((self.command, split.path))
            except Refused as refusal:
                said: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
                said |= {"message": str(refusal), "reason": refusal.reason, "code": refusal.status}
                self._reply(refusal.status, json.dumps(said).encode())

        do_POST = do_DELETE = do_PATCH = do_PUT = do_GET

        def _reply(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _log(self, pieces: Iterator[bytes]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            with suppress(OSError):  # a client that no longer follows
                for piece in pieces:
                    self.wfile.write(piece)
                    self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            """Keep quiet."""

    return Handler


@contextmanager
def serving(cluster: Cluster) -> Iterator[Cluster]:
    """Run the cluster in threads; $KUBECONFIG names it meanwhile. Its pods end with it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(cluster))
    server.daemon_threads = True
    cluster.url = f"http://127.0.0.1:{server.server_address[1]}"
    stopping = threading.Event()

    def run() -> None:
        while not stopping.wait(0.02):
            cluster.sync()

    threads = [threading.Thread(target=each, daemon=True) for each in (lambda: server.serve_forever(0.02), run)]
    for thread in threads:
        thread.start()
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = str(write_kubeconfig(cluster))
    try:
        yield cluster
    finally:
        os.environ.pop("KUBECONFIG")
        if before is not None:
            os.environ["KUBECONFIG"] = before
        stopping.set()
        threads[1].join(10)
        server.shutdown()
        server.server_close()
        cluster.kubelet.stop()


def write_kubeconfig(cluster: Cluster) -> Path:
    """Write the file that names this cluster."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
        "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
        "users": [{"name": "u", "user": {"token": "let-me-in"}}],
    }
    path = cluster.folder / "kubeconfig.json"
    path.write_text(json.dumps(config))
    return path
