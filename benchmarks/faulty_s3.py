"""S3 proxy that loses replies, truncates bodies, fails requests, delays replies and drops conditions, on request or at
random.
"""

from __future__ import annotations

import http.client
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Literal

Kind = Literal["lose_answer", "cut_body", "fail", "slow", "conflict", "refuse", "unconditional"]
SLOW_S = 0.5
"""Delay of a slow reply, in seconds."""
_ANSWERS = {"fail": (503, "SlowDown"), "conflict": (409, "ConditionalRequestConflict"), "refuse": (403, "AccessDenied")}


@dataclass
class Fault:
    """Fault of the next `times` requests of this method whose path and query contain `where`."""

    kind: Kind
    method: str
    where: str = ""
    times: int = 1


class Weather:
    """Random faults: every request fails with probability `rate`, by a seeded choice."""

    BY_METHOD: ClassVar[dict[str, tuple[Kind, ...]]] = {
        "GET": ("fail", "slow", "cut_body"),
        "HEAD": ("fail", "slow"),
        "DELETE": ("fail", "slow", "lose_answer"),
        "PUT": ("fail", "slow", "lose_answer"),
        "POST": ("fail", "slow", "lose_answer"),
    }

    def __init__(self, rate: float, seed: int) -> None:
        self.rate = rate
        self.counts: Counter[str] = Counter()
        self._chance, self._lock = random.Random(seed), threading.Lock()

    def take(self, method: str) -> Fault | None:
        """Fault for a request of this method, if any."""
        with self._lock:
            if self._chance.random() >= self.rate:
                return None
            kind = self._chance.choice(self.BY_METHOD[method])
            self.counts[kind] += 1
        return Fault(kind, method)


@dataclass
class FaultyS3:
    """The proxy: its address, the pending faults, and the requests so far."""

    endpoint: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    weather: Weather | None = None

    def take(self, method: str, path: str) -> Fault | None:
        """Fault for this request, if any."""
        self.requests.append((method, path))
        for fault in self.faults:
            if fault.times > 0 and fault.method == method and fault.where in path:
                fault.times -= 1
                return fault
        return self.weather.take(method) if self.weather else None


@contextmanager
def faulty_s3(server: str) -> Iterator[FaultyS3]:
    """Start a proxy on this machine for `server` (host:port)."""
    proxy = _Server(("127.0.0.1", 0), _Handler)
    state = FaultyS3(f"http://127.0.0.1:{proxy.server_address[1]}")
    _Handler.places[proxy.server_address[1]] = (server, state)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of killed clients."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    places: ClassVar[dict[int, tuple[str, FaultyS3]]] = {}

    def _pass_on(self) -> None:
        server, state = self.places[self.connection.getsockname()[1]]
        body = self._body()
        fault = state.take(self.command, self.path)
        if fault is not None and fault.kind in _ANSWERS:
            status, code = _ANSWERS[fault.kind]
            answer = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>ordered</Message></Error>".encode()
            self._answer(status, {"Content-Type": "application/xml"}, answer)
            return
        if fault is not None and fault.kind == "slow":
            time.sleep(SLOW_S)
        upstream = http.client.HTTPConnection(server, timeout=20)
        sent = {name: value for name, value in self.headers.items() if name not in ("Expect", "Transfer-Encoding")}
        if fault is not None and fault.kind == "unconditional":
            sent.pop("If-None-Match", None)
        upstream.request(self.command, self.path, body, sent | {"Content-Length": str(len(body))})
        response = upstream.getresponse()
        data, headers = response.read(), dict(response.getheaders())
        upstream.close()
        if fault is not None and fault.kind == "lose_answer":
            self.close_connection = True
            return
        self._answer(response.status, headers, data, cut=fault is not None and fault.kind == "cut_body")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def _answer(self, status: int, headers: dict[str, str], data: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):  # the client may have been killed
                self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = cut

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: `FaultyS3.requests` is the log."""
