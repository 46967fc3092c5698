"""A real HTTP server with the surface of an OpenAI-compatible judge and of vLLM's scoring routes; what it answers is a
function of the test's.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]
"""(status, JSON body, a str sent as it is, or bytes of gzip)."""
Behave = Callable[[str, dict[str, Any]], Reply]
"""(path, request body) -> reply."""


def said(text: str) -> Reply:
    """A chat completion."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return 200, {"id": "chat", "object": "chat.completion", "model": "served", "choices": [choice]}


def scored(score: float, reason: str = "fine") -> Reply:
    """A chat completion within the judge's schema."""
    return said(json.dumps({"reason": reason, "score": score}))


@dataclass
class JudgeServer:
    """Where it listens, and what it was asked."""

    behave: Behave
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    """Most requests in flight together."""
    delay_s: float = 0.0
    _in_flight: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Reply:
        """Count the request and answer it."""
        with self._lock:
            self.asked.append(body)
            self.headers.append(headers)
            self._in_flight += 1
            self.at_once = max(self.at_once, self._in_flight)
        time.sleep(self.delay_s)
        with self._lock:
            self._in_flight -= 1
        return self.behave(path, body)


@contextmanager
def judge_server(behave: Behave) -> Iterator[JudgeServer]:
    """A server in a thread; its `url` has no path."""
    state = JudgeServer(behave)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = state.reply(self.path, dict(self.headers), body)
            packed = isinstance(answer, bytes)
            data = answer if packed else (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                if packed:
                    self.send_header("Content-Encoding", "gzip")
                self.end_headers()
                self.wfile.write(data)
            except ConnectionError:
                self.close_connection = True

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # the client was killed
                super().handle()

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield state
        server.shutdown()
        thread.join()
