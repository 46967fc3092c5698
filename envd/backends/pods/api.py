"""Client of a Kubernetes API server for the pods backend: pods, a network policy, a runtime class, and exec as a byte
stream.

The stream is the `exec` subresource over a WebSocket (`v5.channel.k8s.io`, else `v4`): binary messages whose first byte
is their channel, 0 standard input, 1 output, 2 error, 3 the end's Status, 255 a channel's end (v5).
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import websockets
import yaml
from websockets.asyncio.client import ClientConnection, connect

from envd.errors import BackendUnavailable, EnvdError, SandboxStartError

_SERVICE = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PATIENCE_S = 30.0
_PROTOCOLS = [websockets.Subprotocol("v5.channel.k8s.io"), websockets.Subprotocol("v4.channel.k8s.io")]
_MESSAGE = 8 * 1024 * 1024
_PIECE = 64 * 1024
_TAIL = 2048


@dataclass(frozen=True)
class Cluster:
    """Address of an API server, namespace and credentials."""

    url: str
    namespace: str
    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)


def find_cluster() -> Cluster:
    """Find the cluster that this process runs in, else the current context of $KUBECONFIG or ~/.kube/config.

    Raises BackendUnavailable.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if host and (_SERVICE / "token").is_file():
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        context = ssl.create_default_context(cafile=str(_SERVICE / "ca.crt"))
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        return Cluster(
            url, (_SERVICE / "namespace").read_text().strip(), (_SERVICE / "token").read_text().strip(), context
        )
    path = Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube/config")
    try:
        return _from_kubeconfig(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise BackendUnavailable(
            f"no Kubernetes cluster: run in one, or set KUBECONFIG ({path} can't be read)"
        ) from error
    except (KeyError, TypeError, StopIteration, ValueError, ssl.SSLError, yaml.YAMLError) as error:
        raise BackendUnavailable(f"{path} names no cluster and user that this backend can take: {error!r}") from error


def _from_kubeconfig(config: Mapping[str, Any]) -> Cluster:
    def named(kind: str, name: str) -> dict[str, Any]:
        return dict(next(each for each in config[f"{kind}s"] if each["name"] == name)[kind])

    context = named("context", config["current-context"])
    cluster, user = named("cluster", context["cluster"]), named("user", context["user"])
    if "exec" in user or "auth-provider" in user:
        raise ValueError(
            "its user logs in by a program: write a token for envd's service account into a kubeconfig of its own"
        )
    tls: ssl.SSLContext | None = None
    if cluster["server"].startswith("https://"):
        authority = cluster.get("certificate-authority-data")
        words = base64.b64decode(authority).decode() if authority else None
        tls = ssl.create_default_context(cafile=cluster.get("certificate-authority"), cadata=words)
        if "client-certificate-data" in user:
            with tempfile.NamedTemporaryFile() as pair:  # the ssl module takes files only
                pair.write(
                    base64.b64decode(user["client-certificate-data"])
                    + b"\n"
                    + base64.b64decode(user["client-key-data"])
                )
                pair.flush()
                tls.load_cert_chain(pair.name)
        elif "client-certificate" in user:
            tls.load_cert_chain(user["client-certificate"], user["client-key"])
    return Cluster(cluster["server"].rstrip("/"), context.get("namespace", "default"), user.get("token"), tls)


class ApiError(EnvdError):
    """The API server refused a request, or did not answer (status 0)."""

    def __init__(self, words: str, status: int) -> None:
        super().__init__(words)
        self.status = status


class Api:
    """A client of one namespace."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._headers = {"Authorization": f"Bearer {cluster.token}"} if cluster.token else {}
        verify: ssl.SSLContext | bool = cluster.tls if cluster.tls is not None else True
        limits = httpx.Limits(max_connections=64)
        self._http = httpx.AsyncClient(
            base_url=cluster.url, headers=self._headers, verify=verify, timeout=_PATIENCE_S, limits=limits
        )

    async def ask(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        """Make one request to a path below the namespace, or to a whole path that begins with /apis.

        Raises ApiError with the server's message.
        """
        whole = path if path.startswith("/apis") else f"/api/v1/namespaces/{self.cluster.namespace}{path}"
        try:
            answer = await self._http.request(method, whole, json=body, params=query)
        except httpx.HTTPError as error:
            raise ApiError(f"the Kubernetes API server does not answer {method} {whole}: {error!r}", 0) from error
        if answer.status_code >= 400:
            raise ApiError(f"Kubernetes refused {method} {whole}: {_words(answer)}", answer.status_code)
        return answer.json()

    async def exec(self, pod: str, container: str, command: Sequence[str]) -> ExecStream:
        """Run a command in a pod with its standard streams. Raises SandboxStartError."""
        query = [("container", container), *(("command", each) for each in command)]
        query += [(name, "true") for name in ("stdin", "stdout", "stderr")]
        server = self.cluster.url.replace("http", "ws", 1)
        where = f"{server}/api/v1/namespaces/{self.cluster.namespace}/pods/{pod}/exec?{urlencode(query)}"
        options: dict[str, Any] = {"ssl": self.cluster.tls} if self.cluster.tls is not None else {}
        try:
            # No pings: older API servers do not answer them. A dead connection shows as a silent agent.
            stream = await connect(
                where,
                subprotocols=_PROTOCOLS,
                additional_headers=self._headers,
                max_size=_MESSAGE,
                open_timeout=_PATIENCE_S,
                ping_interval=None,
                compression=None,
                **options,
            )
        except (OSError, TimeoutError, websockets.WebSocketException) as error:
            raise SandboxStartError(f"nothing can be run in pod {pod}: {error!r}") from error
        return ExecStream(stream)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


class ExecStream:
    """Standard streams of a command as a socket: read and write `sock`."""

    def __init__(self, stream: ClientConnection) -> None:
        self._stream = stream
        self.sock, self._inner = socket.socketpair()
        self._inner.setblocking(False)
        self._said = b""
        self._ending = ""
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._receive())]

    @property
    def said(self) -> str:
        """End of the command's standard error, and its final status."""
        return " ".join(f"{self._said.decode(errors='replace')} {self._ending}".split())

    async def close(self) -> None:
        """Close the connection; the command reads end of file."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._inner.close()
        with suppress(OSError, TimeoutError, websockets.WebSocketException):
            async with asyncio.timeout(2):
                await self._stream.close()

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError, websockets.WebSocketException):
            while data := await loop.sock_recv(self._inner, _PIECE):
                await self._stream.send(b"\0" + data)
            if self._stream.subprotocol == _PROTOCOLS[0]:
                await self._stream.send(b"\xff\0")

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for message in self._stream:
                if not isinstance(message, bytes) or not message:
                    continue
                if message[0] == 1:
                    await loop.sock_sendall(self._inner, message[1:])
                elif message[0] == 2:
                    self._said = (self._said + message[1:])[-_TAIL:]
                elif message[0] == 3:
                    self._ending = message[1 : 1 + _TAIL].decode(errors="replace")
        except (OSError, websockets.WebSocketException) as error:
            self._ending = self._ending or repr(error)
        finally:
            with suppress(OSError):
                self._inner.shutdown(socket.SHUT_WR)  # the link sees the stream's end


def _words(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])[:400]
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
