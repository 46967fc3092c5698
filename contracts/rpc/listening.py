"""Addresses, TLS and bearer keys of a server."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import grpc

from contracts.errors import ConfigError
from contracts.rpc.connecting import MESSAGE_BYTES, is_local, read_keys, read_secret, wants_key
from contracts.rpc.meeting import MadeKey, make_meeting_directory, meeting_directory

OPTIONS = (
    # requests are decompressed before their key is checked, so compressed ones are refused
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.so_reuseport", 0),
    # beyond so many calls that no handler has begun (1,000 by default) gRPC cancels calls of all clients at random: a
    # burst of one must only delay the others
    ("grpc.server.max_pending_requests", 65_536),
    ("grpc.server.max_pending_requests_hard_limit", 131_072),
    ("grpc.max_concurrent_streams", 16_384),
)
"""Options of every gRPC server."""
LASTING_OPTIONS = (
    *OPTIONS,
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    # detects a client that vanished without closing its connection, so that its calls are cancelled
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
"""Options of the servers that clients stay connected to, and that send messages of up to MESSAGE_BYTES."""


@dataclass(frozen=True)
class Listening:
    """Address of a server and the credentials that it asks clients for."""

    address: str
    """`unix:/path` or `host:port`."""
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
        """Raise ConfigError for an invalid address or combination of options."""
        if not _is_address(self.address):
            raise ConfigError(
                f"--listen {self.address!r} is not an address: write unix:/path or host:port, as 127.0.0.1:7070"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together: give both")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("--tls-client-ca needs TLS: give --tls-cert and --tls-key too")
        if not (self.insecure or is_local(self.address) or self.tls_cert is not None):
            raise ConfigError(
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
        """Accepted keys of `key_file`; empty if it is None. Raises ConfigError."""
        return () if self.key_file is None else read_keys(self.key_file)

    def listen(self, server: grpc.aio.Server) -> int:
        """Bind a server to the address, a Unix socket with mode 0600, and return the port. Raises ConfigError."""
        path = self.address.removeprefix("unix:") if self.address.startswith("unix:") else None
        if path is not None and Path(path).parent == meeting_directory():
            make_meeting_directory()
        if path is not None and _is_taken(path):
            raise ConfigError(f"another server listens on {self.address}: stop it, or name another --listen")
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
            raise ConfigError(f"can't listen on {self.address}: {words}") from error
        finally:
            os.umask(mask)


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
