"""The proxy of a sandbox: what it lets through, what it refuses, and what hostile clients get."""

from __future__ import annotations

import asyncio
import ipaddress

import pytest

from envd.backends.base import NetworkRule
from envd.server import egress, egress_http, egress_relay
from envd.server.destinations import DestinationRefused, Destinations
from envd.server.rules import load_rules
from tests.envd.egress import BODY, Way, chunked_answer, http_answer, through

SERVER = (
    "network: {allow: [{host: 0.0.0.0/0}, {host: 10.0.0.0/8, ports: [80]}, {host: '::/0'}, {host: '*.example.com'}]}"
)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "169.254.169.254",
        "10.0.0.1",
        "172.16.3.4",
        "192.168.1.1",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "168.63.129.16",
        "::1",
        "::",
        "fe80::1",
        "fd00:ec2::254",
        "ff02::1",
        "::ffff:169.254.169.254",
        "::ffff:127.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::1",
    ],
)
def test_reserved_addresses_are_reached_by_no_name_and_no_wide_network(address: str) -> None:
    allowed = Destinations([NetworkRule("name.example"), NetworkRule("0.0.0.0/0"), NetworkRule("::/0")])
    with pytest.raises(DestinationRefused, match="private, reserved"):
        allowed.check_address("name.example", ipaddress.ip_address(address), 80, named=True)
    with pytest.raises(DestinationRefused):
        allowed.check_host(address, 80)


def test_an_address_that_the_rules_name_is_reached_at_its_ports() -> None:
    allowed = Destinations(
        [NetworkRule("10.0.0.0/8", (80,)), NetworkRule("93.184.215.0/24"), NetworkRule("*.example.com", (443,))]
    )
    allowed.check_host("10.1.2.3", 80)
    allowed.check_host("::ffff:10.1.2.3", 80)
    allowed.check_host("93.184.215.14", 9999)
    assert allowed.check_host("a.b.example.com", 443) is None
    for host, port in (
        ("10.1.2.3", 81),
        ("11.0.0.1", 80),
        ("93.184.216.1", 80),
        ("example.com", 443),
        ("a.example.com", 80),
        ("evil-example.com", 443),
        ("a.example.com.evil.com", 443),
        ("a..example.com", 443),
        ("a/b.example.com", 443),
        ("%61.example.com", 443),
        ("0x0a010203", 80),
        ("167837955", 80),
    ):
        with pytest.raises(DestinationRefused, match=r"the sandbox's rules do not allow .*: name it in network\.allow"):
            allowed.check_host(host, port)


@pytest.mark.parametrize(
    ("host", "fits"),
    [
        ("8.8.8.8", True),
        ("169.254.169.254", False),
        ("127.0.0.0/8", False),
        ("10.1.0.0/16, ports: [80]", True),
        ("10.1.0.0/16", False),
        ("'fd00::/8'", False),
    ],
)
def test_a_request_can_not_name_reserved_addresses_that_the_server_does_not(host: str, fits: bool) -> None:
    _, denials = load_rules(f"network: {{allow: [{{host: {host}}}]}}").under(load_rules(SERVER))
    assert (not denials) is fits


def test_a_tunnel_carries_bytes_both_ways_and_half_closes() -> None:
    async def job(way: Way) -> None:
        reader, writer = await way.tunnel()
        writer.write(BODY)
        writer.write_eof()
        assert await reader.read() == BODY
        assert bytes(way.destination.heard[0]) == BODY and way.events() == []

    through(job)


def test_a_plain_request_is_written_anew_and_alone() -> None:
    async def job(way: Way) -> None:
        said = await way.say(
            f"POST http://{way.there}/a?b=1 HTTP/1.1\r\nHost: elsewhere.example\r\nContent-Length:"
            " 5\r\nProxy-Authorization: Basic eA==\r\nConnection: X-Gone, Content-Length, keep-alive\r\nX-Gone:"
            " 1\r\nUpgrade: h2c\r\nX-Kept: 2\r\n\r\nhello".encode()
        )
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and body == BODY and b"X-Kept: 1" in head.replace(b"x-kept", b"X-Kept")
        assert b"keep-alive" not in head.lower() and b"connection: close" in head.lower()
        there = bytes(way.destination.heard[0])
        assert there.startswith(b"POST /a?b=1 HTTP/1.1\r\n") and there.endswith(b"\r\n\r\nhello")
        assert f"host: {way.there}\r\n".encode() in there.lower() and b"x-kept: 2" in there.lower()
        for gone in (b"elsewhere", b"proxy-", b"x-gone", b"upgrade", b"keep-alive"):
            assert gone not in there.lower(), gone
        assert way.events() == []

    through(job, answer=http_answer)


def test_chunks_go_both_ways_and_an_old_client_gets_none() -> None:
    async def job(way: Way) -> None:
        said = await way.say(
            f"PUT http://{way.there}/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n".encode(),
            b"2\r\nde\r\n0\r\n\r\n",
        )
        assert said.count(b"x") == len(BODY) and said.endswith(b"\r\n0\r\n\r\n")
        old = await way.say(f"GET http://{way.there}/ HTTP/1.0\r\n\r\n".encode())
        assert old.endswith(b"\r\n\r\n" + BODY) and b"chunked" not in old

    through(job, answer=chunked_answer)


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: 6\r\nTransfer-Encoding: chunked",
        "Content-Length: 6\r\nContent-Length: 7",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding : chunked",
        "Content-Length: +6",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    ],
)
def test_a_length_that_can_be_read_in_two_ways_reaches_nobody(framing: str) -> None:
    async def job(way: Way) -> None:
        said = await way.say(
            f"POST http://{way.there}/ HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n0\r\n\r\n".encode()
            + b"GET /smuggled HTTP/1.1\r\n\r\n"
        )
        assert said.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 ")), said
        assert way.destination.heard == [] and len(way.events()) == 1

    through(job, answer=http_answer)


@pytest.mark.parametrize("apart", [False, True])
def test_a_second_request_on_a_connection_is_not_read(apart: bool) -> None:
    async def job(way: Way) -> None:
        first = f"GET http://{way.there}/first HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        second = b"GET http://169.254.169.254/second HTTP/1.1\r\nHost: x\r\n\r\n"
        said = await way.say(*([first, second] if apart else [first + second]))
        assert said.count(b"HTTP/1.1 ") == 1 and BODY in said
        (heard,) = way.destination.heard
        assert heard.count(b"HTTP/1.1\r\n") == 1 and b"second" not in heard
        while not way.events():  # it lingers after its answer
            await asyncio.sleep(0.01)
        assert ["second request" in event["reason"] for event in way.events()] == [True]

    through(job, answer=http_answer)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ("GET / HTTP/1.1\r\nHost: {there}", "this is a proxy"),
        ("GET https://{there}/ HTTP/1.1\r\nHost: x", "this is a proxy"),
        ("GET http://u:p@{there}/ HTTP/1.1\r\nHost: x", "this is a proxy"),
        ("CONNECT 127.0.0.1 HTTP/1.1\r\nHost: x", "no port"),
        ("CONNECT {there}/x HTTP/1.1\r\nHost: x", "this is a proxy"),
        ("CONNECT 127.0.0.1:99999 HTTP/1.1\r\nHost: x", "no destination"),
        ("GET http://[::1/ HTTP/1.1\r\nHost: x", "no destination"),
        ("GET http://127.0.0.1:0/ HTTP/1.1\r\nHost: x", "this is a proxy"),
        ("\x16\x03\x01 hello", "not an HTTP/1.1 request"),
        ("GET http://{there}/ HTTP/1.1\r\nX: " + "y" * 20_000, "not an HTTP/1.1 request"),
        ("CONNECT {there} HTTP/1.1\r\nHost: x\r\nContent-Length: 3", "more than one way"),
        ("GET http://127.0.0.1\\@evil/ HTTP/1.1\r\nHost: x", "this is a proxy"),
    ],
)
def test_what_is_no_request_to_a_proxy_is_answered_in_a_line(request_: str, words: str) -> None:
    async def job(way: Way) -> None:
        said = await way.say((request_.replace("{there}", way.there) + "\r\n\r\n").encode())
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and words in body.decode() and body.count(b"\n") == 1
        assert way.destination.heard == []

    through(job)


def test_a_denied_destination_is_named_with_the_fix_and_recorded() -> None:
    async def job(way: Way) -> None:
        for line, where in (
            (f"CONNECT 127.0.0.1:{way.destination.port - 1} HTTP/1.1", f"127.0.0.1:{way.destination.port - 1}"),
            ("GET http://Other.Example./ HTTP/1.1", "other.example:80"),
            ("CONNECT 169.254.169.254:80 HTTP/1.1", "169.254.169.254:80"),
        ):
            said = await way.say(f"{line}\r\nHost: x\r\n\r\n".encode())
            assert said.startswith(b"HTTP/1.1 403 ") and f"do not allow {where}: name it" in said.decode(), said
            assert way.events()[-1]["destination"] == where and "network.allow" in way.events()[-1]["reason"]
        assert way.asked == [] and len(way.events()) == 3  # nothing was resolved for what is not allowed

    through(job)


def test_a_name_is_resolved_once_and_what_it_leads_to_is_what_is_checked() -> None:
    names = {
        "good.example": ["169.254.169.254", "::1", "127.0.0.1"],
        "metadata.example": ["169.254.169.254", "::ffff:127.0.0.2", "fe80::1%1"],
        "none.example": [],
    }

    async def job(way: Way) -> None:
        rules = [NetworkRule(name) for name in (*names, "unknown.example")]
        way.proxy._allowed = Destinations([*rules, NetworkRule("127.0.0.1/32", (way.destination.port,))])
        port = way.destination.port
        said = await way.say(f"GET http://good.example:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert BODY in said and way.asked == ["good.example"]
        assert f"host: good.example:{port}".encode() in bytes(way.destination.heard[0]).lower()
        said = await way.say(f"CONNECT metadata.example:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert said.startswith(b"HTTP/1.1 403 ") and b"private, reserved" in said
        for name in ("none.example", "unknown.example"):
            assert b"502" in await way.say(f"CONNECT {name}:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert len(way.events()) == 1 and len(way.destination.heard) == 1

    through(job, answer=http_answer, names=names)


def test_what_can_not_be_reached_or_does_not_speak_http_is_said() -> None:
    async def job(way: Way) -> None:
        said = await way.say(f"GET http://{way.there}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert said.startswith(b"HTTP/1.1 502 ") and b"does not answer in HTTP/1.1" in said
        await way.destination.stop()
        said = await way.say(f"CONNECT {way.there} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert said.startswith(b"HTTP/1.1 502 ") and b"can't be reached: " in said

    through(job, answer=lambda data: b"220 mail.example ESMTP\r\n\r\n")


def test_a_sandbox_has_so_many_connections_and_room_again_when_one_ends() -> None:
    async def job(way: Way) -> None:
        held = [await way.tunnel() for _ in range(egress.MOST)]
        said = await way.say()
        assert said.startswith(b"HTTP/1.1 503 ") and b"32 connections" in said
        assert way.events()[-1]["reason"] == "too many connections"
        held.pop()[1].close()
        await asyncio.sleep(0.2)
        held.append(await way.tunnel())
        for _, writer in held:
            writer.close()

    through(job)


def test_slow_heads_and_silence_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress_http, "HEAD_S", 0.3)
    monkeypatch.setattr(egress_relay, "IDLE_S", 0.5)

    async def job(way: Way) -> None:
        reader, writer = await way.open()
        for _ in range(8):
            writer.write(b"G")
            await asyncio.sleep(0.05)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        reader, _ = await way.tunnel()
        async with asyncio.timeout(5):
            assert await reader.read() == b""  # after the silence

    through(job)


def test_who_takes_nothing_is_sent_no_more() -> None:
    async def job(way: Way) -> None:
        _, writer = await way.tunnel()
        sent = 0
        try:
            async with asyncio.timeout(1.5):
                while sent < 1 << 28:
                    writer.write(BODY)
                    await writer.drain()
                    sent += len(BODY)
        except TimeoutError:
            pass
        assert sent < 1 << 26  # what kernels' buffers take
        writer.transport.abort()

    through(job)


def test_the_end_of_a_proxy_is_the_end_of_its_connections() -> None:
    async def job(way: Way) -> None:
        reader, _ = await way.tunnel()
        await way.proxy.stop()
        try:
            assert await reader.read() == b""
        except ConnectionError:
            pass
        await way.proxy.stop()

    through(job)


def test_names_that_never_answer_hold_two_lookups_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "_RESOLVE_S", 0.3)

    async def job(way: Way) -> None:
        answers, asked = asyncio.Event(), list[str]()

        async def silent(host: str, port: int) -> list[str]:
            asked.append(host)
            await answers.wait()
            return []

        way.proxy._egress.resolve = silent
        for _ in range(2):
            tried = (way.say(b"CONNECT slow.example:443 HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(3))
            assert [b"no answer in time" in said for said in await asyncio.gather(*tried)] == [True] * 3
        assert len(asked) == 2
        answers.set()
        await asyncio.sleep(0.05)
        assert b"has no address" in await way.say(b"CONNECT slow.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")

    through(job, rules=[NetworkRule("slow.example")])
