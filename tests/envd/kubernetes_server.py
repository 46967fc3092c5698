"""Stand-in for a Kubernetes API server and its kubelet, with the calls of the pods backend: pods by name and label,
network policies, runtime classes, exec over a WebSocket. A "container" is a directory; exec runs the real agent on it.

Paths and objects are those of the OpenAPI document of Kubernetes 1.36 (`/api/v1`, `/apis/networking.k8s.io/v1`,
`/apis/node.k8s.io/v1`); its typed Python client, release 36, validates the replies. `exec` speaks
`v5.channel.k8s.io` (Kubernetes 1.30 and newer) or, as older servers do, only `v4.channel.k8s.io`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

TOKEN = "let-me-in"
POD_FIELDS = {
    *(
        "restartPolicy",
        "activeDeadlineSeconds",
        "terminationGracePeriodSeconds",
        "automountServiceAccountToken",
        "enableServiceLinks",
    ),
    *("hostname", "securityContext", "containers", "volumes", "runtimeClassName"),
}


class Cluster:
    """What the API server knows. `directory`: where containers' files are."""

    def __init__(self, directory: Path, agent: Path, protocol: str = "v5.channel.k8s.io") -> None:
        self.directory, self.agent, self.protocol = directory, agent, protocol
        self.pods: dict[str, dict[str, Any]] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        self.classes = {"sandboxed": "runsc", "vm": "kata-qemu", "plain": "runc"}
        self.broken_image = "registry.invalid/none"
        self.has_nodes = True
        """Whether pods find a node."""
        self.busy: list[int] = []
        """Statuses that the next requests for one pod get, whatever they do."""
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    def app(self) -> Starlette:
        base = "/api/v1/namespaces/sandboxes"
        return Starlette(
            routes=[
                Route(f"{base}/pods", self.create, methods=["POST"]),
                Route(f"{base}/pods", self.list, methods=["GET"]),
                Route(f"{base}/pods", self.delete_all, methods=["DELETE"]),
                Route(f"{base}/pods/{{name}}", self.get, methods=["GET"]),
                Route(f"{base}/pods/{{name}}", self.delete, methods=["DELETE"]),
                WebSocketRoute(f"{base}/pods/{{name}}/exec", self.exec),
                Route("/apis/networking.k8s.io/v1/namespaces/sandboxes/networkpolicies", self.policy, methods=["POST"]),
                Route("/apis/node.k8s.io/v1/runtimeclasses/{name}", self.runtime_class, methods=["GET"]),
            ]
        )

    async def create(self, request: Request) -> JSONResponse:
        if (refused := _unknown(request)) is not None:
            return refused
        pod = await request.json()
        spec, name = pod["spec"], pod["metadata"]["name"]
        if unknown := set(spec) - POD_FIELDS:
            return _status(400, f"strict decoding error: unknown field {sorted(unknown)}")
        if name in self.pods:
            return _status(409, f'pods "{name}" already exists')
        if len(name) > 63 or any(each not in "abcdefghijklmnopqrstuvwxyz0123456789-" for each in name):
            return _status(422, f"metadata.name: Invalid value: {name}")
        if spec.get("runtimeClassName") not in (None, *self.classes):
            return _status(403, f"pod rejected: RuntimeClass {spec['runtimeClassName']} not found")
        container = spec["containers"][0]
        if container["resources"]["limits"] != container["resources"]["requests"]:
            return _status(403, "exceeded quota")
        missing = [
            each["name"]
            for each in container["volumeMounts"]
            if each["name"] not in {volume["name"] for volume in spec["volumes"]}
        ]
        if missing:
            return _status(422, f"volumeMounts: Not found: {missing}")
        for volume in container["volumeMounts"]:
            (self.directory / name / volume["mountPath"].lstrip("/")).mkdir(parents=True)
        self.pods[name] = {**pod, "status": {"phase": "Pending"}, "asked": 0}
        return self._busy() or JSONResponse(self.pods[name], 201)

    async def get(self, request: Request) -> JSONResponse:
        pod = self.pods.get(request.path_params["name"])
        if pod is None:
            return _status(404, f'pods "{request.path_params["name"]}" not found')
        if (refused := self._busy()) is not None:
            return refused
        pod["asked"] += 1
        image = pod["spec"]["containers"][0]["image"]
        if not self.has_nodes:
            unplaced = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/1 nodes fit",
            }
            pod["status"] = {"phase": "Pending", "conditions": [unplaced]}
        elif image == self.broken_image:
            waiting = {"reason": "ErrImagePull", "message": f"failed to pull {image}"}
            pod["status"] = {"phase": "Pending", "containerStatuses": [_container(image, {"waiting": waiting})]}
        elif pod["asked"] > 1:
            running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
            pod["status"] = {"phase": "Running", "containerStatuses": [_container(image, running)]}
        return JSONResponse(pod)

    async def list(self, request: Request) -> JSONResponse:
        return _unknown(request) or JSONResponse(
            {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": self._chosen(request)}
        )

    async def delete(self, request: Request) -> JSONResponse:
        if request.path_params["name"] not in self.pods:
            return _status(404, "not found")
        if (refused := self._busy()) is not None:
            return refused
        await self._remove(request.path_params["name"])
        return _status(200, "deleted")

    async def delete_all(self, request: Request) -> JSONResponse:
        for pod in self._chosen(request):
            await self._remove(pod["metadata"]["name"])
        return _status(200, "deleted")

    async def policy(self, request: Request) -> JSONResponse:
        policy = await request.json()
        name = policy["metadata"]["name"]
        if name in self.policies:
            return _status(409, f'networkpolicies.networking.k8s.io "{name}" already exists')
        self.policies[name] = policy
        return JSONResponse(policy, 201)

    async def runtime_class(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        if name not in self.classes:
            return _status(404, f'runtimeclasses.node.k8s.io "{name}" not found')
        return JSONResponse({"metadata": {"name": name}, "handler": self.classes[name]})

    async def exec(self, socket: WebSocket) -> None:
        """Run the agent on a container's directory."""
        name, query = socket.path_params["name"], socket.query_params
        allowed = socket.headers.get("authorization") == f"Bearer {TOKEN}" and name in self.pods
        streams = all(query.get(each) == "true" for each in ("stdin", "stdout", "stderr"))
        command = query.getlist("command")
        known = command[:2] == ["/usr/local/bin/envd-guest", "--stdio"] and query.get("container") == "sandbox"
        if not (allowed and streams and known) or self.protocol not in socket.headers.get("sec-websocket-protocol", ""):
            await socket.close()
            return
        await socket.accept(subprotocol=self.protocol)
        root = self.directory / name
        own = [
            str(self.agent),
            *(str(root / word.lstrip("/")) if word.startswith("/") else word for word in command[1:]),
        ]
        pipe = asyncio.subprocess.PIPE
        process = self.processes[name] = await asyncio.create_subprocess_exec(
            *own, stdin=pipe, stdout=pipe, stderr=pipe
        )
        assert process.stdin and process.stdout and process.stderr

        async def say(channel: int, stream: asyncio.StreamReader) -> None:
            while data := await stream.read(32768):
                await socket.send_bytes(bytes([channel]) + data)

        saying = asyncio.gather(say(1, process.stdout), say(2, process.stderr))
        hearing = asyncio.create_task(self._hear(socket, process.stdin))
        await asyncio.wait([asyncio.ensure_future(process.wait()), hearing], return_when=asyncio.FIRST_COMPLETED)
        process.stdin.close()
        with suppress(Exception):
            await saying
            status = "Success" if await process.wait() == 0 else "Failure"
            await socket.send_bytes(b"\3" + json.dumps({"status": status}).encode())
            await socket.close()
        hearing.cancel()

    async def _hear(self, socket: WebSocket, stdin: asyncio.StreamWriter) -> None:
        with suppress(WebSocketDisconnect, OSError, RuntimeError):
            while True:
                data = await socket.receive_bytes()
                if data[0] == 255:
                    return
                stdin.write(data[1:])
                await stdin.drain()

    def _busy(self) -> JSONResponse | None:
        return _status(self.busy.pop(0), "busy") if self.busy else None

    def _chosen(self, request: Request) -> list[dict[str, Any]]:
        key, _, value = request.query_params["labelSelector"].partition("=")
        labelled = [pod for pod in self.pods.values() if key in pod["metadata"]["labels"]]
        return [pod for pod in labelled if not value or pod["metadata"]["labels"][key] == value]

    async def _remove(self, name: str) -> None:
        process = self.processes.pop(name, None)
        if process is not None and process.returncode is None:
            process.kill()
        del self.pods[name]
        shutil.rmtree(self.directory / name, ignore_errors=True)


def _container(image: str, state: dict[str, Any]) -> dict[str, Any]:
    """A ContainerStatus with the fields that the API requires."""
    ready = "running" in state
    return {"name": "sandbox", "image": image, "imageID": "", "ready": ready, "restartCount": 0, "state": state}


def _unknown(request: Request) -> JSONResponse | None:
    return None if request.headers.get("authorization") == f"Bearer {TOKEN}" else _status(401, "Unauthorized")


def _status(code: int, message: str) -> JSONResponse:
    return JSONResponse({"kind": "Status", "code": code, "message": message}, code)


@contextmanager
def serving(cluster: Cluster, tls: Path | None = None) -> Iterator[str]:
    """Run it in a thread. Yields its kubeconfig.

    tls: directory with ca, server and client as .crt and .key; the server then asks for the client's certificate.
    """
    options: dict[str, Any] = {}
    if tls is not None:
        options = {"ssl_keyfile": tls / "server.key", "ssl_certfile": tls / "server.crt"}
        options |= {"ssl_ca_certs": str(tls / "ca.crt"), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    settings = uvicorn.Config(cluster.app(), port=0, log_level="error", ws="websockets-sansio", **options)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    config: dict[str, Any] = {
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "sandboxes"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http{'s' if tls else ''}://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
    }
    if tls is not None:
        names = ("ca.crt", "client.crt", "client.key")
        inline = {name: base64.b64encode((tls / name).read_bytes()).decode() for name in names}
        config["clusters"][0]["cluster"]["certificate-authority-data"] = inline["ca.crt"]
        config["users"][0]["user"] |= {
            "client-certificate-data": inline["client.crt"],
            "client-key-data": inline["client.key"],
        }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(config, file)
        file.flush()
        yield file.name
    server.should_exit = True
    thread.join(10)
