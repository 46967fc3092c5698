"""Client of a Kubernetes API server for the pods backend, on `kubernetes.aio` of the official Python client.

That client has no WebSocket, so `exec` opens one on the client's own HTTP session, with its TLS and credentials. The
stream is the `exec` subresource (`v5.channel.k8s.io`, else `v4`): binary messages whose first byte is their channel, 0
standard input, 1 output, 2 error, 3 the end's Status, 255 a channel's end (v5).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import yaml
from kubernetes.aio import client, config

from contracts.retries import backoff_s
from envd.errors import BackendUnavailable, EnvdError, SandboxStartError

_SERVICE = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PATIENCE_S, _CLOSE_S = 30.0, 2.0
_BUSY = (408, 429, 500, 502, 503, 504)
"""HTTP statuses of an API server that may answer the same request later."""
_TRIES, _FIRST_PAUSE_S = 5, 0.2
_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_MESSAGE = 8 * 1024 * 1024
_PIECE = 64 * 1024
_TAIL = 2048


async def connect() -> Api:
    """Return a client of the cluster that this process runs in, else of the current context of the kubeconfig.

    The kubeconfig is $KUBECONFIG or ~/.kube/config; its user may log in by a program. Raises BackendUnavailable.
    """
    configuration = client.Configuration()
    configuration.connection_pool_maxsize = 0  # no limit: each sandbox holds one connection for its lifetime
    path = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube/config")
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and (_SERVICE / "token").is_file():
            config.load_incluster_config(configuration)
            return Api(configuration, (_SERVICE / "namespace").read_text().strip(), None)
        async with asyncio.timeout(_PATIENCE_S):  # a user's program may hang
            loader = await config.load_kube_config(path, client_configuration=configuration, persist_config=False)
        return Api(configuration, loader.current_context["context"].get("namespace", "default"), loader)
    except (config.ConfigException, OSError, ValueError, AttributeError, TypeError, yaml.YAMLError) as error:
        raise BackendUnavailable(
            f"no Kubernetes cluster: run in one, or set KUBECONFIG to a kubeconfig file ({path}: {error!r})"
        ) from error


class ApiError(EnvdError):
    """The API server refused a request, or did not answer (status 0)."""

    def __init__(self, words: str, status: int) -> None:
        super().__init__(words)
        self.status = status


class Api:
    """Typed clients of a cluster, and the namespace of the sandboxes.

    loader: the kubeconfig's loader, which renews its user's tokens; None: tokens of a service account renew themselves.
    """

    def __init__(self, configuration: client.Configuration, namespace: str, loader: Any) -> None:
        self.url, self.namespace = str(configuration.host), namespace
        self._client = client.ApiClient(configuration)
        self.core = client.CoreV1Api(self._client)
        self.networking = client.NetworkingV1Api(self._client)
        self.node = client.NodeV1Api(self._client)
        self._renewal = asyncio.create_task(config.refresh_token(loader, configuration)) if loader else None

    async def ask(self, call: Callable[..., Awaitable[Any]], body: Any = None, **query: Any) -> Any:
        """Make one request by a method of the typed clients, in the namespace if the method takes one.

        A busy server is asked again: what the request creates or deletes may then be there, or gone. Raises ApiError
        with the server's message.
        """
        name = getattr(call, "__name__", "request")
        query |= {"namespace": self.namespace} if "_namespaced_" in name else {}
        query |= {"body": body} if body is not None else {}
        for failures in range(1, _TRIES + 1):
            try:
                return await call(**query, _request_timeout=_PATIENCE_S)
            except client.ApiException as error:
                if error.status not in _BUSY or failures == _TRIES:
                    said = f"Kubernetes at {self.url} refused {name}: {_message(error)}"
                    raise ApiError(said, error.status) from error
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise ApiError(f"Kubernetes at {self.url} does not answer {name}: {error!r}", 0) from error
            except ValueError as error:
                raise ApiError(f"Kubernetes at {self.url} sent an invalid reply to {name}: {error}", 0) from error
            await asyncio.sleep(backoff_s(failures, _FIRST_PAUSE_S))
        raise AssertionError("the loop returns or raises")

    async def exec(self, pod: str, container: str, command: Sequence[str]) -> ExecStream:
        """Run a command in a pod with its standard streams. Raises SandboxStartError."""
        query = [("container", container), *(("command", each) for each in command)]
        query += [(name, "true") for name in ("stdin", "stdout", "stderr")]
        headers: dict[str, str] = {}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        rest = self._client.rest_client
        try:
            async with asyncio.timeout(_PATIENCE_S):
                # No pings: older API servers do not answer them. A dead connection shows as a silent agent.
                stream = await rest.pool_manager.ws_connect(
                    f"{self.url}/api/v1/namespaces/{self.namespace}/pods/{pod}/exec?{urlencode(query)}",
                    headers=headers,
                    protocols=_PROTOCOLS,
                    max_msg_size=_MESSAGE,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
                    server_hostname=rest.server_hostname,
                    proxy=rest.proxy,
                    proxy_headers=rest.proxy_headers,
                )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise SandboxStartError(f"can't run a command in pod {pod}: {error!r}") from error
        return ExecStream(stream)

    async def close(self) -> None:
        """Close the connections."""
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        await self._client.close()


class ExecStream:
    """Standard streams of a command as a socket: read and write `sock`."""

    def __init__(self, stream: aiohttp.ClientWebSocketResponse) -> None:
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
        with suppress(OSError, aiohttp.ClientError):
            await self._stream.close()

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError, aiohttp.ClientError):
            while data := await loop.sock_recv(self._inner, _PIECE):
                await self._stream.send_bytes(b"\0" + data)
            if self._stream.protocol == _PROTOCOLS[0]:
                await self._stream.send_bytes(b"\xff\0")

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for message in self._stream:
                if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                    continue
                channel, content = message.data[0], message.data[1:]
                if channel == 1:
                    await loop.sock_sendall(self._inner, content)
                elif channel == 2:
                    self._said = (self._said + content)[-_TAIL:]
                elif channel == 3:
                    self._ending = content[:_TAIL].decode(errors="replace")
            if self._stream.close_code != aiohttp.WSCloseCode.OK:
                self._ending = self._ending or f"connection closed with code {self._stream.close_code}"
        except OSError as error:
            self._ending = self._ending or repr(error)
        finally:
            with suppress(OSError):
                self._inner.shutdown(socket.SHUT_WR)  # the link sees the stream's end


def _message(error: client.ApiException) -> str:
    try:
        return str(json.loads(error.body)["message"])[:400]
    except (ValueError, KeyError, TypeError):
        return f"status {error.status}"
