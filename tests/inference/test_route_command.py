"""The router's HTTP face, as a process, before servers of ours and before ones that stream or fail."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from inference.errors import BadRequest
from inference.server.bodies import BODY_BYTES
from inference.server.prompts import asked
from tests.http_client import HTTP
from tests.inference.conftest import write_checkpoint
from tests.inference.test_routed_engine import served
from tests.ports import free_port
from tests.vllm.fleet_servers import environment, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


class Upstream:
    """A server in a thread: streams numbers as events, the second one after `go`, or answers with a fault."""

    def __init__(self) -> None:
        self.port, self.status, self.healthy = free_port(), 200, True
        self.sampled = b"7"
        """What its replies name as the number of their tokens."""
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.go, self.gone = threading.Event(), threading.Event()
        routes = [Route("/health", self.health), Route("/v1/chat/completions", self.chat, methods=["POST"])]
        config = uvicorn.Config(Starlette(routes=routes), port=self.port, log_level="critical")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    async def chat(self, request: Request) -> Response:
        self.seen.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.status != 200:
            return JSONResponse({"error": {"message": "not now"}}, self.status)

        async def body() -> Any:
            import asyncio

            try:
                yield b"data: one\n\n"
                while not self.go.is_set():
                    await asyncio.sleep(0.01)
                yield b'data: {"usage": {"completion_tokens": ' + self.sampled + b"}}\n\n"
            finally:
                self.gone.set()

        return StreamingResponse(body(), media_type="text/event-stream")


@contextmanager
def upstream() -> Iterator[Upstream]:
    made = Upstream()
    made.thread.start()
    try:
        until(lambda: made.server.started)
        yield made
    finally:
        made.go.set()
        made.server.should_exit = True
        made.thread.join()


def metric(url: str, name: str, **labels: str) -> float:
    """Sum of a server's samples with this name and these labels."""
    families = text_string_to_metric_families(HTTP.get(f"{url}/metrics", timeout=60).text)
    samples = [each for family in families for each in family.samples if each.name == name]
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


class Routed:
    """`python -m inference route`."""

    def __init__(self, urls: list[str], *options: str) -> None:
        replicas = [part for url in urls for part in ("--replica", url)]
        command = [sys.executable, "-m", "inference", "route", *replicas, "--listen", "127.0.0.1:0", "--metrics"]
        self.process = subprocess.Popen(
            [*command, *options], env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        self.url = self.said.rpartition(" ")[2].strip().removesuffix("/v1")

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return HTTP.post(f"{self.url}{path}", json=body, headers=headers, timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.url, name, **labels)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def routed(urls: list[str], *options: str) -> Iterator[Routed]:
    made = Routed(urls, *options)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        assert made.process.stdout is not None
        made.process.stdout.close()


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "stream": True, **more}


def test_turns_go_where_their_prompt_is_cached_and_survive_a_lost_server(tmp_path: Path) -> None:
    policy = write_checkpoint(tmp_path / "policy", 0)
    with ExitStack() as stack:
        lost = ExitStack()
        first = lost.enter_context(served(policy, "v"))
        second = stack.enter_context(served(policy, "v"))
        urls = [each.removesuffix("/v1") for each in (first, second)]
        face = stack.enter_context(routed(urls))
        assert face.said.startswith("2 of 2 servers at http://127.0.0.1:")
        assert face.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 1}).json()["object"] == "text_completion"
        assert HTTP.get(f"{face.url}/v1/models", timeout=60).json()["data"][0]["version"] == "v"

        def turn(prompt: list[int], seed: int) -> tuple[str, list[int]]:
            body = {"prompt": prompt, "max_tokens": 20, "seed": seed, "return_token_ids": True}
            reply = face.post("/v1/completions", body, **{"x-session": f"talk {seed}"})
            return reply.headers["x-replica"], reply.json()["choices"][0]["token_ids"]

        places = []
        for seed in range(6):
            prompt = [seed] * 48
            place, made = turn(prompt, seed)
            assert turn([*prompt, *made], seed)[0] == place
            places.append(place)
        assert set(places) <= set(urls)
        assert face.metric("route_cached_tokens_total") >= 6 * 48
        lost.close()
        for seed in range(6):
            assert turn([seed] * 48, seed)[0] == urls[1]
        until(lambda: face.metric("route_replicas", state="out") == 1)
        assert face.metric("route_flying_tokens") == 0
        assert face.end() == 0


def test_streams_are_passed_on_as_they_come_with_headers_and_body_unchanged() -> None:
    with upstream() as server, routed([server.url]) as face:
        body = chat(extra={"kept": [1.5, None]})
        with HTTP.stream(
            "POST", f"{face.url}/v1/chat/completions", json=body, headers={"authorization": "Bearer k"}, timeout=60
        ) as reply:
            chunks = reply.iter_raw()
            assert next(chunks) == b"data: one\n\n", "before the server has ended"
            assert face.metric("route_flying_tokens") > 0
            server.go.set()
            assert b"".join(chunks) == b'data: {"usage": {"completion_tokens": 7}}\n\n'
            assert reply.headers["content-type"].startswith("text/event-stream")
        assert server.seen == [body]
        assert server.headers[0]["authorization"] == "Bearer k"
        until(lambda: face.metric("route_requests_total", replica=server.url, code="200") == 1)
        assert face.metric("route_flying_tokens") == 0


def test_a_client_that_leaves_ends_its_request_at_the_server() -> None:
    with upstream() as server, routed([server.url]) as face:
        with HTTP.stream("POST", f"{face.url}/v1/chat/completions", json=chat(), timeout=60) as reply:
            assert next(reply.iter_raw()) == b"data: one\n\n"
        assert server.gone.wait(60)
        until(lambda: face.metric("route_flying_tokens") == 0)


def test_a_server_that_answers_503_is_left_out_until_it_is_well() -> None:
    with upstream() as one, upstream() as other, routed([one.url, other.url]) as face:
        for each in (one, other):
            each.go.set()
        one.status, one.healthy = 503, False
        places = {face.post("/v1/chat/completions", chat(str(each))).headers["x-replica"] for each in range(20)}
        assert places == {other.url}
        assert len(one.seen) <= 1
        until(lambda: face.metric("route_replicas", state="out") == 1)  # a probe finds it if no request did
        other.status, other.healthy = 503, False
        assert face.post("/v1/chat/completions", chat()).status_code == 503
        until(lambda: face.metric("route_replicas", state="out") == 2)
        reply = face.post("/v1/chat/completions", chat())
        assert (reply.status_code, reply.headers["x-replica"]) == (503, other.url), "the last one is never ejected"
        assert reply.json()["error"]["message"] == "not now"
        assert HTTP.get(f"{face.url}/health", timeout=60).status_code == 503
        one.status, one.healthy = 200, True
        until(lambda: HTTP.get(f"{face.url}/health", timeout=60).is_success)
        assert face.post("/v1/chat/completions", chat()).headers["x-replica"] == one.url


def test_sigterm_lets_a_stream_end() -> None:
    with upstream() as server, routed([server.url]) as face:
        with HTTP.stream("POST", f"{face.url}/v1/chat/completions", json=chat(), timeout=60) as reply:
            chunks = reply.iter_raw()
            next(chunks)
            face.process.send_signal(signal.SIGTERM)
            assert face.process.stdout is not None
            assert face.process.stdout.readline().startswith("draining")
            time.sleep(0.3)
            assert face.process.poll() is None
            server.go.set()
            assert b"completion_tokens" in b"".join(chunks)
        assert face.process.wait(60) == 0


def test_contradictory_requests_and_addresses_are_refused_by_name() -> None:
    with upstream() as server, routed([server.url]) as face:
        for content, said in (
            (b"{", "the body is not JSON"),
            (b"[]", "no JSON object"),
            (b"{}", "neither `prompt`, `token_ids` nor a list `messages`"),
            (json.dumps({"prompt": [1 << 31]}).encode(), "not a token id"),
        ):
            reply = HTTP.post(f"{face.url}/v1/completions", content=content, timeout=60)
            assert reply.status_code == 400 and said in reply.json()["error"]["message"]
    command = [sys.executable, "-m", "inference", "route", "--replica", "no address"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("error: --replica") and done.stderr.count("\n") == 1


def test_a_reply_with_an_absurd_usage_harms_no_other_request() -> None:
    with upstream() as server, routed([server.url]) as face:
        server.go.set()
        for sampled in (b"7", b"-1000000000", b"[" * 4000, b"9" * 4000, b"1e400", b"true", b"7"):
            server.sampled = sampled
            reply = face.post("/v1/chat/completions", chat())
            assert reply.status_code == 200 and sampled in reply.content
            until(lambda: face.metric("route_flying_tokens") == 0)
        assert face.metric("route_requests_total", replica=server.url, code="200") == 7


def test_headers_that_are_not_ascii_are_passed_on() -> None:
    with upstream() as server, routed([server.url]) as face:
        server.go.set()
        headers = {b"x-user": "Zoë".encode("latin-1"), b"content-type": b"application/json"}
        reply = HTTP.post(f"{face.url}/v1/chat/completions", json=chat(), headers=headers, timeout=60)
        assert reply.status_code == 200 and server.headers[0]["x-user"] == "Zoë"


def test_a_body_beyond_the_bound_is_refused_while_it_arrives() -> None:
    with upstream() as server, routed([server.url]) as face:
        server.go.set()
        with socket.create_connection(("127.0.0.1", int(face.url.rpartition(":")[2])), timeout=60) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range((BODY_BYTES >> 20) + 1):
                raw.sendall(b"100000\r\n" + b"a" * (1 << 20) + b"\r\n")
            said = raw.recv(1000)
        assert said.startswith(b"HTTP/1.1 413")
        assert face.post("/v1/chat/completions", chat()).status_code == 200


MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": st.text()}), min_size=1
)


@given(MESSAGES, MESSAGES, st.booleans())
def test_a_longer_chat_begins_as_the_shorter_one(before: list[Any], after: list[Any], tools: bool) -> None:
    more = {"tools": [{"type": "function", "function": {"name": "run"}}]} if tools else {}
    short = asked(json.dumps({"messages": before, **more}).encode()).prompt
    whole = asked(json.dumps({**more, "messages": before + after}).encode()).prompt
    assert np.array_equal(short[:-1], whole[: len(short) - 1])
    assert len(whole) > len(short) - 1


@pytest.mark.parametrize(
    ("body", "length", "most"),
    [
        ({"prompt": [5, 6, 7], "max_tokens": 9}, 3, 9),
        ({"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}, 2, 3),
        ({"prompt": "12345678", "max_tokens": "all"}, 2, 256),
        ({"prompt": [5, 6], "max_tokens": 10**400}, 2, 2**31),
        ({"prompt": "\ud83d"}, 1, 256),
        ({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 4, "max_tokens": 5}, 8, 4),
    ],
)
def test_lengths_are_read_from_each_kind_of_request(body: dict[str, Any], length: int, most: int) -> None:
    found = asked(json.dumps(body).encode())
    assert (len(found.prompt), found.max_tokens) == (length, most)


def test_other_bodies_are_refused() -> None:
    for body in (b"nonsense", b"3", b'{"messages": "text"}', b"[" * 100_000):
        with pytest.raises(BadRequest, match="the body"):
            asked(body)


def test_a_name_without_an_address_hides_no_other_server() -> None:
    with upstream() as server, routed(["dns:no-such-name.invalid:8000", server.url]) as face:
        assert face.said.startswith("1 of 1 servers")
