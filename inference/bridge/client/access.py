"""How a client reaches a bridge: channel, TLS and keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from contracts.rpc.connecting import MESSAGE_BYTES, is_local, port_of, read_key, read_secret, wants_key
from contracts.rpc.meeting import default_address, key_file_for

SOCKET = "bridge.sock"
"""Where a bridge listens that was given no address."""
_OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # clients of one process share no connection: each one loses its own alone
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True)
class Access:
    """Address of a bridge and the credentials that it asks for."""

    address: str
    """`unix:/path` or `host:port`."""
    key: str | None = None
    """Bearer key."""
    tls_ca: Path | None = None
    """Certificates that the server's is checked against; TLS is spoken when this is given."""
    tls_cert: Path | None = None
    """Our certificate, where the server asks for one."""
    tls_key: Path | None = None
    """The private key of `tls_cert`."""

    @classmethod
    def found(
        cls, address: str | None, key: str | None, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None
    ) -> Access:
        """Fill in what is not given: the default socket, and the key that this user's bridge on that port of loopback
        made.

        Raises ConfigError for a file that can't be used.
        """
        address = default_address(SOCKET) if address is None else address
        if key is None and wants_key(address) and is_local(address):
            file = key_file_for(port_of(address))
            key = None if file is None else read_key(file)
        return cls(address, key, tls_ca, tls_cert, tls_key)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        return () if self.key is None else (("authorization", f"Bearer {self.key}"),)

    def channel(self) -> grpc.aio.Channel:
        """A new channel. Raises ConfigError for a file that can't be read."""
        if self.tls_ca is None:
            return grpc.aio.insecure_channel(self.address, options=_OPTIONS)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=read_secret(self.tls_ca),
            private_key=None if self.tls_key is None else read_secret(self.tls_key),
            certificate_chain=None if self.tls_cert is None else read_secret(self.tls_cert),
        )
        return grpc.aio.secure_channel(self.address, credentials, options=_OPTIONS)
