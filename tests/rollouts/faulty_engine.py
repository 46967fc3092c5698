"""A proxy before an engine's server that lets requests hang, drops their answers, fails them, or changes answers: to
those of another policy, or to what no policy samples.
"""

from __future__ import annotations

import http.client
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Literal

Kind = Literal["hang", "drop", "fail", "wrong_version", "null", "deep"] | str
"""Others are those of _CHANGES."""


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
        self._answer(response.status, data if fault is None else _changed(data, fault))

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


def _changed(data: bytes, kind: Kind) -> bytes:
    if kind == "null":
        return b"null"
    if kind == "deep":
        return b"[" * 100_000
    answer = json.loads(data)
    for choice in answer["choices"]:
        _CHANGES[kind](choice)
    return json.dumps(answer).encode()


def _of_another_policy(choice: dict[str, Any]) -> None:
    choice["policy_spans"] = [["e" * 64, start, end] for _, start, end in choice["policy_spans"]]


def _too_long(choice: dict[str, Any]) -> None:
    for values in (choice["token_ids"], choice["logprobs"]["token_logprobs"]):
        values += values * 200
    choice["policy_spans"][-1][2] = len(choice["token_ids"])


def _without_stop(choice: dict[str, Any]) -> None:
    choice["token_ids"][-1], choice["finish_reason"] = 5, "stop"


def _empty(choice: dict[str, Any]) -> None:
    choice |= {"token_ids": [], "logprobs": {"token_logprobs": []}, "policy_spans": [], "finish_reason": "length"}


def _with_token(token: Any) -> Callable[[dict[str, Any]], None]:
    return lambda choice: choice["token_ids"].__setitem__(0, token)


def _with_logprob(logprob: Any) -> Callable[[dict[str, Any]], None]:
    return lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, logprob)


_CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "wrong_version": _of_another_policy,
    "too_long": _too_long,
    "without_stop": _without_stop,
    "empty": _empty,
    "foreign_token": _with_token(10**7),
    "negative_token": _with_token(-5),
    "text_token": _with_token("5"),
    "null_logprob": _with_logprob(None),
    "nan_logprob": _with_logprob(math.nan),
    "positive_logprob": _with_logprob(7.5),
    "text_logprob": _with_logprob("-1"),
    "short_spans": lambda choice: choice["policy_spans"][-1].__setitem__(2, 0),
}
