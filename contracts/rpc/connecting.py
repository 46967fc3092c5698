"""What the clients and the servers of every plane agree on: metadata, addresses, and files of keys and certificates."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from urllib.parse import urlsplit

from contracts.errors import ConfigError, describe

MESSAGE_BYTES = 64 * 1024 * 1024
"""Longest message that a client or a server takes."""
KEY_CHARACTERS = 16
"""Fewest characters of a key that a server accepts."""
ERROR_NAME = "triplane-error"
"""Trailing metadata of a failed call: the class of its error."""


def prefer_short_round_trips() -> None:
    """Have gRPC wait in the thread that will answer, before this process opens its first channel or server; a choice
    that is set already stays.

    Its own engine of events hands each message on from another thread, which takes a tenth of a millisecond of a call
    on either side.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")


def wants_key(address: str) -> bool:
    """Whether others than the owner of a socket's file can connect to an address."""
    return not address.startswith("unix:")


def is_local(address: str) -> bool:
    """Whether only this machine can reach an address."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_rebindable(host: str) -> bool:
    """Whether a Host header has a name that its owner may resolve to any address, such as this machine's loopback.

    A page of that name, open in a browser here, then reaches servers at loopback as its own origin (DNS rebinding).
    IP addresses, names without a dot and those below `localhost` have no such owner.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." in name and not name.endswith(".localhost")
    return False


def port_of(address: str) -> int:
    """The port of `host:port`; 0 where there is none."""
    port = address.rpartition(":")[2]
    return int(port) if port.isdecimal() else 0


def read_key(path: Path) -> str:
    """The first key of a file. Raises ConfigError, one line, where it holds none."""
    lines = (line.strip() for line in read_secret(path).decode(errors="replace").splitlines())
    key = next((line for line in lines if line and not line.startswith("#")), None)
    if key is None:
        raise ConfigError(f"{path} holds no key: write one line")
    return key


def read_keys(path: Path) -> tuple[bytes, ...]:
    """The keys that a server accepts: lines of a file that neither are empty nor begin with `#`.

    Raises ConfigError for a file without keys, or with one that is too short.
    """
    lines = (line.strip() for line in read_secret(path).splitlines())
    found = tuple(line for line in lines if line and not line.startswith(b"#"))
    if not found or any(len(key) < KEY_CHARACTERS for key in found):
        raise ConfigError(f"{path} must hold keys of at least {KEY_CHARACTERS} characters, one a line")
    return found


def read_named_key(variable: str) -> str | None:
    """The first key of the file that an environment variable names; None: it is not set. Raises ConfigError."""
    named = os.environ.get(variable)
    try:
        return read_key(Path(named)) if named else None
    except ConfigError as error:
        raise ConfigError(f"{variable}: {error}") from error


def read_secret(path: Path) -> bytes:
    """A certificate's or key's file. Raises ConfigError, one line, when it can't be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"a certificate or key can't be read: {describe(error)}") from error
