"""A fleet behind `python -m inference route`: joins, kills, leases, drains, pins, updates under load, two routers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner

from tests.http_client import HTTP
from tests.inference.conftest import write_checkpoint
from tests.inference.test_route_command import ROOT, Routed, routed
from tests.inference.test_routed_engine import served
from tests.inference.test_shared_router import Server
from tests.needs import require
from tests.ports import free_port
from tests.vllm.fleet_servers import environment, until
from triplane_dagster.cli.app import app

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("policies")
    return write_checkpoint(folder / "first", 0), write_checkpoint(folder / "second", 1)


@contextmanager
def process(*arguments: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m inference ...`, which has printed its first line."""
    command = [sys.executable, "-m", "inference", *arguments]
    made = subprocess.Popen(command, env=environment(**more), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert made.stdout is not None and made.stdout.readline()
        yield made
    finally:
        made.kill()
        made.wait()
        assert made.stdout is not None
        made.stdout.close()


def state(face: Routed) -> dict[str, dict[str, Any]]:
    """Replicas by URL."""
    return {row["url"]: row for row in HTTP.get(f"{face.url}/fleet", timeout=60).json()["replicas"]}


def fleet(*arguments: str) -> str:
    """Output of `triplane fleet`."""
    done = CliRunner().invoke(app, ["fleet", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


class Load:
    """Sessions that ask, each in a thread, until they are told to end. pin: version that they are pinned to."""

    def __init__(self, face: Routed, name: str, sessions: int, pin: str | None = None) -> None:
        self.face, self.pin = face, pin
        self.replies: list[httpx.Response] = []
        self.names = [f"{name} {each}" for each in range(sessions)]
        self.ending = threading.Event()
        self.threads = [threading.Thread(target=self.play, args=(each,), daemon=True) for each in self.names]
        for thread in self.threads:
            thread.start()

    def play(self, name: str) -> None:
        prompt, turn = [len(name), *name.encode()[-3:]][:4], 0
        headers = {"x-session": name, "x-group": name.split()[0]} | ({"x-policy-version": self.pin} if self.pin else {})
        while not self.ending.is_set():
            self.replies.append(self.ask([each % 90 for each in prompt], turn, headers))
            turn += 1

    def ask(self, prompt: list[int], turn: int, headers: dict[str, str]) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 8, "seed": turn, "return_token_ids": True}
        return self.face.post("/v1/completions", body, **headers)

    def end(self) -> None:
        self.ending.set()
        for thread in self.threads:
            thread.join()
        for name in self.names:
            assert HTTP.delete(f"{self.face.url}/fleet/sessions/{name}", timeout=60).is_success

    def versions(self) -> set[str]:
        """Of the tokens of all replies that have some."""
        choices = [reply.json()["choices"][0] for reply in self.replies if reply.is_success]
        assert all(choice["token_ids"] for choice in choices)
        return {version for choice in choices for version in self.versions_of(choice)}

    def versions_of(self, choice: dict[str, Any]) -> set[str]:
        return {version for version, _, _ in choice["policy_spans"]}


def end_and_check(pinned: Sequence[Load], free: Load) -> None:
    """End loads during which the versions changed: each has tokens of its own version alone, or was refused."""
    for load in (*pinned, free):
        load.end()
    for load in pinned:
        assert load.versions() == {load.pin}
        assert {reply.status_code for reply in load.replies} == {200, 409}
    assert {reply.status_code for reply in free.replies} == {200}


def test_a_rolling_update_under_load_keeps_pinned_sessions_on_their_version(policies: tuple[Path, Path]) -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(served(policies[0], "first")).removesuffix("/v1") for _ in range(3)]
        face = stack.enter_context(routed(urls))
        pinned, free = Load(face, "pinned", 4, "first"), Load(face, "free", 2)
        said: list[str] = []
        update = ("update", "--policy", str(policies[1]), "--router", face.url, "--deadline", "200")
        updating = threading.Thread(target=lambda: said.append(fleet(*update)))
        updating.start()
        until(lambda: [row["version"] for row in state(face).values()].count("second") == 2)
        (last,) = (url for url, row in state(face).items() if row["version"] == "first")
        until(lambda: state(face)[last]["state"] == "draining")
        before = len(pinned.replies)
        until(lambda: len(pinned.replies) > before + 12)
        assert state(face)[last]["version"] == "first", "it waits for the sessions that are pinned to its version"
        stranger = face.post("/v1/completions", {"prompt": [1]}, **{"x-session": "new", "x-policy-version": "first"})
        assert (stranger.status_code, stranger.json()["error"]["code"]) == (409, "stale_policy_version")
        pinned.end()
        updating.join(60)
        free.end()
        assert said and "3 of 3 replicas serve second." in said[0]
        assert {reply.status_code for reply in pinned.replies} == {200} and pinned.versions() == {"first"}
        assert {reply.headers["x-policy-version"] for reply in pinned.replies} == {"first"}
        assert {reply.headers["x-replica"] for reply in pinned.replies[before:]} == {last}
        assert {reply.status_code for reply in free.replies} == {200} and free.versions() == {"first", "second"}
        rows = state(face)
        assert {(row["state"], row["requests"], row["tokens"]) for row in rows.values()} == {("serving", 0, 0)}
        assert face.post("/v1/completions", {"prompt": [1]}, **{"x-policy-version": "second"}).is_success


def test_no_pinned_reply_has_a_token_of_another_version_over_five_updates(policies: tuple[Path, Path]) -> None:
    """With --deadline 0 an update does not wait for sessions, so the version that they are pinned to goes away."""
    with ExitStack() as stack:
        urls = [stack.enter_context(served(policies[0], "first")).removesuffix("/v1") for _ in range(2)]
        face = stack.enter_context(routed(urls))
        loads = [Load(face, name, 2, name) for name in ("first", "second")]
        free = Load(face, "free", 1)
        for number in range(5):
            fleet("update", "--policy", str(policies[(number + 1) % 2]), "--router", face.url, "--deadline", "0")
        end_and_check(loads, free)


def test_servers_join_and_one_that_is_killed_or_lapses_costs_no_request(
    policies: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("# the key of the replicas\na key of sixteen letters\n")
    key = {"TRIPLANE_FLEET_KEY_FILE": str(tmp_path / "keys")}
    policy = ("--policy", str(policies[0]), "--listen", f"127.0.0.1:{free_port()}", "--threads", "1")
    with ExitStack() as stack:
        hook = stack.enter_context(hooked())
        face = stack.enter_context(
            routed([], "--fleet-key-file", str(tmp_path / "keys"), "--webhook", f"{hook.url}/told", "--fleet", "f")
        )
        assert face.said.startswith("0 of 0 servers")
        assert face.post("/v1/completions", {"prompt": [1]}).json()["error"]["code"] == "no_server"
        for headers in ({}, {"authorization": "Bearer # the key of the replicas"}):
            body = {"url": "http://x:1", "started": 1}
            refused = HTTP.post(f"{face.url}/fleet/join", json=body, headers=headers, timeout=60)
            assert refused.status_code == 401 and state(face) == {}
        beside = stack.enter_context(served(policies[0], "first")).removesuffix("/v1")
        own = stack.enter_context(process("serve", *policy, "--join", face.url, **key))
        sidecar = ("join", "--replica", beside, "--router", face.url, "--lease", "1", "--capacity", "7")
        side = stack.enter_context(process(*sidecar, **key))
        until(lambda: [row["state"] for row in state(face).values()] == ["serving"] * 2)
        rows = state(face)
        (other,) = set(rows) - {beside}
        assert (rows[beside]["capacity"], rows[other]["capacity"]) == (7, 256)
        assert {row["version"] for row in rows.values()} == {"first"}

        load = Load(face, "talk", 6)
        until(lambda: {each.headers["x-replica"] for each in load.replies} == {beside, other})
        own.kill()
        before = len(load.replies)
        until(lambda: len(load.replies) > before + 20)
        until(lambda: state(face)[other]["state"] == "away")
        load.end()
        assert {reply.status_code for reply in load.replies} == {200}
        until(lambda: set(state(face)) == {beside})

        side.send_signal(signal.SIGTERM)
        until(lambda: state(face) == {})
        assert side.wait(20) == 0
        side = stack.enter_context(process(*sidecar, **key))
        until(lambda: set(state(face)) == {beside})
        side.kill()
        until(lambda: state(face) == {})
        assert face.post("/v1/completions", {"prompt": [1]}).status_code == 503
        told = [(each["event"], each["url"], each["fleet"]) for each in hook.told]
        until(lambda: len([each for each in hook.told if each["event"] == "left"]) == 3)
        assert {("joined", beside, "f"), ("well", other, "f"), ("away", other, "f"), ("left", beside, "f")} <= set(told)


class Hooked:
    """A webhook, and a server that speaks vLLM's routes and whose replies name the version `marked`."""

    def __init__(self) -> None:
        self.port = free_port()
        self.told: list[dict[str, Any]] = []
        self.served = self.marked = "v1"
        self.during: Callable[[], None] = lambda: None
        routes = [
            Route("/told", self.tell, methods=["POST"]),
            Route("/health", self.health),
            Route("/weight_info", self.weight_info),
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
        ]
        self.server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=self.port, log_level="critical"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def tell(self, request: Request) -> Response:
        self.told.append(await request.json())
        return Response()

    async def health(self, request: Request) -> Response:
        return Response()

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.served})

    async def generate(self, request: Request) -> Response:
        self.during()
        marks = [{"version": self.marked, "start": 0, "end": 1}]
        return JSONResponse({"choices": [{"token_ids": [5], "weight_versions": marks}]})


@contextmanager
def hooked() -> Iterator[Hooked]:
    made = Hooked()
    thread = threading.Thread(target=made.server.run, daemon=True)
    thread.start()
    until(lambda: made.server.started)
    try:
        yield made
    finally:
        made.server.should_exit = True
        thread.join()


def test_a_reply_of_another_server_is_passed_on_only_if_it_proves_the_version() -> None:
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
    with hooked() as one, hooked() as other, routed([one.url, other.url]) as face:

        def asked(pin: str) -> tuple[int, str | None]:
            reply = face.post("/inference/v1/generate", body, **{"x-policy-version": pin})
            assert reply.is_success or reply.json()["error"]["code"] == "stale_policy_version"
            return reply.status_code, reply.headers.get("x-replica")

        assert asked("v1")[0] == 200 and asked("v2") == (409, None)
        one.marked = "v2"
        assert {asked("v1") for _ in range(4)} == {(200, other.url)}, "it lies about its version"
        one.marked = "v1"

        def updated() -> None:
            one.served = "v2"

        one.during = updated
        other.served = "v3"
        until(lambda: state(face)[other.url]["version"] == "v3")
        assert asked("v1") == (409, None), "it was updated meanwhile, and marks no tokens of that"
        assert asked("v3")[0] == 409, "that server marks v1"
        until(lambda: state(face)[one.url]["version"] == "v2")
        assert face.post("/inference/v1/generate", body).is_success, "not pinned"


def test_two_routers_share_leases_and_drains_and_outlive_redis(policies: tuple[Path, Path], tmp_path: Path) -> None:
    require("redis-server")
    with ExitStack() as stack:
        redis = Server(tmp_path)
        stack.callback(redis.kill)
        urls = [stack.enter_context(served(policies[0], "first")).removesuffix("/v1") for _ in range(2)]
        one, two = (stack.enter_context(routed([], "--redis", redis.url)) for _ in range(2))
        for url in urls:
            stack.enter_context(process("join", "--replica", url, "--router", one.url, "--lease", "2"))
        for face in (one, two):
            until(lambda face=face: [row["state"] for row in state(face).values()] == ["serving"] * 2)
        load = Load(two, "talk", 2)
        until(lambda: any(row["requests"] for row in state(one).values()))
        said = fleet("drain", f"{urls[0].upper()}/", "--deadline", "1", "--wait", "--router", one.url)
        assert said == f"{urls[0]} drains: nothing is left, stop it.\n"
        assert all(state(face)[urls[0]]["state"] == "draining" for face in (one, two))
        before = len(load.replies)
        until(lambda: len(load.replies) > before + 10)
        assert {each.headers["x-replica"] for each in load.replies[before + 2 :]} == {urls[1]}
        redis.kill()
        time.sleep(3)
        for face in (one, two):
            assert set(state(face)) == set(urls), "leases stay while nobody can renew them"
            assert face.post("/v1/completions", {"prompt": [1]}).headers["x-replica"] == urls[1]
        assert "can't reach Redis" in fleet("list", "--router", one.url)
        load.end()
        assert {reply.status_code for reply in load.replies} == {200}
        redis.start()
        until(lambda: HTTP.get(f"{one.url}/fleet", timeout=60).json()["registry"] == "well")


def test_the_command_lists_and_refuses_by_name(policies: tuple[Path, Path], tmp_path: Path) -> None:
    with ExitStack() as stack:
        url = stack.enter_context(served(policies[0], "first")).removesuffix("/v1")
        down = f"http://127.0.0.1:{free_port()}"
        face = stack.enter_context(routed([url, down]))
        found = {row["url"]: row for row in json.loads(fleet("list", "--json", "--router", face.url))["replicas"]}
        assert (found[url]["state"], found[url]["version"], found[down]["state"]) == ("serving", "first", "away")
        table = fleet("list", "--router", face.url)
        assert url in table and "ConnectError" in table
        broken = tmp_path / "broken"
        broken.mkdir()
        for said, *arguments in (
            ("the fleet has no replica http://x:1: name one of", "drain", "http://x:1"),
            ("is not the URL of one replica", "drain", "x"),
            ("--undo ends the drain", "drain", url, "--undo", "--wait"),
            (f"{url} can't be updated: ", "update", "--policy", str(broken)),
        ):
            done = CliRunner().invoke(app, ["fleet", *arguments, "--router", face.url])
            assert done.exit_code == 1 and said in " ".join(done.output.split()), done.output
        same = write_checkpoint(tmp_path / "first", 1)
        assert "1 serve first already: rename" in fleet("update", "--policy", str(same), "--router", face.url)
        assert state(face)[url]["state"] == "serving", "the refused update ended its drain"
        done = CliRunner().invoke(app, ["fleet", "list", "--router", down])
        assert done.exit_code == 1 and f"the router {down} can't be reached" in " ".join(done.output.split())
