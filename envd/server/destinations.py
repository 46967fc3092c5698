"""Check destinations against a sandbox's rules: names before they are resolved, addresses before the connection.

A reserved (not public) address is allowed only if the rules name it or a network of only reserved addresses. A name
that resolves to another reserved address is refused. This host's own public addresses are never allowed.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from envd.backends.base import NetworkRule
from envd.errors import EnvdError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_SPECIAL = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "168.63.129.16/32",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/3",
    "::/3",
    "4000::/2",
    "8000::/1",
    "2001::/23",
    "2001:db8::/32",
    "2002::/16",
    "3fff::/20",
)
"""IANA's special-purpose registries (RFC 6890) and multicast; 168.63.129.16 is Azure's metadata service; 2001::/23 and
2002::/16 contain tunnels that carry IPv4 addresses, and ::/3 (everything below 2000::) mapped and translated ones.
"""
_RESERVED: tuple[Network, ...] = tuple(map(ipaddress.ip_network, _SPECIAL))
_HOST = re.compile(r"(?=.{1,253}\Z)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")


class DestinationRefused(EnvdError):
    """A destination that a sandbox may not reach; the message is one line with the fix."""


class Destinations:
    """Destinations that the rules of one sandbox allow."""

    def __init__(self, rules: Sequence[NetworkRule]) -> None:
        self._names = [(rule.host, rule.ports) for rule in rules if network_of(rule.host) is None]
        self._networks = [(network, rule.ports) for rule in rules if (network := network_of(rule.host)) is not None]

    def check_host(self, host: str, port: int) -> Address | None:
        """Check a host; return its address, or None if it is a name to be resolved. Raises DestinationRefused."""
        address = _address_of(host)
        if address is not None:
            self.check_address(host, address, port, named=False)
            return address
        if not _HOST.fullmatch(host) or not any(
            _fits(rule, host) and _open(ports, port) for rule, ports in self._names
        ):
            raise DestinationRefused(_denied(host, port))
        return None

    def check_address(self, host: str, address: Address, port: int, *, named: bool) -> None:
        """Raise DestinationRefused unless the rules allow an address. named: an allowed name resolved to it."""
        address = plain(address)
        reserved = _is_reserved(address) or _is_own(address, port)
        rules = [network for network, ports in self._networks if _open(ports, port) and _holds(network, address)]
        if any(means_reserved(network) for network in rules) or ((named or rules) and not reserved):
            return
        if reserved and (named or rules):
            raise DestinationRefused(
                f"{host[:253]}:{port} leads to {address}, which is private, reserved or the server's own: name"
                " that address in network.allow of the rules if it is meant"
            )
        raise DestinationRefused(_denied(host, port))


def plain(address: Address) -> Address:
    """IPv4 address of an IPv4-mapped IPv6 address; any other address unchanged."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def network_of(host: str) -> Network | None:
    """Parse a rule's host as a network, or an address as a network of one; None for a name."""
    try:
        return ipaddress.ip_network(host)
    except ValueError:
        return None


def means_reserved(network: Network) -> bool:
    """Whether a network contains only reserved addresses: 10.0.0.0/8 does, 0.0.0.0/0 does not."""
    return any(each.version == network.version and network.subnet_of(each) for each in _RESERVED)  # type: ignore[arg-type]


def _denied(host: str, port: int) -> str:
    return f"the sandbox's rules do not allow {host[:253]}:{port}: name it in network.allow of the rules"


def _fits(rule: str, host: str) -> bool:
    return host == rule or (rule.startswith("*.") and host.endswith(rule[1:]))


def _open(ports: tuple[int, ...], port: int) -> bool:
    return not ports or port in ports


def _holds(network: Network, address: Address) -> bool:
    return network.version == address.version and address in network


def _is_reserved(address: Address) -> bool:
    return any(_holds(network, address) for network in _RESERVED)


def _is_own(address: Address, port: int) -> bool:
    """Whether an address is this host's own: the kernel then chooses it as the source address. Sends nothing."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), port))
            return bool(ipaddress.ip_address(probe.getsockname()[0]) == address)
    except OSError:
        return False  # no route to the address


def _address_of(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
