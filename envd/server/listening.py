"""Addresses, TLS and bearer keys of a server."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from envd.connection import is_local, read_secret, wants_key
from envd.errors import AccessDenied, EnvdError
from envd.meeting import MadeKey, default_address, make_meeting_directory, meeting_directory
from envd.server import caller
from envd.server.audit import AuditLog
from envd.server.observing import HANDLERS

_MIN_KEY = 16
_HEALTH = "/grpc.health.v1.Health/"
"""Methods that need no key, since a kubelet's probe can't send one."""


@dataclass(frozen=True)
class Listening:
    """Address of a server and the credentials that it asks clients for."""

    address: str = field(default_factory=default_address)
    """`unix:/path` or `host:port`; default: a socket that only this user can connect to."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """CA that must have signed the clients' certificates."""
    key_file: Path | None = None
    """File with one bearer key per line; any of them is accepted. None: the server makes a key for a TCP port without
    client certificates.
    """
    insecure: bool = False
    """Make no key, and allow addresses beyond this machine without TLS. Keys of `key_file` stay required."""

    def check(self) -> None:
        """Raise EnvdError for an invalid address or combination of options."""
        if not _is_address(self.address):
            raise EnvdError(
                f"--listen {self.address!r} is not an address: write unix:/path or host:port, as 127.0.0.1:7070"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise EnvdError("--tls-cert and --tls-key belong together: give both")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise EnvdError("--tls-client-ca needs TLS: give --tls-cert and --tls-key too")
        if not (self.insecure or is_local(self.address) or self.tls_cert is not None):
            raise EnvdError(
                f"{self.address} can be reached from other machines: give --tls-cert and --tls-key, "
                "listen on a unix socket or on 127.0.0.1, or pass --insecure if the network itself blocks other hosts"
            )

    def made_key(self) -> MadeKey | None:
        """Return a new key if the address needs one and the options give none; else None. Other users of the machine
        can connect to a port, also on loopback.
        """
        given = self.key_file is not None or self.tls_client_ca is not None
        return None if self.insecure or given or not wants_key(self.address) else MadeKey.fresh()

    def keys(self) -> tuple[bytes, ...]:
        """Accepted keys of `key_file`; empty if it is None.

        Raises EnvdError for a file without keys, or with one that is too short.
        """
        if self.key_file is None:
            return ()
        lines = (line.strip() for line in read_secret(self.key_file).splitlines())
        found = tuple(line for line in lines if line and not line.startswith(b"#"))
        if not found or any(len(key) < _MIN_KEY for key in found):
            raise EnvdError(f"{self.key_file} must hold keys of at least {_MIN_KEY} characters, one a line")
        return found

    def listen(self, server: grpc.aio.Server) -> int:
        """Bind a server to the address, a Unix socket with mode 0600, and return the port. Raises EnvdError."""
        path = self.address.removeprefix("unix:") if self.address.startswith("unix:") else None
        if path is not None and Path(path).parent == meeting_directory():
            make_meeting_directory()
        if path is not None and _is_taken(path):
            raise EnvdError(f"another server listens on {self.address}: stop it, or name another --listen")
        mask = os.umask(0o177 if path is not None else 0o022)
        try:
            if self.tls_cert is None or self.tls_key is None:
                return int(server.add_insecure_port(self.address))
            pair = (read_secret(self.tls_key), read_secret(self.tls_cert))
            client_ca = None if self.tls_client_ca is None else read_secret(self.tls_client_ca)
            credentials = grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)
            return int(server.add_secure_port(self.address, credentials))
        except RuntimeError as error:
            words = "check that its directory is there, that nobody else listens on it, and that you may"
            raise EnvdError(f"envd can't listen on {self.address}: {words}") from error
        finally:
            os.umask(mask)


class KeyCheck(grpc.aio.ServerInterceptor):
    """Interceptor that answers UNAUTHENTICATED to calls without one of the keys."""

    def __init__(self, keys: tuple[bytes, ...], audit: AuditLog) -> None:
        self._keys, self._audit = keys, audit

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(_HEALTH) or self._is_known(details):
            return handler
        return _refusing(handler, self._audit, str(details.method))

    def _is_known(self, details: grpc.HandlerCallDetails) -> bool:
        said = next((value for key, value in details.invocation_metadata or () if key == "authorization"), "")
        given = (said if isinstance(said, bytes) else said.encode()).removeprefix(b"Bearer ")
        # compares all keys in constant time, so that timing does not reveal a near match
        found = [key for key in self._keys if secrets.compare_digest(given, key)]
        if found:
            caller.known_by(found[0])
        return bool(found)


def _refusing(handler: Any, audit: AuditLog, method: str) -> Any:
    """Handler of the same kind that refuses each call and records the refusal with its caller."""
    error = AccessDenied(
        "this server asks for a key: give --key-file or $TRIPLANE_ENVD_KEY_FILE, which sends `authorization: Bearer"
        " <key>`"
    )

    async def one(request: Any, context: Any) -> Any:
        caller.answering(context, method)
        audit.record("auth.denied", "", what="key", method=method)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error), (("triplane-error", "AccessDenied"),))

    async def many(request: Any, context: Any) -> Any:
        await one(request, context)
        yield  # makes this an async generator

    make = HANDLERS[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(many if handler.response_streaming else one)


def _is_address(address: str) -> bool:
    """Whether an address is valid. gRPC itself would wrap a port beyond 65535 around to 0."""
    kind, _, rest = address.partition(":")
    if kind in ("unix", "unix-abstract"):
        return bool(rest)
    host, _, port = address.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")
    return bool(host) and port.isdecimal() and int(port) <= 65535


def _is_taken(path: str) -> bool:
    """Whether a server answers at a Unix socket's path. gRPC would silently replace its socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except TimeoutError:
            return True
        except OSError:
            return False
    return True
