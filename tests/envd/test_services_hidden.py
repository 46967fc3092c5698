"""What the rules hide shows in no answer of the Files service, also where a program of the sandbox made it again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from contracts.pb import envd_operations_pb2 as pb
from envd.client import ToolCall
from envd.errors import FileError
from envd.local import LocalEnvd
from envd.operations.client import ManagedSandbox, OperationsClient

MAKE = (
    "mkdir -p secrets a; echo needle > secrets/x; echo needle > a/b.key; echo needle > a/c; echo needle > own;"
    " ln -s secrets way; ln -s /workspace/secrets/x file"
)
WAYS = ["secrets", "a/../secrets", "way", "./secrets/", "/workspace/secrets", "a/../way", "secrets/..//secrets"]
FILE_WAYS = ["secrets/x", "a/../secrets/x", "way/x", "file", "a/b.key"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    rules = tmp_path_factory.mktemp("hidden") / "rules.yaml"
    rules.write_text('filesystem: {hidden: [secrets, "*.key"]}\n')
    with LocalEnvd("namespaces", options=["--policy", str(rules)]) as server:
        yield server.address


@asynccontextmanager
async def made(address: str) -> AsyncIterator[ManagedSandbox]:
    async with (
        OperationsClient(address) as client,
        await client.create(await client.put_template({"own": b""})) as sandbox,
    ):
        answer = await sandbox.call(ToolCall("exec", {"command": MAKE}))
        assert answer.ok, answer.text
        yield sandbox


def refused(address: str, ask: Callable[[ManagedSandbox, str], Awaitable[object]], ways: list[str]) -> dict[str, str]:
    """What each way is answered with."""

    async def one(sandbox: ManagedSandbox, way: str) -> str:
        try:
            return repr(await ask(sandbox, way))
        except FileError as error:
            return str(error.errno)

    async def job() -> dict[str, str]:
        async with made(address) as sandbox:
            return {way: await one(sandbox, way) for way in ways}

    return asyncio.run(job())


async def watched(sandbox: ManagedSandbox, way: str) -> pb.FileEvent:
    events = sandbox.files.watch(way)
    try:
        return await anext(events)
    finally:
        await events.aclose()


@pytest.mark.parametrize(
    ("ask", "ways"),
    [
        (lambda sandbox, way: sandbox.files.list(way), WAYS),
        (lambda sandbox, way: sandbox.files.search("needle", path=way), WAYS),
        (watched, WAYS),
        (lambda sandbox, way: sandbox.files.read(way), FILE_WAYS),
        (lambda sandbox, way: sandbox.files.write(f"{way}/new", b""), ["secrets", "way", "a/../secrets"]),
    ],
    ids=["list", "search", "watch", "read", "write"],
)
def test_no_way_leads_to_what_is_hidden(
    address: str, ask: Callable[[ManagedSandbox, str], Awaitable[object]], ways: list[str]
) -> None:
    assert refused(address, ask, ways) == dict.fromkeys(ways, "2")


def test_lists_and_searches_leave_it_out_and_do_not_count_it(address: str) -> None:
    async def job() -> None:
        async with made(address) as sandbox:
            listed, cut = await sandbox.files.list(depth=9, limit=1000)
            names = [each.path for each in listed if not each.path.startswith(".git")]
            assert (sorted(names), cut) == (["a", "a/c", "file", "own", "way"], False)
            some, cut = await sandbox.files.list("a", limit=1)
            assert ([each.path for each in some], cut) == (["a/c"], False)
            found = await sandbox.files.search("needle", limit=2)
            assert ([match.path for match in found.matches], found.truncated) == (["a/c", "own"], False)

    asyncio.run(job())


def test_a_watch_says_nothing_of_it(address: str) -> None:
    async def job() -> list[str]:
        async with made(address) as sandbox:
            seen: list[str] = []
            events = sandbox.files.watch()
            async for event in events:
                if event.kind == "watching":
                    await sandbox.call(ToolCall("exec", {"command": "echo > secrets/y; echo > a/z.key; echo > last"}))
                seen.append(event.path)
                if event.path == "last":
                    break
            await events.aclose()
            return [path for path in seen if path.startswith("secrets") or path.endswith(".key")]

    assert asyncio.run(job()) == []


def test_the_test_makes_what_it_looks_for(address: str) -> None:
    async def job() -> str:
        async with made(address) as sandbox:
            return (await sandbox.call(ToolCall("exec", {"command": "cat secrets/x way/x file a/b.key"}))).text

    assert asyncio.run(job()).count("needle") == 4
