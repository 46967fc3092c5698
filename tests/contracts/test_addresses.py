"""Lists of server addresses: text, names, errors."""

from __future__ import annotations

import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.addresses import Address, parse_addresses, resolve
from contracts.errors import ConfigError, NameUnresolved


def test_list_of_addresses_keeps_its_order_and_drops_repetitions() -> None:
    found = parse_addresses("b:7400, a:7400,b:7400,[fd00::1]:7400")
    assert [each.target for each in found] == ["b:7400", "a:7400", "[fd00::1]:7400"]
    assert [each.url for each in found] == ["http://b:7400", "http://a:7400", "http://[fd00::1]:7400"]


def test_urls_keep_scheme_port_and_path() -> None:
    found = parse_addresses("http://host:8000/,https://gateway/vllm/,http://host")
    assert [each.url for each in found] == ["http://host:8000", "https://gateway:443/vllm", "http://host:80"]


@pytest.mark.parametrize(
    "text",
    ["", "a:1,,b:2", "host", "host:0", "host:70000", "host:port", "dns:name", "dns:10.0.0.1:80", "ftp://host:1",
     "host:80/path", "http://user@host:80", "http://host:80?x=1", "a b:80", "-a:80", "[fd00::1:80"],
)  # fmt: skip
def test_faulty_entry_is_refused_by_name_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.base_url.*host:port"):
        parse_addresses(text, "engine.base_url")


def test_name_is_resolved_anew_each_time_to_every_address_once() -> None:
    addresses = parse_addresses("dns:engines.default.svc:8000,10.0.0.2:8000")
    pods = [["10.0.0.10", "10.0.0.2", "10.0.0.2", "fd00::2"], ["10.0.0.3"]]
    first = resolve(addresses, lookup=lambda name: pods[0])
    assert [each.target for each in first] == ["10.0.0.2:8000", "10.0.0.10:8000", "[fd00::2]:8000"]
    again = resolve(addresses, lookup=lambda name: pods[1])
    assert [each.target for each in again] == ["10.0.0.3:8000", "10.0.0.2:8000"]


def test_systems_resolver_is_asked() -> None:
    found = resolve(parse_addresses("dns:localhost:8000"))
    assert Address("127.0.0.1", 8000) in found or Address("::1", 8000) in found


def test_name_without_address_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NameUnresolved, match=r"dns:engines\.invalid:8000 can't be resolved \(.+\): check the name"):
        resolve(parse_addresses("dns:engines.invalid:8000"))
    with pytest.raises(NameUnresolved, match="it has no address"):
        resolve(parse_addresses("dns:engines:8000"), lookup=lambda name: [])


def test_resolver_that_does_not_reply_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> None:
        time.sleep(5)
        raise OSError("no reply")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    began = time.monotonic()
    with pytest.raises(NameUnresolved, match=r"no reply within 0\.2 s"):
        resolve(parse_addresses("dns:engines:8000"), timeout_s=0.2)
    assert time.monotonic() - began < 3


@given(st.lists(st.tuples(st.from_regex(r"[a-z][a-z0-9.-]{0,20}[a-z0-9]", fullmatch=True), st.integers(1, 65535)),
                min_size=1), st.booleans())  # fmt: skip
def test_text_of_addresses_reads_back(pairs: list[tuple[str, int]], named: bool) -> None:
    addresses = list(dict.fromkeys(Address(host, port, is_name=named) for host, port in pairs))
    assert parse_addresses(",".join(str(each) for each in addresses)) == addresses
