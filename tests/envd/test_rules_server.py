"""A server enforces its rules, and every denial is an event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from contracts.pb import envd_pb2 as pb
from contracts.pb import envd_pb2_grpc as rpc
from envd.client import Limits, ToolCall
from envd.errors import EnvdError, FileError, RulesDenied, SandboxGone
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from tests.envd.harness import require_limits

T = TypeVar("T")
RULES = """
resources: {maximum: {memory_mb: 256, live: 4}, default: {memory_mb: 64, pids: 8}}
filesystem: {hidden: [secrets, "*.key"]}
tools: {allow: [read, write, list, exec]}
isolation: process
"""
FILES = {"calc.py": b"x = 1\n", "secrets/answer": b"the-secret\n", "a/b.key": b"k\n"}


class Served:
    """A server under RULES, and its audit log."""

    def __init__(self, address: str, log: Path) -> None:
        self.address, self.log = address, log

    def run(self, job: Callable[[OperationsClient], Awaitable[T]]) -> T:
        async def scenario() -> T:
            async with OperationsClient(self.address) as client:
                return await job(client)

        return asyncio.run(scenario())

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in map(json.loads, self.log.read_text().splitlines()) if line["kind"] == kind]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("rules")
    (folder / "rules.yaml").write_text(RULES)
    options = ["--policy", str(folder / "rules.yaml"), "--audit-log", str(folder / "audit")]
    with LocalEnvd("namespaces", options=options) as server:
        served = Served(server.address, folder / "audit")
        (backend,) = served.run(OperationsClient.info).backends
        require_limits(backend.limits_enforced, "memory")
        yield served


def test_what_is_hidden_is_in_no_workspace_and_not_in_its_history(served: Served) -> None:
    async def job(client: OperationsClient) -> tuple[str, str, bytes]:
        async with await client.create(await client.put_template(FILES)) as sandbox:
            found = await sandbox.call(
                ToolCall(
                    "exec",
                    {
                        "command": (
                            "find . -path ./.git -prune -o -type f -print | sort; git log -p | cat; cat secrets/answer"
                        )
                    },
                )
            )
            edited = await sandbox.call(ToolCall("write", {"path": "calc.py", "content": "x = 2\n"}))
            return found.text, edited.text, await sandbox.diff()

    text, _, diff = served.run(job)
    assert text.startswith("./calc.py\ncommit") and "the-secret" not in text and "b.key" not in text
    assert b"x = 2" in diff and b"secrets" not in diff


def test_a_tool_that_is_not_allowed_is_refused_and_the_others_run(served: Served) -> None:
    calls = [
        ToolCall("read", {"path": "calc.py"}),
        ToolCall("edit", {"path": "calc.py", "line": 1, "new": "y"}),
        ToolCall("list", {}),
    ]

    async def job(client: OperationsClient) -> tuple[str, list[bool]]:
        async with await client.create(await client.put_template(FILES)) as sandbox:
            return sandbox.id, [result.ok for result in await sandbox.batch(calls)]

    identity, oks = served.run(job)
    assert oks == [True, False, True]
    assert [event["detail"]["tool"] for event in served.events("tool.denied") if event["sandbox"] == identity] == [
        "edit"
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limits": Limits(memory_mb=512)}, "resources.maximum.memory_mb allows at most 256, not 512"),
        ({"rules": "isolation: machine"}, "isolation allows machine or more, not namespaces"),
        ({"rules": "network: {allow: [{host: example.com}]}"}, "network.allow allows no destination, not example.com"),
        ({"rules": "tools: {allow: [search]}"}, "tools.allow"),
    ],
)
def test_what_the_rules_do_not_allow_is_denied_by_name_and_recorded(
    served: Served, options: dict[str, Any], words: str
) -> None:
    before = len(served.events("policy.denied"))
    given = {"limits": Limits(memory_mb=64), **options}

    async def job(client: OperationsClient) -> None:
        await client.create(await client.put_template(FILES), **given)

    with pytest.raises(RulesDenied, match=words):
        served.run(job)
    assert [words in event["detail"]["reason"] for event in served.events("policy.denied")[before:]] == [True]


def test_a_verification_is_bound_by_the_maximum_too(served: Served) -> None:
    hidden = {"test_h.py": b"import resource\n\ndef test_it():\n    assert resource.getpagesize()\n"}

    async def job(client: OperationsClient) -> tuple[str, str]:
        template = await client.put_template(FILES)
        short = "resources: {maximum: {lifetime_s: 500}}"  # its limit of 600 s does not count
        result = await client.verify(
            template, b"", hidden, ["test_h.py::test_it"], limits=Limits(memory_mb=256), rules=short
        )
        with pytest.raises(RulesDenied, match=r"resources.maximum.memory_mb allows at most 256, not 4096"):
            await client.verify(template, b"", hidden, ["test_h.py::test_it"], limits=Limits(memory_mb=4096))
        return result.outcomes[0].status, served.events("policy.denied")[-1]["detail"]["reason"]

    status, reason = served.run(job)
    assert status == "passed" and "not 4096" in reason


def test_invalid_rules_are_one_line(served: Served) -> None:
    async def job(client: OperationsClient) -> None:
        await client.create(await client.put_template(FILES), rules="tools: 3")

    with pytest.raises(EnvdError, match="sandbox rules, field tools"):
        served.run(job)
    assert "sandbox rules, field tools" in served.events("request.refused")[-1]["detail"]["reason"]


def test_no_more_sandboxes_live_than_the_rules_say(served: Served) -> None:
    async def job(client: OperationsClient) -> list[str]:
        template = await client.put_template(FILES)
        limits = Limits(memory_mb=64)
        found = await asyncio.gather(
            *(client.create(template, limits=limits) for _ in range(7)), return_exceptions=True
        )
        alive = [each for each in found if not isinstance(each, BaseException)]
        for sandbox in alive:
            await sandbox.close()
        return [str(each) if isinstance(each, RulesDenied) else type(each).__name__ for each in found]

    outcome = served.run(job)
    assert outcome.count("ManagedSandbox") == 4 and sum("4 sandboxes at once" in each for each in outcome) == 3


def test_wrong_tokens_guessed_ids_escapes_and_lifetimes_are_events(served: Served) -> None:
    async def job(client: OperationsClient) -> tuple[str, str]:
        template = await client.put_template(FILES)
        sandbox = await client.create(template, limits=Limits(memory_mb=64))
        short = await client.create(template, limits=Limits(memory_mb=64, lifetime_s=1))
        await sandbox.call(ToolCall("read", {"path": "../../etc/passwd"}))
        async with grpc.aio.insecure_channel(served.address) as channel:
            stub = rpc.SandboxesStub(channel)  # type: ignore[no-untyped-call]
            for identity in (sandbox.id, "guessed"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Get(pb.GetRequest(sandbox_id=identity), metadata=(("triplane-sandbox-token", "wrong"),))
                assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        await asyncio.sleep(1.5)
        with pytest.raises(SandboxGone):
            await short.call(ToolCall("list", {}))
        await sandbox.close()
        return sandbox.id, short.id

    identity, short = served.run(job)
    assert {event["detail"]["what"] for event in served.events("auth.denied")} == {"sandbox token", "unknown sandbox"}
    assert [event["detail"]["path"] for event in served.events("path.escape") if event["sandbox"] == identity] == [
        "../../etc/passwd"
    ]
    assert [event["sandbox"] for event in served.events("lifetime.expired")] == [short]
    assert served.events("server.started")


def test_what_no_service_sees_is_an_event(served: Served) -> None:
    async def job(client: OperationsClient) -> str:
        async with grpc.aio.insecure_channel(served.address) as channel:
            for method in ("Tools/Batch", "Files/Upload", "Files/Nothing"):
                with pytest.raises(grpc.aio.AioRpcError):
                    call = channel.stream_unary if method == "Files/Upload" else channel.unary_unary
                    data = b"\xff" * 40
                    await call(f"/triplane.envd.v1.{method}")(iter([data]) if method == "Files/Upload" else data)
        sandbox = await client.create(await client.put_template(FILES), limits=Limits(memory_mb=64))
        with pytest.raises(FileError):
            await sandbox.files.read("x" * 300)
        await sandbox.call(ToolCall("exec", {"command": "kill -9 $$"}))
        await sandbox.close()
        return sandbox.id

    identity = served.run(job)
    refused = served.events("request.refused")
    methods = {str(event["detail"].get("method")).rpartition(".")[2] for event in refused}
    assert {"Tools/Batch", "Files/Upload", "Files/Nothing"} <= methods
    assert identity in [event["sandbox"] for event in refused]
    assert [event["detail"]["how"] for event in served.events("shell.died") if event["sandbox"] == identity] == [
        "exit 137; shell restarted"
    ]


def test_hitting_a_limit_is_an_event(served: Served) -> None:
    async def job(client: OperationsClient) -> str:
        template = await client.put_template(FILES)
        sandbox = await client.create(template, limits=Limits(memory_mb=64, disk_mb=4))
        for command in (
            "head -c 99000000 /dev/zero | tail",
            "yes | head -c 3000000",
            "sleep 60",
            "head -c 9000000 /dev/zero > big",
        ):
            await sandbox.call(ToolCall("exec", {"command": command}), timeout_s=2)
        await sandbox.call(ToolCall("write", {"path": "more", "content": "x" * 100_000}))
        await sandbox.close()
        return sandbox.id

    identity = served.run(job)
    kinds = {
        kind
        for kind in ("limit.memory", "limit.output", "limit.time", "limit.disk")
        for event in served.events(kind)
        if event["sandbox"] == identity
    }
    assert kinds == {"limit.memory", "limit.output", "limit.time", "limit.disk"}


def test_tampering_with_a_verdict_is_an_event_and_in_the_reply(served: Served) -> None:
    async def job(client: OperationsClient) -> tuple[str, ...]:
        template = await client.put_template({"calc.py": b"import time\ntime.perf_counter = lambda: 0\n"})
        hidden = {"test_h.py": b"import calc\n\ndef test_it():\n    pass\n"}
        result = await client.verify(template, b"", hidden, ["test_h.py::test_it"])
        return (*result.tampering, result.outcomes[0].status)

    # the template is the task's own, so its patch is no tampering; a diff's is
    assert served.run(job) == ("passed",)

    async def cheat(client: OperationsClient) -> tuple[str, ...]:
        template = await client.put_template({"calc.py": b"x = 1\n"})
        async with await client.create(template, limits=Limits(memory_mb=64)) as sandbox:
            await sandbox.call(
                ToolCall("write", {"path": "calc.py", "content": "import time\ntime.perf_counter = lambda: 0\n"})
            )
            diff = await sandbox.diff()
        hidden = {"test_h.py": b"import calc\n\ndef test_it():\n    pass\n"}
        result = await client.verify(template, diff, hidden, ["test_h.py::test_it"])
        return (*result.tampering, result.outcomes[0].status)

    *found, status = served.run(cheat)
    assert "patched:time.perf_counter" in found and status == "error"
    assert "patched:time.perf_counter" in {each["detail"]["what"] for each in served.events("verify.tampered")}
