"""A proxy before an engine's server that lets requests hang, drops their answers, fails them, or has them answered by
another policy.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Literal

Kind = Literal["hang", "drop", "fail", "wrong_version"]


class Faults:
    """What happens to the next completions, one fault each; None lets one pass."""

    def __init__(self) -> None:
        self.base_url = ""
        self.coming: list[Kind | None] = []
        self.met: list[Kind] = []
        self.over = threading.Event()
        """Until then a request hangs."""
        self._lock = threading.Lock()

    def take(self) -> Kind | None:
        with self._lock:
            kind = self.coming.pop(0) if self.coming else None
            if kind is not None:
                self.met.append(kind)
            return kind


@contextmanager
def faulty_engine(server: str) -> Iterator[Faults]:
    """A proxy on this machine before `server` (host:port)."""
    faults = Faults()
    handler = type("Handler", (_Handler,), {"server_address_behind": server, "faults": faults})
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    proxy.daemon_threads = True
    faults.base_url = f"http://127.0.0.1:{proxy.server_port}/v1"
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield faults
    finally:
        faults.over.set()
        proxy.shutdown()
        proxy.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_address_behind: ClassVar[str]
    faults: ClassVar[Faults]

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.faults.take() if self.path.endswith("/completions") else None
        if fault == "hang":
            self.faults.over.wait()
            self.close_connection = True
            return
        if fault == "fail":
            self._answer(500, b'{"error": {"message": "out of memory"}}')
            return
        upstream = http.client.HTTPConnection(self.server_address_behind, timeout=60)
        upstream.request(self.command, self.path, body, {"Content-Type": "application/json"})
        response = upstream.getresponse()
        data = response.read()
        upstream.close()
        if fault == "drop":
            self.close_connection = True
            return
        self._answer(response.status, _as_of_another_policy(data) if fault == "wrong_version" else data)

    do_GET = do_POST = _pass_on

    def _answer(self, status: int, data: bytes) -> None:
        with suppress(ConnectionError):  # whoever asked may have given up
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Silent."""


def _as_of_another_policy(data: bytes) -> bytes:
    answer = json.loads(data)
    for choice in answer["choices"]:
        choice["policy_spans"] = [["e" * 64, start, end] for _, start, end in choice["policy_spans"]]
    return json.dumps(answer).encode()
