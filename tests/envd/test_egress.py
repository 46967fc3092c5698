"""Sandboxes whose rules allow destinations reach these by their proxy and nothing else."""

from __future__ import annotations

import asyncio
import http.server
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from envd.backends.base import NetworkRule
from envd.backends.namespaces.backend import NamespacesBackend
from envd.client import ToolCall
from envd.errors import RulesDenied
from envd.local import LocalEnvd
from envd.operations.client import ManagedSandbox, OperationsClient
from tests.envd.boxes import spec, with_namespaces
from tests.envd.harness import require_limits

T = TypeVar("T")
FETCH = """
import os, sys, urllib.request, urllib.error
os.environ["no_proxy"] = ""  # else its own loopback is meant
try:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": "http://127.0.0.1:3128"}))
    print(opener.open(sys.argv[1], timeout=10).read().decode())
except (urllib.error.HTTPError) as error:
    print(error.code, error.read().decode())
except OSError as error:
    print("failed", error)
"""
TUNNEL = """
import http.client, sys
tunnel = http.client.HTTPConnection("127.0.0.1", 3128, timeout=10)
tunnel.set_tunnel("127.0.0.1", int(sys.argv[1]))
tunnel.request("GET", "/through")
print(tunnel.getresponse().read().decode())
"""
FILES = {"fetch.py": FETCH.encode(), "tunnel.py": TUNNEL.encode()}


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"page {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Served:
    """A server, its audit log, and a web server of this host."""

    def __init__(self, address: str, log: Path, port: int) -> None:
        self.address, self.log, self.port = address, log, port
        self.rules = f"network: {{allow: [{{host: 127.0.0.1, ports: [{port}]}}]}}"

    def run(self, job: Callable[[ManagedSandbox], Awaitable[T]], *, rules: str | None = None) -> T:
        async def scenario() -> T:
            async with OperationsClient(self.address) as client:
                template = await client.put_template(FILES)
                async with await client.create(template, rules=self.rules if rules is None else rules) as sandbox:
                    return await job(sandbox)

        return asyncio.run(scenario())

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = map(json.loads, self.log.read_text().splitlines())
        return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("egress")
    (folder / "rules").write_text("network: {allow: [{host: 127.0.0.0/8}]}")
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    try:
        options = ["--policy", str(folder / "rules"), "--audit-log", str(folder / "audit"), "--audit-calls"]
        with LocalEnvd("namespaces", options=options) as server:
            yield Served(server.address, folder / "audit", web.server_port)
    finally:
        web.shutdown()
        web.server_close()


async def shell(sandbox: ManagedSandbox, command: str) -> str:
    return (await sandbox.call(ToolCall("exec", {"command": command}), timeout_s=30)).text


def test_what_the_rules_name_is_reached_and_nothing_else(served: Served) -> None:
    async def job(sandbox: ManagedSandbox) -> tuple[str, str, str, str]:
        names = "env | grep -i _proxy | sort"
        page = await shell(sandbox, f"python3 fetch.py http://127.0.0.1:{served.port}/a")
        tunnel = await shell(sandbox, f"python3 tunnel.py {served.port}")
        denied = await shell(
            sandbox, f"python3 fetch.py http://127.0.0.1:{served.port + 1}/; python3 fetch.py http://example.com/"
        )
        return await shell(sandbox, names), page, tunnel, sandbox.id + denied

    names, page, tunnel, denied = served.run(job)
    assert "https_proxy=http://127.0.0.1:3128" in names and "no_proxy=localhost,127.0.0.1" in names
    assert "page /a" in page and "page /through" in tunnel
    assert re.search(rf"403 envd: .* do not allow 127\.0\.0\.1:{served.port + 1}: name it", denied), denied
    told = [
        event["detail"]["destination"]
        for event in served.events("network.denied")
        if denied.startswith(event["sandbox"])
    ]
    assert told == [f"127.0.0.1:{served.port + 1}", "example.com:80"]
    calls = served.log.with_name("audit.calls").read_text()
    assert f'"network.connected", "detail": {{"destination": "127.0.0.1:{served.port}"}}' in calls


def test_a_sandbox_has_no_more_of_a_network_than_that_port(served: Served) -> None:
    look = (
        "cat /proc/net/dev | tail -n +3 | cut -d: -f1; cat /proc/net/route | tail -n +2;"
        f"python3 -c \"import socket; socket.create_connection(('127.0.0.1', {served.port}), 2)\" 2>&1 | tail -1;"
        "python3 -c \"import socket; socket.create_server(('127.0.0.1', 3128))\" 2>&1 | tail -1"
    )
    said = served.run(lambda sandbox: shell(sandbox, look))
    assert "ConnectionRefused" in said and "Address already in use" in said and "eth" not in said


def test_without_destinations_there_is_neither_port_nor_variable(served: Served) -> None:
    look = (
        "env | grep -ci _proxy; python3 -c \"import socket; socket.create_connection(('127.0.0.1', 3128), 2)\" 2>&1 |"
        " tail -1"
    )
    said = served.run(lambda sandbox: shell(sandbox, look), rules="{}")
    assert said.startswith("0\n") and "ConnectionRefused" in said


def test_a_request_for_more_than_the_server_allows_is_denied(served: Served) -> None:
    with pytest.raises(RulesDenied, match=r"network\.allow allows 127\.0\.0\.0/8, not 169\.254\.169\.254"):
        served.run(lambda sandbox: shell(sandbox, "true"), rules="network: {allow: [{host: 169.254.169.254}]}")


def test_copies_and_what_was_hibernated_have_the_same_way_out(served: Served) -> None:
    fetch = f"python3 fetch.py http://127.0.0.1:{served.port}/again"

    async def job(sandbox: ManagedSandbox) -> list[str]:
        copy = await sandbox.fork()
        async with copy:
            said = [await shell(copy, fetch)]
        await sandbox.hibernate()
        await sandbox.resume()
        return [*said, await shell(sandbox, fetch)]

    assert ["page /again" in said for said in served.run(job)] == [True, True]


def test_the_networks_of_such_sandboxes_are_not_used_again(run_dir: Path) -> None:
    async def networks(backend: NamespacesBackend, rules: tuple[NetworkRule, ...] = ()) -> str:
        box = await backend._start(spec(run_dir, network=rules))
        await box.guest.shell([("true", 10)])
        network = str(Path(f"/proc/{box._started.pid}/ns/net").readlink())
        assert (box.proxy_listener is None) == (not box.spec.network)
        await box.destroy()
        return network

    async def job(backend: NamespacesBackend) -> tuple[list[str], str, str]:
        require_limits(backend.features.limits_enforced, "memory")  # nothing is used again without control groups
        usual: list[str] = []
        while len(usual) < 20 and len(set(usual)) == len(usual):  # on a busy machine one may be put back too late
            usual.append(await networks(backend))
        return usual, await networks(backend, (NetworkRule("127.0.0.1"),)), await networks(backend)

    usual, proxied, after = with_namespaces(run_dir, job, pool=1)
    assert len(set(usual)) < len(usual)  # else nothing is used again here at all
    assert after != proxied
