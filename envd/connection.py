"""How a client, or a server that moves a sandbox, reaches an envd server: addresses, TLS, keys, metadata."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from contracts.rpc.connecting import MESSAGE_BYTES, is_local, port_of, read_key, read_secret, wants_key
from contracts.rpc.meeting import key_file_for
from envd.errors import EnvdError, as_envd_error
from envd.meeting import KEY_FILE_VARIABLE

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
]
_RECONNECT_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 2000)]
SANDBOX_TOKEN = "triplane-sandbox-token"
"""Metadata key: the token of the sandbox that a call names."""
IDEMPOTENCY_KEY = "triplane-idempotency-key"
"""Metadata key: a repeated call with the same value answers what the first one did."""
ERROR_NUMBER = "triplane-errno"
"""Trailing metadata of a failed call: the system's number of a file error."""
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Access:
    """What a server asks of who connects. All of it None: a server without TLS and keys."""

    key: str | None = None
    """Its bearer key."""
    tls_ca: Path | None = None
    """Certificates that the server's is checked against; TLS is spoken when this is given."""
    tls_cert: Path | None = None
    """Our certificate, where the server asks for one."""
    tls_key: Path | None = None
    """The private key of `tls_cert`."""
    options: tuple[tuple[str, int], ...] = ()
    """Further options of the channel."""

    @property
    def metadata(self) -> Metadata:
        """Metadata of every call."""
        return () if self.key is None else (("authorization", f"Bearer {self.key}"),)

    @classmethod
    @as_envd_error()
    def found(cls, address: str, options: tuple[tuple[str, int], ...] = ()) -> Access:
        """What this user's own configuration knows of a server: $TRIPLANE_ENVD_KEY_FILE, else the key that a server on
        this machine made for itself, else nothing. Raises EnvdError for a file that can't be used.
        """
        named = os.environ.get(KEY_FILE_VARIABLE)
        on_port = wants_key(address) and is_local(address)
        file = Path(named) if named else key_file_for(port_of(address)) if on_port else None
        return cls(None if file is None else read_key(file), options=options)

    @as_envd_error()
    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel to `unix:/path` or `host:port`. Raises EnvdError for a file that can't be read."""
        options = [*CHANNEL_OPTIONS, *_RECONNECT_OPTIONS, *self.options]
        if self.tls_ca is None:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=read_secret(self.tls_ca),
            private_key=None if self.tls_key is None else read_secret(self.tls_key),
            certificate_chain=None if self.tls_cert is None else read_secret(self.tls_cert),
        )
        return grpc.aio.secure_channel(address, credentials, options=options)


def add_access(add: Any) -> None:
    """The options of a command that connects to a server. add: `add_argument` of its parser."""
    add("--key-file", type=Path, metavar="FILE", help=f"the server's bearer key (default: ${KEY_FILE_VARIABLE})")
    add("--tls-ca", type=Path, metavar="PEM", help="speak TLS, and check the server's certificate against these")
    add("--tls-cert", type=Path, metavar="PEM", help="our certificate, where the server asks for one")
    add("--tls-key", type=Path, metavar="PEM", help="its private key")


@as_envd_error()
def access_of(arguments: Any) -> Access:
    """What the options of `add_access` say. Raises EnvdError, one line, for what can't be used."""
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise EnvdError("--tls-cert and --tls-key belong together: give both")
    if arguments.tls_cert is not None and arguments.tls_ca is None:
        raise EnvdError("--tls-cert needs TLS: give --tls-ca too")
    if arguments.key_file is not None:
        key: str | None = read_key(arguments.key_file)
    else:
        key = None if arguments.address is None else Access.found(arguments.address).key
    return Access(key, arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
