"""Addresses of servers in a setting: one, several separated by commas, or every server behind a DNS name.

    host:7400   [fd00::1]:7400   http://host:8000   dns:NAME:PORT

`dns:NAME:PORT` stands for every address that NAME has at the moment, such as the pods behind a headless Service of
Kubernetes. parse_addresses checks the text, resolve looks the names up, require_free tries one to listen at.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from contracts.errors import ConfigError, NameUnresolved

DNS = "dns:"
"""Prefix of an entry that stands for every address of a name."""
RESOLVE_S = 20.0
"""Default timeout of the lookup of one name, in seconds."""
_HTTP_PORTS = {"http": 80, "https": 443}
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


@dataclass(frozen=True, order=True)
class Address:
    """Address of a server, or of all servers of a name."""

    host: str
    """Host name, or IP address without brackets."""
    port: int
    scheme: str = ""
    """http or https, or empty if the text has none."""
    path: str = ""
    """Path of a URL, without a slash at its end."""
    is_name: bool = False
    """Whether it stands for every address of the DNS name `host`; `resolve` replaces it."""

    @property
    def target(self) -> str:
        """host:port, as gRPC expects it, with brackets around an IPv6 address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """URL of this server, with http unless the text has another scheme."""
        return f"{self.scheme or 'http'}://{self.target}{self.path}"

    def __str__(self) -> str:
        """The text that gives this address."""
        return f"{DNS}{self.target}" if self.is_name else self.url if self.scheme else self.target


def parse_addresses(text: str, setting: str = "address") -> list[Address]:
    """Addresses of a comma-separated list, in its order, each once.

    setting: name of the setting for error messages. Raises ConfigError that names the faulty entry.
    """
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entries):
        raise ConfigError(f"{setting}={text!r} has an empty entry: write host:port, or dns:NAME:PORT, between commas")
    return list(dict.fromkeys(_parse(entry, setting) for entry in entries))


def is_http_url(text: str) -> bool:
    """Whether a text is an http or https URL with a host, and a port that exists if it has one."""
    try:
        parts = urlsplit(text)
        return parts.scheme in _HTTP_PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def resolve(
    addresses: Sequence[Address],
    *,
    timeout_s: float = RESOLVE_S,
    lookup: Callable[[str], Sequence[str]] | None = None,
) -> list[Address]:
    """Addresses without names: each name is replaced by its addresses of this moment, sorted. No address comes twice.

    timeout_s: of each name. lookup: returns the IP addresses of a name; None asks the system. Raises NameUnresolved for
    a name without an address.
    """
    found: dict[Address, None] = {}
    for address in addresses:
        if not address.is_name:
            found[address] = None
            continue
        hosts = lookup(address.host) if lookup else _lookup(address, timeout_s)
        if not hosts:
            raise NameUnresolved(_unresolved(address, "it has no address"))
        for host in sorted(set(hosts), key=lambda each: (":" in each, ipaddress.ip_address(each).packed)):
            found[replace(address, host=host, is_name=False)] = None
    return list(found)


def require_free(host: str, port: int, options: str) -> None:
    """Raise ConfigError unless a server can listen there: asked before anything slow is loaded.

    options: of the command line that name the address, for messages. An empty host, which would be every interface, is
    refused.
    """
    if not host:
        raise ConfigError(f"cannot listen at {host}:{port} (no host): give {options} one, 0.0.0.0 for every interface")
    faults, free = list[OSError](), False
    try:
        for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind, protocol) as probe:
                    if family == socket.AF_INET6:
                        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(place)
                    free = True
            except OSError as error:
                faults.append(error)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that DNS can't have
        faults.append(error if isinstance(error, OSError) else OSError(str(error)))
    fault = next((each for each in faults if not free or each.errno == errno.EADDRINUSE), None)
    if fault is not None:
        why = fault.strerror or str(fault)
        raise ConfigError(f"cannot listen at {host}:{port} ({why}): choose another {options}")


def _parse(entry: str, setting: str) -> Address:
    form = "write host:port, [IPv6]:port, http://host:port or dns:NAME:PORT"
    is_name, url = entry.startswith(DNS), "://" in entry
    try:
        parts = urlsplit(entry if url else f"//{entry.removeprefix(DNS)}")
        port = parts.port or _HTTP_PORTS.get(parts.scheme)
    except ValueError as error:
        raise ConfigError(f"{setting}: {entry!r} is not an address ({error}): {form}") from None
    if url and parts.scheme not in _HTTP_PORTS:
        raise ConfigError(f"{setting}: {entry!r} has the unknown scheme {parts.scheme!r}: {form}")
    extra = parts.query or parts.fragment or parts.username or (not url and parts.path)
    if not parts.hostname or not port or extra or not _is_host(parts.hostname, name=is_name):
        raise ConfigError(f"{setting}: {entry!r} is not an address: {form}")
    return Address(parts.hostname, port, parts.scheme if url else "", parts.path.rstrip("/"), is_name)


def _is_host(host: str, *, name: bool) -> bool:
    """Whether `host` is an IP address or a host name. name: a host name only."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return bool(_HOST_NAME.fullmatch(host))
    return not name


def _lookup(address: Address, timeout_s: float) -> list[str]:
    """IP addresses of a name, by the system's resolver, which has no timeout of its own."""
    found: list[str] = []
    faults: list[str] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            faults.append(error.strerror or str(error))
        else:
            found.extend(str(answer[4][0]) for answer in answers)

    asking = threading.Thread(target=ask, name=f"resolve {address.host}", daemon=True)
    asking.start()
    asking.join(timeout_s)
    if asking.is_alive():
        raise NameUnresolved(_unresolved(address, f"no reply within {timeout_s:g} s"))
    if faults:
        raise NameUnresolved(_unresolved(address, faults[0]))
    return found


def _unresolved(address: Address, why: str) -> str:
    return f"{address} can't be resolved ({why}): check the name, and that a ready server is behind it"
