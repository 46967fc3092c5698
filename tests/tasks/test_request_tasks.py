"""Tasks graded by the requests that an agent made, and agents that forge them."""

from __future__ import annotations

import base64
import http.server
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from import_sources import write
from with_client import with_client

from contracts.final_states import RequestsState
from contracts.store import open_store
from contracts.tasks import Task
from curation.states.requests import grade_requests, requests_state
from curation.tasks.agents import Observation, agent_named, play_suite
from curation.tasks.importing.splits import parse_shares
from curation.tasks.importing.suite import import_suite, read_source, suite_report
from curation.tasks.inspect import suite_tasks
from curation.verdicts import Verdict
from curation.verify import Verifier
from envd.client import SandboxClient, ToolCall
from envd.local import LocalEnvd
from envd.server.egress_http import Target
from envd.server.egress_record import MOST_BODY, MOST_REQUESTS, RequestRecord

ORDER = {"item": "tea", "count": 2}


class _Shop(http.server.BaseHTTPRequestHandler):
    """Takes orders of tea, and refuses others."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(500 if self.path == "/broken" else 201 if b"tea" in body else 400)

    do_DELETE = do_post = do_GET

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Shop)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    rules = tmp_path_factory.mktemp("rules") / "rules.yaml"
    rules.write_text("network: {allow: [{host: 127.0.0.0/8}]}")
    with LocalEnvd("namespaces", options=["--policy", str(rules)]) as envd:
        yield envd.address


def declared(port: int, **changes: Any) -> dict[str, Any]:
    host = f"127.0.0.1:{port}"
    order = {"name": "order", "method": "POST", "host": host, "path": "/orders?by=ann", "body": ORDER} | changes
    return {"kind": "requests", "requests": [order, {"name": "no_list", "method": "GET", "host": host, "count": 0}]}


def task_folder(root: Path, state: dict[str, Any]) -> Path:
    write(root / "shop", {"task.yaml": yaml.safe_dump({"instruction": "Order two teas.", "final_state": state})})
    write(root / "shop", {"README": "POST /orders?by=NAME\n"})
    return root


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, address: str, port: int) -> Task:
    root = tmp_path_factory.mktemp("requests")
    reading, store = read_source(task_folder(root / "tasks", declared(port))), open_store(str(root / "store"))
    suite = with_client(address, lambda client: import_suite(reading, parse_shares([]), store, client))
    assert not suite_report(suite).broken
    assert {each.cheat for each in suite_report(suite).cheats} == {"no_requests", "unanswered", "twice"}
    (found,) = suite_tasks(suite).values()
    return found


class Says:
    """Agent that runs a program with functions that speak to the proxy."""

    def __init__(self, program: str, port: int) -> None:
        self._program = base64.b64encode((_HELPERS.replace("@PORT@", str(port)) + program).encode()).decode()

    def act(self, task: Task, observation: Observation) -> list[ToolCall]:
        if observation.turns:
            return []
        return [ToolCall("exec", {"command": f"echo {self._program} | base64 -d | python3 -"})]


_HELPERS = """
import http.client, json, socket, time
ORDER, PORT = {"count": 2, "item": "tea"}, @PORT@
def ask(method, path, body="", host="127.0.0.1", headers={}):
    proxy = http.client.HTTPConnection("127.0.0.1", 3128, timeout=20)
    proxy.request(method, f"http://{host}:{PORT}{path}", body, headers)
    return proxy.getresponse().status
def order(**more):
    return ask("POST", "/orders?by=ann", json.dumps(ORDER, indent=1), **more)
def raw(data, read=True):
    with socket.create_connection(("127.0.0.1", 3128), timeout=20) as proxy:
        proxy.sendall(data.replace(b"HOST", b"127.0.0.1:%d" % PORT))
        return proxy.recv(9999) if read else b""
BODY = json.dumps(ORDER).encode()
HEAD = b"POST http://HOST/orders?by=ann HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: %d\\r\\n\\r\\n"
WHOLE = HEAD % len(BODY) + BODY
DELETE = b"DELETE http://HOST/ HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"
"""


def verdict(task: Task, program: str, address: str, port: int) -> Verdict:
    agent = Says(program, port)
    (played,) = with_client(address, lambda client: play_suite([task], agent, client, Verifier(client, None)))
    return played.verdict


def test_the_oracle_orders_once_and_noop_does_not(task: Task, address: str) -> None:
    for name, solved in (("oracle", True), ("noop", False)):
        agent = agent_named(name)
        (played,) = with_client(
            address, lambda client, agent=agent: play_suite([task], agent, client, Verifier(client, None))
        )
        assert played.verdict.solved is solved, played
        assert played.verdict.tests_passed == (3 if solved else 0), "doing nothing earns no share"


@pytest.mark.parametrize(
    "program",
    [
        "order()",
        "ask('GET', '/orders'); ask('POST', '/orders', 'coffee'); order()",  # reads, and is refused once
        "raw(WHOLE)",
    ],
)
def test_work_counts_however_it_was_done(program: str, task: Task, address: str, port: int) -> None:
    found = verdict(task, program, address, port)
    assert found.solved, found


FORGED = {
    "made twice": "order(); order()",
    "another body": "ask('POST', '/orders?by=ann', json.dumps(ORDER | {'count': True}))",
    "a body that is no JSON": "ask('POST', '/orders?by=ann', 'tea' + '[' * 60000)",
    "another path": "ask('POST', '/orders?by=bob', json.dumps(ORDER))",
    "another method": "ask('post', '/orders?by=ann', json.dumps(ORDER))",
    "a forbidden one beside it": "order(); ask('GET', '/')",
    "a change beside it": "order(); ask('DELETE', '/orders')",
    "a change that failed beside it": "order(); ask('POST', '/broken', 'tea')",
    "a change nobody waits for": "order(); raw(DELETE, read=False); time.sleep(0.5)",
    "half of it": "raw(WHOLE[:-3], read=False)",
    "two on one connection": "raw(WHOLE.replace(b'POST', b'GET', 1).replace(b'/orders?by=ann', b'/x', 1) + WHOLE)",
    "in the path of another": "raw(b'GET http://HOST/x%20POST%20/orders?by=ann HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')",
    "in the body of another": "ask('GET', '/x', WHOLE)",
    "by a tunnel": (
        "import contextlib\n"
        "with contextlib.suppress(OSError):\n"
        "    tunnel = http.client.HTTPConnection('127.0.0.1', 3128, timeout=9)\n"
        "    tunnel.set_tunnel('127.0.0.1', PORT)\n"
        "    tunnel.request('POST', '/orders?by=ann', json.dumps(ORDER))\n"
    ),
    "at a server of its own": (
        "import http.server, threading\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_POST(self): self.send_response(201); self.end_headers()\n"
        "s = http.server.HTTPServer(('127.0.0.1', PORT), H)\n"
        "threading.Thread(target=s.serve_forever, daemon=True).start()\n"
        "own = http.client.HTTPConnection('127.0.0.1', PORT)\n"
        "own.request('POST', '/orders?by=ann', json.dumps(ORDER))\n"
    ),
    "with the host in a header alone": (
        "PORT += 1\nask('POST', '/orders?by=ann', json.dumps(ORDER), headers={'Host': f'127.0.0.1:{PORT - 1}'})"
    ),
}


@pytest.mark.parametrize("attack", FORGED)
def test_a_forged_request_does_not_count(attack: str, task: Task, address: str, port: int) -> None:
    found = verdict(task, FORGED[attack], address, port)
    assert not found.solved and found.exit == "completed", found


@pytest.mark.parametrize(
    "state",
    [
        b"{",
        b"[]",
        b'{"complete":true}',
        b'{"complete":true,"requests":[{}]}',
        b'{"answer":1}',
        b"diff --git a/x b/x\n",
    ],
)
def test_a_damaged_record_is_unsolved(state: bytes) -> None:
    result = grade_requests(RequestsState.model_validate(declared(80)), state)
    assert {each.status for each in result.outcomes} == {"failed"}


def test_a_record_that_is_not_complete_is_unsolved() -> None:
    expected = RequestsState.model_validate(declared(80))
    state = json.loads(requests_state(expected.requests))
    whole, cut = (json.dumps(state | {"complete": complete}).encode() for complete in (True, False))
    assert {each.status for each in grade_requests(expected, whole).outcomes} == {"passed"}
    assert {each.status for each in grade_requests(expected, cut).outcomes} == {"failed"}


def test_a_record_is_bounded_and_says_what_it_lacks() -> None:
    record, target = RequestRecord(), Target.of(b"POST", b"http://shop.test:81/a?b=c")
    large, small = record.begin(b"POST", target), record.begin(b"POST", target)
    for each, size in ((large, MOST_BODY + 1), (small, MOST_BODY)):
        for _ in range(2):
            each.feed(b"\xff" * (size - size // 2 if not each.body else size // 2))
        each.end()
    rows = json.loads(record.to_json())
    assert rows["complete"] and [row["whole"] for row in rows["requests"]] == [False, True]
    assert rows["requests"][1]["path"] == "/a?b=c" and rows["requests"][1]["body"] == "\\xff" * MOST_BODY
    for _ in range(MOST_REQUESTS - 2):
        record.begin(b"GET", target)
    assert json.loads(record.to_json())["complete"]
    record.begin(b"GET", target)
    rows = json.loads(record.to_json())
    assert not rows["complete"] and len(rows["requests"]) == MOST_REQUESTS


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"host": "shop.test"}, "should match pattern"),
        ({"host": "shop.test:70000"}, "names no port"),
        ({"name": "no_list"}, "request no_list is declared twice"),
        ({"count": 0}, "nothing has to be done"),
        ({"body": "x" * 70_000}, "takes more than 65536 bytes"),
        ({"body": {"count": math.nan}}, "must hold finite numbers only"),
    ],
)
def test_a_declaration_that_is_wrong_is_named_with_its_reason(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    reading = read_source(task_folder(tmp_path, declared(80, **changes)))
    assert not reading.tasks and said in reading.broken[0].reason


def test_the_sandbox_reaches_the_declared_hosts_alone(task: Task, address: str, port: int) -> None:
    async def job(client: SandboxClient) -> tuple[str, bytes]:
        template = await client.put_template(task.files)
        program = (
            _HELPERS.replace("@PORT@", str(port))
            + "print(order(), ask('GET', '/'))\nPORT += 1\nprint(order())\n"
            + "print(raw(b'CONNECT 127.0.0.1:%d HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n' % (PORT - 1)))"
        )
        assert isinstance(task.final_state, RequestsState)
        async with await client.create(template, rules=task.final_state.rules, record_requests=True) as sandbox:
            text = base64.b64encode(program.encode()).decode()
            result = await sandbox.call(ToolCall("exec", {"command": f"echo {text} | base64 -d | python3 -"}))
            await sandbox.finish()
            return result.text, sandbox.requests

    said, record = with_client(address, job)
    assert said.startswith("201 200\n403\n") and "HTTP/1.1 403" in said and "recorded, so it has no tunnels" in said
    made = json.loads(record)
    assert made["complete"] and [(each["method"], each["status"]) for each in made["requests"]] == [
        ("POST", 201),
        ("GET", 200),
    ]
    assert json.loads(made["requests"][0]["body"]) == ORDER
