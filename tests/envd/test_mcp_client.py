"""The client of the `mcp` package, which nobody here wrote, drives sandboxes over standard streams and over HTTP."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from contracts.rpc.meeting import meeting_directory
from envd.operations.client import OperationsClient
from envd.tools import toolset_named
from tests.envd.harness import Harness
from tests.ports import free_port

pytestmark = pytest.mark.slow

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
COMMAND = ["-m", "envd", "mcp"]


@asynccontextmanager
async def over_stdio(*options: str) -> AsyncIterator[Client]:
    parameters = StdioServerParameters(command=sys.executable, args=[*COMMAND, *options], env=ENVIRONMENT)
    async with Client(stdio_client(parameters)) as client:
        yield client


async def said(client: Client, name: str, **arguments: object) -> tuple[bool, str]:
    result = await client.call_tool(name, dict(arguments))
    (content,) = result.content
    assert content.type == "text"
    return not result.is_error, content.text


async def live(address: str) -> int:
    async with OperationsClient(address) as client:
        return (await client.info()).live


async def eventually_live(address: str, count: int) -> bool:
    deadline = time.monotonic() + 10
    while await live(address) != count:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


def test_an_mcp_client_drives_a_sandbox(namespaces: Harness, tmp_path: Path) -> None:
    (tmp_path / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_text("secret")

    async def job() -> None:
        before = await live(namespaces.address)
        async with over_stdio("--address", namespaces.address, "--files", str(tmp_path)) as client:
            listed = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert {name: tool.input_schema for name, tool in listed.items()} == {
                name: dict(spec.parameters) for name, spec in toolset_named("").tools.items()
            }
            assert await said(client, "list") == (True, "calc.py")
            assert await said(client, "edit", path="calc.py", line=2.0, new="    return a + b") == (True, "ok")
            assert await said(
                client, "exec", command="export X=5; python3 -c 'import calc; print(calc.add(1, 2))'"
            ) == (
                True,
                "3\nexit 0",
            )
            assert await said(client, "exec", command="echo $X; cat .git/config | grep -c secret") == (
                False,
                "5\n0\nexit 1",
            )
            assert await said(client, "read", path="gone") == (False, "error: no such file: gone")
            assert await said(client, "fly") == (False, "error: no such tool: fly")
            both = await asyncio.gather(*(said(client, "exec", command="sleep 0.2; echo done") for _ in range(2)))
            assert both == [(True, "done\nexit 0")] * 2
            assert await live(namespaces.address) == before + 1
        assert await eventually_live(namespaces.address, before)

    asyncio.run(job())


def test_a_toolset_is_what_is_listed_and_what_may_be_called(namespaces: Harness) -> None:
    async def job() -> None:
        async with over_stdio("--address", namespaces.address, "--toolset", "answer") as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == list(toolset_named("answer").tools)
            assert await said(client, "submit_answer", answer={"rows": [[1, 2.5]]}) == (True, "submitted")
            assert await said(client, "lint") == (False, "error: no such tool: lint")
        async with over_stdio("--address", namespaces.address, "--toolset", "files+python") as client:
            assert [tool.name for tool in (await client.list_tools()).tools][-1] == "python"
            assert [(await said(client, "python", code=code))[1] for code in ("x = 2", "x + 1")] == ["", "3"]

    asyncio.run(job())


def over_http(url: str) -> Client:
    """A client with the key that the server made."""
    key = (meeting_directory() / f"mcp-{httpx.URL(url).port}.key").read_text().strip()
    http = httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=30)
    return Client(streamable_http_client(url, http_client=http))


@contextmanager
def http_server(address: str, *options: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, *COMMAND, "--address", address, "--http", f"127.0.0.1:{port}", *options]
    process = subprocess.Popen(command, env=ENVIRONMENT)
    try:
        url = f"http://127.0.0.1:{port}/mcp"
        deadline = time.monotonic() + 20
        while True:
            try:
                httpx.get(url, timeout=2)
                break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        assert process.wait(20) == 0
        assert not (meeting_directory() / f"mcp-{port}.key").exists()


def test_over_http_each_session_has_a_sandbox_of_its_own(namespaces: Harness) -> None:
    async def job(url: str) -> None:
        before = await live(namespaces.address)
        async with over_http(url) as one, over_http(url) as other:
            assert await said(one, "write", path="f", content="one\n") == (True, "ok")
            assert await said(other, "read", path="f") == (False, "error: no such file: f")
            assert await said(one, "exec", command="cat f") == (True, "one\nexit 0")
            assert await live(namespaces.address) == before + 2
        assert await eventually_live(namespaces.address, before)

    with http_server(namespaces.address) as url:
        asyncio.run(job(url))


def test_an_idle_session_loses_its_sandbox_and_one_too_many_is_refused(namespaces: Harness) -> None:
    async def job(url: str) -> None:
        before = await live(namespaces.address)
        async with over_http(url) as client:
            assert (await said(client, "list"))[0]
            initialize = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
            accept = {"accept": "application/json, text/event-stream"}
            assert httpx.post(url, json=initialize, headers=accept).status_code == 401
            key = (meeting_directory() / f"mcp-{httpx.URL(url).port}.key").read_text().strip()
            accept["authorization"] = f"Bearer {key}"
            assert httpx.post(url, json=initialize, headers=accept).status_code == 503
            assert await eventually_live(namespaces.address, before)

    with http_server(namespaces.address, "--idle", "2", "--max-sessions", "1") as url:
        asyncio.run(job(url))


def test_a_key_is_asked_for(namespaces: Harness, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst-key-of-a-client\n\nsecond-key-of-a-client\n")
    body = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    with http_server(namespaces.address, "--http-keys", str(keys)) as url:
        for authorization in (
            "",
            "Bearer",
            "Bearer third",
            "Bearer #",
            "Bearer ours",
            "Bearer # ours",
            "Bearer first-key-of-a-client\n",
        ):
            headers = {"authorization": authorization.strip("\n") + "x" * authorization.count("\n")}
            assert httpx.post(url, json=body, headers=headers).status_code == 401
        accept = {"authorization": "Bearer second-key-of-a-client", "accept": "application/json, text/event-stream"}
        assert httpx.post(url, json=body, headers=accept).status_code != 401


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--http", "0.0.0.0:8000"], "give --http-keys"),
        (["--http", "nonsense"], "must be HOST:PORT"),
        (["--files", "/nowhere"], "is not a directory"),
        (["--timeout", "0"], "--timeout must be above 0"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], words: str) -> None:
    done = subprocess.run([sys.executable, *COMMAND, *options], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1
