"""Clients that send or read nothing, or endless heads, lose their connections; others are served meanwhile."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contracts import http_connections
from contracts.http_connections import HEAD_BYTES, BoundedConnection
from contracts.rpc import scraping
from tests.http_client import HTTP
from tests.ports import free_port

REPLY = 64 << 20


async def read(request: Request) -> Response:
    return Response(str(len(await request.body())))


async def long(request: Request) -> Response:
    return Response(bytes(REPLY))


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    for name in ("HEAD_S", "SILENT_S", "UNREAD_S"):
        monkeypatch.setattr(http_connections, name, 0.5)
    found = free_port()
    app = Starlette(routes=[Route("/", read, methods=["GET", "POST"]), Route("/long", long)])
    server = uvicorn.Server(uvicorn.Config(app, port=found, http=BoundedConnection, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield found
    server.should_exit = True
    thread.join()


def connected(port: int, sent: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=20)
    made.sendall(sent)
    return made


def rest(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    found = b""
    with connection:
        try:
            while piece := connection.recv(1 << 20):
                found += piece
        except ConnectionResetError:
            pass
    return found


@pytest.mark.parametrize("sent", ["", "GET / HTTP/1.1\r\nx-a: ", "POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nabc"])
def test_a_client_that_sends_no_more_is_let_go(port: int, sent: str) -> None:
    began = time.monotonic()
    silent = connected(port, sent.encode())
    assert HTTP.get(f"http://127.0.0.1:{port}/").text == "0"
    assert rest(silent) == b"" and time.monotonic() - began >= 0.5


def test_a_client_that_takes_its_time_within_the_bounds_is_served(port: int) -> None:
    slow = connected(port, b"POST / HTTP/1.1\r\nconnection: close\r\ncontent-length: 9\r\n\r\n")
    for _ in range(9):
        time.sleep(0.2)
        slow.sendall(b"a")
    assert rest(slow).endswith(b"\r\n\r\n9")


@pytest.mark.parametrize("before", ["", "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"])
def test_an_endless_head_or_trailer_is_refused(port: int, before: str) -> None:
    endless = connected(port, (before or "GET / HTTP/1.1\r\n").encode() + b"x-a: ")
    with pytest.raises(OSError), endless:
        for _ in range(10 * HEAD_BYTES // 1000):
            endless.sendall(b"a" * 1000)
            time.sleep(0.001)


def test_a_client_that_reads_nothing_is_let_go(port: int) -> None:
    stuck = connected(port, b"GET /long HTTP/1.1\r\n\r\n")
    time.sleep(2)
    assert 0 < len(rest(stuck)) < REPLY


@pytest.mark.parametrize("sent", ["", "GET /metrics HTTP/1.1\r\nx-a: "])
def test_a_silent_client_of_metrics_is_let_go(monkeypatch: pytest.MonkeyPatch, sent: str) -> None:
    monkeypatch.setattr(scraping, "SILENT_S", 0.5)
    endpoint = scraping.Endpoint()
    port = endpoint.start("127.0.0.1:0")
    try:
        silent = connected(port, sent.encode())
        assert HTTP.get(f"http://127.0.0.1:{port}/metrics").is_success
        assert rest(silent) == b""
    finally:
        endpoint.stop()
